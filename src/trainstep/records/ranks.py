"""What each rank of a cell took and held: read from tables of its record that have a column `rank`.

`ranks` has a row a rank and quantity, raw values; those of a cell of memory (ledger, timeline...) have every rank's rows, and
`rank_facts` every rank's facts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from trainstep.records.record import Record
from trainstep.records.tables import RANK_FACTS, RANKS

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


def fullest_rank(record: Record) -> int:
    """The rank that held most at its peak, whose facts are the record's; 0 of one rank."""
    return int(record.fact("fullest_rank", 0))


def table_of_rank(record: Record, name: str, rank: int | None = None) -> Mapping[str, Sequence[Any]]:
    """A rank's part of a table, the fullest rank's by default, without the column `rank`; {} where there is no such table.

    The table as it is where there is one rank."""
    table = record.tables.get(name, {})
    if "rank" not in table:
        return table
    chosen = fullest_rank(record) if rank is None else rank
    places = [place for place, its in enumerate(table["rank"]) if its == chosen]
    return {column: [values[place] for place in places] for column, values in table.items() if column != "rank"}


def facts_of_rank(record: Record, rank: int) -> dict[str, Any]:
    """Name -> value of what that rank found; of one rank the record's own."""
    table = table_of_rank(record, RANK_FACTS, rank)
    if not table:
        return {name: fact.value for name, fact in record.facts.items()}
    return dict(zip(table["fact"], table["value"], strict=True))
