"""The workload `attention`: one implementation's forward, backward or both on one shape, and whether it is right.

The quantities a record of it holds:

samples  time_s [s]: one pass that begins with the device idle, between CUDA events (on a CPU by the host's clock)
         host_s [s]: until the host had issued that pass (on a CPU, where work runs as it is issued, the same as time_s)
facts    flops; peak_bytes above what was there before the inputs (GPU); held_bytes kept from forward for backward, output
         included, inputs not; first_call_s with compilation; inputs_ scores_ softmax_ lse_ output_ gradients_ needed_bytes
         as costs/attention.py counts them, of a failed cell too; error_*, has_nan, deterministic (attention_checks.py);
         device_busy_s, launch_bound and which_ran from one profiled pass; afterwards_failed

The forward pass is a training one: it keeps what backward needs. For direction `backward` each timed pass has a forward of its
own before it, untimed; gradients are returned, not added up. Launch-bound: as a training step is
(traces/launch_bound.py).
"""

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainstep.config.attention import AttentionConfig
from trainstep.measure.attention_checks import check_values
from trainstep.measure.attention_inputs import Tensors, accounting_words, counted_facts, random_tensors
from trainstep.measure.attention_looks import device_facts, held_bytes, kernels_chosen, peak_facts
from trainstep.measure.call_clock import time_alone_s
from trainstep.measure.failures import CellFailed, out_of_memory_as, try_afterwards
from trainstep.measure.memory import MemoryWatch
from trainstep.measure.nvml import GpuState
from trainstep.measure.peers import attend_named, refused, why_refused
from trainstep.measure.workload import Findings, Measurement, Stage, Stages
from trainstep.records.facts import Fact, facts_of
from trainstep.records.record import Samples
from trainstep.training.attention import Attention
from trainstep.training.precision import float32_matmuls


class AttentionWorkload:
    """Cells share a process until one fails: nothing outlives a cell but torch's caches and loaded kernels."""

    shares_worker = True

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> Measurement:
        """Make the inputs, run the first pass (which compiles what compiles) and the warm-ups.

        CellFailed, with the bytes the pass needs, where the implementation does not take the case or memory runs out.
        """
        return prepare_attention(AttentionConfig(**config), stage)


WORKLOAD = AttentionWorkload()


@dataclass(frozen=True, kw_only=True)
class AttentionPass:
    """What is timed, on its inputs. `cold_cache`: filled before each pass, to take the cache's place."""

    config: AttentionConfig
    device: torch.device
    tensors: Tensors
    attend: Attention
    cold_cache: Tensor | None = None

    def before(self) -> Tensor | None:
        """What the timed part begins with: for backward, a forward pass's output."""
        return self.attend(*self.tensors.leaves) if self.config.direction == "backward" else None

    def run(self, output: Tensor | None) -> tuple[Tensor, ...]:
        """The timed part; `output` is `before`'s."""
        if output is None:
            output = self.attend(*self.tensors.leaves)
        if self.config.direction == "forward":
            return (output,)
        return torch.autograd.grad(output, self.tensors.leaves, self.tensors.do)

    def time_s(self) -> tuple[float, float]:
        """Seconds of one pass on the device, and of the host until it was issued."""
        output = self.before()
        if self.cold_cache is not None:
            self.cold_cache.zero_()
        return time_alone_s(lambda: self.run(output), self.device.type)

    def first_call_s(self) -> float:
        """Seconds of the first pass. An implementation that does not take the case says so here, or in a warning."""
        started_s = time.perf_counter()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                self.run(self.before())
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
            except Exception as error:
                reason = why_refused(self.config, error, [str(warning.message) for warning in said])
                if reason is None:
                    raise
                raise refused(reason) from None
        return time.perf_counter() - started_s


@dataclass(frozen=True, kw_only=True)
class _Cell:
    """One cell in a process that measures others too. `facts`: what its record tells, if it fails too."""

    config: AttentionConfig
    stages: Stages
    memory: MemoryWatch
    facts: dict[str, Fact]

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """fp32 multiplied as asked, while this cell works. A refusal, or memory running out, becomes CellFailed that tells the
        bytes the pass needs."""
        with (
            float32_matmuls("high" if self.config.fp32_precision == "tf32" else "highest"),
            out_of_memory_as(self._out_of_memory),
        ):
            try:
                yield
            except CellFailed as error:
                _give_back(self.config.device)
                raise CellFailed(error.failure, self.facts) from None

    def _out_of_memory(self, error: Exception) -> CellFailed:
        failure = self.memory.failure(error, self.stages.current)
        message = f"{failure.message}; {accounting_words(self.facts)}"
        return CellFailed(replace(failure, message=message), self.facts)


