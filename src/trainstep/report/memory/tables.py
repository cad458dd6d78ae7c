"""The tables of `trainstep memory`: peaks of every cell, memory at the peak by category, ledgers."""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from trainstep.config.memory import LARGEST_TRIED
from trainstep.grouping import grouped
from trainstep.records.ranks import facts_of_rank, fullest_rank, rank_name, table_of_rank
from trainstep.records.record import Record
from trainstep.records.tables import RANK_FACTS, table_lines
from trainstep.report.kit.forms import (
    COUNT,
    NAME,
    PERCENT,
    ROUGH_SIZE,
    TEXT,
    Form,
    beside,
    byte_words,
    failure_sentence,
    percent,
)
from trainstep.report.kit.rows import Row, quantities, shown_facts
from trainstep.report.kit.tables import Column, Entry, Line, Table, doubts_column, filled, point_columns
from trainstep.traces.ledger import HELD, MOMENTS, SAVED_FOR_BACKWARD

_DETAILED = 2
"""The most cells whose own tables are shown under the common tables outside the page."""
_SHOWN_ALLOCATIONS = 12
_FAILS = "smallest that does not"
_SIZES = {
    "allocated": "peak_allocated_bytes",
    "by formula": "expected_peak_bytes",
    "reserved": "peak_reserved_bytes",
    "driver": "driver_bytes",
    "NCCL": "nccl_bytes",
    "resident": "peak_rss_bytes",
}
"""Column -> fact of a rank; a fact that no rank has gets no column."""
_SIZE_NOTES = {
    "allocated": "Allocated: memory that the allocator gave tensors.",
    "reserved": "Reserved: memory that it took from the driver.",
    "driver": "Driver: what nvidia-smi would show for this process.",
    "resident": "Resident: memory of the process on the host.",
}
"""Column of the table of cells -> its sentence in the note."""
_POOL, _POOL_BELONGS_TO = "of that, the graph's pool", "reserved"
"""A line of the ledger that older records store at the end, and the line that it is part of."""
_COMPARED = ("parameters", "gradients", "optimizer state", "communication")
_RANKS_NOTE = (
    "{unit}. The peak of each rank. By formula: the largest of the moments that plan/peak_memory.py computes from the model's "
    "parameters and the measured activations, without temporaries, batches and workspaces. Torch's parallel strategies have no "
    "formula."
)
_HELD_NOTE = (
    "{unit}. A number alone agrees with the formula; a number in brackets is the formula's. Gradients: whole gradients, a "
    "rank's shards, and the buckets that they are views of. Communication: other buffers, and parameters gathered from other "
    "ranks. Activations: all memory that forward keeps for backward. Rest: temporaries, workspaces, batches, rounding of the "
    "allocator."
)
_LEDGER_NOTE = (
    "The sum of the categories and rounding is compared with allocated; allocated with cache and fragmentation, with reserved; "
    "reserved with the context (of an empty process), the loaded kernels (of a process that runs one layer) and, for several "
    "ranks, NCCL (memory that the driver gave while the ranks met), with the driver's number. Unexplained is the difference."
)


def memory_tables(rows: Sequence[Row]) -> list[Table]:
    """All tables that these records fill, with those of each cell if there are few cells."""
    tables = common_tables(rows)
    for row in rows if len(rows) <= _DETAILED else ():
        name = f"{row.label()}: " if len(rows) > 1 else ""
        tables += [dataclasses.replace(table, title=f"{name}{table.title}") for table in cell_tables(row)]
    return tables


def common_tables(rows: Sequence[Row]) -> list[Table]:
    """The tables of all cells; failed cells are in them too."""
    return filled(fit_table(rows), peaks_table(rows), ranks_table(rows), phases_table(rows), held_table(rows))


def cell_tables(row: Row, *, allocations: int = _SHOWN_ALLOCATIONS) -> list[Table]:
    """A cell's ledger, its memory by rank if there are several, its activations by layer and its largest allocations."""
    ledger, held = ledger_table(row), held_by_ranks_table(row)
    return filled(ledger, held, layers_table(row), allocations_table(row, allocations))


def peaks_table(rows: Sequence[Row]) -> Table:
    """The peaks of each cell, their unexplained share, and the bytes per parameter."""
    columns = [*point_columns(rows), *_PEAKS, doubts_column(lambda row: doubts(row.record))]
    return Table.of("Memory of a step", rows, columns, note="{unit}.", raw=map(_raw, rows))


def fit_table(rows: Sequence[Row]) -> Table:
    """The largest value that fits in each search, and the headroom at that value."""
    note = (
        "{unit}. Headroom: the GPU's memory that neither the allocator nor the context took at that size; on a CPU, the rest "
        "of the process's limit at the peak."
    )
    return Table.of("What fits", _searches(rows), _SEARCH, note=note)


