"""The instruments: one row a workload that `trainstep` itself measures. A workload of one's own needs none.

    resolve(INSTRUMENTS["memory"].measured)      # the object that measure/ runs
    resolve(INSTRUMENTS["memory"].sections[0])   # what makes its part of the page

What stands in higher layers is named as module:object and imported by whoever needs it, so that no reader of the table imports
torch, and a report imports the modules of the workloads that it shows.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainstep.config.attention import AttentionConfig
from trainstep.config.attention_tiles import AttentionTilesConfig
from trainstep.config.ceiling import CeilingConfig
from trainstep.config.collective import CollectiveConfig
from trainstep.config.memory import MemoryConfig
from trainstep.config.numerics import NumericsConfig
from trainstep.config.parallel import ParallelConfig
from trainstep.config.profile import ProfileConfig
from trainstep.config.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class Instrument:
    """One workload. Functions of report/ are module:function and take its rows of a report (`summary`: their configs)."""

    name: str
    title: str
    """Stands over its table of cells, and over a page of it alone."""
    config: type[Any]
    """What a cell is made of."""
    measured: str
    """The object that satisfies measure/workload.py."""
    verb: str
    """What the command line that measures it is called."""
    answer: str
    """The function of report/ that makes its `Answer` from the cells that ran, at least one; None where nothing was seen."""
    facts: tuple[str, ...] = ()
    """What its raw rows show beside IN_EVERY_ROW of records/facts.py, in this order."""
    always: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Part of a record -> what every record without a failure has there; of one with a failure, config alone."""
    tables: str = ""
    """In place of the common table of cells."""
    compared_tables: str = ""
    """Where a reader compares: in place of `tables`, or beside the common table."""
    charts: tuple[str, ...] = ()
    """Above the common table, on the page."""
    sections: tuple[str, ...] = ()
    """Make sections of the page; with `held_to`, given that workload's rows too."""
    held_to: str = ""
    """The workload whose measurements explain this one's, where a page has both."""
    last_sections: tuple[str, ...] = ()
    """Of the page, behind what compares cells."""
    summary: str = ""
    """What was run, in words; without one the number of its cells."""
    own_words: frozenset[str] = frozenset()
    """Which of `peak`, `ratios`, `spread` and `times` its own tables say, and common notes and tables leave out."""


