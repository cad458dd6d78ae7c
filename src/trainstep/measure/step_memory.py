"""The workload `memory`: where the memory of one training step goes, by category, by moment and over time.

The history is recorded from before the model is built to the end of one step after the warm-ups. A record of it holds:

facts   parameters; peak_allocated_bytes, peak_requested_bytes, peak_reserved_bytes, driver_bytes, context_bytes,
        kernels_bytes (loaded code), allocation_retries (GPU); process_data_bytes (CPU: what its limit is on, at the peak);
        process_group (its backend, or none: then nothing is NCCL's); timeline_peak_bytes (ours, of requested bytes) and its phase;
        history_full; residual shares; residual_stream_bytes and how it comes about; parameter_, gradient_ and
        optimizer_state_bytes_each; snapshot (a file)
tables  ledger (a line a category, a column a moment), peaks (by phase), layers (activations after forward),
        timeline (bytes by category over time), allocations (the largest at the peak, with their stacks)

[Note: the residuals] allocated minus the categories minus rounding, and driver minus reserved minus context and kernels:
computed from the allocator's and the driver's own figures at the same moments, never set to what is left.
"""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from trainstep.config.memory import MemoryConfig
from trainstep.config.model import ModelConfig
from trainstep.config.parsing import from_plain
from trainstep.config.phases import Phase
from trainstep.measure.empty_process import OutsideBytes, outside_bytes
from trainstep.measure.failures import CellFailed, out_of_memory, out_of_memory_as
from trainstep.measure.kept_files import kept_folder
from trainstep.measure.memory import MemoryWatch
from trainstep.measure.memory_history import history_of, mark
from trainstep.measure.memory_tables import Reading, ledger_tables
from trainstep.measure.workload import Findings, Stage
from trainstep.records.record import Fact
from trainstep.traces.ledger import Known, Ledger, step_window
from trainstep.traces.memory_timeline import MemoryTimeline
from trainstep.traces.snapshot import snapshot_of
from trainstep.training.batches import Batch
from trainstep.training.build import Assembly, build_step, parameter_count
from trainstep.training.precision import precision_named
from trainstep.training.step import Mark

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
    """One run whose memory is recorded. Memory running out raises CellFailed with what held it."""

    def __init__(self, config: MemoryConfig, stage: Stage) -> None:
        self._config = config
        self._run = config.run()
        self._device = torch.device(config.device)
        self._tell_stage = stage
        self._stage = "build"
        self._watch = MemoryWatch(self._device)
        self._history = history_of(self._device)
        self._assembly: Assembly | None = None
        self._readings: dict[str, Reading] = {}
        self._data_bytes: dict[str, int] = {}
        self._gradients: frozenset[int] = frozenset()
        self._inputs: frozenset[int] = frozenset()
        self._outside: OutsideBytes | None = None

    def prepare(self) -> None:
        """Build, and take the steps before the recorded one."""
        if self._config.keep_snapshot is not None:
            kept_folder("keep_snapshot", self._config.keep_snapshot)
        with out_of_memory_as(self.out_of_memory):
            self._tell("build")
            if self._device.type == "cuda":
                self._outside = outside_bytes(self._run)
                self._watch.before_context()
                torch.zeros(1, device=self._device)
            self._history.start()
            self._assembly = build_step(self._run)
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
            self._inputs = storages([*tensors, *self._assembly.module.buffers()])
            self._synchronize()
            self._reset_peaks()
            with self._history.spans():
                mark("begin")
                self._run_step(batches, self._mark_phase)
                self._synchronize()
                mark("end")
            self._read("after step")

    def finish(self) -> Findings:
        """Stop recording, put every allocation into its category, and hand the tables over."""
        self._tell("afterwards")
        assert self._assembly is not None
        known = self._known(self._assembly)
        document = self._history.stop()
        facts = self._facts(self._assembly)
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
            parameters=int(facts["parameters"].value),
        )
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

    def _run_step(self, batches: list[Batch], mark_phase: Mark | None = None) -> None:
        assert self._assembly is not None
        self._assembly.step(batches, *([mark_phase] if mark_phase else []))
        if self._run.mode == "forward_backward":
            self._assembly.step.clear_gradients()

    def _mark_phase(self, phase: Phase) -> None:
        assert self._assembly is not None
        mark(phase)
        self._read(f"after {phase}")
        if phase in (Phase.BACKWARD, Phase.GRAD_SYNC):
            gradients = [one.grad for one in self._assembly.module.parameters() if one.grad is not None]
            self._gradients = storages(gradients)

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
        optimizer, scaler = assembly.step.optimizer, assembly.step.scaler
        states = [value for state in (optimizer.state.values() if optimizer else ()) for value in state.values()]
        states += list(vars(scaler).values()) if scaler is not None else []
        autocast = precision_named(self._run.precision).autocast
        return Known(
            parameters=storages(list(assembly.module.parameters())),
            gradients=self._gradients,
            optimizer_state=storages([value for value in states if isinstance(value, Tensor)]),
            inputs=self._inputs,
            cast_bytes=weight_copies(assembly.module, autocast) if autocast else (),
        )

    def _facts(self, assembly: Assembly) -> dict[str, Fact]:
        facts = {
            **self._watch.facts(),
            "parameters": Fact(value=parameter_count(assembly.module), unit="count"),
            "tokens": Fact(value=self._run.tokens, unit="count"),
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
        name = "-".join(
            [self._run.model.name.replace(":", "."), str(self._run.context), self._run.precision, self._run.mode]
        )
        path = next(
            path
            for number in range(1, 10_000)
            if not (path := folder / f"{name}{f'-{number}' if number > 1 else ''}.pickle").exists()
        )
        path.write_bytes(pickle.dumps(dict(document), protocol=_PICKLE_PROTOCOL))
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


def storages(tensors: list[Any]) -> frozenset[int]:
    """Addresses of the storages behind tensors."""
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)


def weight_copies(module: nn.Module, dtype: torch.dtype) -> tuple[int, ...]:
    """Bytes of each 16-bit copy that autocast keeps in a forward: of the matrices, but of no embedding's."""
    embedded = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    return tuple(
        one.numel() * dtype.itemsize
        for one in module.parameters()
        if one.dim() >= 2 and id(one) not in embedded and one.dtype == torch.float32
    )
