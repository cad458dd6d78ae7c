"""Attention as tables: implementations side by side a quantity, every cell with its doubts, what memory is made of."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from trainstep.records.record import Record
from trainstep.records.summary import doubts
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
    failure_cell,
    failure_reason,
    flag,
    flops_per_s,
    implementations,
    number,
    ratio_tables,
    ratios,
    time_summary,
)
from trainstep.report.attention_tile_map import tile_tables
from trainstep.report.forms import ABSENT, COLUMN_SIZE, ERROR, MS_STD, SIZE, TEXT, Form, three_digits
from trainstep.report.quantities import quantities
from trainstep.report.rows import Row, words
from trainstep.report.tables import Column, Table, doubts_column, point_columns

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
    for column in _SIDE_BY_SIDE:
        shown = [one for one in found if _belongs(one, column)]
        if any(_has(row, column) for one in shown for row in one.cells.values()):
            columns = [*configuration_columns(shown), *(_of_implementation(name, column) for name in names)]
            note = " ".join(filter(None, (column.help, *side_notes(shown))))
            tables.append(Table.of(f"Attention: {column.title}", shown, columns, note=note))
    return tables


def _of_implementation(name: str, column: Column) -> Column:
    def get(one: Configuration) -> Any:
        return column.read(one.cells[name]) if name in one.cells else None

    return Column(name, column.form, get, failed=None)


def _belongs(one: Configuration, column: Column) -> bool:
    """Whether some cell has the quantity, or none ran: a forward pass alone holds nothing, a row of failures says so."""
    ran = [row for row in one.cells.values() if row.record.failure is None]
    return not ran or any(_has(row, column) for row in ran)


def _has(row: Row, column: Column) -> bool:
    return row.record.failure is None and column.read(row) is not None


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
    note = (
        "Error: the largest, over the largest magnitude of a reference in higher precision. Plain PyTorch's: of the output "
        "that attention written out in PyTorch gives in the cell's own dtype. NaN: or infinity. Host: until the call returns. "
        "Launch-bound: the device waits for the host."
    )
    columns = [
        *point_columns(rows, without=hidden),
        *_CELL,
        doubts_column(lambda row: "; ".join([*_troubles(row.record), *doubts(row.record)])),
    ]
    return Table.of("Attention: every cell", rows, columns, note=note, raw=map(_numbers, rows))


def accounting_tables(rows: Sequence[Row]) -> list[Table]:
    """What the memory of each configuration is made of, as its implementation needs it."""
    told = [row for row in rows if any(number(row.record, f"{part}_bytes") is not None for part in _ACCOUNTED)]
    if not told:
        return []
    hidden = {name for row in told for name in row.point} - {*configuration_names(rows), *NOT_THE_WORK}
    columns = [*point_columns(told, without=hidden), *_ACCOUNT]
    note = "From the shapes: what each implementation must hold. Needed: all of it together."
    return [Table.of("Attention: memory accounting", told, columns, note=note, folded=True)]


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


def _time(name: str) -> Callable[[Row], tuple[float, float | None] | None]:
    """Median, and the standard deviation of several."""

    def get(row: Row) -> tuple[float, float | None] | None:
        found = time_summary(row.record, name)
        return (found.median, found.std if found.n > 1 else None) if found else None

    return get


def _number(name: str) -> Callable[[Row], float | None]:
    return lambda row: number(row.record, name)


def _flag(name: str) -> Callable[[Row], bool | None]:
    return lambda row: flag(row.record, name)


def _cut(value: Any) -> str:
    text = words(value)
    return text if len(text) <= _MOST_OF_A_NAME else f"{text[: _MOST_OF_A_NAME - 1]}…"


_WORDS = replace(TEXT, text=_cut)
_TERA = Form(text=lambda rate: three_digits(rate / 1e12))
_TIME = Column("time (ms)", MS_STD, _time(TIME), help="Median ± standard deviation of a call.", failed=failure_cell)
_RATE = Column(
    "TFLOP/s",
    _TERA,
    lambda row: flops_per_s(row.record),
    help="Over the median time; FLOPs are counted from the shape, a causal mask's half left out.",
    failed=failure_cell,
)
_SIDE_BY_SIDE = (
    _TIME,
    _RATE,
    Column("peak memory ({unit})", SIZE, _number("peak_bytes"), failed=failure_cell),
    Column("memory held before backward ({unit})", SIZE, _number("held_bytes"), failed=failure_cell),
)
_ACCOUNT = (
    *(Column(f"{part} ({{unit}})", SIZE, _number(f"{part}_bytes"), optional=True, failed=None) for part in _ACCOUNTED),
    Column("peak seen ({unit})", SIZE, _number("peak_bytes"), failed=failure_cell),
)
_CELL = (
    replace(_TIME, help=""),  # a failed row shows its failure here alone, and its reason at the end
    *(
        replace(column, help="", optional=True, failed=lambda _: ABSENT)
        for column in (
            _RATE,
            Column("error of output", ERROR, _number("error_output")),
            Column("plain PyTorch's error", ERROR, _number("error_same_dtype")),
            *(Column(f"error of {name}", ERROR, _number(f"error_{name}")) for name in ("dq", "dk", "dv", "lse")),
            Column("NaN", _WORDS, _flag("has_nan")),
            Column("deterministic", _WORDS, _flag("deterministic")),
            Column("which ran", _WORDS, "which_ran"),
            Column("host (ms)", MS_STD, _time(HOST)),
            Column("launch-bound", _WORDS, _flag("launch_bound")),
            Column("peak ({unit})", COLUMN_SIZE, _number("peak_bytes")),
            Column("held ({unit})", COLUMN_SIZE, _number("held_bytes")),
        )
    ),
)
