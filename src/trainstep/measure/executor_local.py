"""Runs groups of cells on this machine, one at a time, and yields each group's records as soon as they are there."""

from collections.abc import Iterator, Sequence

from trainstep.config.cell import Cell
from trainstep.measure.connection import CellConnection, Tell
from trainstep.measure.interleave import run_interleaved
from trainstep.measure.runner import CellRun, Limits, run_alone
from trainstep.records.record import Record


def run_groups(groups: Sequence[Sequence[Cell]], limits: Limits, tell: Tell) -> Iterator[list[Record]]:
    """A group of one is a cell on its own, several are variants that take turns.

    A process that says it can measure another cell gets the next single one of its workload; after any failure the
    next cell has a fresh process. Closing the iterator ends whatever runs.
    """
    kept: CellConnection | None = None
    kept_workload = ""
    try:
        for group in groups:
            if kept is not None and (len(group) > 1 or group[0].workload != kept_workload or not kept.alive):
                kept.close()
                kept = None
            if len(group) > 1:
                yield run_interleaved(group, limits, tell)
                continue
            [cell] = group
            run = CellRun(cell, limits, kept or CellConnection(tell))
            kept, kept_workload = run.connection, cell.workload
            record, again = run_alone(run)
            yield [record]
            if not again:
                kept.close()
                kept = None
    finally:
        if kept is not None:
            kept.kill()
