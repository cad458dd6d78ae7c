"""What each rank of a cell took: read from the table `ranks` of its record (one row a rank and quantity, raw values)."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from trainstep.records.record import Record

RANKS = "ranks"
SLOWEST = ("step", "window_step", "time")
"""Quantities whose samples in the record are, value by value, the slowest rank's."""


@dataclass(frozen=True, kw_only=True)
class RankSpread:
    """The slowest and the fastest rank of a quantity, by median."""

    slowest: int
    slowest_value: float
    fastest: int
    fastest_value: float


def rank_values(record: Record, quantity: str) -> dict[int, Sequence[float]]:
    """Rank -> its raw values; empty where the record has no such table or quantity."""
    table = record.tables.get(RANKS, {})
    columns = (table.get(name, ()) for name in ("rank", "quantity", "values"))
    return {rank: values for rank, name, values in zip(*columns, strict=True) if name == quantity and values}


def rank_spread(record: Record, quantity: str) -> RankSpread | None:
    """Who is slowest and who is fastest; None for fewer than two ranks."""
    medians = {rank: median(values) for rank, values in rank_values(record, quantity).items()}
    if len(medians) < 2:
        return None
    slowest, fastest = (choose(medians, key=lambda rank: medians[rank]) for choose in (max, min))
    return RankSpread(slowest=slowest, slowest_value=medians[slowest], fastest=fastest, fastest_value=medians[fastest])
