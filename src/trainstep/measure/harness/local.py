"""Runs groups of cells on this machine, one group at a time, and yields each record as soon as it is complete."""

from collections.abc import Iterator, Sequence

from trainstep.config.grid import Cell
from trainstep.measure.harness.connection import Tell
from trainstep.measure.harness.files import remove_abandoned
from trainstep.measure.harness.interleave import run_interleaved
from trainstep.measure.harness.runner import CellRun, IdleProcesses, Limits, run_alone
from trainstep.measure.harness.sweep import RoundParts
from trainstep.records.record import Record


def run_groups(
    groups: Sequence[Sequence[Cell]], limits: Limits, tell: Tell, kept: RoundParts | None = None
) -> Iterator[list[Record]]:
    """Run each group: a single cell alone, several cells interleaved as variants that are compared.

    A process that can measure another cell gets the next cell of its workload, whether that cell is alone or a variant.
    After any failure the next cell has a fresh process. `kept`: stores the parts of variants that run in rounds, until
    the caller asks for the next group; by then it has stored the records. Closing the iterator ends whatever runs.
    """
    remove_abandoned()  # folders of an earlier driver that was killed
    idle = IdleProcesses(forks=limits.forks, nodes=limits.nodes)
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
                record, is_reusable = run_alone(run)
                yield [record]
            except BaseException:
                run.connection.kill()
                raise
            if is_reusable:
                idle.give(cell, run.connection)
            else:
                run.connection.close()
    finally:
        idle.kill()
