"""`trainstep memory --fit`: the trials, told one by one, and their table."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from trainstep.cli.cells import interrupt_says, show
from trainstep.cli.run_options import RunOptions
from trainstep.cli.streams import outliving_reader
from trainstep.config.cell import Cell
from trainstep.config.memory import LARGEST_TRIED
from trainstep.measure.executor_local import run_groups
from trainstep.measure.runner import Limits, with_facts
from trainstep.measure.runner_fit import at, largest_fit
from trainstep.records.record import Record
from trainstep.records.store import Store
from trainstep.report.visible import one_line


def fit_cells(
    cells: Sequence[Cell],
    field: str,
    store: Store,
    bounds: Limits,
    how: RunOptions,
    *,
    page: Path | None = None,
    as_json: bool = False,
) -> int:
    """Search for each cell; every trial is a record on disk before the next begins. Returns the exit code."""
    command = shlex.join(["trainstep", *sys.argv[1:]])

    def tell(line: str) -> None:
        if not how.quiet:
            with outliving_reader(sys.stderr):
                print(one_line(line), file=sys.stderr, flush=True)

    def run(cell: Cell) -> Record:
        [record] = next(run_groups([[cell]], bounds, lambda _cell, _stage: None))
        limit = bounds.memory_for(cell)
        noted = with_facts(
            record, command=command, defaults_from=how.defaults_from, fit_of=field, memory_limit_bytes=limit
        )
        store.append(noted)
        tell(f"{cell.label}: {'fits' if noted.failure is None else noted.failure.message}")
        return noted

    searched = {at(cell, field, 1).key: cell for cell in cells}  # values of the field itself are only where to start
    records: list[Record] = []
    tell(f"looking for the largest {field} that fits, up to {LARGEST_TRIED[field]:,}: each trial is told when it ends")
    with store.locked(), interrupt_says(lambda: _kept_words(len(records), store)):
        for cell in searched.values():
            for record in largest_fit(cell, field, run):
                records.append(record)  # one by one: an interrupt counts them
    return show(records, store, page, as_json=as_json, every=how.every)


def _kept_words(count: int, store: Store) -> str:
    if not count:
        return "no trial was finished"
    return f"{count} trial{'s are' if count > 1 else ' is'} finished and kept in {store.path}"
