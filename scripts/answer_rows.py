"""Values of records for the lines of scripts/answer_tables.py: rows of one config, medians, facts and ratios."""

from collections.abc import Callable, Iterable
from typing import Any

from trainstep.records.compare import Comparison
from trainstep.records.record import Record
from trainstep.report.kit.forms import failure_word
from trainstep.report.kit.ranking import median_of, ratio_of
from trainstep.report.kit.rows import Row, flat_config
from trainstep.report.kit.tables import Entry

Line = dict[str, Any]
"""Title of a column -> value in SI."""


def config_of(row: Row, name: str) -> Any:
    return flat_config(row.record).get(name)


def named(row: Row, *names: str) -> Line:
    return {name: config_of(row, name) for name in names}


def where(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """Rows whose config has these values; for a tuple, one of its values."""
    allowed = {name: value if isinstance(value, tuple) else (value,) for name, value in wanted.items()}
    return [row for row in rows if all(config_of(row, name) in values for name, values in allowed.items())]


def done(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.record.failure is None]


def median(row: Row | None, quantity: str) -> Any:
    return _read(row, lambda record: median_of(record, quantity))


def fact(row: Row | None, name: str) -> Any:
    return _read(row, lambda record: record.fact(name))


def _read(row: Row | None, value_of: Callable[[Record], Any]) -> Any:
    """A value of a cell's record, in SI; the word of its failure if the cell failed; None if there is no such cell."""
    failure = row.record.failure if row else None
    return Entry(text=failure_word(failure), failure=failure) if failure else row and value_of(row.record)


def over(above: Any, below: Any) -> float | None:
    """The ratio of two values, if both are numbers."""
    return above / below if isinstance(above, int | float) and isinstance(below, int | float) and below else None


def ratio(base: Row | None, row: Row | None) -> Comparison | None:
    """The ratio of two steps, from interleaved runs, and its 99 % interval; None if there is none."""
    return ratio_of(base, row, "step").known if base and row and base is not row else None
