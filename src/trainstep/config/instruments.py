"""The instruments: one row a workload that `trainstep` itself measures. A workload of one's own needs none."""

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
    """`config`: what a cell of it is made of. `facts`: those that its raw rows show beside records/facts.py's IN_EVERY_ROW, in
    this order. `always`: part of a record -> what every one without a failure has there; of one with a failure the config's."""

    name: str
    config: type[Any]
    facts: tuple[str, ...] = ()
    always: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


_TRAIN_STEP = Instrument(name="train_step", config=RunConfig)
_PARALLEL = Instrument(
    name="parallel",
    config=ParallelConfig,
    facts=(
        *("communication_s", "waiting_s", "transfer_s", "exposed_s", "tail_s", "wire_bytes", "expected_wire_bytes"),
        *("expected_peak_bytes", "expected_peak_point", "context_bytes", "nccl_bytes", "agreement"),
    ),
    always={"config": ("ranks", "sync", "bucket_mib", "device")},
)
_ATTENTION = Instrument(name="attention", config=AttentionConfig)
_ATTENTION_TILES = Instrument(
    name="attention_tiles",
    config=AttentionTilesConfig,
    always={
        "config": ("kernel", "arithmetic", "head_dim", "mask", "shape"),
        "facts": ("best", "in_use", "rate"),
    },
)
_CEILING = Instrument(name="ceiling", config=CeilingConfig, always={"config": ("kind", "dtype")})
_COLLECTIVE = Instrument(
    name="collective",
    config=CollectiveConfig,
    always={
        "config": ("operation", "backend", "ranks", "dtype", "mib", "device"),
        "samples": ("time",),
        "facts": ("payload_bytes", "ring_bytes"),
    },
)
_MEMORY = Instrument(
    name="memory",
    config=MemoryConfig,
    facts=(
        *("peak_requested_bytes", "timeline_peak_bytes", "timeline_peak_phase", "context_bytes", "kernels_bytes"),
        *("allocation_retries", "allocated_residual_share", "driver_residual_share", "driver_residual_bytes"),
        *("parameter_bytes_each", "gradient_bytes_each", "optimizer_state_bytes_each", "residual_stream_bytes"),
        *("history_full", "process_group", "nccl_bytes", "fullest_rank", "expected_peak_bytes"),
        *("expected_peak_point", "process_data_bytes", "fit_of", "memory_limit_bytes"),
    ),
)
_NUMERICS = Instrument(name="numerics", config=NumericsConfig)
_PROFILE = Instrument(
    name="profile",
    config=ProfileConfig,
    facts=(
        *("idle_s", "kernels_s", "pieces", "launches", "profiler_slowdown", "assigned_share", "fallback_share"),
        *("graph_replay_s", "graph_replay_kernels_s", "graph_replay_phases", "graph_replay_left_out"),
        *("graph_replay_failed", "attention_split", "trace_file"),
    ),
)

INSTRUMENTS: Mapping[str, Instrument] = {
    one.name: one
    for one in (
        _TRAIN_STEP,
        _PARALLEL,
        _ATTENTION,
        _ATTENTION_TILES,
        _CEILING,
        _COLLECTIVE,
        _MEMORY,
        _NUMERICS,
        _PROFILE,
    )
}
"""The one table of what `trainstep` measures, in the order of its help."""
