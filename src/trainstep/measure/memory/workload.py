"""The workload `memory` measures what holds the memory of one training step: by category, moment and time.

The history is recorded from before the model is built to the end of one step after the warm-ups. A record has no samples. Its facts
are those under "Memory" in records/facts.py and its tables those of records/tables.py, from the ledger (a line a category, a column
a moment) to the largest allocations at the peak.

Each of several ranks records its own step, and one record has them all (memory/tables.py). "After backward" is then the moment when
gradients are synchronised too.

[Note: captured steps] With `capture` the recorded step is the one in which the step is captured: a launch allocates nothing,
and what the capture allocates is what every launch uses. Where a capture fails, the next step is recorded, which runs eagerly.
The line "of that, the graph's pool" is memory that is free for the next launch and for nothing else.

[Note: the residuals] The residuals are allocated minus the categories minus rounding, and driver minus reserved minus context and
kernels. They are computed from the allocator's and the driver's own figures at the same moments, never set to what is left.
"""

import pickle
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from trainstep.capture.waits import NotCapturable
from trainstep.config.memory import MemoryConfig
from trainstep.config.model import ModelConfig
from trainstep.config.parsing import from_plain
from trainstep.config.run import Phase, RunConfig
from trainstep.costs.exchange import ParameterSize
from trainstep.measure.harness.files import kept_file, kept_folder
from trainstep.measure.harness.workload import Findings, Stage, Stages
from trainstep.measure.memory.empty_process import OutsideBytes, outside_bytes
from trainstep.measure.memory.history import GradientNotes, MemoryHistory, history_of, mark
from trainstep.measure.memory.readings import Readings
from trainstep.measure.memory.tables import expected_tables, ledger_tables, together
from trainstep.measure.parallel.meeting import open_ranks, own_device, wait_for_parameters
from trainstep.measure.parallel.memory import Storages, held_storages, state_tensors, storages_of
from trainstep.measure.step.built_step import BuiltStep
from trainstep.measure.step.clock import MOST_BEFORE_CAPTURE
from trainstep.parallel.agreement import HostAgreement
from trainstep.parallel.collectives import Collectives
from trainstep.parallel.ranks import Ranks
from trainstep.parallel.units import parameter_sizes
from trainstep.records.facts import Fact, facts_of
from trainstep.traces.ledger import Known, Ledger, step_window
from trainstep.traces.memory_timeline import MemoryTimeline
from trainstep.traces.snapshot import snapshot_of
from trainstep.training.batches import Batch
from trainstep.training.build import Assembly, build_step
from trainstep.training.captured import CapturedTrainStep
from trainstep.training.parallelism import parallel
from trainstep.training.precision import precision_named
from trainstep.training.step import Mark

_GLOO_RELEASE_S = 0.01
_PICKLE_PROTOCOL = 4  # torch's memory_viz shows a blank page for protocol 5


class StepMemoryWorkload:
    shares_worker = False  # memory that an earlier cell left behind would count

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> "StepMemoryMeasurement":
        """Build, and run the steps before the recorded step. CellFailed if there are too few GPUs."""
        cell = from_plain(MemoryConfig, config)
        device = own_device(cell.ranks, cell.run.device, cell.nodes)
        if cell.keep_snapshot is not None:
            kept_folder("keep_snapshot", cell.keep_snapshot)
        stages = Stages(stage)
        outside = outside_bytes(cell.run, device) if device.type == "cuda" else None
        opened, ranks, meeting_facts = open_ranks(cell.ranks, device, stages)
        history = history_of(device)
        history.start()
        try:
            whole_gradients = GradientNotes()
            built = opened.build(lambda: _build(cell, ranks, whole_gradients))
            mark("built")
            readings = Readings(opened)
            readings.take("init")
            measurement = StepMemoryMeasurement(
                config=cell,
                built=built,
                weights=built.assembly.seen,
                history=history,
                readings=readings,
                whole_gradients=whole_gradients,
                holders=StepHolders(built.assembly, whole_gradients),
                outside=outside,
                meeting_facts=meeting_facts,
                largest=HostAgreement(ranks) if cell.ranks > 1 and built.assembly.captured is not None else int,
            )
            measurement.warm_up()
        except BaseException:
            history.cancel()
            raise
        return measurement


WORKLOAD = StepMemoryWorkload()


@dataclass(frozen=True, kw_only=True)
class _Weights:
    """The parameters before a parallel strategy splits them. `cast_bytes`: the size of each copy that autocast makes."""

    sizes: list[ParameterSize]
    cast_bytes: tuple[int, ...]


def _build(config: MemoryConfig, ranks: Ranks, whole_gradients: GradientNotes) -> Assembly:
    """Build the step, and note its parameters before a parallel strategy splits them."""
    run = config.run
    autocast = precision_named(run.precision).autocast if config.sync.compute_dtype == "own" else None

    def look(module: nn.Module) -> _Weights:
        if config.ranks > 1 or run.updates_in_backward:
            whole_gradients.listen_to(module)
        cast_bytes = weight_copies(module, autocast) if autocast else ()
        return _Weights(sizes=parameter_sizes(module), cast_bytes=cast_bytes)

    return build_step(run, parallel(ranks, config.sync) if config.ranks > 1 else None, look=look)


