"""Constructed records of the workload `op`: plausible times of an H200."""

from collections.abc import Sequence
from typing import Any

from record_maker import ENVIRONMENT, a_record, seconds
from trainstep.config.op import OpConfig
from trainstep.config.parsing import config_hash, to_plain
from trainstep.costs.single_op import op_bytes, op_flops
from trainstep.records.facts import facts_of
from trainstep.records.record import Fact, Failure, Record

TIMES = [1.0, 1.01, 1.02, 1.0, 1.01] * 4
"""Of twenty calls, as multiples of their time."""


def op(
    *,
    time_s: float = 1e-4,
    busy_s: float | None = None,
    group: str | None = "g",
    facts: dict[str, Any] | None = None,
    failure: Failure | None = None,
    times: Sequence[float] = TIMES,
    **fields: Any,
) -> Record:
    """The record of a cell whose calls take about `time_s`; `group`: interleaved with the others of this group."""
    config = OpConfig(**{"dtype": "bf16", "device": "cuda", **fields})
    plain, element_bytes = to_plain(config), 4 if config.dtype == "fp32" else 2
    counted = facts_of(
        bytes=op_bytes(config.op, config.direction, config.sizes, element_bytes),
        flops=op_flops(config.op, config.direction, config.sizes),
    )
    measured = facts_of(
        **{
            "peak_bytes": 3 * 2**20,
            "held_bytes": 2**20,
            "error_output": 2e-3,
            "error_same_dtype": 2.5e-3,
            "error_dx": 3e-3,
            "error_same_dtype_dx": 3.5e-3,
            "has_nan": 0,
            "deterministic": 1,
            "which_ran": "rms_norm_kernel",
            "device_busy_s": busy_s,
            "interleaving": "live" if group else "none",
            "interleaving_group": group,
            **(facts or {}),
        }
    )
    return a_record(
        workload="op",
        key=config_hash("op", plain),
        config=plain,
        samples={}
        if failure
        else {"time_s": seconds([time_s * x for x in times]), "host_s": seconds([3e-5] * len(times))},
        facts=counted if failure else counted | measured,
        failure=failure,
    )


def copy_ceiling(bytes_per_s: float) -> Record:
    """The record of a copy within the memory of the same GPU."""
    return a_record(
        workload="ceiling",
        key="c",
        config={"kind": "copy", "dtype": "fp32", "device": "cuda"},
        environment=ENVIRONMENT,
        samples={"time": seconds([1e-3] * 5)},
        facts={"rate": Fact(value=bytes_per_s, unit="bytes/s"), **facts_of(bytes=2**31)},
    )
