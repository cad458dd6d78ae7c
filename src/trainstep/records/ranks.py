"""Read what each rank of a cell measured, from the tables of its record that have a column `rank`.

The table `ranks` has a row for each rank and quantity, with raw values. In a record of `trainstep memory`, the tables (ledger,
timeline...) have every rank's rows, and `rank_facts` has every rank's facts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from trainstep.records.record import Record
from trainstep.records.tables import RANK_FACTS, RANKS

SLOWEST = ("step", "window_step", "time")
"""Quantities where each value of the record's samples is the slowest rank's value."""


@dataclass(frozen=True, kw_only=True)
class RankSpread:
    """The slowest and the fastest rank in one quantity, by median."""

    slowest: int
    slowest_value: float
    fastest: int
    fastest_value: float


def rank_values(record: Record, quantity: str) -> dict[int, Sequence[float]]:
    """Rank -> its raw values; empty where the record has no table `ranks` or no such quantity in it."""
    table = record.tables.get(RANKS, {})
    columns = (table.get(name, ()) for name in ("rank", "quantity", "values"))
    return {rank: values for rank, name, values in zip(*columns, strict=True) if name == quantity and values}


def rank_spread(record: Record, quantity: str) -> RankSpread | None:
    """The slowest and the fastest rank; None for fewer than two ranks."""
    medians = {rank: median(values) for rank, values in rank_values(record, quantity).items()}
    if len(medians) < 2:
        return None
    slowest, fastest = (choose(medians, key=lambda rank: medians[rank]) for choose in (max, min))
    return RankSpread(slowest=slowest, slowest_value=medians[slowest], fastest=fastest, fastest_value=medians[fastest])


def node_of_rank(record: Record, rank: int) -> str | None:
    """The name of the node on which a rank ran; None where the cell ran on one."""
    table = record.tables.get(RANKS, {})
    named = dict(zip(table.get("rank", ()), table.get("node", ()), strict=False)).get(rank)
    return named if named is not None or RANK_FACTS not in record.tables else facts_of_rank(record, rank).get("node")


def rank_name(record: Record, rank: int) -> str:
    """`rank 3`, or `rank 3 (n2)` where the cell ran on several nodes."""
    return rank_on(node_of_rank(record, rank), rank)


def rank_on(node: str | None, rank: int) -> str:
    """`rank 3`, or `rank 3 (n2)` on a node with a name."""
    return f"rank {rank}" + (f" ({node})" if node else "")


def fullest_rank(record: Record) -> int:
    """The rank with the highest peak of memory, which the record's own facts describe; 0 where there is one rank."""
    return int(record.fact("fullest_rank", 0))


def table_of_rank(record: Record, name: str, rank: int | None = None) -> Mapping[str, Sequence[Any]]:
    """The rows of one rank in a table, by default of the fullest rank, without the column `rank`.

    A table without that column is returned whole; {} where the record has no such table.
    """
    table = record.tables.get(name, {})
    if "rank" not in table:
        return table
    rank = fullest_rank(record) if rank is None else rank
    rows = [row for row, row_rank in enumerate(table["rank"]) if row_rank == rank]
    return {column: [values[row] for row in rows] for column, values in table.items() if column != "rank"}


def facts_of_rank(record: Record, rank: int) -> dict[str, Any]:
    """Fact name -> value on one rank; the record's own facts where there is no table `rank_facts`."""
    table = table_of_rank(record, RANK_FACTS, rank)
    if not table:
        return {name: fact.value for name, fact in record.facts.items()}
    return dict(zip(table["fact"], table["value"], strict=True))
