"""The workload `train_step` builds a step, warms it up, times it, and inspects memory, device-busy time and FLOPs.

A record of this workload holds

samples  forward backward grad_sync optimizer [s]: device time between CUDA events, or host time (fact `timing`)
         step [s]: host time of synchronised steps; enqueue [s]: host time until the last work was issued (GPU)
         sm_clock [Hz], device_allocations [count] (GPU): read after each window; the second counts calls of cudaMalloc
facts    the facts of every workload, and those under "A training step" in records/facts.py
tables   losses: of the steps before the timed ones (those that capture takes, then the warm-ups), on the batches from the first on
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from trainstep.config.machine import matmul_dtype
from trainstep.config.model import ModelConfig, UserModel
from trainstep.config.parsing import from_plain
from trainstep.config.run import BenchConfig, Phase, RunConfig
from trainstep.costs.transformer import CONVENTION
from trainstep.measure.harness.failures import CellFailed, try_afterwards
from trainstep.measure.harness.workload import Findings, Stage, Stages, compilation_facts
from trainstep.measure.step.built_step import BuiltStep, open_device
from trainstep.measure.step.clock import ReadWindow, StepTimer
from trainstep.measure.step.device_trace import device_busy_s
from trainstep.measure.step.recompute_budget import Recomputation, fit_budget
from trainstep.parallel.launch import find_launch
from trainstep.plan.recomputation import BudgetTooSmall
from trainstep.records.facts import Fact, facts_of
from trainstep.records.record import Failure, Samples
from trainstep.traces.verdict import is_launch_bound
from trainstep.training.batches import Batch
from trainstep.training.build import Assembly, build_step, parameter_count
from trainstep.training.recompute import RecomputedForward
from trainstep.training.user_model import source_of

_COUNTER = "torch.utils.flop_counter"
_COUNTER_CONVENTION = "every matmul and attention that torch's FLOP counter saw in one eager step, attention not halved"


class TrainStepWorkload:
    """Times training steps; each cell has a fresh process, so that no cell disturbs the next."""

    shares_worker = False

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> "TrainStepMeasurement":
        run = from_plain(BenchConfig, config)
        # Several processes that take the step by themselves have the variables of ranks (harness/rank_connection.py).
        several = run.device == "cuda" and run.ranks > 1
        return prepare_step(run, stage, torch.device("cuda", find_launch(os.environ).local_rank) if several else None)


WORKLOAD = TrainStepWorkload()


def prepare_step(run: RunConfig, stage: Stage, device: torch.device | None = None) -> "TrainStepMeasurement":
    """Open the device, by default the first of `run.device`, build the step and warm it up."""
    opened = open_device(device or torch.device(run.device), Stages(stage))
    return warm_up(opened.build(lambda: build_step(run)))


def warm_up(built: BuiltStep) -> "TrainStepMeasurement":
    """Choose the recomputation for the run's budget, if it has one, and run the warm-up steps; their times are kept apart.

    Raises CellFailed if nothing fits the budget, or if the step should be captured and cannot be.
    """
    recomputation = _recomputation(built)
    timer, stages, count = StepTimer(built), built.opened.stages, built.assembly.run.warmups
    warmups, losses = [], []
    with built.names_out_of_memory():
        if built.assembly.captured is not None:
            stages.enter("capture")
            with built.names_what_is_not_captured():
                losses += timer.capture()
        stages.enter("warmup")
        for done in range(count):
            warmups.append(timer.window(1))
            losses.append(timer.loss.item())
            stages.count(done + 1, count)
        if built.assembly.captured is None:
            built.opened.memory.start()
        stages.enter("steps")
    return TrainStepMeasurement(built, timer, warmups, losses, recomputation)


def _recomputation(built: BuiltStep) -> Recomputation | None:
    if built.assembly.run.recompute_budget_gib is None:
        return None
    built.opened.stages.enter("recompute")
    with built.names_out_of_memory():
        try:
            return fit_budget(built.assembly)
        except BudgetTooSmall as error:
            raise CellFailed(Failure(kind="unsupported", phase="recompute", message=str(error))) from None


class TrainStepMeasurement:
    """A run after its warm-up. If memory runs out, CellFailed is raised with the phase, the bytes and what held the rest."""

    def __init__(
        self,
        built: BuiltStep,
        timer: StepTimer,
        warmups: Sequence[ReadWindow],
        losses: Sequence[float],
        recomputation: Recomputation | None = None,
    ) -> None:
        """`losses`: of all steps before this, which take the first batches in order."""
        self.built = built
        self._losses = losses
        self._recomputation = recomputation
        self._run = built.assembly.run
        self._timer = timer
        self._warmups = warmups
        self._windows: list[ReadWindow] = []
        self._gpu_facts: dict[str, Fact] = {}
        self._throttle_reasons: set[str] = set()

    @property
    def assembly(self) -> Assembly:
        """The built step, for workloads that inspect it in their own way."""
        return self.built.assembly

    @property
    def batches(self) -> list[Batch]:
        """The last step's batches."""
        return self._timer.batches

    def take(self, steps: int) -> None:
        """Time this many more steps, in windows of the size that `sync` gives."""
        size = self._run.sync if isinstance(self._run.sync, int) else 1
        with self.built.names_out_of_memory():
            for done in range(0, steps, size):
                self._windows.append(self._timer.window(min(size, steps - done)))
                self.built.opened.stages.count(done + size, steps)
            self._read_gpu()

    def time_window(self, steps: int) -> float:
        """Seconds per step of one window of this many steps; the window is not among the samples."""
        with self.built.names_out_of_memory():
            return self._timer.window(steps).times.step_s

    def settle(self) -> None:
        """Run the last step again, untimed. Does nothing before the first step, which is meant to be cold."""
        if self.batches:
            with self.built.names_out_of_memory():
                self._timer.step_again()
                self.built.opened.synchronize()

    def eager_settle(self) -> None:
        """Run the last step again, untimed and never as a graph, so that Python code observes its messages."""
        with self.built.names_out_of_memory():
            self._timer.eager_step_again()
            self.built.opened.synchronize()

    def finish(self, *, inspects: bool = True) -> Findings:
        """Inspect the step and return all results. Extra steps run here: they change no sample, even if they fail. `inspects`
        False: without these steps."""
        opened, assembly, run = self.built.opened, self.assembly, self._run
        on_gpu = opened.device.type == "cuda"
        with self.built.names_out_of_memory():
            opened.stages.enter("afterwards")
            loss = self._timer.loss.item()
            facts = facts_of(
                context_s=opened.context_s,
                build_s=self.built.build_s,
                loss=loss if math.isfinite(loss) else str(loss),  # JSON has no NaN and no infinity
                tokens=run.tokens * assembly.ranks.world_size,
                parameters=parameter_count(assembly.module),
                timing="cuda_events" if on_gpu and run.sync != "phase" else "host_clock",
            )
            if isinstance(run.model, UserModel):
                facts |= facts_of(model_source=source_of(run.model.function) or None)
            facts |= self._gpu_facts | opened.memory.facts()
            if run.compile != "none":
                facts |= compilation_facts()
            facts |= self.built.capture_facts()
            facts |= self._recomputation.facts() if self._recomputation else {}
            if on_gpu and inspects:
                self._inspect(facts, "device-busy time and a reallocated step", self._inspect_device)
            if inspects:
                self._inspect(
                    facts,
                    "model FLOPs",
                    lambda facts: facts.update(flops_facts(run, self._timer.eager_step_again, assembly.recomputed)),
                )
        tables = self._recomputation.tables() if self._recomputation else {}
        if self._losses:
            tables["losses"] = {"loss": [loss if math.isfinite(loss) else None for loss in self._losses]}
        return Findings(samples=self.samples(), facts=facts, tables=tables)

    def finish_uninspected(self) -> Findings:
        """Return the samples alone."""
        return Findings(samples=self.samples(), facts={})

    def samples(self) -> dict[str, Samples]:
        """The samples of the steps timed so far."""
        return _samples_of(
            self._windows, self._warmups, self.built.opened.device.type == "cuda", self._run.sync == "phase"
        )

    def _inspect(self, facts: dict[str, Fact], what: str, inspect: Callable[[dict[str, Fact]], None]) -> None:
        if not try_afterwards(facts, what, inspect):
            self.assembly.step.clear_gradients()

    def _inspect_device(self, facts: dict[str, Fact]) -> None:
        """Profile one step for device-busy time, then time one step with an empty allocator cache for cudaMalloc's cost."""
        busy_s = device_busy_s(self._timer.step_again)
        if busy_s:
            facts |= facts_of(device_busy_s=busy_s)
            if self._run.sync != "phase":  # synchronising at each phase takes away the host's lead
                facts |= facts_of(launch_bound=self._is_launch_bound(busy_s))
        self._timer.step_again()
        torch.cuda.empty_cache()
        facts |= facts_of(reallocated_step_s=self._timer.window_again().step_s)

    def _is_launch_bound(self, busy_s: float) -> bool:
        step_s = median(window.times.step_s for window in self._windows)
        enqueue_s = median(window.times.enqueue_s or 0.0 for window in self._windows)
        return is_launch_bound(busy_s=busy_s, enqueue_s=enqueue_s, step_s=step_s)

    def _read_gpu(self) -> None:
        """Read the clock limit, power, temperature and throttling at once: they fall within milliseconds after the work."""
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


