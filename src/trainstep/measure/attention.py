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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainstep.config.attention import AttentionConfig
from trainstep.measure.attention_checks import check_values
from trainstep.measure.attention_inputs import Tensors, accounting_words, counted_facts, random_tensors
from trainstep.measure.attention_looks import device_facts, held_bytes, kernels_chosen, peak_facts
from trainstep.measure.call_clock import time_alone_s
from trainstep.measure.failures import CellFailed, failure_of, out_of_memory, out_of_memory_as
from trainstep.measure.memory import MemoryWatch
from trainstep.measure.nvml import GpuState
from trainstep.measure.peers import attend_named, refused, why_refused
from trainstep.measure.workload import Findings, Measurement, Stage
from trainstep.records.record import Fact, Samples
from trainstep.training.attention import Attention
from trainstep.training.precision import float32_matmuls


class AttentionWorkload:
    """Cells share a process until one fails: nothing outlives a cell but torch's caches and loaded kernels."""

    shares_worker = True

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> Measurement:
        """Make the inputs, run the first pass (which compiles what compiles) and the warm-ups.

        CellFailed, with the bytes the pass needs, where the implementation does not take the case or memory runs out.
        """
        measurement = AttentionMeasurement(AttentionConfig(**config), stage)
        measurement.prepare()
        return measurement


WORKLOAD = AttentionWorkload()