def fit_sentences(rows: Sequence[Row]) -> list[str]:
    """A sentence per search: `The largest batch_size that fits is 12 (13 does not).`"""
    sentences = []
    for line in _searches(rows):
        what = f" for {line['what']}" if line["what"] else ""
        fits, fails = line.get("largest that fits"), line.get(_FAILS)
        if fits is not None:
            more = f" ({fails:,} does not)" if fails else ""
            sentences.append(f"The largest {line['searched']} that fits{what} is {fits.text}{more}.")
        elif fails:
            sentences.append(f"No {line['searched']} that was tried fits{what}, not even {fails:,}.")
    return sentences


def _searches(rows: Sequence[Row]) -> list[dict[str, Any]]:
    trials = [(field, row) for row in rows if (field := row.record.fact("fit_of")) in row.record.config]
    searches = grouped(trials, lambda trial: (trial[0], trial[1].rest(trial[0], "machine")))
    return [_search(field, rest, [row for _, row in same]) for (field, rest), same in searches.items()]


def _search(field: str, rest: Sequence[tuple[str, str]], trials: Sequence[Row]) -> dict[str, Any]:
    """The line of a search: column's title -> value."""
    trials = sorted(trials, key=lambda row: int(row.record.config[field]))
    fits = [row for row in trials if row.record.failure is None]
    failed = [(row, row.record.failure) for row in trials if row.record.failure is not None]
    fails = [row for row, failure in failed if failure.kind == "out_of_memory"]
    broken = next((failure for _, failure in failed if failure.kind != "out_of_memory"), None)
    line: dict[str, Any] = {"what": " ".join(value for _, value in rest), "searched": field, "trials": len(trials)}
    at_bound = False
    if fits:
        best = fits[-1].record
        value = int(best.config[field])
        line["largest that fits"] = Entry(text=f"{'' if fails else 'at least '}{value:,}", sort=value)
        at_bound = value >= LARGEST_TRIED.get(field, value)
        line |= {"allocated": best.fact("peak_allocated_bytes"), "headroom": headroom_bytes(best)}
    if fails:
        line[_FAILS] = int(fails[0].record.config[field])
    ended = failure_sentence(broken) if broken else "the bound of the search" if at_bound and not fails else ""
    return {**line, "ended by": Entry(text=ended, failure=broken)}


def headroom_bytes(record: Record) -> int | None:
    """The bytes left of the GPU's memory, or of a CPU cell's limit, which its ranks share equally; None if unknown."""
    names = ("driver_bytes", "peak_reserved_bytes", "process_data_bytes", "peak_rss_bytes")
    used = next((size for name in names if (size := record.fact(name)) is not None), None)
    limit = record.fact("memory_limit_bytes")
    capacity = int(limit) // int(record.config.get("ranks", 1)) if limit else record.environment.gpu_memory_bytes
    return None if used is None or capacity is None else int(capacity) - int(used)


def phases_table(rows: Sequence[Row]) -> Table:
    """The peak of each phase: bytes requested, allocated, reserved, and the driver's number at the end of the phase."""
    lines = [Line(row, line) for row in rows for line in table_lines(table_of_rank(row.record, "peaks"))]
    sizes = (Column(name, ROUGH_SIZE, f"{name}_bytes") for name in ("requested", "allocated", "reserved", "driver"))
    columns = [*point_columns(lines), Column("phase", NAME, names=True), *sizes]
    return Table.of("Peak by phase ({unit})", lines, columns)


def held_table(rows: Sequence[Row]) -> Table:
    """The bytes held at the peak: a row per cell, a column per category that a cell has."""
    lines = [Line(row, ledger_of(row.record, "peak")) for row in rows if row.record.tables.get("ledger")]
    names = [name for name in dict.fromkeys(name for line in lines for name in line.value) if name in HELD]
    sizes = [Column(name, ROUGH_SIZE) for name in names if any(line.value.get(name) for line in lines)]
    return Table.of("Held at the peak ({unit})", lines if sizes else [], [*point_columns(lines), *sizes])


def ledger_table(row: Row, rank: int | None = None) -> Table:
    """The ledger of a cell: a line per category and a column per moment, with sums and unexplained bytes below. `rank` is by
    default the fullest."""
    lines = [
        line
        for line in table_lines(table_of_rank(row.record, "ledger", rank))
        if any(line[moment] for moment in MOMENTS) or line["line"] not in HELD
    ]
    pool = [line for line in lines if line["line"] == _POOL]
    lines = [line for line in lines if line not in pool]
    place = next((place for place, line in enumerate(lines, 1) if line["line"] == _POOL_BELONGS_TO), len(lines))
    lines[place:place] = pool
    columns = [Column("", TEXT, "line"), *(Column(moment, _EXACT, optional=True) for moment in MOMENTS)]
    title, note = f"Ledger{rank_words(row.record, rank)}", " ".join([_LEDGER_NOTE, *_without_lines(row.record)])
    return Table.of(title, lines, columns, note=note, folded=rank is not None)


