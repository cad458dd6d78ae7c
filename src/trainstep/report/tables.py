"""Tables as people publish them: columns are declared, rows are read by them, and absence and failure are written here alone.

    Table.of("Step", rows, [*point_columns(rows), Column("step (ms)", MS, step_s), doubts_column(doubts_of)], note="Medians.")

A row of a table is a record's `Row`, or anything that has one as `row`: a `Line` of several that one record fills, a pair that is
compared. What has neither (a line of a trace) is read in the same way and cannot have failed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, NamedTuple

from trainstep.config.instruments import INSTRUMENTS, says
from trainstep.records.facts import FACTS
from trainstep.records.ranks import rank_spread
from trainstep.records.record import Failure, Record
from trainstep.records.values import is_number
from trainstep.report.forms import (
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
from trainstep.report.rows import PHASES, TIMES, Row, mean_of, of_workload, quantities, time_of, words

TITLES = {"grad_sync": "grad sync", "step": "total step"}
_UNIT = "{unit}"
"""Stands for the unit of bytes in titles and notes."""


class Line(NamedTuple):
    """A row of a table where a record fills several, or needs more than itself: the record's row, and what stands in the line."""

    row: Row
    of: Any


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What stands in one place of a table. `sort`: what a reader sorts by, where that is a number."""

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
    """One column: what it is called, how its values are written, and how a row's value is found (None: absent).

    `get`: a function of the row, or a name (the title, where it is not given): of a key of a mapping, of a fact of a record, of
    an attribute of anything else. A function may also give an `Entry` as it is to stand there.
    """

    title: str
    form: Form = TEXT
    get: Callable[[Any], Any] | str = ""
    _: KW_ONLY
    help: str = ""
    """What it means, shown on the page under the pointer."""
    optional: bool = False
    """Left out where no row has a value."""
    failed: Callable[[Record], str] | None = _word
    """What stands in the row of a failed record; None: its value, as in every other row."""
    names: bool = False
    """Tells a row from the others: a table too wide for the terminal is split into blocks, and each begins with these."""
    more: bool = False
    """Left out on a terminal, and in plain text, unless --all asks for it."""

    @property
    def number(self) -> bool:
        return self.form.number

    def read(self, row: Any) -> Any:
        """The row's value; an `Entry` where its record failed."""
        record: Record | None = getattr(row_of(row), "record", None)
        if record is not None and record.failure is not None and self.failed is not None:
            return Entry(text=self.failed(record), failure=record.failure)
        if callable(self.get):
            return self.get(row)
        name, held = self.get or self.title, row.of if isinstance(row, Line) else row
        if isinstance(held, Mapping):
            return held.get(name)
        return _fact(held.record, name) if hasattr(held, "record") else getattr(held, name)

    def entry(self, value: Any, unit: ByteUnit) -> Entry:
        """A value as it stands in the table."""
        if isinstance(value, Entry):
            return value
        form = self.form
        if value is None:
            return Entry(text=form.absent)
        return Entry(text=form.text(value, unit) if form.unit else form.text(value), sort=form.sort(value))

    def sizes(self, values: Iterable[Any]) -> list[float | None]:
        """The bytes among its values, which choose the unit."""
        return [size for value in _present(values) for size in self.form.sizes(value)] if self.form.unit else []


@dataclass(frozen=True, kw_only=True)
class Table:
    """What a person reads (`entries`) and, for the cells, what a program reads (`raw`: one mapping a row, units in names)."""

    title: str
    columns: tuple[Column, ...]
    entries: tuple[tuple[Entry, ...], ...]
    raw: tuple[Mapping[str, Any], ...] = ()
    note: str = ""
    folded: bool = False
    """Shown on the page only when asked for."""

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
        """The table of these rows. `{unit}` in the title, the note and columns' titles is the unit of their bytes."""
        lines = list(rows)
        read = [(column, [column.read(line) for line in lines]) for column in columns]
        read = [(column, values) for column, values in read if not column.optional or _present(values)]
        shared = byte_unit(
            size for column, values in read if column.form.unit == "table" for size in column.sizes(values)
        )
        made, written = [], []
        for column, values in read:
            unit = byte_unit(column.sizes(values)) if column.form.unit == "column" else shared
            made.append(replace(column, title=column.title.replace(_UNIT, unit.name)))
            written.append([column.entry(value, unit) for value in values])
        return cls(
            title=title.replace(_UNIT, shared.name),
            columns=tuple(made),
            entries=tuple(tuple(values[place] for values in written) for place in range(len(lines))),
            raw=tuple(raw),
            note=note.replace(_UNIT, shared.name),
            folded=folded,
        )

    def brief(self) -> "Table":
        """The table without the columns that --all asks for."""
        places = [place for place, column in enumerate(self.columns) if not column.more]
        return replace(
            self,
            columns=tuple(self.columns[place] for place in places),
            entries=tuple(tuple(row[place] for place in places) for row in self.entries),
        )


