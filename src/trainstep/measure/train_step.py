"""The workload `train_step`: build a step, warm it up, time it, and look once at memory, device-busy time and compilation.

The quantities a record of it holds:

samples  forward backward grad_sync optimizer [s]: device time between CUDA events, or the host's clock (fact `timing`)
         step [s]: host clock around synchronised steps; enqueue [s]: until the last work was issued (GPU)
         sm_clock [Hz], device_allocations [count] (GPU): read after each window; the second counts calls of cudaMalloc
facts    tokens, parameters, model_flops (with source and convention), memory peaks, device_busy_s and launch_bound,
         compile_s and compile_cache, context_s, build_s, reallocated_step_s, clocks, power, throttle reasons, loss,
         afterwards_failed (what could not be looked at once the steps were timed)
"""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from trainstep.config.parsing import from_plain
from trainstep.config.run import RunConfig
from trainstep.measure.clock import Window, clock_for
from trainstep.measure.compilation import compilation_facts
from trainstep.measure.device_time import device_busy_s
from trainstep.measure.failures import CellFailed, failure_of, out_of_memory, out_of_memory_as
from trainstep.measure.memory import MemoryWatch
from trainstep.measure.model_flops import flops_facts
from trainstep.measure.nvml import GpuState
from trainstep.measure.workload import Findings, Measurement, Stage
from trainstep.records.record import Fact, Samples
from trainstep.spans import nvtx_spans
from trainstep.traces.launch_bound import is_launch_bound
from trainstep.training.batches import Batch
from trainstep.training.build import Assembly, build_step, parameter_count


class TrainStepWorkload:
    """Each cell in a fresh process, so that none spoils the next."""

    shares_worker = False

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> Measurement:
        measurement = TrainStepMeasurement(from_plain(RunConfig, config), stage)
        measurement.prepare()
        return measurement


WORKLOAD = TrainStepWorkload()


