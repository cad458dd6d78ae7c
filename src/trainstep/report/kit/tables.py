"""Makes tables from declared columns; missing values and failures are written here for all tables.

    Table.of("Step", rows, [*point_columns(rows), Column("step (ms)", MS, step_s), doubts_column(doubts_of)], note="Medians.")

An item of a table is a record's `Row`, or any object with a `row` attribute: a `Line`, where one record fills several lines, or a
compared pair. An object without one (a line of a trace) is read in the same way and cannot have failed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, NamedTuple

from trainstep.config.instruments import INSTRUMENTS, Instrument, resolve, says
from trainstep.records.facts import FACTS, is_number
from trainstep.records.ranks import rank_spread
from trainstep.records.record import Failure, Record
from trainstep.report.kit.forms import (
    GIB,
    MS_STD,
    PERCENT,
    RANK_MS,
    TEXT,
    WHOLE,
    ByteUnit,
    Form,
    byte_unit,
    failure_sentence,
    failure_word,
    rate_words,
)
from trainstep.report.kit.rows import PHASES, TIMES, Row, mean_of, of_workload, quantities, time_of, words

TITLES = {"grad_sync": "grad sync", "step": "total step"}
_UNIT = "{unit}"
"""A placeholder in titles and notes for the unit of bytes."""


class Line(NamedTuple):
    """A line of a table where a record fills several lines, or where columns read more than the record."""

    row: Row
    value: Any


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One cell of a table as it is shown. `sort`: the number that a reader sorts by, if there is one."""

    text: str
    sort: float | None = None
    failure: Failure | None = None


def _word(record: Record) -> str:
    assert record.failure is not None
    return failure_word(record.failure)


def _sentence(record: Record) -> str:
    assert record.failure is not None
    return failure_sentence(record.failure)


@dataclass(frozen=True)
class Column:
    """One column: its title, the form of its values, and how a row's value is read (None: absent).

    `get` is a function of the row, or a name (by default the title): the key of a mapping, the fact of a record, or the attribute
    of any other object. A function may also return a finished `Entry`.
    """

    title: str
    form: Form = TEXT
    get: Callable[[Any], Any] | str = ""
    _: KW_ONLY
    help: str = ""
    """What the column means, shown on the page when the pointer is over its title."""
    note: str = ""
    """A sentence in the table's note, only where the column is shown."""
    optional: bool = False
    """Left out if no row has a value."""
    failed: Callable[[Record], str] | None = _word
    """The text in the row of a failed record; None: the value, as in every other row."""
    names: bool = False
    """Tells a row from the others: a table too wide for the terminal is split into blocks, and each begins with these columns."""
    more: bool = False
    """Left out on a terminal and in plain text, unless --all is given."""

    @property
    def number(self) -> bool:
        return self.form.number

    @property
    def side(self) -> Literal["left", "right"]:
        """The side to which the column is aligned."""
        return "right" if self.number else "left"

    def read(self, row: Any) -> Any:
        """The row's value; an `Entry` if its record failed."""
        record: Record | None = getattr(row_of(row), "record", None)
        if record is not None and record.failure is not None and self.failed is not None:
            return Entry(text=self.failed(record), failure=record.failure)
        if callable(self.get):
            return self.get(row)
        name, source = self.get or self.title, row.value if isinstance(row, Line) else row
        if isinstance(source, Mapping):
            return source.get(name)
        if not hasattr(source, "record"):
            return getattr(source, name)
        if name not in FACTS:  # misspelt: no record would ever have it
            raise KeyError(f"a column reads the fact {name!r}, which records/facts.py does not declare")
        return source.record.fact(name)

    def entry(self, value: Any, unit: ByteUnit) -> Entry:
        """The table's entry for a value."""
        if isinstance(value, Entry):
            return value
        form = self.form
        if value is None:
            return Entry(text=form.absent)
        return Entry(text=form.text(value, unit) if form.unit else form.text(value), sort=form.sort(value))

    def sizes(self, values: Iterable[Any]) -> list[float | None]:
        """The bytes in these values, from which the unit is chosen."""
        return [size for value in _present(values) for size in self.form.sizes(value)] if self.form.unit else []


