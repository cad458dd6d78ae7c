"""The tables of `trainstep memory`: peaks of every cell, who held what at the peak, and each cell's own ledger."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainstep.records.ranks import table_of_rank
from trainstep.records.record import Record
from trainstep.report.forms import ABSENT, ByteUnit, byte_unit, byte_words, failure_sentence, failure_word, percent
from trainstep.report.hand_built import Column, point_columns
from trainstep.report.memory_ranks import held_by_ranks_table, rank_words, ranks_table, size_entry
from trainstep.report.quantities import quantities
from trainstep.report.rows import Row
from trainstep.report.tables import Entry, Table
from trainstep.traces.ledger import HELD, MOMENTS

WORKLOAD = "memory"
_DETAILED = 2
"""Cells whose own tables stand under the common ones outside the page."""
_SHOWN_ALLOCATIONS = 12
_FACTS = (
    "peak_requested_bytes",
    "timeline_peak_bytes",
    "timeline_peak_phase",
    "context_bytes",
    "kernels_bytes",
    "allocation_retries",
    "allocated_residual_share",
    "driver_residual_share",
    "driver_residual_bytes",
    "parameter_bytes_each",
    "gradient_bytes_each",
    "optimizer_state_bytes_each",
    "residual_stream_bytes",
    "history_full",
    "process_group",
    "nccl_bytes",
    "fullest_rank",
    "expected_peak_bytes",
    "expected_peak_point",
    "process_data_bytes",
    "fit_of",
    "memory_limit_bytes",
)


def memory_rows(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.record.workload == WORKLOAD]


def memory_tables(rows: Sequence[Row]) -> list[Table]:
    """Every table that these records hold, each cell's own only while cells are few; none without a record of memory."""
    mine = memory_rows(rows)
    if not mine:
        return []
    own = [table for row in mine for table in cell_tables(row, titled=len(mine) > 1)] if len(mine) <= _DETAILED else []
    ranks = ranks_table(mine)
    return [*fit_table(mine), peaks_table(mine), *ranks, *phases_table(mine), *held_table(mine), *own]


def cell_tables(row: Row, *, titled: bool = True) -> list[Table]:
    """One cell's ledger, its activations by layer and its largest allocations; of several ranks what each held, and the rest of
    the fullest."""
    made = [ledger_table(row), held_by_ranks_table(row), layers_table(row), allocations_table(row)]
    name = f"{row.label()}: " if titled else ""
    return [dataclasses.replace(table, title=f"{name}{table.title}") for table in made if table is not None]


def peaks_table(rows: Sequence[Row]) -> Table:
    """Peaks by cell, what is left unexplained, what a parameter costs."""
    points = point_columns(rows)
    unit = byte_unit(row.record.fact(name) for row in rows for name in _PEAK_FACTS.values())
    columns = [column for column, _ in points] + [Column(title=title, number=True) for title in _PEAKS]
    columns += [Column(title="peaks in"), Column(title="doubts")]
    entries = []
    for row in rows:
        place = str(row.record.fact("timeline_peak_phase", ABSENT))
        last = (_failed(row) or Entry(text=place), _failed(row, whole=True) or Entry(text=doubts(row.record)))
        numbers = (_failed(row) or make(row.record, unit) for make in _PEAKS.values())
        entries.append((*(make(row) for _, make in points), *numbers, *last))
    note = (
        f"{unit.name}. Allocated: what the allocator gave tensors. Reserved: what it took from the driver. Driver: what "
        "nvidia-smi would show of this process. Unexplained: the larger of what neither step can name."
    )
    raw = tuple(_raw(row) for row in rows)
    return Table(title="Memory of a step", columns=tuple(columns), entries=tuple(entries), raw=raw, note=note)


