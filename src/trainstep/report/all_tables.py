"""Every table of a report: each workload's own, one of cells for each that has none."""

from collections.abc import Sequence

from trainstep.config.instruments import INSTRUMENTS, Instrument, resolve
from trainstep.report.rows import Row, of_workload
from trainstep.report.tables import Table, cell_tables


def all_tables(rows: Sequence[Row], *, compared: bool = True) -> list[Table]:
    """Tables of cells; `compared`: with the ratios that a workload's implementations always have against each other."""
    made = cell_tables(without_own_tables(rows))
    for one in instruments_of(rows):
        place = (one.compared_tables if compared else "") or one.tables
        made += resolve(place)(of_workload(rows, one.name)) if place else []
    return made


def instruments_of(rows: Sequence[Row]) -> list[Instrument]:
    """Of the workloads in these rows, in the order of the table."""
    workloads = {row.record.workload for row in rows}
    return [one for name, one in INSTRUMENTS.items() if name in workloads]


def without_own_tables(rows: Sequence[Row]) -> list[Row]:
    """Rows whose cells stand in the common table."""
    own = {one.name for one in instruments_of(rows) if one.tables}
    return [row for row in rows if row.record.workload not in own]
