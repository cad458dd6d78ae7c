"""The table of instruments: one row for each workload that `trainstep` itself measures.

    resolve(INSTRUMENTS["memory"].measured)      # the object that measure/ runs
    resolve(INSTRUMENTS["memory"].sections[0])   # the function that makes its section of the page

Objects of higher layers are named as module:object and imported where they are needed. So reading the table does not import torch,
and a report imports only the modules of the workloads that it shows. A user's workload needs no row.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainstep.config.attention import AttentionConfig, AttentionTilesConfig
from trainstep.config.calibration import CalibrationConfig
from trainstep.config.collective import CeilingConfig, CollectiveConfig
from trainstep.config.memory import MemoryConfig
from trainstep.config.numerics import NumericsConfig
from trainstep.config.op import OpConfig
from trainstep.config.parallel import ParallelConfig
from trainstep.config.profile import ProfileConfig
from trainstep.config.run import BenchConfig
from trainstep.config.script import ScriptConfig


@dataclass(frozen=True, kw_only=True)
class Instrument:
    """One workload. Functions of report/ are named as module:function and take the report's rows of the workload (`summary` takes
    their configs)."""

    name: str
    title: str
    """Title of its table of cells, and of a page that shows only this workload."""
    config: type[Any]
    """The class of a cell's config."""
    measured: str
    """The object that satisfies measure/harness/workload.py."""
    verb: str
    """The command that measures it."""
    answer: str
    """The function of report/ that makes its `Answer` from the cells that ran (at least one); it may return None."""
    facts: tuple[str, ...] = ()
    """Facts that its raw rows show beside IN_EVERY_ROW of records/facts.py, in this order."""
    always: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Part of a record -> names that every record has there; a record with a failure needs only those of its config."""
    tables: str = ""
    """Makes tables that replace the common table of cells."""
    compared_tables: str = ""
    """Makes tables for a reader who compares; they replace `tables`, or stand beside the common table."""
    charts: tuple[str, ...] = ()
    """Make charts above the common table of the page."""
    sections: tuple[str, ...] = ()
    """Make sections of the page; with `held_to`, they take that workload's rows too."""
    held_to: str = ""
    """The workload whose measurements explain this workload's, where a page has both."""
    tables_held_to: bool = False
    """Whether `tables` take the rows of `held_to` too."""
    last_sections: tuple[str, ...] = ()
    """Make sections of the page that follow the comparisons of cells."""
    summary: str = ""
    """Says in words what was run; by default a report gives the number of cells."""
    own_words: frozenset[str] = frozenset()
    """Which of `peak`, `ratios`, `spread` and `times` its own tables explain, so that common notes and tables leave them out."""
    identity: bool = False
    """Whether records are joined by their config. It is checked as a user's is when a record is read, which configs of other
    workloads are not: their rules change, and records from before must stay readable."""
    ranks_apart: bool = False
    """Whether the ranks of a cell send each other nothing: each does the same work by itself."""