def fit_table(rows: Sequence[Row]) -> list[Table]:
    """The largest that fitted of each search, and what was left then."""
    trials = [row for row in rows if "fit_of" in row.record.facts]
    searches: dict[Any, list[Row]] = {}
    for row in trials:
        field = str(row.record.fact("fit_of"))
        searches.setdefault((field, row.rest(field, "machine")), []).append(row)
    entries = []
    unit = byte_unit(row.record.fact("peak_allocated_bytes") for row in trials)
    for (field, rest), found in searches.items():
        values = sorted(found, key=lambda row: int(row.record.config[field]))
        fits = [row for row in values if row.record.failure is None]
        failed = [(row, row.record.failure) for row in values if row.record.failure is not None]
        fails = [row for row, failure in failed if failure.kind == "out_of_memory"]
        broken = next((failure for _, failure in failed if failure.kind != "out_of_memory"), None)
        best = fits[-1] if fits else None
        taken = (best.record.fact("peak_allocated_bytes"), headroom_bytes(best.record)) if best else (None, None)
        entries.append(
            (
                Entry(text=" ".join(value for _, value in rest)),
                Entry(text=field.replace("_", " ")),
                *(_value(row, field) for row in (best, fails[0] if fails else None)),
                *(size_entry(size, unit) for size in taken),
                Entry(text=f"{len(found):,}", sort=len(found)),
                Entry(text=failure_sentence(broken) if broken else "", failure=broken),
            )
        )
    titles = (
        "what",
        "searched",
        "largest that fits",
        "smallest that does not",
        "allocated",
        "headroom",
        "trials",
        "ended by",
    )
    columns = tuple(Column(title=title, number=1 < place < 7) for place, title in enumerate(titles))
    note = (
        f"{unit.name}. Headroom: of the memory there is, what neither the allocator nor the context had taken at that size; "
        "on a CPU what was left of the process's limit at the peak."
    )
    return [Table(title="What fits", columns=columns, entries=tuple(entries), note=note)] if entries else []


def headroom_bytes(record: Record) -> int | None:
    """What is left of the GPU, or of a CPU cell's limit, of which each rank has an equal part."""
    names = ("driver_bytes", "peak_reserved_bytes", "process_data_bytes", "peak_rss_bytes")
    used = next((size for name in names if (size := record.fact(name)) is not None), None)
    limit = record.fact("memory_limit_bytes")
    there_is = int(limit) // int(record.config.get("ranks", 1)) if limit else record.environment.gpu_memory_bytes
    return None if used is None or there_is is None else int(there_is) - int(used)


def phases_table(rows: Sequence[Row]) -> list[Table]:
    """The peak of each phase: as tensors asked, as the allocator gave and reserved, as the driver saw it end."""
    found = [row for row in rows if "peaks" in row.record.tables]
    if not found:
        return []
    points = point_columns(found)
    sizes = ("requested", "allocated", "reserved", "driver")
    columns = [column for column, _ in points] + [Column(title="phase")]
    columns += [Column(title=name, number=True) for name in sizes]
    names = ("phase", *(f"{size}_bytes" for size in sizes))
    tables = [(row, table_of_rank(row.record, "peaks")) for row in found]
    lines = [(row, line) for row, table in tables for line in zip(*(table[name] for name in names), strict=True)]
    unit = byte_unit(size for _, (_, *held) in lines for size in held)
    entries = [
        (
            *(make(row) for _, make in points),
            Entry(text=phase.replace("_", " ")),
            *(size_entry(size, unit) for size in held),
        )
        for row, (phase, *held) in lines
    ]
    return [Table(title=f"Peak by phase ({unit.name})", columns=tuple(columns), entries=tuple(entries))]


def held_table(rows: Sequence[Row]) -> list[Table]:
    """Who held what at the peak: a row a cell, a column a category that any cell has."""
    found = [(row, ledger_of(row.record, "peak")) for row in rows if "ledger" in row.record.tables]
    names = [name for name in dict.fromkeys(name for _, held in found for name in held) if name in HELD]
    names = [name for name in names if any(held.get(name) for _, held in found)]
    if not names:
        return []
    points = point_columns([row for row, _ in found])
    unit = byte_unit(held.get(name) for _, held in found for name in names)
    columns = [column for column, _ in points] + [Column(title=name, number=True) for name in names]
    entries = tuple(
        (*(make(row) for _, make in points), *(size_entry(held.get(name), unit) for name in names))
        for row, held in found
    )
    return [Table(title=f"Held at the peak ({unit.name})", columns=tuple(columns), entries=entries)]


