"""The workload `train_step`: build a step, warm it up, time it, and look once at memory, device-busy time and compilation.

The quantities a record of it holds:

samples  forward backward grad_sync optimizer [s]: device time between CUDA events, or the host's clock (fact `timing`)
         step [s]: host clock around synchronised steps; enqueue [s]: until the last work was issued (GPU)
         sm_clock [Hz], device_allocations [count] (GPU): read after each window; the second counts calls of cudaMalloc
facts    those of every workload and those under "A training step" in records/facts.py
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from trainstep.capture.waits import NotCapturable
from trainstep.config.parsing import from_plain
from trainstep.config.phases import Phase
from trainstep.config.run import RunConfig
from trainstep.measure.built_step import BuiltStep, open_device
from trainstep.measure.compilation import compilation_facts
from trainstep.measure.device_time import device_busy_s
from trainstep.measure.failures import CellFailed, try_afterwards
from trainstep.measure.model_flops import flops_facts
from trainstep.measure.step_timer import ReadWindow, StepTimer
from trainstep.measure.workload import Findings, Stage, Stages
from trainstep.records.facts import Fact, facts_of
from trainstep.records.record import Failure, Samples
from trainstep.traces.launch_bound import is_launch_bound
from trainstep.training.batches import Batch
from trainstep.training.build import Assembly, build_step, parameter_count
from trainstep.training.captured import CapturedTrainStep


class TrainStepWorkload:
    """Each cell in a fresh process, so that none spoils the next."""

    shares_worker = False

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> "TrainStepMeasurement":
        return prepare_step(from_plain(RunConfig, config), stage)


WORKLOAD = TrainStepWorkload()


def prepare_step(run: RunConfig, stage: Stage) -> "TrainStepMeasurement":
    """Everything before the first timed step."""
    opened = open_device(torch.device(run.device), Stages(stage))
    return warm_up(opened.build(lambda: build_step(run)))


def warm_up(built: BuiltStep) -> "TrainStepMeasurement":
    """The steps before the timed ones, kept apart."""
    timer, stages, count = StepTimer(built), built.opened.stages, built.assembly.run.warmups
    warmups = []
    with built.names_out_of_memory():
        if built.assembly.captured is not None:
            stages.enter("capture")
            _capture(timer)
        stages.enter("warmup")
        for done in range(count):
            warmups.append(timer.window(1))
            stages.count(done + 1, count)
        if built.assembly.captured is None:
            built.opened.memory.start()
        stages.enter("steps")
    return TrainStepMeasurement(built, timer, warmups)


def _capture(timer: StepTimer) -> None:
    """CellFailed where the run asks for a captured step and this one cannot be."""
    try:
        timer.capture()
    except NotCapturable as error:
        raise CellFailed(Failure(kind="unsupported", phase="capture", message=str(error))) from None


class TrainStepMeasurement:
    """One run, warmed up. Memory running out anywhere raises CellFailed with the phase, the bytes and what held the rest."""

    def __init__(self, built: BuiltStep, timer: StepTimer, warmups: Sequence[ReadWindow]) -> None:
        self.built = built
        self._run = built.assembly.run
        self._timer = timer
        self._warmups = warmups
        self._windows: list[ReadWindow] = []
        self._gpu_facts: dict[str, Fact] = {}
        self._throttle_reasons: set[str] = set()

    @property
    def assembly(self) -> Assembly:
        """What was built: for who looks at its step in a way of their own."""
        return self.built.assembly

    @property
    def batches(self) -> list[Batch]:
        """The last step's."""
        return self._timer.batches

    def take(self, steps: int) -> None:
        """Time `steps` more, in windows as `sync` says."""
        size = self._run.sync if isinstance(self._run.sync, int) else 1
        with self.built.names_out_of_memory():
            for done in range(0, steps, size):
                self._windows.append(self._timer.window(min(size, steps - done)))
                self.built.opened.stages.count(done + size, steps)
            self._read_gpu()

    def time_window(self, steps: int) -> float:
        """Seconds a step of so many in a row, with one synchronisation at each end. Not among the samples."""
        with self.built.names_out_of_memory():
            return self._timer.window(steps).times.step_s

    def settle(self) -> None:
        """The last step once more, untimed. Before the first step there is none, and the first is meant to be cold."""
        if self.batches:
            with self.built.names_out_of_memory():
                self._timer.step_again()
                self.built.opened.synchronize()

    def eager_settle(self) -> None:
        """The same, but never as a graph: Python sees what is sent."""
        with self.built.names_out_of_memory():
            self._timer.eager_step_again()
            self.built.opened.synchronize()

    def finish(self) -> Findings:
        """Everything that is looked at once, after the timed steps: extra steps run here touch no sample, nor can they
        lose one by failing."""
        opened, assembly, run = self.built.opened, self.assembly, self._run
        on_gpu = opened.device.type == "cuda"
        with self.built.names_out_of_memory():
            opened.stages.enter("afterwards")
            facts = facts_of(
                context_s=opened.context_s,
                build_s=self.built.build_s,
                loss=_finite(self._timer.loss.item()),
                tokens=run.tokens * assembly.ranks.world_size,
                parameters=parameter_count(assembly.module),
                timing="cuda_events" if on_gpu and run.sync != "phase" else "host_clock",
            )
            facts |= self._gpu_facts | opened.memory.facts()
            if run.compile != "none":
                facts |= compilation_facts()
            if assembly.captured is not None:
                facts |= _capture_facts(assembly.captured)
            if on_gpu:
                self._look(facts, "device-busy time and a reallocated step", self._look_at_device)
            self._look(facts, "model FLOPs", self._count_flops)
        return Findings(samples=self.samples(), facts=facts)

    def finish_unseen(self) -> Findings:
        """What was timed alone."""
        return Findings(samples=self.samples(), facts={})

    def samples(self) -> dict[str, Samples]:
        """What was timed so far."""
        return _samples_of(
            self._windows, self._warmups, self.built.opened.device.type == "cuda", self._run.sync == "phase"
        )

    def _look(self, facts: dict[str, Fact], what: str, look: Callable[[dict[str, Fact]], None]) -> None:
        if not try_afterwards(facts, what, look):
            self.assembly.step.clear_gradients()

    def _count_flops(self, facts: dict[str, Fact]) -> None:
        facts |= flops_facts(self._run, self._timer.eager_step_again)

    def _look_at_device(self, facts: dict[str, Fact]) -> None:
        """Device-busy time of one profiled step; then one step after emptying the allocator's cache: what cudaMalloc costs."""
        busy_s = device_busy_s(self._timer.step_again)
        if busy_s:
            facts |= facts_of(device_busy_s=busy_s)
            if self._run.sync != "phase":  # which takes the host's lead away
                facts |= facts_of(launch_bound=self._is_launch_bound(busy_s))
        self._timer.step_again()
        torch.cuda.empty_cache()
        facts |= facts_of(reallocated_step_s=self._timer.window_again().step_s)

    def _is_launch_bound(self, busy_s: float) -> bool:
        step_s = median(window.times.step_s for window in self._windows)
        enqueue_s = median(window.times.enqueue_s or 0.0 for window in self._windows)
        return is_launch_bound(busy_s=busy_s, enqueue_s=enqueue_s, step_s=step_s)

    def _read_gpu(self) -> None:
        """Clock limit, power, heat, throttling, read right behind timed work (they fall within milliseconds)."""
        gpu = self.built.opened.gpu
        if gpu is None:
            return
        self._throttle_reasons |= set((gpu.throttle_reasons() or "").split(", ")) - {""}
        self._gpu_facts |= facts_of(
            power_w=gpu.power_w(),
            temperature_c=gpu.temperature_c(),
            sm_clock_max_hz=gpu.sm_clock_max_hz(),
            throttle_reasons=", ".join(sorted(self._throttle_reasons)),
        )


