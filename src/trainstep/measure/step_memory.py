"""The workload `memory`: where the memory of one training step goes, by category, by moment and over time.

The history is recorded from before the model is built to the end of one step after the warm-ups. A record has no samples: its facts
are those under "Memory" in records/facts.py, its tables those of records/tables.py, from the ledger (a line a category, a column a
moment) to the largest allocations at the peak.

Of several ranks each looks at its own step, and the record has all of them (memory_ranks.py). "After backward" is then when
gradients are synchronised too.

[Note: the residuals] allocated minus the categories minus rounding, and driver minus reserved minus context and kernels:
computed from the allocator's and the driver's own figures at the same moments, never set to what is left.
"""

import pickle
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from trainstep.config.memory import MemoryConfig
from trainstep.config.model import ModelConfig
from trainstep.config.parsing import from_plain
from trainstep.config.phases import Phase
from trainstep.config.run import RunConfig
from trainstep.costs.exchange import ParameterSize
from trainstep.measure.built_step import BuiltStep
from trainstep.measure.empty_process import OutsideBytes, outside_bytes
from trainstep.measure.gradient_notes import GradientNotes
from trainstep.measure.kept_files import kept_file, kept_folder
from trainstep.measure.meeting import open_ranks, own_device, wait_for_parameters
from trainstep.measure.memory_history import MemoryHistory, history_of, mark
from trainstep.measure.memory_ranks import expected_tables, together
from trainstep.measure.memory_readings import Readings
from trainstep.measure.memory_tables import ledger_tables
from trainstep.measure.step_holders import StepHolders
from trainstep.measure.workload import Findings, Stage, Stages
from trainstep.parallel.collectives import Collectives
from trainstep.parallel.ranks import Ranks
from trainstep.parallel.units import parameter_sizes
from trainstep.records.facts import Fact, facts_of
from trainstep.traces.ledger import Ledger, step_window
from trainstep.traces.memory_timeline import MemoryTimeline
from trainstep.traces.snapshot import snapshot_of
from trainstep.training.batches import Batch
from trainstep.training.build import Assembly, build_step
from trainstep.training.parallelism import parallel
from trainstep.training.precision import precision_named
from trainstep.training.step import Mark

_LET_GO_S = 0.01
_PICKLE_PROTOCOL = 4
"""memory_viz shows a blank page for 5."""


class StepMemoryWorkload:
    """Each cell in a fresh process: what another left behind would count."""

    shares_worker = False

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> "StepMemoryMeasurement":
        return prepare_memory(from_plain(MemoryConfig, config), stage)


WORKLOAD = StepMemoryWorkload()


@dataclass(frozen=True, kw_only=True)
class _Weights:
    """What the parameters are before a parallel strategy takes them apart. `cast_bytes`: of each copy that autocast makes."""

    sizes: list[ParameterSize]
    cast_bytes: tuple[int, ...]


def prepare_memory(config: MemoryConfig, stage: Stage) -> "StepMemoryMeasurement":
    """Build, and take the steps before the recorded one."""
    device = own_device(config.ranks, config.run.device)
    if config.keep_snapshot is not None:
        kept_folder("keep_snapshot", config.keep_snapshot)
    stages = Stages(stage)
    outside = outside_bytes(config.run, device) if device.type == "cuda" else None
    opened, ranks, met = open_ranks(config.ranks, device, stages)
    history = history_of(device)
    history.start()
    whole_gradients = GradientNotes()
    built = opened.build(lambda: _build(config, ranks, whole_gradients))
    mark("built")
    readings = Readings(opened)
    readings.take("init")
    measurement = StepMemoryMeasurement(
        config=config,
        built=built,
        weights=built.assembly.seen,
        history=history,
        readings=readings,
        whole_gradients=whole_gradients,
        holders=StepHolders(built.assembly, whole_gradients),
        outside=outside,
        met=met,
    )
    measurement.warm_up()
    return measurement


def _build(config: MemoryConfig, ranks: Ranks, whole_gradients: GradientNotes) -> Assembly:
    """The step; what its parameters are is noted before a parallel strategy takes them apart."""
    run = config.run
    autocast = precision_named(run.precision).autocast if config.sync.compute_dtype == "own" else None

    def look(module: nn.Module) -> _Weights:
        if config.ranks > 1:
            whole_gradients.listen_to(module)
        cast_bytes = weight_copies(module, autocast) if autocast else ()
        return _Weights(sizes=parameter_sizes(module), cast_bytes=cast_bytes)

    return build_step(run, parallel(ranks, config.sync) if config.ranks > 1 else None, look=look)