@dataclass(frozen=True, kw_only=True)
class Table:
    """A finished table: `entries` for people, and for tables of cells `raw` for programs (a mapping per row, units in names)."""

    title: str
    columns: tuple[Column, ...]
    entries: tuple[tuple[Entry, ...], ...]
    raw: tuple[Mapping[str, Any], ...] = ()
    note: str = ""
    folded: bool = False
    """Collapsed on the page until the reader opens it."""

    @classmethod
    def of(
        cls,
        title: str,
        rows: Iterable[Any],
        columns: Iterable[Column],
        *,
        note: str = "",
        raw: Iterable[Mapping[str, Any]] = (),
        folded: bool = False,
    ) -> "Table":
        """The table of these rows. `{unit}` in the title, the note and the columns' titles becomes the unit of bytes."""
        lines = list(rows)
        read = [(column, [column.read(line) for line in lines]) for column in columns]
        read = [(column, values) for column, values in read if not column.optional or _present(values)]
        shared = byte_unit(
            size for column, values in read if column.form.unit == "table" for size in column.sizes(values)
        )
        titled, entries = [], []
        for column, values in read:
            unit = byte_unit(column.sizes(values)) if column.form.unit == "column" else shared
            titled.append(replace(column, title=column.title.replace(_UNIT, unit.name)))
            entries.append([column.entry(value, unit) for value in values])
        return cls(
            title=title.replace(_UNIT, shared.name),
            columns=tuple(titled),
            entries=tuple(tuple(values[place] for values in entries) for place in range(len(lines))),
            raw=tuple(raw),
            note=" ".join(filter(None, [note, *(column.note for column in titled)])).replace(_UNIT, shared.name),
            folded=folded,
        )

    def brief(self) -> "Table":
        """The table without the columns that only --all shows, and without their notes."""
        places = [place for place, column in enumerate(self.columns) if not column.more]
        note = self.note
        for hidden in (column.note for column in self.columns if column.more and column.note):
            note = note.replace(hidden, "").replace("  ", " ").strip()
        return replace(
            self,
            columns=tuple(self.columns[place] for place in places),
            entries=tuple(tuple(row[place] for place in places) for row in self.entries),
            note=note,
        )


def filled(*tables: Table) -> list[Table]:
    """The tables that have rows; a table without rows is shown nowhere."""
    return [table for table in tables if table.entries]


def point_columns(rows: Iterable[Any], *, without: Iterable[str] = ()) -> list[Column]:
    """The columns that name a row; a failed row shows them too."""
    points, hidden = [row_of(row).point for row in rows], set(without)
    names = dict.fromkeys(name for point in points for name in point)
    return [_point_column(name, points) for name in names if name not in hidden]


def doubts_column(get: Callable[[Any], Any] | str, *, title: str = "doubts") -> Column:
    """The last column of a table of cells: why a row's numbers are doubtful, or a sentence about its failure."""
    return Column(title, TEXT, get, failed=_sentence)


def rank_columns(quantity: str) -> list[Column]:
    """The slowest and the fastest rank by their medians, if there are several ranks."""

    def extreme(which: str) -> Callable[[Any], tuple[int, float] | None]:
        def get(row: Any) -> tuple[int, float] | None:
            spread = rank_spread(row_of(row).record, quantity)
            return None if spread is None else (getattr(spread, which), getattr(spread, f"{which}_value"))

        return get

    return [Column(f"{which} rank (ms)", RANK_MS, extreme(which), more=True) for which in ("slowest", "fastest")]


def row_of(row: Any) -> Row:
    """The record's row behind an item of a table."""
    record_row: Row = getattr(row, "row", row)
    return record_row


# Tables of a report: each workload's own, and one common table of cells for workloads that have none.


def all_tables(rows: Sequence[Row], *, compared: bool = True) -> list[Table]:
    """The tables of a report; `compared`: with the ratios between implementations where a workload always has them."""
    tables = cell_tables(without_own_tables(rows))
    for instrument in instruments_of(rows):
        function = (instrument.compared_tables if compared else "") or instrument.tables
        held_to = [of_workload(rows, instrument.held_to)] if instrument.tables_held_to else []
        tables += resolve(function)(of_workload(rows, instrument.name), *held_to) if function else []
    return tables