def ledger_table(row: Row, rank: int | None = None) -> Table | None:
    """A line a category, a column a moment; sums and what is left unexplained below. Of several ranks that of the fullest, or of
    the one asked for."""
    ledger = table_of_rank(row.record, "ledger", rank)
    if not ledger:
        return None
    moments = [moment for moment in MOMENTS if any(size is not None for size in ledger[moment])]
    lines = [
        (name, [ledger[moment][place] for moment in moments])
        for place, name in enumerate(ledger["line"])
        if any(ledger[moment][place] for moment in moments) or name not in HELD
    ]
    columns = (Column(title=""), *(Column(title=moment, number=True) for moment in moments))
    entries = tuple((Entry(text=name), *(_words(size) for size in sizes)) for name, sizes in lines)
    title = f"Ledger{rank_words(row.record, rank)}"
    return Table(title=title, columns=columns, entries=entries, note=f"{_LEDGER_NOTE}{_unseen(row.record)}")


def _unseen(record: Record) -> str:
    """What has no line of its own here, and why."""
    words = ""
    if record.config.get("compile") == "model":
        words += (
            " The whole model is one compiled graph: its logits count as activations, and layers are not told apart."
        )
    group = record.fact("process_group")
    if record.fact("driver_bytes") is not None and group == "none":
        words += " NCCL has no line: this process is in no process group."
    elif record.fact("driver_bytes") is not None and group is not None and record.fact("nccl_bytes") is None:
        words += f" What the process group ({group}) takes is not measured apart: it is in what is unexplained."
    return words


def layers_table(row: Row) -> Table | None:
    """Activations by layer after forward, alike neighbours in one line."""
    layers = table_of_rank(row.record, "layers")
    if not layers or not layers["layer"]:
        return None
    runs: list[tuple[str, str, int, int]] = []
    for name, size in zip(layers["layer"], layers["bytes"], strict=True):
        numbered = name.rstrip("0123456789")
        if runs and runs[-1][2] == size and runs[-1][1].rstrip("0123456789") == numbered != name:
            runs[-1] = (runs[-1][0], name, size, runs[-1][3] + 1)
        else:
            runs.append((name, name, size, 1))
    entries = tuple(
        (
            Entry(text=first if count == 1 else f"{first} to {last}"),
            _words(size),
            Entry(text=f"{count:,}", sort=count),
            _words(size * count),
        )
        for first, last, size, count in runs
    )
    titles = ("layer", "each", "layers", "together")
    columns = tuple(Column(title=title, number=place > 0) for place, title in enumerate(titles))
    return Table(title="Activations after forward, by layer", columns=columns, entries=entries)


def allocations_table(row: Row, most: int = _SHOWN_ALLOCATIONS) -> Table | None:
    """The largest held at the peak."""
    found = table_of_rank(row.record, "allocations")
    if not found or not found["bytes"]:
        return None
    names = ("bytes", "count", "category", "phase", "layer", "stack")
    titles = ("each", "times", "category", "born in", "layer", "born at (innermost first)")
    entries = tuple(
        (_words(size), Entry(text=f"{count:,}", sort=count), *(Entry(text=str(text)) for text in texts))
        for size, count, *texts in list(zip(*(found[name] for name in names), strict=True))[:most]
    )
    columns = tuple(Column(title=title, number=place < 2) for place, title in enumerate(titles))
    share = percent(float(row.record.config.get("min_share", 0)))
    note = f"Lines under {share} % of the peak are not listed (--min-share)."
    return Table(title="Largest allocations at the peak", columns=columns, entries=entries, note=note)


def ledger_of(record: Record, moment: str, rank: int | None = None) -> dict[str, int]:
    """Line -> bytes at that moment; of several ranks of the fullest, or of the one asked for."""
    ledger = table_of_rank(record, "ledger", rank)
    if not ledger:
        return {}
    return {name: size for name, size in zip(ledger["line"], ledger[moment], strict=True) if size is not None}