_ROWS = (
    Instrument(
        name="train_step",
        title="Training step",
        config=BenchConfig,
        measured="trainstep.measure.step.workload:WORKLOAD",
        verb="bench",
        answer="trainstep.report.step.answer:step_answer",
        compared_tables="trainstep.report.step.ranks:step_tables",
        charts=("trainstep.report.step.phases:phases_charts",),
        sections=(
            "trainstep.report.step.ranks:ranks_sections",
            "trainstep.report.step.recomputation:recomputation_sections",
        ),
        last_sections=("trainstep.report.step.warmup:warmup_sections",),
        summary="trainstep.report.kit.notes:step_words",
        own_words=frozenset({"times"}),
        ranks_apart=True,
    ),
    Instrument(
        name="parallel",
        title="Parallel training step",
        config=ParallelConfig,
        measured="trainstep.measure.parallel.workload:WORKLOAD",
        verb="parallel",
        answer="trainstep.report.parallel.answer:parallel_answer",
        facts=(
            *("communication_s", "waiting_s", "transfer_s", "exposed_s", "tail_s", "wire_bytes", "expected_wire_bytes"),
            *("expected_peak_bytes", "expected_peak_point", "context_bytes", "nccl_bytes", "agreement"),
        ),
        always={"config": ("ranks", "sync", "bucket_mib", "device")},
        tables="trainstep.report.parallel.tables:parallel_tables",
        sections=(
            "trainstep.report.parallel.page:parallel_sections",
            "trainstep.report.step.recomputation:recomputation_sections",
        ),
        held_to="collective",
        own_words=frozenset({"spread", "ratios"}),
    ),
    Instrument(
        name="attention",
        title="Attention",
        config=AttentionConfig,
        measured="trainstep.measure.attention.workload:WORKLOAD",
        verb="attention",
        answer="trainstep.report.attention.answer:attention_answer",
        tables="trainstep.report.attention.tables:plain_tables",
        compared_tables="trainstep.report.attention.tables:attention_tables",
        sections=("trainstep.report.attention.page:attention_sections",),
        summary="trainstep.report.kit.notes:attention_words",
    ),
    Instrument(
        name="attention_tiles",
        title="Attention tiles",
        config=AttentionTilesConfig,
        measured="trainstep.measure.attention.tiles:WORKLOAD",
        verb="tune",
        answer="trainstep.report.attention.answer:tiles_answer",
        always={"config": ("kernel", "arithmetic", "head_dim", "mask", "shape"), "facts": ("best", "in_use", "rate")},
        compared_tables="trainstep.report.attention.tiles:tuning_tables",
        sections=("trainstep.report.attention.tiles:tile_sections",),
    ),
    Instrument(
        name="op",
        title="Ops",
        config=OpConfig,
        measured="trainstep.measure.op.workload:WORKLOAD",
        verb="op",
        answer="trainstep.report.op.answer:op_answer",
        always={"config": ("op", "implementation", "direction", "dtype", "device")},
        tables="trainstep.report.op.tables:op_tables",
        sections=("trainstep.report.op.page:op_sections",),
        held_to="ceiling",
        tables_held_to=True,
        own_words=frozenset({"ratios"}),
    ),
    Instrument(
        name="ceiling",
        title="Ceilings",
        config=CeilingConfig,
        measured="trainstep.measure.step.ceilings:WORKLOAD",
        verb="doctor",
        answer="trainstep.report.parallel.answer:ceilings_answer",
        always={"config": ("kind", "dtype")},
        charts=("trainstep.report.step.phases:ceilings_charts",),
    ),
    Instrument(
        name="calibration",
        title="Calibration",
        config=CalibrationConfig,
        measured="trainstep.measure.step.calibration:WORKLOAD",
        verb="doctor",
        answer="trainstep.report.plan.calibration:calibration_answer",
        facts=("multiprocessors",),
    ),
    Instrument(
        name="collective",
        title="Collectives",
        config=CollectiveConfig,
        measured="trainstep.measure.parallel.collective:WORKLOAD",
        verb="collectives",
        answer="trainstep.report.parallel.answer:collectives_answer",
        always={
            "config": ("operation", "backend", "ranks", "dtype", "mib", "device"),
            "samples": ("time",),
            "facts": ("payload_bytes", "ring_bytes"),
        },
        tables="trainstep.report.parallel.collectives:collective_tables",
        sections=("trainstep.report.parallel.collectives:collective_sections",),
    ),
    Instrument(
        name="numerics",
        title="Numerics",
        config=NumericsConfig,
        measured="trainstep.measure.numerics.workload:WORKLOAD",
        verb="numerics",
        answer="trainstep.report.numerics.answer:numerics_answer",
        tables="trainstep.report.numerics.tables:numerics_tables",
        sections=("trainstep.report.numerics.page:numerics_sections",),
    ),
    Instrument(
        name="profile",
        title="Profiled steps",
        config=ProfileConfig,
        measured="trainstep.measure.step.profile:WORKLOAD",
        verb="profile",
        answer="trainstep.report.profile.answer:profile_answer",
        facts=(
            *("idle_s", "kernels_s", "pieces", "launches", "profiler_slowdown", "assigned_share", "fallback_share"),
            *("graph_replay_s", "graph_replay_kernels_s", "graph_replay_phases", "graph_replay_left_out"),
            *("graph_replay_failed", "replayed_share", "replay_idle_share", "attention_split", "trace_file"),
        ),
        always={"config": ("precision",)},
        compared_tables="trainstep.report.profile.tables:profile_tables",
        sections=(
            "trainstep.report.profile.page:profile_sections",
            "trainstep.report.step.recomputation:recomputation_sections",
        ),
        held_to="ceiling",
    ),
    Instrument(
        name="memory",
        title="Memory of a training step",
        config=MemoryConfig,
        measured="trainstep.measure.memory.workload:WORKLOAD",
        verb="memory",
        answer="trainstep.report.memory.answer:memory_answer",
        facts=(
            *("peak_requested_bytes", "timeline_peak_bytes", "timeline_peak_phase", "context_bytes", "kernels_bytes"),
            *("allocation_retries", "allocated_residual_share", "driver_residual_share", "driver_residual_bytes"),
            *("parameter_bytes_each", "gradient_bytes_each", "optimizer_state_bytes_each", "residual_stream_bytes"),
            *("history_full", "process_group", "nccl_bytes", "fullest_rank", "expected_peak_bytes"),
            *("expected_peak_point", "process_data_bytes", "fit_of", "memory_limit_bytes"),
        ),
        tables="trainstep.report.memory.tables:memory_tables",
        sections=("trainstep.report.memory.page:memory_sections",),
        own_words=frozenset({"peak"}),
    ),
    Instrument(
        name="run",
        title="Runs of scripts",
        config=ScriptConfig,
        measured="trainstep.measure.run.workload:WORKLOAD",
        verb="run",
        answer="trainstep.report.run.answer:run_answer",
        facts=(
            *("steps_seen", "forward_passes", "backward_passes", "skipped_updates", "optimizers", "watching_s"),
            *("inspected_step", "profiled_step_s", "device_busy_s", "communication_s", "exposed_s", "verdict"),
            *("compiled_graphs", "recompilations", "graph_breaks", "allocation_retries", "ending", "ending_part"),
        ),
        always={"config": ("script", "run", "rank", "ranks", "first_step", "device")},
        tables="trainstep.report.run.tables:run_tables",
        sections=("trainstep.report.run.page:run_sections",),
        summary="trainstep.report.run.answer:run_words",
        own_words=frozenset({"peak", "ratios", "spread"}),
        identity=True,
    ),
)
INSTRUMENTS: Mapping[str, Instrument] = {instrument.name: instrument for instrument in _ROWS}
"""Workload -> its row."""


def resolve(place: str) -> Any:
    """The object named by module:object; this imports the module."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def says(workload: str, topic: str) -> bool:
    """Whether the workload's own tables explain that topic of `own_words`; False for a user's workload."""
    return workload in INSTRUMENTS and topic in INSTRUMENTS[workload].own_words
