"""Tables whose columns and entries are still made apart; each leaves this file as it declares its columns."""

from collections.abc import Callable, Sequence

from trainstep.report import tables
from trainstep.report.forms import COUNT, TEXT, ByteUnit, byte_unit
from trainstep.report.rows import Row
from trainstep.report.tables import Entry


class Column(tables.Column):
    """A column's head alone."""

    def __init__(self, *, title: str, number: bool = False, help: str = "") -> None:
        super().__init__(title, COUNT if number else TEXT, help=help)


def point_columns(rows: Sequence[Row], *, without: Sequence[str] = ()) -> list[tuple[Column, Callable[[Row], Entry]]]:
    """The columns that name a row, each with what makes its entries."""
    unit = byte_unit([])
    return [(_head(column), _maker(column, unit)) for column in tables.point_columns(rows, without=without)]


def _head(column: tables.Column) -> Column:
    return Column(title=column.title, number=column.number)


def _maker(column: tables.Column, unit: ByteUnit) -> Callable[[Row], Entry]:
    return lambda row: column.entry(column.read(row), unit)
