"""What each of several ranks held: a row a rank with its peak, and at four moments beside the formula."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainstep.records.ranks import facts_of_rank, fullest_rank, table_of_rank
from trainstep.records.record import Record
from trainstep.report.forms import ABSENT, ByteUnit, byte_unit
from trainstep.report.hand_built import Column, point_columns
from trainstep.report.rows import Row
from trainstep.report.tables import Entry, Table
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
    "Each rank's own peak. By formula: at the fullest of the moments that plan/peak_memory.py knows, from the model's parameters "
    "and what forward was seen to keep; what comes and goes between them, batches and workspaces are not in it. Torch's own ways "
    "have none."
)
_HELD_NOTE = (
    "A number alone is the formula's too, else the formula's stands in brackets. Gradients: whole ones, a rank's shards, and "
    "buckets that they are views of. Communication: other buffers, and parameters gathered from other ranks. Activations: all "
    "that forward keeps for backward. Rest: temporaries, workspaces, batches, what the allocator rounds up."
)


def several_ranks(record: Record) -> int:
    """How many; 0 where there is one, or the cell failed."""
    ranks = int(record.config.get("ranks", 1))
    return ranks if ranks > 1 and record.failure is None and "rank_facts" in record.tables else 0


def rank_words(record: Record, rank: int | None = None) -> str:
    """` of rank 1, the fullest of 2`; nothing for one rank."""
    ranks = several_ranks(record)
    shown = fullest_rank(record) if rank is None else rank
    fullest = f", the fullest of {ranks}" if shown == fullest_rank(record) else ""
    return f" of rank {shown}{fullest}" if ranks else ""


def ranks_table(rows: Sequence[Row]) -> list[Table]:
    """A row a rank of the cells that have several."""
    found = [(row, rank, facts_of_rank(row.record, rank)) for row in rows for rank in range(several_ranks(row.record))]
    if not found:
        return []
    points = point_columns([row for row, _, _ in found])
    sizes = {title: fact for title, fact in _SIZES.items() if any(facts.get(fact) is not None for _, _, facts in found)}
    unit = byte_unit(facts.get(fact) for _, _, facts in found for fact in sizes.values())
    columns = [column for column, _ in points] + [Column(title="sync"), Column(title="rank", number=True)]
    columns += [Column(title=title, number=True) for title in sizes] + [Column(title="peaks in")]
    entries = tuple(
        (
            *(make(row) for _, make in points),
            Entry(text=str(row.record.config["sync"])),
            Entry(text=f"{rank}", sort=rank),
            *(size_entry(facts.get(fact), unit) for fact in sizes.values()),
            Entry(text=str(facts.get("timeline_peak_phase", ABSENT)).replace("_", " ")),
        )
        for row, rank, facts in found
    )
    if any(column.title == "sync" for column, _ in points):  # it is among the points, where it varies
        place = len(points)
        columns = columns[:place] + columns[place + 1 :]
        entries = tuple((*entry[:place], *entry[place + 1 :]) for entry in entries)
    raw = tuple(_raw(row, rank, facts) for row, rank, facts in found)
    note = f"{unit.name}. {_RANKS_NOTE}"
    return [Table(title="Peak of each rank", columns=tuple(columns), entries=entries, raw=raw, note=note)]


def held_by_ranks_table(row: Row) -> Table | None:
    """A row a rank and moment: what is compared with the formula, and the rest."""
    record = row.record
    found = [
        (rank, moment, ledger, expected)
        for rank in range(several_ranks(record))
        for moment, ledger, expected in _moments(record, rank)
    ]
    if not found:
        return None
    unit = byte_unit(ledger.get("allocated") for _, _, ledger, _ in found)
    titles = (*_COMPARED, "activations", "rest", "allocated")
    entries = tuple(
        (
            Entry(text=f"{rank}", sort=rank),
            Entry(text=moment),
            *(_beside(ledger.get(line), expected.get(line), unit) for line in _COMPARED),
            *(size_entry(size, unit) for size in _others(ledger)),
        )
        for rank, moment, ledger, expected in found
    )
    columns = (Column(title="rank", number=True), Column(title="moment"))
    return Table(
        title="Held by each rank",
        columns=(*columns, *(Column(title=title, number=True) for title in titles)),
        entries=entries,
        note=f"{unit.name}. {_HELD_NOTE}",
    )


def _moments(record: Record, rank: int) -> list[tuple[str, dict[str, int], dict[str, int]]]:
    """(moment, line -> bytes, line -> bytes by formula) of a rank's ledger."""
    ledger, expected = (table_of_rank(record, name, rank) for name in ("ledger", "expected"))
    moments = [moment for moment in MOMENTS if any(size is not None for size in ledger.get(moment, ()))]
    return [(moment, _at(ledger, moment), _at(expected, moment)) for moment in moments]


def _at(table: Mapping[str, Sequence[Any]], moment: str) -> dict[str, int]:
    if moment not in table:
        return {}
    return {line: size for line, size in zip(table["line"], table[moment], strict=True) if size is not None}


def _others(ledger: Mapping[str, int]) -> tuple[int, int | None, int | None]:
    """Activations, what is left, and what was allocated."""
    kept = sum(ledger.get(line, 0) for line in SAVED_FOR_BACKWARD)
    allocated = ledger.get("allocated")
    compared = sum(ledger.get(line, 0) for line in _COMPARED)
    return kept, None if allocated is None else allocated - compared - kept, allocated


def _raw(row: Row, rank: int, facts: Mapping[str, Any]) -> dict[str, Any]:
    names = ("timeline_peak_phase", "expected_peak_point", "snapshot", "allocated_residual_share", *_SIZES.values())
    held = {
        f"{line}_{moment}_{what}".replace(",", "").replace(" ", "_"): size
        for moment, ledger, expected in _moments(row.record, rank)
        for what, lines in (("bytes", ledger), ("expected_bytes", expected))
        for line, size in lines.items()
    }
    return {
        "workload": f"{row.record.workload}_rank",
        **row.point,
        "sync": row.record.config["sync"],
        "rank": rank,
        **{name: facts[name] for name in names if name in facts},
        **held,
    }


def _beside(size: int | None, expected: int | None, unit: ByteUnit) -> Entry:
    seen = size_entry(size, unit)
    aside = "" if expected is None or expected == size else f" ({unit.words(expected)})"
    return Entry(text=f"{seen.text}{aside}", sort=size)


def size_entry(size: int | None, unit: ByteUnit) -> Entry:
    """In the table's unit."""
    if size is None:
        return Entry(text=ABSENT)
    return Entry(text="<0.001" if 0 < size < unit.byte_count / 1000 else unit.words(size), sort=size)
