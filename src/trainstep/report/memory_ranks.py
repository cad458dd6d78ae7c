"""What each of several ranks held: a row a rank with its peak, and at four moments beside the formula."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainstep.records.ranks import facts_of_rank, fullest_rank, table_of_rank
from trainstep.records.record import Record
from trainstep.records.tables import RANK_FACTS
from trainstep.report.forms import COUNT, NAME, ROUGH_SIZE, TEXT, beside
from trainstep.report.rows import Row
from trainstep.report.tables import Column, Line, Table, point_columns
from trainstep.traces.ledger import MOMENTS, SAVED_FOR_BACKWARD

_SIZES = {
    "allocated": "peak_allocated_bytes",
    "by formula": "expected_peak_bytes",
    "reserved": "peak_reserved_bytes",
    "driver": "driver_bytes",
    "NCCL": "nccl_bytes",
    "resident": "peak_rss_bytes",
}
"""Column -> fact of a rank; one that no rank has is no column."""
_COMPARED = ("parameters", "gradients", "optimizer state", "communication")
_RANKS_NOTE = (
    "{unit}. Each rank's own peak. By formula: at the fullest of the moments that plan/peak_memory.py knows, from the model's "
    "parameters and what forward was seen to keep; what comes and goes between them, batches and workspaces are not in it. "
    "Torch's own ways have none."
)
_HELD_NOTE = (
    "{unit}. A number alone is the formula's too, else the formula's stands in brackets. Gradients: whole ones, a rank's shards, "
    "and buckets that they are views of. Communication: other buffers, and parameters gathered from other ranks. Activations: all "
    "that forward keeps for backward. Rest: temporaries, workspaces, batches, what the allocator rounds up."
)


def several_ranks(record: Record) -> int:
    """How many; 0 where there is one, or the cell failed."""
    ranks = int(record.config.get("ranks", 1))
    whole = record.failure is None and RANK_FACTS in record.tables and "sync" in record.config
    return ranks if ranks > 1 and whole else 0


def rank_words(record: Record, rank: int | None = None) -> str:
    """` of rank 1, the fullest of 2`; nothing for one rank."""
    ranks = several_ranks(record)
    shown = fullest_rank(record) if rank is None else rank
    fullest = f", the fullest of {ranks}" if shown == fullest_rank(record) else ""
    return f" of rank {shown}{fullest}" if ranks else ""


def ranks_table(rows: Sequence[Row]) -> list[Table]:
    """A row a rank of the cells that have several."""
    lines = [
        Line(row, {**facts_of_rank(row.record, rank), "rank": rank})
        for row in rows
        for rank in range(several_ranks(row.record))
    ]
    if not lines:
        return []
    named = point_columns(lines)
    if all(column.title != "sync" for column in named):
        named.append(Column("sync", TEXT, lambda line: line.row.record.config["sync"]))
    sizes = (Column(title, ROUGH_SIZE, fact, optional=True) for title, fact in _SIZES.items())
    columns = [*named, Column("rank", COUNT), *sizes, Column("peaks in", NAME, "timeline_peak_phase")]
    return [Table.of("Peak of each rank", lines, columns, note=_RANKS_NOTE, raw=map(_raw, lines))]


def held_by_ranks_table(row: Row) -> Table | None:
    """A row a rank and moment: what is compared with the formula, and the rest."""
    lines = [
        {"rank": rank, "moment": moment, **_held(ledger, expected)}
        for rank in range(several_ranks(row.record))
        for moment, ledger, expected in _moments(row.record, rank)
    ]
    columns = [
        Column("rank", COUNT),
        Column("moment"),
        *(Column(name, beside(ROUGH_SIZE)) for name in _COMPARED),
        *(Column(name, ROUGH_SIZE) for name in ("activations", "rest", "allocated")),
    ]
    return Table.of("Held by each rank", lines, columns, note=_HELD_NOTE) if lines else None


def _moments(record: Record, rank: int) -> list[tuple[str, dict[str, int], dict[str, int]]]:
    """(moment, line -> bytes, line -> bytes by formula) of a rank's ledger."""
    ledger, expected = (table_of_rank(record, name, rank) for name in ("ledger", "expected"))
    moments = [moment for moment in MOMENTS if any(size is not None for size in ledger.get(moment, ()))]
    return [(moment, _at(ledger, moment), _at(expected, moment)) for moment in moments]


def _at(table: Mapping[str, Sequence[Any]], moment: str) -> dict[str, int]:
    if moment not in table:
        return {}
    return {line: size for line, size in zip(table["line"], table[moment], strict=True) if size is not None}


def _held(ledger: Mapping[str, int], expected: Mapping[str, int]) -> dict[str, Any]:
    """What the formula knows beside it, activations, what is left, and what was allocated."""
    kept = sum(ledger.get(line, 0) for line in SAVED_FOR_BACKWARD)
    allocated = ledger.get("allocated")
    compared = {line: (ledger[line], expected.get(line)) for line in _COMPARED if line in ledger}
    rest = None if allocated is None else allocated - kept - sum(size for size, _ in compared.values())
    return {**compared, "activations": kept, "rest": rest, "allocated": allocated}


def _raw(line: Line) -> dict[str, Any]:
    row, facts = line
    names = ("timeline_peak_phase", "expected_peak_point", "snapshot", "allocated_residual_share", *_SIZES.values())
    held = {
        f"{line}_{moment}_{what}".replace(",", "").replace(" ", "_"): size
        for moment, ledger, expected in _moments(row.record, facts["rank"])
        for what, lines in (("bytes", ledger), ("expected_bytes", expected))
        for line, size in lines.items()
    }
    return {
        "workload": f"{row.record.workload}_rank",
        **row.point,
        "sync": row.record.config["sync"],
        "rank": facts["rank"],
        **{name: facts[name] for name in names if name in facts},
        **held,
    }