def instruments_of(rows: Sequence[Row]) -> list[Instrument]:
    """The instruments of the workloads in these rows, in the order of the table of instruments."""
    workloads = {row.record.workload for row in rows}
    return [instrument for name, instrument in INSTRUMENTS.items() if name in workloads]


def without_own_tables(rows: Sequence[Row]) -> list[Row]:
    """The rows of workloads without tables of their own; the common table shows them."""
    names = {instrument.name for instrument in instruments_of(rows) if instrument.tables}
    return [row for row in rows if row.record.workload not in names]


def cell_tables(rows: Sequence[Row]) -> list[Table]:
    """One table of cells for each workload, in the order of appearance."""
    workloads = dict.fromkeys(row.record.workload for row in rows)
    return [_cell_table(workload, of_workload(rows, workload)) for workload in workloads]


def _cell_table(workload: str, rows: Sequence[Row]) -> Table:
    lines = [Line(row, quantities(row)) for row in rows]
    other_times = [] if says(workload, "times") else _other_times(lines)
    title = INSTRUMENTS[workload].title if workload in INSTRUMENTS else workload
    columns = [*point_columns(lines), *_MEASURED, *other_times, doubts_column("doubts")]
    return Table.of(title, lines, columns, raw=[line.value for line in lines])


def _point_column(name: str, points: Sequence[Mapping[str, Any]]) -> Column:
    form = Form(
        text=words,
        sort=lambda value: float(value) if is_number(value) else None,
        number=all(is_number(point.get(name)) for point in points),
        absent=words(None),
    )
    return Column(name, form, lambda row: row_of(row).point.get(name), failed=None, names=True)


def _present(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if value is not None and not isinstance(value, Entry)]


def _time(title: str, name: str) -> Column:
    return Column(
        f"{title.replace('_', ' ')} (ms)",
        MS_STD,
        lambda line: time_of(line.value, name),
        optional=True,
        more=name in PHASES,
    )


def _mean(title: str, name: str) -> Column:
    return Column(
        f"{title.replace('_', ' ')}, mean ± std (ms)",
        MS_STD,
        lambda line: mean_of(line.value, name),
        optional=True,
        more=True,
    )


def _other_times(lines: Sequence[Line]) -> list[Column]:
    """Columns for times with names of their own, which a user's workload may have."""
    medians = dict.fromkeys(name for line in lines for name in line.value if name.endswith("_median_s"))
    names = [name for median in medians if (name := median.removesuffix("_median_s")) not in (*TIMES, "time")]
    return [column(name, name) for column in (_time, _mean) for name in names]


def _rate(line: Line) -> tuple[float, str] | None:
    rate, unit = line.value.get("rate"), "flop/s" if "flops" in line.value else "bytes/s"
    return None if rate is None else (rate, unit)


_MEASURED = (
    *(_time(TITLES.get(name, name), name) for name in TIMES),
    _time("a call", "time"),
    Column("rate", Form(text=lambda rate: rate_words(*rate), sort=lambda rate: rate[0]), _rate, optional=True),
    Column("tokens/s", WHOLE, "tokens_per_s", optional=True),
    Column("TFLOP/s", Form(text=lambda rate: f"{rate / 1e12:,.4g}"), "model_flops_per_s", optional=True, more=True),
    Column("MFU (%)", PERCENT, "mfu_ratio", optional=True),
    Column("compile (s)", Form(text=lambda seconds: f"{seconds:,.1f}"), "compile_s", optional=True, more=True),
    # Allocated on the device, or resident in the process of a CPU cell.
    Column(
        "peak (GiB)",
        GIB,
        lambda line: line.value.get("peak_allocated_bytes", line.value.get("peak_rss_bytes")),
        optional=True,
    ),
    *(_mean(TITLES.get(name, name), name) for name in TIMES),
    _mean("a call", "time"),
)
