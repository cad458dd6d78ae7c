"""The workload `attention` times one implementation's forward, backward or both on one shape, and checks its values.

A record of it holds:

samples  time_s [s]: one pass that begins with the device idle, between CUDA events (on a CPU by the host's clock)
         host_s [s]: until the host had issued that pass (on a CPU, where work runs as it is issued, the same as time_s)
facts    flops; peak_bytes above what was there before the inputs (GPU); held_bytes kept from forward for backward, with the
         output, without inputs; first_call_s with compilation; inputs_ scores_ softmax_ lse_ output_ gradients_ needed_bytes
         as costs/attention.py counts them, also for a failed cell; error_*, has_nan, deterministic (attention/checks.py);
         device_busy_s, launch_bound (by traces/verdict.py) and which_ran from one profiled pass; afterwards_failed

The forward pass is a training one: it keeps what backward needs. For direction `backward`, an untimed forward precedes each timed
pass; gradients are returned, not accumulated.
"""

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from trainstep.config.attention import AttentionConfig
from trainstep.measure.attention.checks import Tensors, accounting_words, check_values, counted_facts, random_tensors
from trainstep.measure.attention.peers import attend_named, own_settings, refused, why_refused
from trainstep.measure.harness.failures import CellFailed, out_of_memory_as, try_afterwards
from trainstep.measure.harness.workload import Findings, Stage, Stages
from trainstep.measure.machine.nvml import GpuState
from trainstep.measure.step.clock import time_alone_s
from trainstep.measure.step.device_trace import DeviceEvent, device_events
from trainstep.measure.step.memory_watch import MemoryWatch
from trainstep.ops.flash_attention.choice import describe_choice
from trainstep.records.facts import Fact, facts_of
from trainstep.records.record import Samples
from trainstep.traces.nesting import union_s
from trainstep.traces.verdict import is_launch_bound
from trainstep.training.attention import Attention
from trainstep.training.precision import float32_matmuls

Before = Callable[[], Tensor | None]
Run = Callable[[Tensor | None], tuple[Tensor, ...]]
"""`AttentionPass.before` and `AttentionPass.run`."""
_KERNELS_NAMED, _NAME_LENGTH = 3, 80
_ON_A_CPU = {
    "trainstep": "algorithm.py (tiled PyTorch)",
    "plain": "reference.py (plain PyTorch)",
    "plain_compiled": "reference.py, compiled",
}


class AttentionWorkload:
    shares_worker = True  # only torch's caches and loaded kernels outlive a cell

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> "AttentionMeasurement":
        """Make the inputs, run the first pass, which compiles, and the warm-ups.

        CellFailed, with the bytes that the pass needs, if the implementation refuses the case or memory runs out.
        """
        attention = AttentionConfig(**config)
        device = torch.device(attention.device)
        cell = _Cell(config=attention, stages=Stages(stage), memory=MemoryWatch(device), facts=counted_facts(attention))
        if attention.refusal:
            raise CellFailed(refused(attention.refusal).failure, cell.facts)
        with cell.at_work():
            gpu, cold_cache, base_bytes = _open_device(attention, device) if device.type == "cuda" else (None, None, 0)
            attention_pass = AttentionPass(
                config=attention,
                device=device,
                tensors=random_tensors(attention, device),
                attend=attend_named(attention),
                cold_cache=cold_cache,
            )
            cell.stages.enter("first pass")
            cell.facts.update(facts_of(first_call_s=attention_pass.first_call_s()))
            cell.stages.enter("warmup")
            warmups = [attention_pass.time_s() for _ in range(attention.warmups)]
            cell.stages.enter(attention.direction)
        return AttentionMeasurement(cell, attention_pass, warmups, gpu, base_bytes)


WORKLOAD = AttentionWorkload()


@dataclass(frozen=True, kw_only=True)
class AttentionPass:
    """The pass that is timed, with its inputs. `cold_cache`: a tensor that is written before each pass to fill the L2 cache."""

    config: AttentionConfig
    device: torch.device
    tensors: Tensors
    attend: Attention
    cold_cache: Tensor | None = None

    def before(self) -> Tensor | None:
        """Run the untimed part: for direction `backward` a forward pass, whose output it returns."""
        return self.attend(*self.tensors.leaves) if self.config.direction == "backward" else None

    def run(self, output: Tensor | None) -> tuple[Tensor, ...]:
        """Run the timed part on the output of `before`."""
        if output is None:
            output = self.attend(*self.tensors.leaves)
        if self.config.direction == "forward":
            return (output,)
        return torch.autograd.grad(output, self.tensors.leaves, self.tensors.do)

    def time_s(self) -> tuple[float, float]:
        """Time one pass: seconds on the device, and on the host until it was issued."""
        output = self.before()
        if self.cold_cache is not None:
            self.cold_cache.zero_()
        return time_alone_s(lambda: self.run(output), self.device.type)

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
                reason = why_refused(self.config, error, [str(warning.message) for warning in caught])
                if reason is None:
                    raise
                raise refused(reason) from None
        return time.perf_counter() - started_s


@dataclass(frozen=True, kw_only=True)
class _Cell:
    """One cell in a process that measures several. `facts`: the facts of its record, also if it fails."""

    config: AttentionConfig
    stages: Stages
    memory: MemoryWatch
    facts: dict[str, Fact]

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """A context with the config's fp32 matmul mode. A refusal, or running out of memory, becomes CellFailed with the facts."""
        with (
            float32_matmuls("high" if self.config.fp32_precision == "tf32" else "highest"),
            out_of_memory_as(self._out_of_memory),
        ):
            try:
                yield
            except CellFailed as error:
                _release_memory(self.config.device)
                raise CellFailed(error.failure, self.facts) from None

    def _out_of_memory(self, error: Exception) -> CellFailed:
        failure = self.memory.failure(error, self.stages.current)
        message = f"{failure.message}; {accounting_words(self.facts)}"
        return CellFailed(replace(failure, message=message), self.facts)