def prepare_attention(config: AttentionConfig, stage: Stage) -> "AttentionMeasurement":
    """Everything before the first timed pass."""
    device = torch.device(config.device)
    cell = _Cell(config=config, stages=Stages(stage), memory=MemoryWatch(device), facts=counted_facts(config))
    if config.refusal:
        raise CellFailed(refused(config.refusal).failure, cell.facts)
    with cell.at_work():
        gpu, cold_cache, base_bytes = _open_device(config, device) if device.type == "cuda" else (None, None, 0)
        one = AttentionPass(
            config=config,
            device=device,
            tensors=random_tensors(config, device),
            attend=attend_named(config),
            cold_cache=cold_cache,
        )
        cell.stages.enter("first pass")
        cell.facts.update(facts_of(first_call_s=one.first_call_s()))
        cell.stages.enter("warmup")
        warmups = [one.time_s() for _ in range(config.warmups)]
        cell.stages.enter(config.direction)
    return AttentionMeasurement(cell, one, warmups, gpu, base_bytes)


class AttentionMeasurement:
    """One implementation on one shape. `base_bytes`: what was allocated before the inputs."""

    def __init__(
        self,
        cell: _Cell,
        one: AttentionPass,
        warmups: Sequence[tuple[float, float]],
        gpu: GpuState | None,
        base_bytes: int,
    ) -> None:
        self._cell = cell
        self._pass = one
        self._warmups = warmups
        self._gpu = gpu
        self._base_bytes = base_bytes
        self._times: list[tuple[float, float]] = []
        self._throttle_reasons: set[str] = set()

    def take(self, steps: int) -> None:
        """Time this many more passes."""
        with self._cell.at_work():
            self._times += [self._pass.time_s() for _ in range(steps)]
            if self._gpu is not None:  # right behind timed work: clocks and power fall within milliseconds
                self._throttle_reasons |= set((self._gpu.throttle_reasons() or "").split(", ")) - {""}

    def settle(self) -> None:
        """One pass that is not timed."""
        with self._cell.at_work():
            self._pass.time_s()

    def finish(self) -> Findings:
        """Memory, correctness and what ran, looked at once; passes run here touch no sample, nor can they lose one."""
        self._cell.stages.enter("afterwards")
        with self._cell.at_work():
            self._look(self._pass)
        facts, device = self._cell.facts, self._cell.config.device
        facts |= facts_of(timing="host_clock" if device == "cpu" else "cuda_events")
        if self._throttle_reasons:
            facts |= facts_of(throttle_reasons=", ".join(sorted(self._throttle_reasons)))
        del self._pass
        _give_back(device)
        samples = {
            name: Samples(
                unit="s",
                values=tuple(times[place] for times in self._times),
                warmups=tuple(times[place] for times in self._warmups),
            )
            for place, name in enumerate(("time_s", "host_s"))
        }
        return Findings(samples=samples, facts=facts)

    def _look(self, one: AttentionPass) -> None:
        config, tensors, attend = one.config, one.tensors, one.attend

        def look(what: str, found: Callable[[], Mapping[str, Fact]]) -> None:
            try_afterwards(self._cell.facts, what, lambda facts: facts.update(found()))

        look("memory held", lambda: facts_of(held_bytes=held_bytes(tensors, attend)))
        if config.device == "cuda":  # a CPU's allocator does not tell
            look("memory", lambda: peak_facts(one.run, one.before, self._base_bytes))
        look("values", lambda: check_values(config, tensors, attend))
        chosen = kernels_chosen(config, tensors)
        look("device", lambda: device_facts(config, one.run, before=one.before, times=self._times, chosen=chosen))


def _open_device(config: AttentionConfig, device: torch.device) -> tuple[GpuState, Tensor | None, int]:
    """What the cells before left goes; a cold cache's filler is twice the cache, and counts as there before."""
    _give_back("cuda")
    properties = torch.cuda.get_device_properties(device)
    cold = config.l2 == "cold"
    filler = torch.empty(2 * properties.L2_cache_size, dtype=torch.uint8, device=device) if cold else None
    return GpuState(str(properties.uuid)), filler, torch.cuda.memory_allocated()


def _give_back(device: str) -> None:
    """What nothing holds any more, to the device."""
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
