"""Runs a pass of one op by itself, timed from an idle device, and inspects it: its memory, its kernels and its error.

The workloads `attention` and `op` are made of these parts. A record of either holds:

samples  time_s [s]: one pass that begins with the device idle, between CUDA events (on a CPU by the host's clock)
         host_s [s]: until the host had issued that pass (on a CPU, where work runs as it is issued, the same as time_s)
facts    first_call_s with compilation; held_bytes kept from forward for backward, with the output, without inputs; peak_bytes of
         a pass (GPU); device_busy_s, launch_bound (by traces/verdict.py) and which_ran from one profiled pass; afterwards_failed
"""

import gc
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from trainstep.measure.harness.failures import CellFailed, out_of_memory_as, refused, try_afterwards
from trainstep.measure.harness.workload import Findings, Stages
from trainstep.measure.machine.nvml import GpuState
from trainstep.measure.step.clock import time_alone_s
from trainstep.measure.step.device_trace import DeviceEvent, device_events
from trainstep.measure.step.memory_watch import MemoryWatch
from trainstep.records.facts import Fact, facts_of
from trainstep.records.record import Samples
from trainstep.traces.nesting import union_s
from trainstep.traces.verdict import is_launch_bound
from trainstep.training.precision import float32_matmuls

Times = Sequence[tuple[float, float]]
"""Seconds of each pass on the device, and on the host until it was issued."""
_KERNELS_NAMED, _NAME_LENGTH = 3, 80


@dataclass(frozen=True, kw_only=True)
class LonePass(ABC):
    """The pass that is timed. `cold_cache`: a tensor that is written before each pass to fill the L2 cache."""

    device: torch.device
    cold_cache: Tensor | None = None

    @abstractmethod
    def before(self) -> Any:
        """Run the untimed part, and return what `run` takes."""

    @abstractmethod
    def run(self, prepared: Any) -> object:
        """Run the timed part on what `before` returned."""

    @abstractmethod
    def why_refused(self, error: Exception, warned: Sequence[str]) -> str | None:
        """A sentence if the first call's error is a refusal of the case; None if it is a fault. `warned`: that call's warnings."""

    def time_s(self) -> tuple[float, float]:
        """Time one pass: seconds on the device, and on the host until it was issued."""
        prepared = self.before()
        if self.cold_cache is not None:
            self.cold_cache.zero_()
        return time_alone_s(lambda: self.run(prepared), self.device.type)

    def first_call_s(self) -> float:
        """Time the first pass. CellFailed if the implementation refuses the case, by an error or in a warning."""
        started_s = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self.run(self.before())
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
            except Exception as error:
                reason = self.why_refused(error, [str(warning.message) for warning in caught])
                if reason is None:
                    raise
                raise refused(reason) from None
        return time.perf_counter() - started_s


@dataclass(frozen=True, kw_only=True)
class PassCell:
    """One cell in a process that measures several. `facts`: the facts of its record, also if it fails."""

    device: torch.device
    stages: Stages
    memory: MemoryWatch
    facts: dict[str, Fact]
    float32_matmuls: str = "highest"
    needed_words: str = ""
    """What the pass needs in memory, for the message of a failure."""

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """A context with the cell's fp32 matmul mode. A refusal, or running out of memory, becomes CellFailed with the facts."""
        with float32_matmuls(self.float32_matmuls), out_of_memory_as(self._out_of_memory):
            try:
                yield
            except CellFailed as error:
                release_memory(self.device)
                raise CellFailed(error.failure, self.facts) from None

    def warm_up(self, timed: LonePass, warmups: int) -> Times:
        """Run the first pass, which compiles, and the warm-ups, and return the warm-ups' times."""
        self.stages.enter("first pass")
        self.facts.update(facts_of(first_call_s=timed.first_call_s()))
        self.stages.enter("warmup")
        return [timed.time_s() for _ in range(warmups)]

    def inspect(self, subject: str, facts_now: Callable[[], Mapping[str, Fact]]) -> None:
        """Add facts from an extra pass; if it fails, the fact `afterwards_failed` says why."""
        try_afterwards(self.facts, subject, lambda facts: facts.update(facts_now()))

    def _out_of_memory(self, error: Exception) -> CellFailed:
        failure = self.memory.failure(error, self.stages.current)
        message = "; ".join(filter(None, (failure.message, self.needed_words)))
        return CellFailed(replace(failure, message=message), self.facts)