class AttentionMeasurement:
    """One implementation on one shape. `base_bytes`: what was allocated before the inputs."""

    def __init__(
        self,
        cell: _Cell,
        attention_pass: AttentionPass,
        warmups: Sequence[tuple[float, float]],
        gpu: GpuState | None,
        base_bytes: int,
    ) -> None:
        self._cell = cell
        self._pass = attention_pass
        self._warmups = warmups
        self._gpu = gpu
        self._base_bytes = base_bytes
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
        self._cell.stages.enter("afterwards")
        with self._cell.at_work():
            self._inspect()
        facts, device = self._cell.facts, self._cell.config.device
        facts |= facts_of(timing="host_clock" if device == "cpu" else "cuda_events")
        if self._throttle_reasons:
            facts |= facts_of(throttle_reasons=", ".join(sorted(self._throttle_reasons)))
        del self._pass
        _release_memory(device)
        samples = {
            name: Samples(
                unit="s",
                values=tuple(times[place] for times in self._times),
                warmups=tuple(times[place] for times in self._warmups),
            )
            for place, name in enumerate(("time_s", "host_s"))
        }
        return Findings(samples=samples, facts=facts)

    def _inspect(self) -> None:
        timed, config, tensors = self._pass, self._pass.config, self._pass.tensors

        def inspect(subject: str, facts_now: Callable[[], Mapping[str, Fact]]) -> None:
            try_afterwards(self._cell.facts, subject, lambda facts: facts.update(facts_now()))

        inspect("memory held", lambda: facts_of(held_bytes=held_bytes(tensors, timed.attend)))
        if config.device == "cuda":  # a CPU's allocator keeps no peak
            inspect("memory", lambda: peak_facts(timed.run, timed.before, self._base_bytes))
        inspect("values", lambda: check_values(config, tensors, timed.attend))
        chosen = kernels_chosen(config, tensors)
        run, before = timed.run, timed.before
        inspect("device", lambda: device_facts(config, run, before=before, times=self._times, chosen=chosen))


def _open_device(config: AttentionConfig, device: torch.device) -> tuple[GpuState, Tensor | None, int]:
    """Free what earlier cells left. Returns the GPU's state, the filler for a cold cache, and the bytes allocated with it."""
    _release_memory("cuda")
    properties = torch.cuda.get_device_properties(device)
    filler = None
    if config.l2 == "cold":
        filler = torch.empty(2 * properties.L2_cache_size, dtype=torch.uint8, device=device)  # twice the cache
    return GpuState(str(properties.uuid)), filler, torch.cuda.memory_allocated()


def _release_memory(device: str) -> None:
    """Return unused memory to the device."""
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def peak_facts(run: Run, before: Before, base_bytes: int) -> dict[str, Fact]:
    """The most that was allocated on the GPU during a pass, above `base_bytes`."""
    torch.cuda.reset_peak_memory_stats()
    run(before())
    return facts_of(peak_bytes=torch.cuda.max_memory_allocated() - base_bytes)


def held_bytes(tensors: Tensors, attend: Attention) -> int:
    """Bytes that a forward pass leaves allocated; on a CPU, those of the storages that autograd saved and of the output."""
    if tensors.q.is_cuda:
        before_bytes = torch.cuda.memory_allocated()
        output = attend(*tensors.leaves)
        kept_bytes = torch.cuda.memory_allocated() - before_bytes
        del output
        return kept_bytes
    inputs = {x.untyped_storage().data_ptr() for x in tensors.leaves}
    storages: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in inputs:
            storages[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        output = attend(*tensors.leaves)
    note(output)
    return sum(storages.values())


def device_facts(
    config: AttentionConfig, run: Run, *, before: Before, times: Sequence[tuple[float, float]], chosen: str = ""
) -> dict[str, Fact]:
    """Facts of what ran, and of whether the device waited for the host. `times`: (device, host) seconds of the timed passes.

    `chosen`: the words of `kernels_chosen`, which follow the kernels' names.
    """
    if config.device == "cpu":
        name = config.implementation
        return facts_of(which_ran=_ON_A_CPU.get(name, f"torch's {name} backend"))
    events = device_events(run, before)
    words = "; ".join(filter(None, (main_kernels(events), chosen)))
    facts = facts_of(which_ran=words) if events else {}
    busy_s = union_s((event.start_ns, event.end_ns) for event in events)
    if busy_s and times:
        facts |= facts_of(device_busy_s=busy_s)
        time_s, host_s = (median(seconds) for seconds in zip(*times, strict=True))
        launch_bound = is_launch_bound(busy_s=busy_s, enqueue_s=host_s, step_s=time_s)
        facts |= facts_of(launch_bound=launch_bound)
    return facts


def kernels_chosen(config: AttentionConfig, tensors: Tensors) -> str:
    """Which of its kernels trainstep's attention chose and why; empty for other implementations."""
    if config.implementation != "trainstep":
        return ""
    by_head = {"BHSD": lambda x: x, "BSHD": lambda x: x.transpose(1, 2), "BSD": lambda x: x.unsqueeze(1)}[config.layout]
    settings = own_settings(config)
    return describe_choice(
        *map(by_head, tensors.leaves),
        backward=config.direction != "forward",
        fp32_precision=settings["fp32_precision"],
        tiles=settings["tiles"],
    )


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
