"""Every table of a report: attention's own, one of cells for each other workload."""

from collections.abc import Sequence

from trainstep.report.attention_rows import WORKLOAD
from trainstep.report.attention_tables import attention_tables
from trainstep.report.collectives_tables import WORKLOAD as COLLECTIVE
from trainstep.report.collectives_tables import collective_tables
from trainstep.report.memory_tables import WORKLOAD as MEMORY
from trainstep.report.memory_tables import memory_tables
from trainstep.report.numerics_tables import WORKLOAD as NUMERICS
from trainstep.report.numerics_tables import numerics_tables
from trainstep.report.parallel_rows import WORKLOAD as PARALLEL
from trainstep.report.parallel_tables import parallel_tables
from trainstep.report.profile_tables import profile_tables
from trainstep.report.rows import Row
from trainstep.report.tables import Table, cell_tables
from trainstep.report.tiles_page import summary_table, tile_tables

_OWN = (WORKLOAD, COLLECTIVE, MEMORY, NUMERICS, PARALLEL)
"""Workloads whose cells have tables of their own kind."""


def all_tables(rows: Sequence[Row], *, compared: bool = True) -> list[Table]:
    """Tables of cells; `compared`: with the ratios that a workload's implementations always have against each other."""
    others = [row for row in rows if row.record.workload not in _OWN]
    tiles = [*summary_table(rows), *tile_tables(rows)] if compared else []
    return [
        *cell_tables(others),
        *attention_tables(rows, compared=compared),
        *parallel_tables(rows),
        *collective_tables(rows),
        *numerics_tables(rows),
        *memory_tables(rows),
        *(profile_tables(rows) if compared else []),
        *tiles,
    ]