_ROWS = (
    Instrument(
        name="train_step",
        title="Training step",
        config=RunConfig,
        measured="trainstep.measure.train_step:WORKLOAD",
        verb="bench",
        answer="trainstep.report.answers_step:step_answer",
        charts=("trainstep.report.sweep_page:phases_charts",),
        last_sections=("trainstep.report.warmup_page:warmup_sections",),
        summary="trainstep.report.notes:step_words",
        own_words=frozenset({"times"}),
    ),
    Instrument(
        name="parallel",
        title="Parallel training step",
        config=ParallelConfig,
        measured="trainstep.measure.parallel:WORKLOAD",
        verb="parallel",
        answer="trainstep.report.answers_parallel:parallel_answer",
        facts=(
            *("communication_s", "waiting_s", "transfer_s", "exposed_s", "tail_s", "wire_bytes", "expected_wire_bytes"),
            *("expected_peak_bytes", "expected_peak_point", "context_bytes", "nccl_bytes", "agreement"),
        ),
        always={"config": ("ranks", "sync", "bucket_mib", "device")},
        tables="trainstep.report.parallel_tables:parallel_tables",
        sections=("trainstep.report.parallel_page:parallel_sections",),
        held_to="collective",
        own_words=frozenset({"spread", "ratios"}),
    ),
    Instrument(
        name="attention",
        title="Attention",
        config=AttentionConfig,
        measured="trainstep.measure.attention:WORKLOAD",
        verb="attention",
        answer="trainstep.report.answers_attention:attention_answer",
        tables="trainstep.report.attention_tables:plain_tables",
        compared_tables="trainstep.report.attention_tables:attention_tables",
        sections=("trainstep.report.attention_page:attention_sections",),
        summary="trainstep.report.notes:attention_words",
    ),
    Instrument(
        name="attention_tiles",
        title="Attention tiles",
        config=AttentionTilesConfig,
        measured="trainstep.measure.attention_tiles:WORKLOAD",
        verb="tune",
        answer="trainstep.report.answers_attention:tiles_answer",
        always={
            "config": ("kernel", "arithmetic", "head_dim", "mask", "shape"),
            "facts": ("best", "in_use", "rate"),
        },
        compared_tables="trainstep.report.tiles_page:tuning_tables",
        sections=("trainstep.report.tiles_page:tile_sections",),
    ),
    Instrument(
        name="ceiling",
        title="Ceilings",
        config=CeilingConfig,
        measured="trainstep.measure.ceilings:WORKLOAD",
        verb="doctor",
        answer="trainstep.report.answers_rates:ceilings_answer",
        always={"config": ("kind", "dtype")},
        charts=("trainstep.report.sweep_page:ceilings_charts",),
    ),
    Instrument(
        name="collective",
        title="Collectives",
        config=CollectiveConfig,
        measured="trainstep.measure.collective:WORKLOAD",
        verb="collectives",
        answer="trainstep.report.answers_rates:collectives_answer",
        always={
            "config": ("operation", "backend", "ranks", "dtype", "mib", "device"),
            "samples": ("time",),
            "facts": ("payload_bytes", "ring_bytes"),
        },
        tables="trainstep.report.collectives_tables:collective_tables",
        sections=("trainstep.report.collectives_tables:collective_sections",),
    ),
    Instrument(
        name="numerics",
        title="Numerics",
        config=NumericsConfig,
        measured="trainstep.measure.numerics:WORKLOAD",
        verb="numerics",
        answer="trainstep.report.answers_numerics:numerics_answer",
        tables="trainstep.report.numerics_tables:numerics_tables",
        sections=("trainstep.report.numerics_page:numerics_sections",),
    ),
    Instrument(
        name="profile",
        title="Profiled steps",
        config=ProfileConfig,
        measured="trainstep.measure.profile:WORKLOAD",
        verb="profile",
        answer="trainstep.report.answers_profile:profile_answer",
        facts=(
            *("idle_s", "kernels_s", "pieces", "launches", "profiler_slowdown", "assigned_share", "fallback_share"),
            *("graph_replay_s", "graph_replay_kernels_s", "graph_replay_phases", "graph_replay_left_out"),
            *("graph_replay_failed", "attention_split", "trace_file"),
        ),
        always={"config": ("precision",)},
        compared_tables="trainstep.report.profile_tables:profile_tables",
        sections=("trainstep.report.profile_page:profile_sections",),
        held_to="ceiling",
    ),
    Instrument(
        name="memory",
        title="Memory of a training step",
        config=MemoryConfig,
        measured="trainstep.measure.step_memory:WORKLOAD",
        verb="memory",
        answer="trainstep.report.answers_memory:memory_answer",
        facts=(
            *("peak_requested_bytes", "timeline_peak_bytes", "timeline_peak_phase", "context_bytes", "kernels_bytes"),
            *("allocation_retries", "allocated_residual_share", "driver_residual_share", "driver_residual_bytes"),
            *("parameter_bytes_each", "gradient_bytes_each", "optimizer_state_bytes_each", "residual_stream_bytes"),
            *("history_full", "process_group", "nccl_bytes", "fullest_rank", "expected_peak_bytes"),
            *("expected_peak_point", "process_data_bytes", "fit_of", "memory_limit_bytes"),
        ),
        tables="trainstep.report.memory_tables:memory_tables",
        sections=("trainstep.report.memory_page:memory_sections",),
        own_words=frozenset({"peak"}),
    ),
)
INSTRUMENTS: Mapping[str, Instrument] = {one.name: one for one in _ROWS}
"""The one table of what `trainstep` measures."""


def resolve(place: str) -> Any:
    """The object that module:object names, imported now."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def says(workload: str, what: str) -> bool:
    """Whether a workload's own tables say that; nobody knows what those of one's own workload do."""
    return workload in INSTRUMENTS and what in INSTRUMENTS[workload].own_words