class AttentionMeasurement:
    """One implementation on one shape."""

    def __init__(self, config: AttentionConfig, stage: Stage) -> None:
        self._config = config
        self._stage_told = stage
        self._stage = "build"
        self._device = torch.device(config.device)
        self._memory = MemoryWatch(self._device)
        self._gpu: GpuState | None = None
        self._throttle_reasons: set[str] = set()
        self._tensors: Tensors | None = None
        self._attend: Attention | None = None
        self._cold_cache: Tensor | None = None
        self._base_bytes = 0
        self._warmups: list[tuple[float, float]] = []
        self._times: list[tuple[float, float]] = []
        self._facts = counted_facts(config)

    def prepare(self) -> None:
        config = self._config
        self._tell("build")
        if config.refusal:
            raise CellFailed(refused(config.refusal).failure, self._facts)
        with self._at_work():
            if self._device.type == "cuda":
                self._open_device()
            self._tensors = random_tensors(config, self._device)
            self._attend = attend_named(config)
            self._tell("first pass")
            self._facts["first_call_s"] = Fact(value=self._first_call_s(), unit="s")
            self._tell("warmup")
            self._warmups = [self._timed() for _ in range(config.warmups)]
            self._tell(config.direction)

    def take(self, steps: int) -> None:
        """Time this many more passes."""
        with self._at_work():
            self._times += [self._timed() for _ in range(steps)]
            if self._gpu is not None:  # right behind timed work: clocks and power fall within milliseconds
                self._throttle_reasons |= set((self._gpu.throttle_reasons() or "").split(", ")) - {""}

    def settle(self) -> None:
        """One pass that is not timed."""
        with self._at_work():
            self._timed()

    def finish(self) -> Findings:
        """Memory, correctness and what ran, looked at once; passes run here touch no sample, nor can they lose one."""
        self._tell("afterwards")
        config, tensors, attend = self._config, self._tensors, self._attend
        assert tensors is not None and attend is not None
        with self._at_work():
            self._try_afterwards("memory held", lambda: {"held_bytes": _bytes(held_bytes(tensors, attend))})
            if self._device.type == "cuda":  # a CPU's allocator does not tell
                self._try_afterwards("memory", lambda: peak_facts(self._run, self._before, self._base_bytes))
            self._try_afterwards("values", lambda: check_values(config, tensors, attend))
            chosen = kernels_chosen(config, tensors)
            self._try_afterwards(
                "device",
                lambda: device_facts(config, self._run, before=self._before, times=self._times, chosen=chosen),
            )
        self._facts["timing"] = Fact(value="host_clock" if self._device.type == "cpu" else "cuda_events")
        if self._throttle_reasons:
            self._facts["throttle_reasons"] = Fact(value=", ".join(sorted(self._throttle_reasons)))
        self._release()
        samples = {
            name: Samples(
                unit="s",
                values=tuple(times[place] for times in self._times),
                warmups=tuple(times[place] for times in self._warmups),
            )
            for place, name in enumerate(("time_s", "host_s"))
        }
        return Findings(samples=samples, facts=self._facts)

    def _open_device(self) -> None:
        """What the cells before left goes; a cold cache's filler is twice the cache, and counts as there before."""
        gc.collect()
        torch.cuda.empty_cache()
        properties = torch.cuda.get_device_properties(self._device)
        if self._config.l2 == "cold":
            self._cold_cache = torch.empty(2 * properties.L2_cache_size, dtype=torch.uint8, device=self._device)
        self._base_bytes = torch.cuda.memory_allocated()
        self._gpu = GpuState(str(properties.uuid))

    def _first_call_s(self) -> float:
        """Seconds of the first pass. An implementation that does not take the case says so here, or in a warning."""
        started_s = time.perf_counter()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                self._run(self._before())
                self._synchronize()
            except Exception as error:
                reason = why_refused(self._config, error, [str(warning.message) for warning in said])
                if reason is None:
                    raise
                raise refused(reason) from None
        return time.perf_counter() - started_s

    def _before(self) -> Tensor | None:
        """What the timed part begins with: for backward, a forward pass's output."""
        if self._config.direction != "backward":
            return None
        assert self._tensors is not None and self._attend is not None
        return self._attend(*self._tensors.leaves)

    def _run(self, output: Tensor | None) -> tuple[Tensor, ...]:
        """The timed part; `output` is `_before`'s."""
        assert self._tensors is not None and self._attend is not None
        if output is None:
            output = self._attend(*self._tensors.leaves)
        if self._config.direction == "forward":
            return (output,)
        return torch.autograd.grad(output, self._tensors.leaves, self._tensors.do)

    def _timed(self) -> tuple[float, float]:
        """Seconds of one pass on the device, and of the host until it was issued."""
        output = self._before()
        if self._cold_cache is not None:
            self._cold_cache.zero_()
        return time_alone_s(lambda: self._run(output), self._device.type)

    def _try_afterwards(self, what: str, look: Callable[[], dict[str, Fact]]) -> None:
        """Look, or say in the fact `afterwards_failed` why that could not be: the samples are kept."""
        try:
            self._facts |= look()
        except Exception as error:  # noqa: BLE001  (a peer may raise anything)
            before = self._facts.get("afterwards_failed")
            sentence = f"{what}: {failure_of(error, self._stage).message}"
            self._facts["afterwards_failed"] = Fact(value=f"{before.value}; {sentence}" if before else sentence)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """fp32 multiplied as asked, while this cell works: the process measures others too. A refusal, or memory running out,
        becomes CellFailed that tells the bytes the pass needs."""
        with (
            float32_matmuls("high" if self._config.fp32_precision == "tf32" else "highest"),
            out_of_memory_as(self._out_of_memory),
        ):
            try:
                yield
            except CellFailed as error:
                self._release()
                raise CellFailed(error.failure, self._facts) from None

    def _out_of_memory(self, error: Exception) -> CellFailed:
        failure = out_of_memory(
            error,
            self._stage,
            allocated_bytes=self._memory.allocated_bytes(),
            capacity_bytes=self._memory.capacity_bytes(),
        )
        message = f"{failure.message}; {accounting_words(self._facts)}"
        return CellFailed(replace(failure, message=message), self._facts)

    def _release(self) -> None:
        self._tensors = self._attend = self._cold_cache = None
        if self._device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _tell(self, stage: str) -> None:
        self._stage = stage
        self._stage_told(stage)


def _bytes(count: int) -> Fact:
    return Fact(value=count, unit="bytes")