def _without_lines(record: Record) -> list[str]:
    """Sentences about memory that has no line of its own in the ledger."""
    sentences = []
    if record.config.get("compile") == "model":
        sentences.append(
            "The whole model is one compiled graph: its logits count as activations, and its layers cannot be separated."
        )
    group = record.fact("process_group")
    if record.fact("driver_bytes") is not None and group == "none":
        sentences.append("NCCL has no line, because this process is in no process group.")
    elif record.fact("driver_bytes") is not None and group is not None and record.fact("nccl_bytes") is None:
        sentences.append(f"The memory of the process group ({group}) is not measured separately; it is unexplained.")
    return sentences


def layers_table(row: Row) -> Table:
    """Activations by layer after forward; neighbouring layers with equal sizes share a line."""
    layers = table_lines(table_of_rank(row.record, "layers"))
    lines = []
    for (_, size), run in groupby(layers, lambda line: (line["layer"].rstrip("0123456789"), line["bytes"])):
        first, *others = [line["layer"] for line in run]
        name, count = f"{first} to {others[-1]}" if others else first, 1 + len(others)
        lines.append({"layer": name, "each": size, "layers": count, "together": size * count})
    columns = (Column("layer"), Column("each", _EXACT), Column("layers", COUNT), Column("together", _EXACT))
    return Table.of("Activations after forward, by layer", lines, columns, folded=True)


def allocations_table(row: Row, most: int) -> Table:
    """The largest allocations held at the peak."""
    lines = table_lines(table_of_rank(row.record, "allocations"))[:most]
    share = percent(float(row.record.config.get("min_share", 0)))
    note = f"Allocations under {share} % of the peak are not listed (--min-share)."
    return Table.of("Largest allocations at the peak", lines, _ALLOCATION, note=note, folded=True)


def ledger_of(record: Record, moment: str, rank: int | None = None) -> dict[str, int]:
    """Line -> bytes at a moment; `rank` is by default the fullest."""
    return _at(table_of_rank(record, "ledger", rank), moment)


def doubts(record: Record) -> str:
    """Reasons to doubt these numbers."""
    reasons = []
    if record.fact("history_full"):
        reasons.append("history full: its beginning is lost, so there is no ledger and no timeline")
    if retries := record.fact("allocation_retries"):
        reasons.append(f"{retries} allocation retries: the allocator ran out of memory, emptied its cache and waited")
    ours, allocators = record.fact("timeline_peak_bytes"), record.fact("peak_requested_bytes")
    if ours is not None and allocators is not None and ours != allocators:
        reasons.append(f"the timeline's peak differs from the allocator's by {byte_words(abs(allocators - ours))}")
    if (record.fact("allocated_residual_share") or 0) > 0.01:
        reasons.append("over 1 % of the allocated memory has no category")
    if (record.fact("driver_residual_share") or 0) > 0.01 and (record.fact("driver_residual_bytes") or 0) > 2**26:
        reasons.append(f"{byte_words(record.fact('driver_residual_bytes'))} of the driver's figure are unexplained")
    return "; ".join(reasons)


def _unexplained(row: Row) -> float | None:
    shares = [row.record.fact(name) for name in ("allocated_residual_share", "driver_residual_share")]
    return max((share for share in shares if share is not None), default=None)


def _each(row: Row) -> list[float] | None:
    """The bytes of weight, gradient and optimizer state per parameter; None if one of them is unknown."""
    names = ("parameter_bytes_each", "gradient_bytes_each", "optimizer_state_bytes_each")
    parts = [row.record.fact(name) for name in names]
    return None if None in parts else parts


_EACH = Form(text=lambda parts: f"{' + '.join(f'{part:.3g}' for part in parts)} = {sum(parts):.3g}", sort=sum)
"""Form of bytes per parameter: `4 + 4 + 8 = 16`."""
_EXACT = Form(text=lambda size: f"{size:,} B" if abs(size) < 100_000 else byte_words(size))
_PEAKS = (
    *(Column(name, ROUGH_SIZE, _SIZES[name], optional=True, note=note) for name, note in _SIZE_NOTES.items()),
    Column(
        "unexplained (%)",
        PERCENT,
        _unexplained,
        more=True,
        note="Unexplained: the larger share of allocated, or of the driver's number, without a category.",
    ),
    Column("bytes per parameter", _EACH, _each, more=True),
    Column("peaks in", TEXT, "timeline_peak_phase"),
)
_SEARCH = (
    Column("what", names=True),
    Column("searched", NAME, names=True),
    *(Column(title, COUNT) for title in ("largest that fits", _FAILS)),
    *(Column(title, ROUGH_SIZE) for title in ("allocated", "headroom")),
    Column("trials", COUNT),
    Column("ended by"),
)
_ALLOCATION = (
    Column("each", _EXACT, "bytes"),
    Column("times", COUNT, "count"),
    Column("category"),
    Column("allocated in", TEXT, "phase", more=True),
    Column("layer"),
    Column("allocated at (innermost first)", TEXT, "stack"),
)