class PassMeasurement:
    """A warmed-up pass. `inspect` adds facts after the timed passes, whose times it takes."""

    def __init__(
        self,
        cell: PassCell,
        timed: LonePass,
        warmups: Times,
        gpu: GpuState | None,
        inspect: Callable[[Times], None],
    ) -> None:
        self._cell = cell
        self._pass = timed
        self._warmups = warmups
        self._gpu = gpu
        self._inspect = inspect
        self._times: list[tuple[float, float]] = []
        self._throttle_reasons: set[str] = set()

    def take(self, steps: int) -> None:
        with self._cell.at_work():
            self._times += [self._pass.time_s() for _ in range(steps)]
            if self._gpu is not None:  # directly after timed work, since clocks and power fall within milliseconds
                self._throttle_reasons |= set((self._gpu.throttle_reasons() or "").split(", ")) - {""}

    def settle(self) -> None:
        with self._cell.at_work():
            self._pass.time_s()

    def finish(self) -> Findings:
        """Inspect memory, values and what ran, and return everything. Passes run here neither add nor lose a sample."""
        cell = self._cell
        cell.stages.enter("afterwards")
        with cell.at_work():
            self._inspect(self._times)
        facts = cell.facts
        facts |= facts_of(timing="host_clock" if cell.device.type == "cpu" else "cuda_events")
        if self._throttle_reasons:
            facts |= facts_of(throttle_reasons=", ".join(sorted(self._throttle_reasons)))
        del self._pass, self._inspect
        release_memory(cell.device)
        samples = {
            name: Samples(
                unit="s",
                values=tuple(times[place] for times in self._times),
                warmups=tuple(times[place] for times in self._warmups),
            )
            for place, name in enumerate(("time_s", "host_s"))
        }
        return Findings(samples=samples, facts=facts)


def open_device(device: torch.device, *, cold: bool) -> tuple[GpuState | None, Tensor | None]:
    """Free what earlier cells left on a GPU. Returns the GPU's state, and the filler for a cold cache; two None on a CPU."""
    if device.type == "cpu":
        return None, None
    release_memory(device)
    properties = torch.cuda.get_device_properties(device)
    filler = None
    if cold:
        filler = torch.empty(2 * properties.L2_cache_size, dtype=torch.uint8, device=device)  # twice the cache
    return GpuState(str(properties.uuid)), filler


def release_memory(device: torch.device) -> None:
    """Return unused memory to the device."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def peak_facts(timed: LonePass, base_bytes: int) -> dict[str, Fact]:
    """The most that was allocated on the GPU during a pass, above `base_bytes`."""
    torch.cuda.reset_peak_memory_stats()
    timed.run(timed.before())
    return facts_of(peak_bytes=torch.cuda.max_memory_allocated() - base_bytes)


def held_bytes(inputs: Iterable[Tensor], forward: Callable[[], tuple[Tensor, ...]]) -> int:
    """Bytes that a forward pass leaves allocated; on a CPU, those of the storages that autograd saved and of the outputs."""
    known = {x.untyped_storage().data_ptr() for x in inputs}
    if any(x.is_cuda for x in inputs):
        before_bytes = torch.cuda.memory_allocated()
        outputs = forward()
        kept_bytes = torch.cuda.memory_allocated() - before_bytes
        del outputs
        return kept_bytes
    storages: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        outputs = forward()
    for output in outputs:
        note(output)
    return sum(storages.values())


def device_facts(timed: LonePass, times: Times, chosen: str = "") -> dict[str, Fact]:
    """Facts of what ran on a GPU, and of whether it waited for the host. `chosen`: words that follow the kernels' names."""
    events = device_events(timed.run, timed.before)
    words = "; ".join(filter(None, (main_kernels(events), chosen)))
    facts = facts_of(which_ran=words) if events else {}
    busy_s = union_s((event.start_ns, event.end_ns) for event in events)
    if busy_s and times:
        facts |= facts_of(device_busy_s=busy_s)
        time_s, host_s = (median(seconds) for seconds in zip(*times, strict=True))
        launch_bound = is_launch_bound(busy_s=busy_s, enqueue_s=host_s, step_s=time_s)
        facts |= facts_of(launch_bound=launch_bound)
    return facts


def main_kernels(events: Sequence[DeviceEvent]) -> str:
    """The names of the kernels that took the longest, without the types of their arguments.

    These are a template's arguments, or what CuTe's DSL writes behind the object of which the kernel is a method.
    """
    total_ns: dict[str, int] = {}
    for event in events:
        name = event.name.removeprefix("void ")
        for types_begin in ("(", "<", "_object_at_"):
            name = name.partition(types_begin)[0]
        name = name.strip() or event.name
        total_ns[name] = total_ns.get(name, 0) + event.end_ns - event.start_ns
    ranked = sorted(total_ns, key=lambda name: -total_ns[name])
    return ", ".join(name[:_NAME_LENGTH] for name in ranked[:_KERNELS_NAMED])


def relative_error(value: Tensor, exact: Tensor) -> float | None:
    """max |x - ref| / max |ref| over the finite values of the reference. None if this is not finite, which `has_nan` tells."""
    finite = torch.isfinite(exact)  # a query that sees no key has a log-sum-exp of -inf
    exact, value = exact[finite], value[finite].to(exact.dtype)
    if not exact.numel():
        return None
    largest = exact.abs().max().item()
    error = (value - exact).abs().max().item() / (largest or 1.0)
    return error if error < float("inf") else None