def _samples_of(
    windows: Sequence[ReadWindow], warmups: Sequence[ReadWindow], on_gpu: bool, synced_phases: bool
) -> dict[str, Samples]:
    def samples(values_of: Callable[[ReadWindow], Sequence[float]], unit: str = "s") -> Samples:
        return Samples(
            unit=unit,
            values=tuple(float(value) for window in windows for value in values_of(window)),
            warmups=tuple(float(value) for window in warmups for value in values_of(window)),
        )

    def phase_s(phase: Phase) -> Samples:
        return samples(lambda window: [step[phase] for step in window.times.phases])

    by_name = {"step": samples(lambda window: [window.times.step_s])}
    by_name |= {str(phase): phase_s(phase) for phase in windows[0].times.phases[0]}
    if on_gpu:
        if not synced_phases:
            by_name["enqueue"] = samples(lambda window: [window.times.enqueue_s or 0.0])
        if all(window.sm_clock_hz is not None for window in (*warmups, *windows)):
            by_name["sm_clock"] = samples(lambda window: [window.sm_clock_hz or 0.0], "Hz")
        by_name["device_allocations"] = samples(lambda window: [window.device_allocations], "count")
    return by_name


def flops_facts(
    run: RunConfig, run_step: Callable[[], object], recomputed: Sequence[RecomputedForward] = ()
) -> dict[str, Fact]:
    """`model_flops` per step, with their source, their convention and the dtype of the matmuls.

    They are computed from shapes for the built-in model. For a user's model torch's counter counts them in one step,
    which `run_step` runs; what its `recomputed` blocks compute again does not count.
    """
    if isinstance(run.model, ModelConfig):
        model, source, convention = run.model, "shapes", CONVENTION
        flops = run.model_flops(model)
    else:
        source, convention = _COUNTER, _COUNTER_CONVENTION
        # Eagerly, because compiled regions hide their ops from the counter.
        with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False) as counter:
            flops = _counted_once(counter, run_step, recomputed)
    return facts_of(
        model_flops=flops, flops_source=source, flops_convention=convention, flops_dtype=matmul_dtype(run.precision)
    )


def _counted_once(counter: FlopCounterMode, run_step: Callable[[], object], blocks: Sequence[RecomputedForward]) -> int:
    """The FLOPs of a step without those that backward repeats."""
    repeated = 0

    @contextmanager
    def again() -> Iterator[None]:
        nonlocal repeated
        before = int(counter.get_total_flops())
        try:
            yield
        finally:
            repeated += int(counter.get_total_flops()) - before

    for block in blocks:
        block.uncompiled, block.around = True, again
    try:
        run_step()
    finally:
        for block in blocks:
            block.uncompiled, block.around = False, nullcontext
    return int(counter.get_total_flops()) - repeated