class StepHolders:
    """Notes the category of storages at the marks of a recorded step, because the allocator's history does not tell."""

    def __init__(self, assembly: Assembly, whole_gradients: GradientNotes) -> None:
        self._assembly = assembly
        self._whole_gradients = whole_gradients
        self._inputs: frozenset[int] = frozenset()
        self._gradients: frozenset[int] = frozenset()
        self._communication: dict[str, frozenset[int]] = {}

    def note_inputs(self, batches: list[Batch]) -> None:
        """Note the batches and the model's buffers."""
        tensors = [tensor for batch in batches for tensor in batch.values() if isinstance(tensor, Tensor)]
        self._inputs = self._addresses([*tensors, *self._assembly.module.buffers()])

    def note_phase(self, phase: Phase) -> None:
        """Note gradients and communication at the end of a phase."""
        gradients = frozenset(self.note_communication(phase)["gradients"])
        self._whole_gradients.addresses[phase] = gradients
        if phase in (Phase.BACKWARD, Phase.GRAD_SYNC):
            self._gradients = gradients

    def note_communication(self, name: str) -> dict[str, Storages]:
        """Note under a mark's name what the parallel strategy keeps now; returns the storages of every category."""
        storages = held_storages(self._assembly, {})
        self._communication[name] = frozenset(storages["communication"])
        return storages

    def known(self, cast_bytes: tuple[int, ...]) -> Known:
        """All that was noted, for the ledger."""
        step = self._assembly.step
        scaler_state = vars(step.scaler).values() if step.scaler else ()
        states = [*state_tensors(step.optimizer), *(value for value in scaler_state if isinstance(value, Tensor))]
        return Known(
            parameters=self._addresses(self._assembly.module.parameters()),
            gradients=self._gradients,
            optimizer_state=self._addresses(states),
            inputs=self._inputs,
            cast_bytes=cast_bytes,
            communication=self._communication,
            whole_gradients=self._whole_gradients.addresses,
        )

    def _addresses(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        return frozenset(storages_of(tensors, self._assembly.device))


@dataclass(kw_only=True)
class StepMemoryMeasurement:
    """One run, or one rank's part of it, with its memory recorded. Running out of memory raises CellFailed with the holders.

    `outside`: what the process takes of a GPU beside the allocator. `meeting_facts`: the facts of `meet`. `largest`: the
    largest number of all ranks. `next_step`: the number of the next step. `why_not`: why no step was captured, if none was.
    """

    config: MemoryConfig
    built: BuiltStep
    weights: _Weights
    history: MemoryHistory
    readings: Readings
    whole_gradients: GradientNotes
    holders: StepHolders
    outside: OutsideBytes | None
    meeting_facts: Mapping[str, Fact]
    largest: Callable[[int], int]
    next_step: int = 0
    why_not: str = ""

    def warm_up(self) -> None:
        """Run the steps before the recorded step: as many as the config asks for, or until the next step will be captured."""
        run, captured = self.config.run, self._captured
        most = run.warmups if captured is None else max(run.warmups, MOST_BEFORE_CAPTURE)
        with self.built.names_out_of_memory(), self.built.names_what_is_not_captured():
            self.built.opened.stages.enter("warmup")
            ready = self._records_next()
            while not ready and self.next_step < most:
                self._run_step(self._next_batches())
                self.next_step += 1
                ready = self._records_next()
            if captured is not None and not ready:
                self.why_not = (
                    f"none of {most} steps was captured: their batches, or those of other ranks, differ in shape"
                )
                if run.capture == "step":
                    raise NotCapturable(self.why_not)

    def take(self, steps: int) -> None:
        """Record one step, whatever `steps` says: a second step would show nothing new."""
        with self.built.names_out_of_memory(), self.built.names_what_is_not_captured():
            self.built.opened.stages.enter("steps")
            was_to_be_captured = self._is_captured
            self._record_step()
            if was_to_be_captured and not self._is_captured:
                # The capture failed: the next step shows what runs instead, without the memory of the failed graph.
                if self.built.opened.device.type == "cuda":
                    torch.cuda.empty_cache()
                self._record_step()

    def _records_next(self) -> bool:
        """Whether the next step is captured on every rank, or on none and the warm-ups are done."""
        captured, batches = self._captured, self._next_batches()
        ready = self.next_step >= self.config.run.warmups
        if captured is not None:
            ready = captured.captures_next(batches) or (ready and captured.is_settled(batches))
        return not self.largest(int(not ready))

    def _record_step(self) -> None:
        opened, assembly, batches = self.built.opened, self.built.assembly, self._next_batches()
        self.holders.note_inputs(batches)
        opened.synchronize()
        self.readings.begin_step()
        with self.history.spans(), self.whole_gradients.listening():
            mark("begin")
            self._run_step(batches, self._mark_phase)
            wait_for_parameters(assembly)
            opened.synchronize()
            mark("end")
        self.next_step += 1
        self.holders.note_communication("end")
        pool_bytes = self._captured.pool_unused_bytes() if self._captured and self._is_captured else None
        self.readings.take("after step", pool_unused_bytes=pool_bytes)

    def _next_batches(self) -> list[Batch]:
        return self.built.assembly.micro_batches(self.next_step)

    @property
    def _captured(self) -> CapturedTrainStep | None:
        return self.built.assembly.captured

    @property
    def _is_captured(self) -> bool:
        """Whether the step is in a graph, or will be as far as anyone knows."""
        return self._captured is not None and not self.why_not and self._captured.what != "nothing"

    def finish(self) -> Findings:
        """Stop recording, put every allocation into its category, and return the tables, of all ranks if there are several."""
        self.built.opened.stages.enter("afterwards")
        Collectives(self._ranks).barrier()  # so that no message is under way when the recorder stops
        findings = self._own_findings()
        return findings if self.config.ranks == 1 else together(self._ranks, findings)

    def _own_findings(self) -> Findings:
        config, known = self.config, self.holders.known(self.weights.cast_bytes)
        document, cpu = self.history.stop()
        facts = self._facts()
        if config.keep_snapshot is not None:
            facts |= facts_of(snapshot=str(self._keep(document, config.keep_snapshot)))
        snapshot = snapshot_of(document, where="history", ring_entries=self.history.ring_entries)
        facts |= facts_of(history_full=snapshot.history_is_full)
        if snapshot.history_is_full:
            return Findings(samples={}, facts=facts)
        timeline = MemoryTimeline(snapshot)
        ledger = Ledger(timeline, step_window(timeline), known)
        if cpu is not None:
            facts |= self.readings.add_cpu(cpu, ledger)
        nccl = self.meeting_facts.get("nccl_bytes")
        ledger_facts, tables = ledger_tables(
            ledger,
            self.readings.at,
            min_share=config.min_share,
            outside=self.outside,
            nccl_bytes=None if nccl is None else int(nccl.value),
            parameters=int(facts["parameters"].value),
        )
        facts |= ledger_facts
        if config.ranks > 1:
            expected_facts, expected = expected_tables(config, self.weights.sizes, self._ranks.rank, tables["ledger"])
            facts, tables = facts | expected_facts, tables | expected
        return Findings(samples={}, facts=facts, tables=tables)

    @property
    def _ranks(self) -> Ranks:
        return self.built.assembly.ranks

    def _run_step(self, batches: list[Batch], mark_phase: Mark | None = None) -> None:
        assembly, at_phase = self.built.assembly, mark_phase or (lambda _phase: self._release_sent())
        if self._captured is None:
            assembly.step(batches, at_phase)
        else:
            self._captured.on_phase = at_phase
            self._captured(batches)
        if self.config.run.mode == "forward_backward":
            assembly.step.clear_gradients()

    def _mark_phase(self, phase: Phase) -> None:
        self._release_sent()
        mark(phase)
        self.readings.take(f"after {phase}")
        self.holders.note_phase(phase)

    def _release_sent(self) -> None:
        """Give gloo's threads a moment to release what they sent."""
        # They keep it a little longer than the wait for it. If theirs were the last reference, the profiler would miss the free.
        if self.config.ranks > 1 and self.config.run.device == "cpu":
            time.sleep(_GLOO_RELEASE_S)

    def _facts(self) -> dict[str, Fact]:
        run = self.built.assembly.run
        facts = {
            **self.built.opened.memory.facts(),
            **self.meeting_facts,
            **(
                facts_of(captured="nothing", capture_left_out=self.why_not)
                if self.why_not
                else self.built.capture_facts()
            ),
            **facts_of(
                parameters=sum(parameter.numel for parameter in self.weights.sizes),
                tokens=run.tokens * self.config.ranks,
                process_group=_process_group(),
            ),
        }
        facts.pop("driver_bytes", None)  # the readings have it for each moment
        return facts | self.readings.facts(self.outside) | _residual_stream(run)

    def _keep(self, document: Mapping[str, Any], folder_name: str) -> Path:
        folder = kept_folder("keep_snapshot", folder_name)
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
    """The size of one tensor of shape batch x context x d_model, in the dtype of the residual sums."""
    if not isinstance(run.model, ModelConfig):
        return {}
    size = precision_named(run.precision).weights.itemsize
    words = f"batch {run.batch_size} x context {run.context} x d_model {run.model.d_model} x {size} bytes"
    stream_bytes = run.batch_size * run.context * run.model.d_model * size
    return facts_of(residual_stream_bytes=stream_bytes, residual_stream=words)


def _process_group() -> str:
    """The backend of the process group, which a user's model may have opened, or `none`."""
    opened = distributed.is_available() and distributed.is_initialized()
    return str(distributed.get_backend()) if opened else "none"


def weight_copies(module: nn.Module, dtype: torch.dtype) -> tuple[int, ...]:
    """Bytes of each 16-bit copy of a weight that autocast keeps in a forward: all matrices but those of embeddings."""
    embedded = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    return tuple(
        weight.numel() * dtype.itemsize
        for weight in module.parameters()
        if weight.dim() >= 2 and id(weight) not in embedded and weight.dtype == torch.float32
    )
