"""The workload `memory`: where the memory of one training step goes, by category, by moment and over time.

The history is recorded from before the model is built to the end of one step after the warm-ups. A record of it holds:

facts   parameters; peak_allocated_bytes, peak_requested_bytes, peak_reserved_bytes, driver_bytes, context_bytes,
        kernels_bytes (loaded code), allocation_retries (GPU); process_data_bytes (CPU: what its limit is on, at the peak);
        process_group (its backend, or none: then nothing is NCCL's); timeline_peak_bytes (ours, of requested bytes) and its phase;
        history_full; residual shares; residual_stream_bytes and how it comes about; parameter_, gradient_ and
        optimizer_state_bytes_each; snapshot (a file)
tables  ledger (a line a category, a column a moment), peaks (by phase), layers (activations after forward),
        timeline (bytes by category over time), allocations (the largest at the peak, with their stacks)

Of several ranks each looks at its own step, and the record has all of them (memory_ranks.py). "After backward" is then when
gradients are synchronised too.

[Note: the residuals] allocated minus the categories minus rounding, and driver minus reserved minus context and kernels:
computed from the allocator's and the driver's own figures at the same moments, never set to what is left.
"""

import pickle
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from trainstep.config.memory import MemoryConfig
from trainstep.config.model import ModelConfig
from trainstep.config.parsing import from_plain
from trainstep.config.phases import Phase
from trainstep.costs.exchange import ParameterSize
from trainstep.measure.empty_process import OutsideBytes, outside_bytes
from trainstep.measure.failures import CellFailed, out_of_memory, out_of_memory_as
from trainstep.measure.gradient_notes import GradientNotes
from trainstep.measure.held_storages import Storages, held_storages, state_tensors, storages_of
from trainstep.measure.kept_files import kept_file, kept_folder
from trainstep.measure.meeting import check_gpus, meet, own_device, wait_for_parameters
from trainstep.measure.memory import MemoryWatch
from trainstep.measure.memory_history import history_of, mark
from trainstep.measure.memory_ranks import expected_tables, together
from trainstep.measure.memory_tables import Reading, ledger_tables
from trainstep.measure.workload import Findings, Stage
from trainstep.parallel.collectives import Collectives
from trainstep.parallel.ranks import alone
from trainstep.parallel.units import parameter_sizes
from trainstep.records.record import Fact
from trainstep.traces.ledger import Known, Ledger, step_window
from trainstep.traces.memory_timeline import MemoryTimeline
from trainstep.traces.snapshot import snapshot_of
from trainstep.training.batches import Batch
from trainstep.training.build import Assembly, build_step
from trainstep.training.parallelism import parallel
from trainstep.training.precision import precision_named
from trainstep.training.step import Mark
from trainstep.training.wrapping import looked_at

_LET_GO_S = 0.01
_PICKLE_PROTOCOL = 4
"""memory_viz shows a blank page for 5."""


class StepMemoryWorkload:
    """Each cell in a fresh process: what another left behind would count."""

    shares_worker = False

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> "StepMemoryMeasurement":
        measurement = StepMemoryMeasurement(from_plain(MemoryConfig, config), stage)
        measurement.prepare()
        return measurement


WORKLOAD = StepMemoryWorkload()


