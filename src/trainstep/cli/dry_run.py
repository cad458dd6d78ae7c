"""`--dry-run`: the cells that a verb would run, what is done of them already, and about how long the rest takes."""

import json
import sys
from collections.abc import Mapping, Sequence

from trainstep.cli.progress import cell_count, span_words, time_words
from trainstep.cli.streams import outliving_reader
from trainstep.config.cell import Cell
from trainstep.measure.sweep import check_same_place, pending
from trainstep.records.durations import ExpectedTime, earlier_durations, expected_time
from trainstep.records.record import Environment
from trainstep.records.store import RUNS, Store
from trainstep.report.visible import one_line


def show_cells(
    groups: Sequence[Sequence[Cell]],
    store: Store,
    *,
    here: Environment | None,
    allow_mixed: bool = False,
    retry_failed: bool = False,
    anew: bool = False,
    as_json: bool = False,
    note: str = "",
) -> int:
    """Print what would run: as `run_cells` would with the same arguments. ValueError as there; returns the exit code.

    `note`: a sentence that a person should read beside the estimate.
    """
    if here is not None and not allow_mixed and not anew:
        check_same_place(store, here)
    waiting = [list(group) for group in groups] if anew else pending(groups, store, retry_failed=retry_failed)
    durations = earlier_durations([store.path, RUNS])
    to_run = {cell.key: expected_time(cell, durations) for group in waiting for cell in group}
    cells = [cell for group in groups for cell in group]
    if as_json:
        _print(json.dumps(_plain(cells, to_run, store), indent=1))
        return 0
    done = len(cells) - len(to_run)
    there = f"; {done} of {len(cells)} {'is' if done == 1 else 'are'} done already" if done else ""
    about = f", {time_words(to_run.values())}" if to_run else ""
    _print(f"{cell_count(len(to_run)) if to_run else 'no cell'} to run{about}{there}")
    for cell in cells:
        expected = to_run.get(cell.key)
        how = f"about {span_words(expected.seconds)} ({expected.source})" if expected else "done already"
        _print(f"  {one_line(cell.label)}: {how}")
    if turns := [group for group in waiting if len(group) > 1]:
        _print(f"compared variants take turns: {len(turns)} group{'s' if len(turns) > 1 else ''}")
    _print(one_line(f"{note + ' ' if note else ''}records: {store.path} (nothing was run)"))
    return 0


def _plain(cells: Sequence[Cell], to_run: Mapping[str, ExpectedTime], store: Store) -> dict[str, object]:
    """The same as JSON values: seconds, and what they are by."""
    return {
        "dry_run": True,
        "to_run": len(to_run),
        "done": len(cells) - len(to_run),
        "expected_s": sum(expected.seconds for expected in to_run.values()),
        "records": str(store.path),
        "cells": [
            {
                "label": cell.label,
                "workload": cell.workload,
                "key": cell.key,
                "done": cell.key not in to_run,
                "expected_s": to_run[cell.key].seconds if cell.key in to_run else None,
                "expected_by": to_run[cell.key].source if cell.key in to_run else None,
            }
            for cell in cells
        ],
    }


def _print(line: str) -> None:
    with outliving_reader(sys.stdout):
        print(line, flush=True)