def _raw(row: Row) -> Mapping[str, Any]:
    record = row.record
    numbers = quantities(row)
    if record.failure is None:
        numbers |= shown_facts(record)
        for moment in MOMENTS:
            numbers |= _raw_sizes(ledger_of(record, moment), f"{moment}_bytes")
    return numbers


def _raw_sizes(sizes: Mapping[str, int], what: str) -> dict[str, int]:
    """The sizes by names of a raw row: `optimizer_state_after_forward_bytes`."""
    return {f"{line}_{what}".replace(",", "").replace(" ", "_"): size for line, size in sizes.items()}


def several_ranks(record: Record) -> int:
    """The number of ranks; 0 if there is only one or the cell failed."""
    ranks = int(record.config.get("ranks", 1))
    whole = record.failure is None and RANK_FACTS in record.tables and "sync" in record.config
    return ranks if ranks > 1 and whole else 0


def rank_words(record: Record, rank: int | None = None) -> str:
    """` of rank 1, the fullest of 2`; empty for one rank."""
    ranks = several_ranks(record)
    shown = fullest_rank(record) if rank is None else rank
    fullest = f", the fullest of {ranks}" if shown == fullest_rank(record) else ""
    return f" of {rank_name(record, shown)}{fullest}" if ranks else ""


def ranks_table(rows: Sequence[Row]) -> Table:
    """A row per rank, for cells with several ranks."""
    lines = [
        Line(row, {**facts_of_rank(row.record, rank), "rank": rank})
        for row in rows
        for rank in range(several_ranks(row.record))
    ]
    names = point_columns(lines)
    if all(column.title != "sync" for column in names):
        names.append(Column("sync", TEXT, lambda line: line.row.record.config["sync"], names=True))
    sizes = (Column(title, ROUGH_SIZE, fact, optional=True) for title, fact in _SIZES.items())
    place = (Column("node", TEXT, names=True, optional=True), Column("rank", COUNT, names=True))
    columns = [*names, *place, *sizes, Column("peaks in", NAME, "timeline_peak_phase")]
    return Table.of("Peak of each rank", lines, columns, note=_RANKS_NOTE, raw=map(_rank_raw, lines))


def held_by_ranks_table(row: Row) -> Table:
    """A row per rank and moment: the categories that have a formula, activations, and the rest."""
    lines = [
        {"rank": rank, "moment": moment, **_held(ledger, expected)}
        for rank in range(several_ranks(row.record))
        for moment, ledger, expected in _moments(row.record, rank)
    ]
    columns = [
        Column("rank", COUNT, names=True),
        Column("moment", names=True),
        *(Column(name, beside(ROUGH_SIZE)) for name in _COMPARED),
        *(Column(name, ROUGH_SIZE) for name in ("activations", "rest", "allocated")),
    ]
    return Table.of("Held by each rank", lines, columns, note=_HELD_NOTE)


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
    """Column -> value of a line: categories as (bytes, by formula), activations, the rest, and allocated bytes."""
    kept = sum(ledger.get(line, 0) for line in SAVED_FOR_BACKWARD)
    allocated = ledger.get("allocated")
    compared = {line: (ledger[line], expected.get(line)) for line in _COMPARED if line in ledger}
    rest = None if allocated is None else allocated - kept - sum(size for size, _ in compared.values())
    return {**compared, "activations": kept, "rest": rest, "allocated": allocated}


def _rank_raw(line: Line) -> dict[str, Any]:
    row, facts = line
    names = ("timeline_peak_phase", "expected_peak_point", "snapshot", "allocated_residual_share", *_SIZES.values())
    numbers = {"workload": f"{row.record.workload}_rank", **row.point, "sync": row.record.config["sync"]}
    numbers |= {name: facts[name] for name in ("rank", *names) if name in facts}
    for moment, ledger, expected in _moments(row.record, facts["rank"]):
        numbers |= _raw_sizes(ledger, f"{moment}_bytes") | _raw_sizes(expected, f"{moment}_expected_bytes")
    return numbers
