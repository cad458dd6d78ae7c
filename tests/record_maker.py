"""A complete record for tests that need a part of it."""

from typing import Any

from trainstep.records.record import Environment, Record, Samples

ENVIRONMENT = Environment(
    hostname="host",
    os="Linux",
    cpu="a cpu",
    cores=2,
    memory_bytes=1,
    python="3.11",
    trainstep="0.1",
    source="abc",
    torch="2.13.0",
    triton="3.6.0",
    cuda="12.8",
    gpu="NVIDIA H200",
    gpu_count=1,
    driver="570",
)
RECOMPUTE_CURVE: dict[str, list[Any]] = {
    "peak_bytes": [20 * 2**30, 30 * 2**30],
    "added_s": [0.0125, 0.0],
    "none": [4, 12],
    "selective": [8, 0],
    "narrow": [0, 0],
    "block": [0, 0],
    "chains": [0, 0],
    "chosen": [True, False],
}
"""The table of a run with a budget for recomputation."""


def seconds(values: Any, warmups: tuple[float, ...] = ()) -> Samples:
    return Samples(unit="s", values=tuple(float(value) for value in values), warmups=warmups)


def a_record(**changes: Any) -> Record:
    """A record of train_step on ENVIRONMENT with three steps of one second; `changes` replace its fields."""
    given = {
        "workload": "train_step",
        "key": "k",
        "config": {},
        "environment": ENVIRONMENT,
        "started_at": "2026-11-01T00:00:00Z",
        "duration_s": 1.5,
        "samples": {"step": seconds([1, 1, 1])},
    }
    return Record(**{**given, **changes})


COMMUNICATION_BY_RANK = {
    "rank": [0, 1],
    "communication_s": [0.9, 0.3],
    "waiting_s": [0.7, 0.1],
    "transfer_s": [0.2, 0.2],
    "exposed_s": [0.8, 0.1],
    "tail_s": [0.0, 0.0],
}
"""A profiled step's communication in which rank 0 came first and waited for rank 1."""