def filled(*tables: Table) -> list[Table]:
    """Those that have rows: a table without any is shown nowhere."""
    return [table for table in tables if table.entries]


def point_columns(rows: Iterable[Any], *, without: Iterable[str] = ()) -> list[Column]:
    """The columns that name a row, whatever became of it."""
    points, hidden = [row_of(row).point for row in rows], set(without)
    return [
        _point_column(name, points)
        for name in dict.fromkeys(name for one in points for name in one)
        if name not in hidden
    ]


def doubts_column(get: Callable[[Any], Any] | str, *, title: str = "doubts") -> Column:
    """The last column of a table of cells: what makes a row's numbers doubtful, or the sentence of its failure."""
    return Column(title, TEXT, get, failed=_sentence)


def rank_columns(quantity: str) -> list[Column]:
    """The slowest and the fastest rank by their medians, where there are several."""

    def end(which: str) -> Callable[[Any], tuple[int, float] | None]:
        def get(row: Any) -> tuple[int, float] | None:
            spread = rank_spread(row_of(row).record, quantity)
            return None if spread is None else (getattr(spread, which), getattr(spread, f"{which}_value"))

        return get

    return [Column(f"{which} rank (ms)", RANK_MS, end(which), more=True) for which in ("slowest", "fastest")]


def row_of(row: Any) -> Row:
    """The record's row behind a row of a table."""
    found: Row = getattr(row, "row", row)
    return found


def cell_tables(rows: Sequence[Row]) -> list[Table]:
    """One table of cells for each workload, in the order of appearance."""
    workloads = dict.fromkeys(row.record.workload for row in rows)
    return [_cell_table(workload, of_workload(rows, workload)) for workload in workloads]


def _cell_table(workload: str, rows: Sequence[Row]) -> Table:
    lines = [Line(row, quantities(row)) for row in rows]
    others = [] if says(workload, "times") else _other_times(lines)
    title = INSTRUMENTS[workload].title if workload in INSTRUMENTS else workload
    columns = [*point_columns(lines), *_MEASURED, *others, doubts_column("doubts")]
    return Table.of(title, lines, columns, raw=[line.of for line in lines])


def _point_column(name: str, points: Sequence[Mapping[str, Any]]) -> Column:
    form = Form(
        text=words,
        sort=lambda value: float(value) if is_number(value) else None,
        number=all(is_number(point.get(name)) for point in points),
        absent=words(None),
    )
    return Column(name, form, lambda row: row_of(row).point.get(name), failed=None, names=True)


def _fact(record: Record, name: str) -> Any:
    """A declared fact; KeyError for a misspelt one, which no record would ever have."""
    if name not in FACTS:
        raise KeyError(f"a column reads the fact {name!r}, which records/facts.py does not declare")
    return record.fact(name)


def _present(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if value is not None and not isinstance(value, Entry)]


def _time(title: str, name: str) -> Column:
    return Column(f"{title} (ms)", MS_STD, lambda line: time_of(line.of, name), optional=True, more=name in PHASES)


def _mean(title: str, name: str) -> Column:
    return Column(f"{title}, mean ± std (ms)", MS_STD, lambda line: mean_of(line.of, name), optional=True, more=True)


def _other_times(lines: Sequence[Line]) -> list[Column]:
    """Times of a workload of one's own, whatever they are called."""
    medians = dict.fromkeys(name for line in lines for name in line.of if name.endswith("_median_s"))
    names = [name for found in medians if (name := found.removesuffix("_median_s")) not in (*TIMES, "time")]
    return [form(name, name) for form in (_time, _mean) for name in names]


def _peak(line: Line) -> float | None:
    """Allocated on the device, or resident in the process of a CPU cell."""
    peak: float | None = line.of.get("peak_allocated_bytes", line.of.get("peak_rss_bytes"))
    return peak


def _rate(line: Line) -> tuple[float, str] | None:
    rate, unit = line.of.get("rate"), "flop/s" if "flops" in line.of else "bytes/s"
    return None if rate is None else (rate, unit)


_MEASURED = (
    *(_time(TITLES.get(name, name), name) for name in TIMES),
    _time("a call", "time"),
    Column("rate", Form(text=lambda rate: rate_words(*rate), sort=lambda rate: rate[0]), _rate, optional=True),
    Column("tokens/s", WHOLE, "tokens_per_s", optional=True),
    Column("TFLOP/s", Form(text=lambda rate: f"{rate / 1e12:,.4g}"), "model_flops_per_s", optional=True, more=True),
    Column("MFU (%)", PERCENT, "mfu_ratio", optional=True),
    Column("compile (s)", Form(text=lambda seconds: f"{seconds:,.1f}"), "compile_s", optional=True, more=True),
    Column("peak (GiB)", GIB, _peak, optional=True),
    *(_mean(TITLES.get(name, name), name) for name in TIMES),
    _mean("a call", "time"),
)