class TrainStepMeasurement:
    """One prepared run. Memory running out anywhere raises CellFailed with the phase, the bytes and what held the rest.

    `device`: this rank's own, where there are several; by default the run's. `meet`: called before each window, untimed, so that
    ranks begin together.
    """

    def __init__(
        self,
        run: RunConfig,
        stage: Stage,
        *,
        device: torch.device | None = None,
        meet: Callable[[], None] | None = None,
    ) -> None:
        self._run = run
        self._meet = meet or (lambda: None)
        self._stage_told = stage
        self._stage = "build"
        self._device = device or torch.device(run.device)
        self._memory = MemoryWatch(self._device)
        self._gpu: GpuState | None = None
        self._assembly: Assembly | None = None
        self._clock = clock_for(self._device, run.sync)
        self._windows: list[Window] = []
        self._warmups: list[Window] = []
        self._readings: list[tuple[float | None, int]] = []
        self._throttle_reasons: set[str] = set()
        self._facts: dict[str, Fact] = {}
        self._next_step = 0
        self._last_batches: list[Batch] = []
        self._told_s = 0.0
        self._loss: torch.Tensor | None = None

    def prepare(self) -> None:
        """Everything before the first timed step."""
        self.open_device()
        self.build(lambda: build_step(self._run))
        self.warm_up()

    def open_device(self) -> None:
        """Create the CUDA context here, timed, so that no step pays for it."""
        with out_of_memory_as(self._out_of_memory):
            self._tell("build")
            if self._device.type == "cuda":
                self._open_gpu()

    def build(self, build: Callable[[], Assembly]) -> Assembly:
        """The step, timed."""
        with out_of_memory_as(self._out_of_memory):
            started_s = time.perf_counter()
            self._assembly = build()
            self._synchronize()
            self._facts["build_s"] = Fact(value=time.perf_counter() - started_s, unit="s")
            return self._assembly

    def warm_up(self) -> None:
        """The steps before the timed ones, kept apart."""
        with out_of_memory_as(self._out_of_memory):
            self._tell("warmup")
            for done in range(self._run.warmups):
                self._warmups.append(self._window(1))
                self._tell_progress(done + 1, self._run.warmups)
            self._memory.start()
            self._tell("steps")

    def take(self, steps: int) -> None:
        """Time `steps` more, in windows as `sync` says."""
        size = self._run.sync if isinstance(self._run.sync, int) else 1
        with out_of_memory_as(self._out_of_memory):
            for done in range(0, steps, size):
                self._windows.append(self._window(min(size, steps - done)))
                self._tell_progress(done + size, steps)
            self._read_gpu()

    def time_window(self, steps: int) -> float:
        """Seconds a step of so many in a row, with one synchronisation at each end. Not among the samples."""
        with out_of_memory_as(self._out_of_memory):
            return self._timed(self._next_batches(steps)).step_s

    def settle(self) -> None:
        """The last step once more, untimed. Before the first step there is none, and the first is meant to be cold."""
        if self._last_batches:
            with out_of_memory_as(self._out_of_memory):
                self._run_step_unmarked()
                self._synchronize()

    def finish(self) -> Findings:
        """Everything that is looked at once, after the timed steps: extra steps run here touch no sample, nor can they
        lose one by failing."""
        with out_of_memory_as(self._out_of_memory):
            self._tell("afterwards")
            assert self._assembly is not None and self._loss is not None
            self._facts["loss"] = Fact(value=_finite(self._loss.item()))
            self._facts.update(self._memory.facts())
            tokens = self._run.tokens * self._assembly.ranks.world_size
            self._facts["tokens"] = Fact(value=tokens, unit="count")
            self._facts["parameters"] = Fact(value=parameter_count(self._assembly.module), unit="count")
            on_events = self._device.type == "cuda" and self._run.sync != "phase"
            self._facts["timing"] = Fact(value="cuda_events" if on_events else "host_clock")
            if self._run.compile != "none":
                self._facts.update(compilation_facts())
            if self._device.type == "cuda":
                self._try_afterwards("device-busy time and a reallocated step", self._look_at_device)
            self._try_afterwards("model FLOPs", self._count_flops)
        return Findings(samples=self.samples(), facts=self._facts)

    def finish_unseen(self) -> Findings:
        """What was timed alone."""
        return Findings(samples=self.samples(), facts={})

    @property
    def phase(self) -> str:
        """Where it is: the phase at work during steps, else the stage."""
        in_steps = self._stage in ("warmup", "steps") and self._assembly is not None
        return str(self._assembly.step.running) if in_steps and self._assembly else self._stage

    def holders(self) -> dict[str, int]:
        """Bytes by what holds them, as far as tensors can be named."""
        if self._assembly is None:
            return {}
        return self._memory.holders(self._assembly.module, self._assembly.step.optimizer)

    def prepared(self) -> tuple[Assembly, list[Batch]]:
        """What was built, and the last step's batches: for who looks at that step in a way of its own."""
        assert self._assembly is not None
        return self._assembly, self._last_batches

    @property
    def memory(self) -> MemoryWatch:
        return self._memory

    def _out_of_memory(self, error: Exception) -> CellFailed:
        failure = out_of_memory(
            error,
            self.phase,
            allocated_bytes=self._memory.allocated_bytes(),
            capacity_bytes=self._memory.capacity_bytes(),
            holders=self.holders(),
        )
        return CellFailed(failure)

    def _window(self, steps: int) -> Window:
        batches = self._next_batches(steps)
        allocations_before = self._memory.device_allocations()
        window = self._timed(batches)
        if self._gpu is not None:
            allocations = self._memory.device_allocations() - allocations_before
            self._readings.append((self._gpu.sm_clock_hz(), allocations))
        return window

    def _next_batches(self, steps: int) -> list[list[Batch]]:
        assert self._assembly is not None
        self._last_batches = []  # frees them before the next are made
        batches = [self._assembly.micro_batches(self._next_step + index) for index in range(steps)]
        self._next_step += steps
        self._last_batches = batches[-1]
        return batches

    def _timed(self, batches: Sequence[list[Batch]]) -> Window:
        self._meet()
        self._clock.start_window()
        for micro_batches in batches:
            self._clock.start_step()
            self._loss = self._run_step(micro_batches)
        return self._clock.stop_window()

    def _run_step(self, micro_batches: list[Batch]) -> torch.Tensor:
        assert self._assembly is not None
        step = self._assembly.step
        if self._run.nvtx:
            with nvtx_spans():
                loss = step(micro_batches, self._clock.mark)
        else:
            loss = step(micro_batches, self._clock.mark)
        if self._run.mode == "forward_backward":
            step.clear_gradients()
        return loss

    def _open_gpu(self) -> None:
        self._memory.before_context()
        started_s = time.perf_counter()
        if self._device.index is not None:
            torch.cuda.set_device(self._device)
        torch.zeros(1, device=self._device)
        torch.cuda.synchronize()
        self._facts["context_s"] = Fact(value=time.perf_counter() - started_s, unit="s")
        self._gpu = GpuState(str(torch.cuda.get_device_properties(self._device).uuid))

    def _try_afterwards(self, what: str, look: Callable[[], None]) -> None:
        """Look, or say in the fact `afterwards_failed` why that could not be: what is there already is kept."""
        assert self._assembly is not None
        try:
            look()
        except Exception as error:  # noqa: BLE001  (a user's model may raise anything)
            self._assembly.step.clear_gradients()
            before = self._facts.get("afterwards_failed")
            sentence = f"{what}: {failure_of(error, self._stage).message}"
            self._facts["afterwards_failed"] = Fact(value=f"{before.value}; {sentence}" if before else sentence)

    def _count_flops(self) -> None:
        self._facts.update(flops_facts(self._run, self._run_step_unmarked))

    def _look_at_device(self) -> None:
        """Device-busy time of one profiled step; then one step after emptying the allocator's cache: what cudaMalloc costs."""
        busy_s = device_busy_s(self._run_step_unmarked)
        if busy_s:
            self._facts["device_busy_s"] = Fact(value=busy_s, unit="s")
            if self._run.sync != "phase":  # which takes the host's lead away
                self._facts["launch_bound"] = Fact(value=self._is_launch_bound(busy_s))
        self._run_step_unmarked()
        torch.cuda.empty_cache()
        self._facts["reallocated_step_s"] = Fact(value=self._timed([self._last_batches]).step_s, unit="s")

    def _is_launch_bound(self, busy_s: float) -> bool:
        step_s = median(window.step_s for window in self._windows)
        enqueue_s = median(window.enqueue_s or 0.0 for window in self._windows)
        return is_launch_bound(busy_s=busy_s, enqueue_s=enqueue_s, step_s=step_s)

    def _run_step_unmarked(self) -> None:
        """The last step's batches again: of a user's there may be no more."""
        assert self._assembly is not None
        self._assembly.step(self._last_batches)
        if self._run.mode == "forward_backward":
            self._assembly.step.clear_gradients()

    def _read_gpu(self) -> None:
        """Clock limit, power, heat, throttling, read right behind timed work (they fall within milliseconds)."""
        if self._gpu is None:
            return
        self._throttle_reasons |= set((self._gpu.throttle_reasons() or "").split(", ")) - {""}
        readings = {
            "power_w": (self._gpu.power_w(), "W"),
            "temperature_c": (self._gpu.temperature_c(), "C"),
            "sm_clock_max_hz": (self._gpu.sm_clock_max_hz(), "Hz"),
            "throttle_reasons": (", ".join(sorted(self._throttle_reasons)), ""),
        }
        self._facts.update(
            {name: Fact(value=value, unit=unit) for name, (value, unit) in readings.items() if value is not None}
        )

    def samples(self) -> dict[str, Samples]:
        """What was timed so far."""
        samples = {"step": _samples([w.step_s for w in self._windows], [w.step_s for w in self._warmups])}
        for phase in self._windows[0].phases[0]:
            samples[str(phase)] = _samples(
                [step[phase] for window in self._windows for step in window.phases],
                [step[phase] for window in self._warmups for step in window.phases],
            )
        if self._device.type == "cuda":
            if self._run.sync != "phase":
                samples["enqueue"] = _samples(
                    [w.enqueue_s or 0.0 for w in self._windows], [w.enqueue_s or 0.0 for w in self._warmups]
                )
            first, end = len(self._warmups), len(self._warmups) + len(self._windows)
            clocks = [clock for clock, _ in self._readings[:end]]
            if None not in clocks:
                samples["sm_clock"] = _samples(clocks[first:], clocks[:first], unit="Hz")
            allocations = [count for _, count in self._readings[:end]]
            samples["device_allocations"] = _samples(allocations[first:], allocations[:first], unit="count")
        return samples

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _tell(self, stage: str) -> None:
        self._stage = stage
        self._told_s = time.monotonic()
        self._stage_told(stage)

    def _tell_progress(self, done: int, of: int) -> None:
        """Between windows, at most once a second."""
        if time.monotonic() - self._told_s > 1:
            self._told_s = time.monotonic()
            self._stage_told(f"{self._stage} {done}/{of}")


def _samples(values: list[Any], warmups: list[Any], unit: str = "s") -> Samples:
    return Samples(unit=unit, values=tuple(map(float, values)), warmups=tuple(map(float, warmups)))


def _finite(value: float) -> float | str:
    """JSON has no NaN or infinity; a loss that is one says so in words."""
    return value if abs(value) < float("inf") else str(value)
