"""Attention as tables: implementations side by side a quantity, every cell with its doubts, what memory is made of."""

from collections.abc import Callable, Sequence
from typing import Any

from trainstep.records.record import Record
from trainstep.records.summary import doubts
from trainstep.report.attention_ratios import ratio_tables, ratios
from trainstep.report.attention_rows import (
    HOST,
    NOT_THE_WORK,
    OURS,
    TIME,
    Configuration,
    attention_rows,
    configuration_columns,
    configuration_names,
    configurations,
    failed_entry,
    failure_reason,
    flag,
    flops_per_s,
    implementations,
    number,
    time_summary,
)
from trainstep.report.attention_tile_map import tile_tables
from trainstep.report.forms import ABSENT, ByteUnit, byte_unit, failure_sentence, in_ms, milliseconds, three_digits
from trainstep.report.hand_built import Column, point_columns
from trainstep.report.quantities import quantities
from trainstep.report.rows import Row, words
from trainstep.report.tables import Entry, Table

Make = Callable[[Record], Entry | None]
_REASONS = 6
_ACCOUNTED = ("inputs", "scores", "softmax", "lse", "output", "gradients", "needed")
_MOST_OF_A_NAME = 60


def plain_tables(rows: Sequence[Row]) -> list[Table]:
    """As attention_tables, without ours against each."""
    return attention_tables(rows, compared=False)


def attention_tables(rows: Sequence[Row], *, compared: bool = True) -> list[Table]:
    """Implementations side by side, ours against each (where `compared`), tiles, every cell, the memory accounting."""
    mine = attention_rows(rows)
    if not mine:
        return []
    found = configurations(mine)
    against = ratio_tables(ratios(found)) if compared else []
    return [*side_by_side(found), *against, *tile_tables(mine), cells_table(mine), *accounting_tables(mine)]


def side_by_side(found: Sequence[Configuration]) -> list[Table]:
    """Time, rate and memory, a table each: a row a configuration, a column an implementation. None with a single one."""
    names = implementations([row for one in found for row in one.cells.values()])
    names.sort(key=lambda name: name != OURS)  # ours beside the configuration: a wide table scrolls
    if len(names) < 2:
        return []
    tables = []
    records = [row.record for one in found for row in one.cells.values()]
    for title, make in [*_SPEED, *(_bytes(title, name, records) for title, name in _MEMORY)]:
        shown = [one for one in found if _belongs(one, make)]
        if not any(make(row.record) for one in shown for row in one.cells.values()):
            continue
        points = configuration_columns(shown)
        entries = tuple(
            (*(mine[place] for _, mine in points), *(_entry(one.cells.get(name), make) for name in names))
            for place, one in enumerate(shown)
        )
        columns = (*(column for column, _ in points), *(Column(title=name, number=True) for name in names))
        note = " ".join(filter(None, (_NOTES.get(title, ""), *side_notes(shown))))
        tables.append(Table(title=f"Attention: {title}", columns=columns, entries=entries, note=note))
    return tables


def _belongs(one: Configuration, make: Make) -> bool:
    """Whether some cell has the quantity, or none ran: a forward pass alone holds nothing, a row of failures says so."""
    ran = [row.record for row in one.cells.values() if row.record.failure is None]
    return not ran or any(map(make, ran))


def side_notes(found: Sequence[Configuration]) -> list[str]:
    """What short words in cells stand for, and what was left aside."""
    failures = [row for one in found for row in one.cells.values() if row.record.failure]
    reasons = dict.fromkeys(failure_reason(row.record) for row in failures)
    told = [f"{reason.rstrip('.')}." for reason in list(reasons)[:_REASONS]]
    if len(reasons) > _REASONS:
        told.append("The others stand in the table of every cell.")
    aside = sum(one.left_aside for one in found)
    tiles = (
        f"Where trainstep ran at several tiles, its default tiles stand here, or its fastest where those did not run; "
        f"{aside} cells stand below only."
    )
    return [*told, *([tiles] if aside else [])]


def cells_table(rows: Sequence[Row]) -> Table:
    """Every cell: beside its time the error, NaN, determinism, the kernel that ran, the host's time, the doubts."""
    hidden = {name for row in rows for name in row.point} - {*configuration_names(rows), *NOT_THE_WORK}
    points = point_columns(rows, without=[*hidden])
    sizes = (_bytes(title, name, [row.record for row in rows]) for title, name in _CELL_MEMORY)
    of_cells = [*_CELL, *((Column(title=title, number=True), make) for title, make in sizes)]
    shown = [(column, make) for column, make in of_cells if any(make(row.record) for row in rows)]
    entries = tuple(
        (
            *(make(row) for _, make in points),
            *(_cell_entry(row.record, make, first=place == 0) for place, (_, make) in enumerate(shown)),
            _doubts(row.record),
        )
        for row in rows
    )
    return Table(
        title="Attention: every cell",
        columns=(*(column for column, _ in points), *(column for column, _ in shown), Column(title="doubts")),
        entries=entries,
        note="Error: the largest, over the largest magnitude of a reference in higher precision. Plain PyTorch's: of the output "
        "that attention written out in PyTorch gives in the cell's own dtype. NaN: or infinity. Host: until the call returns. "
        "Launch-bound: the device waits for the host.",
        raw=tuple(map(_numbers, rows)),
    )