class StepMemoryMeasurement:
    """One run, or one rank's side of it, whose memory is recorded. Memory running out raises CellFailed with what held it."""

    def __init__(self, config: MemoryConfig, stage: Stage) -> None:
        self._config = config
        self._run = config.run()
        check_gpus(config.ranks, config.device)
        self._device = own_device(config.ranks, config.device)
        self._ranks = alone(self._device)
        self._tell_stage = stage
        self._stage = "build"
        self._watch = MemoryWatch(self._device)
        self._history = history_of(self._device)
        self._assembly: Assembly | None = None
        self._readings: dict[str, Reading] = {}
        self._data_bytes: dict[str, int] = {}
        self._sizes: list[ParameterSize] = []
        self._cast_bytes: tuple[int, ...] = ()
        self._whole_gradients = GradientNotes()
        self._gradients: frozenset[int] = frozenset()
        self._communication: dict[str, frozenset[int]] = {}
        self._inputs: frozenset[int] = frozenset()
        self._outside: OutsideBytes | None = None
        self._met: dict[str, Fact] = {}

    def prepare(self) -> None:
        """Build, and take the steps before the recorded one."""
        if self._config.keep_snapshot is not None:
            kept_folder("keep_snapshot", self._config.keep_snapshot)
        with out_of_memory_as(self.out_of_memory):
            self._tell("build")
            if self._device.type == "cuda":
                self._outside = outside_bytes(self._run, self._device)
                self._watch.before_context()
                torch.cuda.set_device(self._device)
                torch.zeros(1, device=self._device)
            if self._config.ranks > 1:
                self._tell("meet")
                self._ranks, self._met = meet(self._device, self._watch)
                self._tell("build")
            self._history.start()
            self._assembly = self._build()
            self._synchronize()
            mark("built")
            self._read("init")
            self._tell("warmup")
            for step in range(self._config.warmups):
                self._run_step(self._assembly.micro_batches(step))

    def take(self, steps: int) -> None:
        """Record one step: of another there would be nothing new to say."""
        assert self._assembly is not None
        with out_of_memory_as(self.out_of_memory):
            self._tell("steps")
            batches = self._assembly.micro_batches(self._config.warmups)
            tensors = [tensor for batch in batches for tensor in batch.values() if isinstance(tensor, Tensor)]
            self._inputs = self._addresses([*tensors, *self._assembly.module.buffers()])
            self._synchronize()
            self._reset_peaks()
            with self._history.spans(), self._whole_gradients.listening():
                mark("begin")
                self._run_step(batches, self._mark_phase)
                wait_for_parameters(self._assembly)
                self._synchronize()
                mark("end")
            self._note_communication("end")
            self._read("after step")

    def finish(self) -> Findings:
        """Stop recording, put every allocation into its category, and hand the tables over: all ranks', where there are several."""
        self._tell("afterwards")
        assert self._assembly is not None
        Collectives(self._ranks).barrier()  # nothing is on its way when the recorder stops
        found = self._found(self._assembly)
        return found if self._config.ranks == 1 else together(self._ranks, found)

    def _found(self, assembly: Assembly) -> Findings:
        known = self._known(assembly)
        document = self._history.stop()
        facts = self._facts(assembly)
        if self._config.keep_snapshot is not None:
            facts["snapshot"] = Fact(value=str(self._keep(document)))
        snapshot = snapshot_of(document, where="history", ring_entries=self._history.ring_entries)
        facts["history_full"] = Fact(value=snapshot.history_is_full)
        if snapshot.history_is_full:
            return Findings(samples={}, facts=facts)
        timeline = MemoryTimeline(snapshot)
        ledger = Ledger(timeline, step_window(timeline), known)
        facts |= self._add_cpu_readings(ledger)
        more, tables = ledger_tables(
            ledger,
            self._readings,
            min_share=self._config.min_share,
            outside=self._outside,
            nccl_bytes=self._met["nccl_bytes"].value if "nccl_bytes" in self._met else None,
            parameters=int(facts["parameters"].value),
        )
        if self._config.ranks > 1:
            expected = expected_tables(self._config.parallel(), self._sizes, self._ranks.rank, tables["ledger"])
            more, tables = more | expected[0], tables | expected[1]
        return Findings(samples={}, facts={**facts, **more}, tables=tables)

    @property
    def phase(self) -> str:
        """Where it is: the phase at work during steps, else the stage."""
        stepping = self._stage in ("warmup", "steps") and self._assembly is not None
        return str(self._assembly.step.running) if stepping and self._assembly else self._stage

    def out_of_memory(self, error: BaseException) -> CellFailed:
        """The failure, with what can be named of what held the rest."""
        held = self._assembly and self._watch.holders(self._assembly.module, self._assembly.step.optimizer)
        failure = out_of_memory(
            error,
            self.phase,
            allocated_bytes=self._watch.allocated_bytes(),
            capacity_bytes=self._watch.capacity_bytes(),
            holders=held or {},
        )
        return CellFailed(failure)

    def _build(self) -> Assembly:
        """The step; what its parameters are is noted before a way of going parallel takes them apart."""
        if self._config.ranks == 1:
            assembly = build_step(self._run)
            self._note_weights(assembly.module)
            return assembly
        way = parallel(self._ranks, self._config.parallel().sync_config())
        return build_step(self._run, looked_at(way, self._look))

    def _look(self, module: nn.Module) -> None:
        self._note_weights(module)
        self._whole_gradients.listen_to(module)

    def _note_weights(self, module: nn.Module) -> None:
        autocast = precision_named(self._run.precision).autocast if self._config.compute_dtype == "own" else None
        self._sizes = parameter_sizes(module)
        self._cast_bytes = weight_copies(module, autocast) if autocast else ()

    def _run_step(self, batches: list[Batch], mark_phase: Mark | None = None) -> None:
        assert self._assembly is not None
        self._assembly.step(batches, mark_phase or (lambda _phase: self._let_go()))
        if self._run.mode == "forward_backward":
            self._assembly.step.clear_gradients()

    def _mark_phase(self, phase: Phase) -> None:
        self._let_go()
        mark(phase)
        self._read(f"after {phase}")
        held = self._note_communication(phase)
        self._whole_gradients.addresses[phase] = frozenset(held["gradients"])
        if phase in (Phase.BACKWARD, Phase.GRAD_SYNC):
            self._gradients = frozenset(held["gradients"])

    def _let_go(self) -> None:
        """A moment for gloo's threads, which hold what they sent a little longer than who waited for it: were theirs the last
        reference, the profiler would miss that it is free."""
        if self._config.ranks > 1 and self._device.type == "cpu":
            time.sleep(_LET_GO_S)

    def _note_communication(self, name: str) -> dict[str, Storages]:
        """Note, under a mark's name, what the way of going parallel keeps now; all that is held by anybody."""
        assert self._assembly is not None
        held = held_storages(self._assembly, {})
        self._communication[name] = frozenset(held["communication"])
        return held

    def _read(self, moment: str) -> None:
        """Note what allocator and driver say now, and the peaks since the last reading."""
        if self._device.type == "cuda":
            reading = Reading.now(self._device, self._watch.driver_bytes())
            self._readings[moment] = reading.with_peaks_of(self._readings.get(moment))
            torch.cuda.reset_peak_memory_stats()
        else:
            self._data_bytes[moment] = self._watch.allocated_bytes()

    def _reset_peaks(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _add_cpu_readings(self, ledger: Ledger) -> dict[str, Fact]:
        """A CPU's allocator tells its count with each event; the moments' positions say which. What the process had at the
        peak: what was read when most was held, and as much as tensors then took more."""
        if self._history.cpu is None:
            return {}
        for moment, position in ledger.window.moments.items():
            since = self._history.cpu.allocated_bytes(ledger.timeline.time_us(position))
            self._readings[moment] = Reading(allocated_bytes=since + ledger.timeline.held_before_bytes)
        peak = self._readings["peak"].allocated_bytes
        read = self._data_bytes.keys() & self._readings.keys()
        fullest = max(read, key=lambda moment: self._readings[moment].allocated_bytes)
        data = self._data_bytes[fullest] + peak - self._readings[fullest].allocated_bytes
        facts = {"peak_allocated_bytes": peak, "process_data_bytes": data}
        return {name: Fact(value=value, unit="bytes") for name, value in facts.items()}

    def _known(self, assembly: Assembly) -> Known:
        scaler = assembly.step.scaler
        states = state_tensors(assembly.step.optimizer)
        states += [value for value in (vars(scaler).values() if scaler else ()) if isinstance(value, Tensor)]
        return Known(
            parameters=self._addresses(assembly.module.parameters()),
            gradients=self._gradients,
            optimizer_state=self._addresses(states),
            inputs=self._inputs,
            cast_bytes=self._cast_bytes,
            communication=self._communication,
            whole_gradients=self._whole_gradients.addresses,
        )

    def _addresses(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        return frozenset(storages_of(tensors, self._device))

    def _facts(self, assembly: Assembly) -> dict[str, Fact]:
        facts = {
            **self._watch.facts(),
            **self._met,
            "parameters": Fact(value=sum(one.numel for one in self._sizes), unit="count"),
            "tokens": Fact(value=self._run.tokens * self._config.ranks, unit="count"),
            "process_group": Fact(value=_process_group()),
        }
        facts.pop("driver_bytes", None)  # the readings have it at each moment
        if self._device.type == "cuda":
            readings = list(self._readings.values())[1:]  # without the one before the step
            peaks = {
                "peak_allocated_bytes": max(one.peak_allocated_bytes or 0 for one in readings),
                "peak_requested_bytes": max(one.peak_requested_bytes or 0 for one in readings),
                "peak_reserved_bytes": max(one.peak_reserved_bytes or 0 for one in readings),
                "driver_bytes": max((one.driver_bytes or 0 for one in readings), default=0) or None,
                "context_bytes": self._outside and self._outside.context,
                "kernels_bytes": self._outside and self._outside.step,
            }
            facts |= {name: Fact(value=value, unit="bytes") for name, value in peaks.items() if value is not None}
        return facts | self._residual_stream()

    def _residual_stream(self) -> dict[str, Fact]:
        """One tensor of shape batch x context x d_model, in the dtype that the residual sums have."""
        model = self._run.model
        if not isinstance(model, ModelConfig):
            return {}
        size = precision_named(self._run.precision).weights.itemsize
        words = f"batch {self._run.batch_size} x context {self._run.context} x d_model {model.d_model} x {size} bytes"
        held = self._run.batch_size * self._run.context * model.d_model * size
        return {"residual_stream_bytes": Fact(value=held, unit="bytes"), "residual_stream": Fact(value=words)}

    def _keep(self, document: Mapping[str, Any]) -> Path:
        folder = kept_folder("keep_snapshot", str(self._config.keep_snapshot))
        parts = [self._run.model.name.replace(":", "."), str(self._run.context), self._run.precision, self._run.mode]
        if self._config.ranks > 1:
            parts += [self._config.sync, f"rank{self._ranks.rank}"]
        name = "-".join(parts)
        path = next(
            path
            for number in range(1, 10_000)
            if not (path := folder / f"{name}{f'-{number}' if number > 1 else ''}.pickle").exists()
        )
        with kept_file("keep_snapshot", path) as file:
            pickle.dump(dict(document), file, protocol=_PICKLE_PROTOCOL)
        return path

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _tell(self, stage: str) -> None:
        self._stage = stage
        self._tell_stage(stage)


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