def doubts(record: Record) -> str:
    """What makes these numbers doubtful."""
    found = []
    if record.fact("history_full"):
        found.append("history full: its beginning is lost, so there is no ledger and no timeline")
    if retries := record.fact("allocation_retries"):
        found.append(f"{retries} allocation retries: the allocator ran out, emptied its cache and waited")
    ours, theirs = record.fact("timeline_peak_bytes"), record.fact("peak_requested_bytes")
    if ours is not None and theirs is not None and ours != theirs:
        found.append(f"the timeline's peak differs from the allocator's by {byte_words(abs(theirs - ours))}")
    if (record.fact("allocated_residual_share") or 0) > 0.01:
        found.append("over 1 % of what is allocated has no category")
    if (record.fact("driver_residual_share") or 0) > 0.01 and (record.fact("driver_residual_bytes") or 0) > 2**26:
        found.append(f"{byte_words(record.fact('driver_residual_bytes'))} that the driver sees are unexplained")
    return "; ".join(found)


def _value(row: Row | None, field: str) -> Entry:
    if row is None:
        return Entry(text=ABSENT)
    value = int(row.record.config[field])
    return Entry(text=f"{value:,}", sort=value)


def _peak(fact: str) -> Callable[[Record, ByteUnit], Entry]:
    return lambda record, unit: size_entry(record.fact(fact), unit)


def _unexplained(record: Record, _unit: ByteUnit) -> Entry:
    shares = [record.fact(name) for name in ("allocated_residual_share", "driver_residual_share")]
    known = [share for share in shares if share is not None]
    return Entry(text=percent(max(known)), sort=max(known)) if known else Entry(text=ABSENT)


def _each(record: Record, _unit: ByteUnit) -> Entry:
    """`4 + 4 + 8 = 16`: bytes of weights, gradients and optimizer state that a parameter costs."""
    names = ("parameter_bytes_each", "gradient_bytes_each", "optimizer_state_bytes_each")
    parts = [record.fact(name) for name in names]
    if None in parts:
        return Entry(text=ABSENT)
    return Entry(text=f"{' + '.join(f'{part:.3g}' for part in parts)} = {sum(parts):.3g}", sort=sum(parts))


_PEAK_FACTS = {
    "allocated": "peak_allocated_bytes",
    "reserved": "peak_reserved_bytes",
    "driver": "driver_bytes",
    "resident": "peak_rss_bytes",
}
_PEAKS: dict[str, Callable[[Record, ByteUnit], Entry]] = {
    **{title: _peak(fact) for title, fact in _PEAK_FACTS.items()},
    "unexplained (%)": _unexplained,
    "bytes per parameter": _each,
}

_LEDGER_NOTE = (
    "Categories and rounding add up to allocated, allocated with cache and fragmentation to reserved, that with the context "
    "(of an empty process) and loaded kernels (of a process that runs one layer), of several ranks with NCCL (what the driver gave "
    "while they met), to what the driver sees; what is left at each step is the line unexplained."
)


def _raw(row: Row) -> Mapping[str, Any]:
    record = row.record
    more = {name: record.fact(name) for name in _FACTS if name in record.facts}
    held = {
        f"{line}_{moment}_bytes".replace(",", "").replace(" ", "_"): size
        for moment in MOMENTS
        for line, size in ledger_of(record, moment).items()
    }
    return {**quantities(row), **more, **held} if record.failure is None else quantities(row)


def _failed(row: Row, *, whole: bool = False) -> Entry | None:
    failure = row.record.failure
    if failure is None:
        return None
    return Entry(text=failure_sentence(failure) if whole else failure_word(failure), failure=failure)


def _words(size: int | None) -> Entry:
    """With its unit."""
    if size is None:
        return Entry(text=ABSENT)
    small = f"{size:,} B" if abs(size) < 100_000 else byte_words(size)
    return Entry(text=small, sort=size)