def accounting_tables(rows: Sequence[Row]) -> list[Table]:
    """What the memory of each configuration is made of, as its implementation needs it."""
    told = [row for row in rows if any(number(row.record, f"{part}_bytes") is not None for part in _ACCOUNTED)]
    if not told:
        return []
    hidden = {name for row in told for name in row.point} - {*configuration_names(rows), *NOT_THE_WORK}
    points = point_columns(told, without=[*hidden])
    records = [row.record for row in told]
    unit = byte_unit(number(record, f"{part}_bytes") for record in records for part in _ACCOUNTED)
    parts = [(f"{part} ({unit.name})", _sized(f"{part}_bytes", unit, whatever=True)) for part in _ACCOUNTED]
    parts = [(title, make) for title, make in parts if any(map(make, records))]
    parts += [(f"peak seen ({unit.name})", _sized("peak_bytes", unit))]
    entries = tuple(
        (*(make(row) for _, make in points), *(_entry(row, make, failed=make is parts[-1][1]) for _, make in parts))
        for row in told
    )
    columns = (*(column for column, _ in points), *(Column(title=title, number=True) for title, _ in parts))
    note = "From the shapes: what each implementation must hold. Needed: all of it together."
    return [Table(title="Attention: memory accounting", columns=columns, entries=entries, note=note, folded=True)]


def _entry(row: Row | None, make: Make, *, failed: bool = True) -> Entry:
    if row is None:
        return Entry(text=ABSENT)
    if row.record.failure and failed:
        return failed_entry(row.record)
    return make(row.record) or Entry(text=ABSENT)


def _cell_entry(record: Record, make: Make, *, first: bool) -> Entry:
    """A failed row shows its failure once, where its time would stand, and its reason at the end."""
    if record.failure:
        return failed_entry(record) if first else Entry(text=ABSENT, failure=record.failure)
    return make(record) or Entry(text=ABSENT)


def _doubts(record: Record) -> Entry:
    if record.failure:
        return Entry(text=failure_sentence(record.failure), failure=record.failure)
    return Entry(text="; ".join([*_troubles(record), *doubts(record)]))


def _troubles(record: Record) -> list[str]:
    """What makes the result itself doubtful, and what could not be looked at."""
    failed = record.fact("afterwards_failed")
    return [
        *(["NaN or infinity"] if flag(record, "has_nan") else []),
        *([f"not seen: {words(failed)}"] if failed else []),
    ]


def _numbers(row: Row) -> dict[str, Any]:
    """What a program reads: the whole config, the quantities, the accounting of a failed cell too."""
    record = row.record
    numbers = quantities(row)
    config = {name: value for name, value in record.config.items() if name not in numbers}
    accounted = {f"{part}_bytes": number(record, f"{part}_bytes") for part in _ACCOUNTED}
    needed = {name: value for name, value in accounted.items() if value is not None}
    return {"workload": numbers.pop("workload"), **config, **numbers, **needed, "flops_per_s": flops_per_s(record)}


def _time(name: str) -> Make:
    def make(record: Record) -> Entry | None:
        found = time_summary(record, name)
        if found is None:
            return None
        std = found.std if found.n > 1 else None
        return Entry(text=milliseconds(found.median, std), sort=in_ms(found.median))

    return make


def _rate(record: Record) -> Entry | None:
    value = flops_per_s(record)
    return None if value is None else Entry(text=three_digits(value / 1e12), sort=value)


def _bytes(title: str, name: str, records: Sequence[Record]) -> tuple[str, Make]:
    """A column's title and entries, in the unit that its largest value has."""
    unit = byte_unit(number(record, name) for record in records if not record.failure)
    return f"{title} ({unit.name})", _sized(name, unit)


def _sized(name: str, unit: ByteUnit, *, whatever: bool = False) -> Make:
    """A fact of bytes; `whatever` became of the cell."""

    def make(record: Record) -> Entry | None:
        value = number(record, name)
        if value is None or (record.failure and not whatever):
            return None
        return Entry(text=unit.words(value), sort=value)

    return make


def _error(name: str) -> Make:
    def make(record: Record) -> Entry | None:
        value = number(record, name)
        return None if value is None or record.failure else Entry(text=f"{value:.1e}", sort=value)

    return make


def _flag(name: str) -> Make:
    def make(record: Record) -> Entry | None:
        value = flag(record, name)
        return None if value is None or record.failure else Entry(text=words(value))

    return make


def _said(name: str) -> Make:
    def make(record: Record) -> Entry | None:
        value = record.fact(name)
        if value is None or record.failure:
            return None
        text = words(value)
        return Entry(text=text if len(text) <= _MOST_OF_A_NAME else f"{text[: _MOST_OF_A_NAME - 1]}…")

    return make


_SPEED = (("time (ms)", _time(TIME)), ("TFLOP/s", _rate))
_MEMORY = (("peak memory", "peak_bytes"), ("memory held before backward", "held_bytes"))
_CELL_MEMORY = (("peak", "peak_bytes"), ("held", "held_bytes"))
_NOTES = {
    "time (ms)": "Median ± standard deviation of a call.",
    "TFLOP/s": "Over the median time; FLOPs are counted from the shape, a causal mask's half left out.",
}
_CELL: list[tuple[Column, Make]] = [
    (Column(title="time (ms)", number=True), _time(TIME)),
    (Column(title="TFLOP/s", number=True), _rate),
    (Column(title="error of output", number=True), _error("error_output")),
    (Column(title="plain PyTorch's error", number=True), _error("error_same_dtype")),
    *((Column(title=f"error of {name}", number=True), _error(f"error_{name}")) for name in ("dq", "dk", "dv", "lse")),
    (Column(title="NaN"), _flag("has_nan")),
    (Column(title="deterministic"), _flag("deterministic")),
    (Column(title="which ran"), _said("which_ran")),
    (Column(title="host (ms)", number=True), _time(HOST)),
    (Column(title="launch-bound"), _flag("launch_bound")),
]