def _capture_facts(captured: CapturedTrainStep) -> dict[str, Fact]:
    return facts_of(
        captured=captured.what,
        capture_left_out=captured.left_out,
        capture_s=captured.capture_s,
        capture_pool_bytes=captured.pool_bytes(),
    )


def _samples_of(
    windows: Sequence[ReadWindow], warmups: Sequence[ReadWindow], on_gpu: bool, synced_phases: bool
) -> dict[str, Samples]:
    def samples(values_of: Callable[[ReadWindow], Sequence[float]], unit: str = "s") -> Samples:
        timed, warm = (tuple(float(value) for one in some for value in values_of(one)) for some in (windows, warmups))
        return Samples(unit=unit, values=timed, warmups=warm)

    def phase_s(phase: Phase) -> Samples:
        return samples(lambda one: [step[phase] for step in one.times.phases])

    found = {"step": samples(lambda one: [one.times.step_s])}
    found |= {str(phase): phase_s(phase) for phase in windows[0].times.phases[0]}
    if on_gpu:
        if not synced_phases:
            found["enqueue"] = samples(lambda one: [one.times.enqueue_s or 0.0])
        if all(one.sm_clock_hz is not None for one in (*warmups, *windows)):
            found["sm_clock"] = samples(lambda one: [one.sm_clock_hz or 0.0], "Hz")
        found["device_allocations"] = samples(lambda one: [one.device_allocations], "count")
    return found


def _finite(value: float) -> float | str:
    """JSON has no NaN or infinity; a loss that is one says so in words."""
    return value if abs(value) < float("inf") else str(value)
