"""Runs groups of cells on this machine, one at a time, and yields records as soon as they are there."""

from collections.abc import Iterator, Sequence

from trainstep.config.cell import Cell
from trainstep.measure.connection import Tell
from trainstep.measure.idle_processes import IdleProcesses
from trainstep.measure.interleave import run_interleaved
from trainstep.measure.round_parts import RoundParts
from trainstep.measure.runner import CellRun, Limits, run_alone
from trainstep.measure.temporary_folder import remove_abandoned
from trainstep.records.record import Record


def run_groups(
    groups: Sequence[Sequence[Cell]], limits: Limits, tell: Tell, kept: RoundParts | None = None
) -> Iterator[list[Record]]:
    """A group of one is a cell on its own, several are variants that take turns.

    A process that says it can measure another cell gets the next one of its workload, single or a variant among others; after
    any failure the next cell has a fresh process. `kept`: where variants that run in rounds keep what each round gave, until
    the next group is asked for: whoever asks has stored the records by then. Closing the iterator ends whatever runs.
    """
    remove_abandoned()  # by an earlier driver that was killed
    idle = IdleProcesses(forks=limits.forks)
    try:
        for group in groups:
            if len(group) > 1:
                yield from run_interleaved(group, limits, tell, idle, kept)
                if kept is not None:
                    kept.drop([group])
                continue
            [cell] = group
            run = CellRun(cell, limits, idle.take(cell, tell))
            try:
                record, again = run_alone(run)
                yield [record]
            except BaseException:
                run.connection.kill()
                raise
            if again:
                idle.give(cell, run.connection)
            else:
                run.connection.close()
    finally:
        idle.kill()
