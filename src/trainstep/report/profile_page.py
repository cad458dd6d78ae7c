"""What a page shows of profiles: what limits each cell and how classes share its time; then each cell by itself."""

import dataclasses
from collections.abc import Sequence

from trainstep.report.charts import Section
from trainstep.report.profile_charts import kernels_chart, phases_by_class, shares_chart
from trainstep.report.profile_tables import (
    DETAILED_CELLS,
    TORCH_COLUMNS,
    profile_rows,
    row_tables,
    shares_tables,
    verdict_table,
)
from trainstep.report.profile_words import sentences
from trainstep.report.rows import Row
from trainstep.report.tables import Table


def profile_sections(rows: Sequence[Row]) -> list[Section]:
    """The parts of the page that these records fill."""
    mine = profile_rows(rows)
    if not mine:
        return []
    shares = shares_chart(mine)
    overview = Section(
        title="Where the time goes",
        paragraphs=(TORCH_COLUMNS[:1].upper() + TORCH_COLUMNS[1:],),
        charts=(shares,) if shares else (),
        tables=(verdict_table(mine), *shares_tables(mine)),
    )
    ran = [
        row
        for row in mine
        if row.record.failure is None and row.record.tables.get("classes") and row.record.tables.get("kernels")
    ]
    return [overview, *(map(_cell, ran) if len(ran) <= DETAILED_CELLS else ())]


def _cell(row: Row) -> Section:
    tables = row_tables(row, whole=True)
    return Section(
        title=f"Profile of {row.label()}",
        paragraphs=tuple(sentences(row.record.tables, row.record.fact)),
        charts=(phases_by_class(row), kernels_chart(row)),
        tables=tuple(_unfolded(table, first=place == 0) for place, table in enumerate(tables)),
    )


def _unfolded(table: Table, *, first: bool) -> Table:
    """The table of kernels is the page's reason to be; it stands open."""
    return dataclasses.replace(table, folded=False) if first else table