@dataclass(frozen=True, kw_only=True)
class StepMemoryMeasurement:
    """One run, or one rank's side of it, whose memory is recorded. Memory running out raises CellFailed with what held it.

    `outside`: what the process takes of a GPU beside the allocator. `met`: what ranks found when they met.
    """

    config: MemoryConfig
    built: BuiltStep
    weights: _Weights
    history: MemoryHistory
    readings: Readings
    whole_gradients: GradientNotes
    holders: StepHolders
    outside: OutsideBytes | None
    met: Mapping[str, Fact]

    def warm_up(self) -> None:
        """The steps before the recorded one."""
        with self.built.names_out_of_memory():
            self.built.opened.stages.enter("warmup")
            for step in range(self.config.run.warmups):
                self._run_step(self.built.assembly.micro_batches(step))

    def take(self, steps: int) -> None:
        """Record one step: of another there would be nothing new to say."""
        opened, assembly = self.built.opened, self.built.assembly
        with self.built.names_out_of_memory():
            opened.stages.enter("steps")
            batches = assembly.micro_batches(self.config.run.warmups)
            self.holders.note_inputs(batches)
            opened.synchronize()
            self.readings.reset_peaks()
            with self.history.spans(), self.whole_gradients.listening():
                mark("begin")
                self._run_step(batches, self._mark_phase)
                wait_for_parameters(assembly)
                opened.synchronize()
                mark("end")
            self.holders.note_communication("end")
            self.readings.take("after step")

    def finish(self) -> Findings:
        """Stop recording, put every allocation into its category, and hand the tables over: all ranks', where there are several."""
        self.built.opened.stages.enter("afterwards")
        Collectives(self._ranks).barrier()  # nothing is on its way when the recorder stops
        found = self._found()
        return found if self.config.ranks == 1 else together(self._ranks, found)

    def _found(self) -> Findings:
        known = self.holders.known(self.weights.cast_bytes)
        document, cpu = self.history.stop()
        facts = self._facts()
        if self.config.keep_snapshot is not None:
            facts |= facts_of(snapshot=str(self._keep(document, self.config.keep_snapshot)))
        snapshot = snapshot_of(document, where="history", ring_entries=self.history.ring_entries)
        facts |= facts_of(history_full=snapshot.history_is_full)
        if snapshot.history_is_full:
            return Findings(samples={}, facts=facts)
        timeline = MemoryTimeline(snapshot)
        ledger = Ledger(timeline, step_window(timeline), known)
        if cpu is not None:
            facts |= self.readings.add_cpu(cpu, ledger)
        more, tables = ledger_tables(
            ledger,
            self.readings.at,
            min_share=self.config.min_share,
            outside=self.outside,
            nccl_bytes=self.met["nccl_bytes"].value if "nccl_bytes" in self.met else None,
            parameters=int(facts["parameters"].value),
        )
        if self.config.ranks > 1:
            expected = expected_tables(self.config, self.weights.sizes, self._ranks.rank, tables["ledger"])
            more, tables = more | expected[0], tables | expected[1]
        return Findings(samples={}, facts={**facts, **more}, tables=tables)

    @property
    def _ranks(self) -> Ranks:
        return self.built.assembly.ranks

    def _run_step(self, batches: list[Batch], mark_phase: Mark | None = None) -> None:
        step = self.built.assembly.step
        step(batches, mark_phase or (lambda _phase: self._let_go()))
        if self.config.run.mode == "forward_backward":
            step.clear_gradients()

    def _mark_phase(self, phase: Phase) -> None:
        self._let_go()
        mark(phase)
        self.readings.take(f"after {phase}")
        self.holders.note_phase(phase)

    def _let_go(self) -> None:
        """A moment for gloo's threads to drop what they sent, which they keep a little after the wait for it is over: were theirs
        the last reference, the profiler would miss that it is free."""
        if self.config.ranks > 1 and self.config.run.device == "cpu":
            time.sleep(_LET_GO_S)

    def _facts(self) -> dict[str, Fact]:
        run = self.built.assembly.run
        facts = {
            **self.built.opened.memory.facts(),
            **self.met,
            **facts_of(
                parameters=sum(one.numel for one in self.weights.sizes),
                tokens=run.tokens * self.config.ranks,
                process_group=_process_group(),
            ),
        }
        facts.pop("driver_bytes", None)  # the readings have it at each moment
        return facts | self.readings.facts(self.outside) | _residual_stream(run)

    def _keep(self, document: Mapping[str, Any], name_of_folder: str) -> Path:
        folder = kept_folder("keep_snapshot", name_of_folder)
        run = self.config.run
        parts = [run.model.name.replace(":", "."), str(run.context), run.precision, run.mode]
        if self.config.ranks > 1:
            parts += [self.config.sync.name, f"rank{self._ranks.rank}"]
        name = "-".join(parts)
        path = next(
            path
            for number in range(1, 10_000)
            if not (path := folder / f"{name}{f'-{number}' if number > 1 else ''}.pickle").exists()
        )
        with kept_file("keep_snapshot", path) as file:
            pickle.dump(dict(document), file, protocol=_PICKLE_PROTOCOL)
        return path


def _residual_stream(run: RunConfig) -> dict[str, Fact]:
    """One tensor of shape batch x context x d_model, in the dtype that the residual sums have."""
    if not isinstance(run.model, ModelConfig):
        return {}
    size = precision_named(run.precision).weights.itemsize
    words = f"batch {run.batch_size} x context {run.context} x d_model {run.model.d_model} x {size} bytes"
    held = run.batch_size * run.context * run.model.d_model * size
    return facts_of(residual_stream_bytes=held, residual_stream=words)


def _process_group() -> str:
    """The backend of the process group that a user's model may have opened, or `none`."""
    opened = distributed.is_available() and distributed.is_initialized()
    return str(distributed.get_backend()) if opened else "none"


def weight_copies(module: nn.Module, dtype: torch.dtype) -> tuple[int, ...]:
    """Bytes of each 16-bit copy that autocast keeps in a forward: of the matrices, but of no embedding's."""
    embedded = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    return tuple(
        one.numel() * dtype.itemsize
        for one in module.parameters()
        if one.dim() >= 2 and id(one) not in embedded and one.dtype == torch.float32
    )
