"""Run a verb's cells into a store with progress, then show tables and the page; or show what would run.

`measure_grid` does all of it for a verb with a grid; other verbs call its parts.
"""

import contextlib
import itertools
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainstep.cli.options import GridOptions, RunOptions
from trainstep.cli.running.progress import CellProgress, cell_count, duration_words, time_words
from trainstep.cli.streams import outliving_reader
from trainstep.config.grid import Cell
from trainstep.measure.harness.sweep import check_same_place, is_done, pending
from trainstep.records.durations import ExpectedTime, earlier_durations, expected_time
from trainstep.records.record import Environment, Record
from trainstep.records.store import RUNS, Store
from trainstep.report.kit.visible import one_line

if TYPE_CHECKING:
    from trainstep.measure.harness.nodes import Nodes
    from trainstep.measure.harness.runner import Limits
    from trainstep.report.kit.rows import Row

Execute = Callable[[Sequence[Sequence[Cell]], Callable[[Cell, str], None]], Iterator[list[Record]]]
UNFINISHED = 4
"""The exit code if the budget ended before all cells had run."""
FAULTED = 3
"""The exit code if a cell ended with one of `_FAULTS`."""
_FAULTS = ("crash", "timeout", "import_error", "divergence", "node_lost")


def measure_grid(
    groups: Sequence[Sequence[Cell]],
    verb: str,
    bounds: "Limits",
    options: GridOptions,
    environment: Environment,
    *,
    compare: str | None = None,
    kept_files: str | None = None,
) -> int:
    """Run a verb's cells on this machine, print their tables and write the page; or show the cells, with `--dry-run`.

    With `--resume`, only cells that the store does not have are run. `kept_files`: the config field that names a folder for files
    of the cells. Returns the exit code.
    """
    store = options.open_store(verb)
    check_page(options.page, store.path)
    if options.dry_run:
        return show_dry_run(
            groups, store, environment=environment, options=options, rerun=not options.resume, as_json=options.json
        )
    if kept_files is not None:
        check_kept([cell for group in groups for cell in group], kept_files, bounds.nodes)
    from trainstep.measure.harness.local import run_groups

    def execute(waiting: Sequence[Sequence[Cell]], tell: Callable[[Cell, str], None]) -> Iterator[list[Record]]:
        return run_groups(waiting, bounds, tell)

    records = run_cells(groups, store, execute, environment=environment, options=options, rerun=not options.resume)
    code = show(records, store, options.page, compare=compare, as_json=options.json, every=options.every)
    return unfinished(groups, records, store, options) or code


def run_cells(
    groups: Sequence[Sequence[Cell]],
    store: Store,
    execute: Execute,
    *,
    environment: Environment | None,
    options: RunOptions = RunOptions(),
    retry_failed: bool = False,
    rerun: bool = False,
) -> list[Record]:
    """Run the cells that the store does not have yet (or all, `rerun`) until the budget is spent.

    Returns the records that the store then has of these cells (of those that just ran, if `rerun`), in the order of the cells.
    """
    from trainstep.measure.harness.runner import with_facts
    from trainstep.measure.harness.sweep import run_sweep

    command = shlex.join(["trainstep", *sys.argv[1:]])

    def execute_noting_command(waiting: Sequence[Sequence[Cell]]) -> Iterator[list[Record]]:
        for records in execute(waiting, progress.tell):
            yield [with_facts(record, command=command, defaults_from=options.defaults_from) for record in records]

    cells = [cell for group in groups for cell in group]
    before = store.latest() if rerun else {}
    waiting, expected = _waiting(groups, store, rerun=rerun, retry_failed=retry_failed)
    ran: set[str] = set()
    with CellProgress(cells, expected, quiet=options.quiet) as progress:
        reports = run_sweep(
            groups,
            store,
            execute_noting_command,
            here=environment,
            allow_mixed=options.allow_mixed,
            retry_failed=retry_failed,
            rerun=rerun,
        )
        with interrupt_says(lambda: _kept_words(cells, store, before, options)), contextlib.closing(reports):
            for report in reports:
                progress.finished(report.done, report.of, report.records, whole=report.whole)
                ran |= {record.key for record in report.records}
                if report.whole and _is_spent(options.budget_minutes, progress.elapsed_s, len(ran), waiting):
                    break
    latest = store.latest()
    done = ran if rerun else latest.keys()
    return [latest[cell.key] for cell in cells if cell.key in done]


def _waiting(
    groups: Sequence[Sequence[Cell]], store: Store, *, rerun: bool, retry_failed: bool
) -> tuple[Sequence[Sequence[Cell]], dict[str, ExpectedTime]]:
    """The groups that are to run, and the expected time of each of their cells by its key."""
    waiting = groups if rerun else pending(groups, store, retry_failed=retry_failed)
    durations = earlier_durations([store.path, RUNS])
    return waiting, {cell.key: expected_time(cell, durations) for group in waiting for cell in group}


def _is_spent(minutes: float | None, elapsed_s: float, ran: int, waiting: Sequence[Sequence[Cell]]) -> bool:
    """Whether the next group would end after the budget, if its cells take as long as the cells that ran."""
    if minutes is None or not ran:
        return False
    starts = itertools.accumulate(map(len, waiting), initial=0)  # the cells that ran are the first ones of `waiting`
    size = next((len(group) for start, group in zip(starts, waiting, strict=False) if start >= ran), 0)
    return elapsed_s * (1 + size / ran) > minutes * 60


def unfinished(groups: Sequence[Sequence[Cell]], records: Sequence[Record], store: Store, options: RunOptions) -> int:
    """If the budget left cells, say how many and how to continue. Returns the exit code: UNFINISHED, or 0 if no cell is left."""
    count = sum(map(len, groups))
    if options.budget_minutes is None or len(records) == count:
        return 0
    with outliving_reader(sys.stderr):
        print(
            f"{count - len(records)} of {count} cells are left: the budget of {options.budget_minutes:g} min is spent. "
            f"To continue: {_continuing_command(store, options)}",
            file=sys.stderr,
        )
    return UNFINISHED


def _continuing_command(store: Store, options: RunOptions) -> str:
    """The command line that runs the cells that are missing in the store: this one, with its file of records named."""
    words = sys.argv[1:]
    if words[:1] != ["sweep"] and not any(word.split("=")[0] == "--out" for word in words):
        words = [*words, "--out", str(store.path)]
    if isinstance(options, GridOptions) and "--resume" not in words:
        words = [*words, "--resume"]
    return one_line(shlex.join(["trainstep", *words]))


@contextlib.contextmanager
def interrupt_says(words: Callable[[], str]) -> Iterator[None]:
    """Give a KeyboardInterrupt, or the loss of a node, the words that say what is kept; `words` is called when it happens."""
    from trainstep.measure.harness.nodes import NodeLost

    try:
        yield
    except NodeLost as error:
        raise ValueError(f"{error}; {words()}") from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(words()) from None


def _kept_words(cells: Sequence[Cell], store: Store, before: Mapping[str, Record], options: RunOptions) -> str:
    """How many of the cells have a new record in the store, and the command that continues."""
    latest = store.latest()

    def is_new(cell: Cell) -> bool:
        record = latest.get(cell.key)
        return record is not None and record != before.get(cell.key) and is_done(record, retry_failed=False)

    count = sum(map(is_new, cells))
    if not count:
        return "no cell was finished"
    left = f"; to continue: {_continuing_command(store, options)}" if count < len(cells) else ""
    return f"{count} of {len(cells)} cells {'is' if count == 1 else 'are'} finished and kept in {store.path}" + left


def show(
    records: Sequence[Record],
    store: Store,
    page: Path | None,
    *,
    compare: str | None = None,
    as_json: bool = False,
    every: bool = False,
    title: str | None = None,
    description: str | None = None,
    paragraphs: Sequence[str] = (),
) -> int:
    """Print the answers, `paragraphs`, the tables, verdicts along a compared axis, the last lines of crashed cells, and the path of
    the records; write the page, under the sweep's title and description. Returns the exit code.
    """
    from trainstep.report.kit.rows import rows_of

    rows = rows_of([(str(store.path), record) for record in records])
    _print_report(rows, compare=compare, as_json=as_json, every=every, paragraphs=paragraphs)
    any_fault = _print_faults(rows)
    stream = sys.stderr if as_json else sys.stdout
    with outliving_reader(stream):
        print(f"records: {store.path}", file=stream, flush=True)
    if page is not None:
        write_page(records, store, page, title=title, description=description)
        with outliving_reader(stream):
            print(f"page: {page}", file=stream, flush=True)
    return FAULTED if any_fault else 0


def _print_report(
    rows: "Sequence[Row]", *, compare: str | None, as_json: bool, every: bool, paragraphs: Sequence[str]
) -> None:
    """Print the answers, `paragraphs` and the tables, or, `as_json`, the answers and the tables as JSON."""
    from trainstep.report.answers import answers
    from trainstep.report.kit.answer import print_answers
    from trainstep.report.kit.notes import notes
    from trainstep.report.kit.tables import all_tables
    from trainstep.report.kit.terminal import print_paragraphs, print_tables
    from trainstep.report.step.comparison import comparison_tables

    tables = [*all_tables(rows), *(comparison_tables(rows, compare) if compare else [])]
    row_answers = answers(rows, compare)
    with outliving_reader(sys.stdout):
        if as_json:
            from trainstep.report.kit.frames import json_text

            sys.stdout.write(json_text(tables, row_answers))
        else:
            print_answers(row_answers, sys.stdout)
            print_paragraphs([*paragraphs, ""] if paragraphs else [], sys.stdout)
            print_tables(tables, notes(rows), sys.stdout, every=every)
        sys.stdout.flush()


def _print_faults(rows: "Sequence[Row]") -> bool:
    """Print the last lines of each cell that ended with one of `_FAULTS`. Returns whether there is one."""
    from trainstep.report.kit.visible import visible

    faults = [(row, failure) for row in rows if (failure := row.record.failure) and failure.kind in _FAULTS]
    with outliving_reader(sys.stderr):
        for row, failure in faults:
            last = (visible(line).replace("\n", " ") for line in failure.last_lines[-3:])
            print("\n    ".join([one_line(f"{row.label()}: {failure.message}"), *last]), file=sys.stderr)
    return bool(faults)


def check_page(page: Path | None, records: Path) -> None:
    """ValueError for a page that cannot be written or would replace another file: before hours of measuring, not after."""
    if page is None:
        return
    from trainstep.report.kit.output_file import check_output

    if os.path.realpath(page) == os.path.realpath(records):
        raise ValueError(f"page: {page} is the file of records; give the page another name")
    check_output("page", page, "html")


def check_kept(cells: Sequence[Cell], field: str, nodes: "Nodes | None" = None) -> None:
    """ValueError for a folder in which the cells could not keep their files: before hours of measuring, not after."""
    from trainstep.measure.harness.files import kept_folder

    for folder in {str(cell.config[field]) for cell in cells if cell.config[field] is not None}:
        kept_folder(field, folder)
        if nodes is not None and any(cell.config["nodes"] > 1 for cell in cells):
            nodes.check_shared(field, Path(folder))


def write_page(
    records: Sequence[Record], store: Store, page: Path, *, title: str | None = None, description: str | None = None
) -> None:
    """Write the records' page. ValueError, which says that the records are kept, if it cannot be written."""
    from trainstep.report.kit.output_file import write_output
    from trainstep.report.kit.rows import rows_of
    from trainstep.report.page import page as make_page

    text = make_page(rows_of([(str(store.path), record) for record in records]), title=title, description=description)
    try:
        write_output("page", page, "html", text)
    except ValueError as error:
        raise ValueError(f"{error}; {store.path} has the records: trainstep report makes a page of them") from None


def show_dry_run(
    groups: Sequence[Sequence[Cell]],
    store: Store,
    *,
    environment: Environment | None,
    options: RunOptions,
    retry_failed: bool = False,
    rerun: bool = False,
    as_json: bool = False,
    note: str = "",
) -> int:
    """Show which cells `run_cells` would run with the same arguments, which are done, and about how long the rest takes.

    `note`: a sentence to print beside the estimate. ValueError as `run_cells`. Returns the exit code.
    """
    if environment is not None and not options.allow_mixed and not rerun:
        check_same_place(store, environment)
    waiting, to_run = _waiting(groups, store, rerun=rerun, retry_failed=retry_failed)
    cells = [cell for group in groups for cell in group]
    if as_json:
        _print(json.dumps(_plain_cells(cells, to_run, store), indent=1))
        return 0
    done = len(cells) - len(to_run)
    done_words = f"; {done} of {len(cells)} {'is' if done == 1 else 'are'} done already" if done else ""
    about = f", {time_words(to_run.values())}" if to_run else ""
    _print(f"{cell_count(len(to_run)) if to_run else 'no cell'} to run{about}{done_words}")
    for cell in cells:
        expected = to_run.get(cell.key)
        words = f"about {duration_words(expected.seconds)} ({expected.source})" if expected else "done already"
        _print(f"  {one_line(cell.label)}: {words}")
    if interleaved := sum(len(group) > 1 for group in waiting):
        _print(f"compared variants are interleaved: {interleaved} group{'s' if interleaved > 1 else ''}")
    _print(one_line(f"{note + ' ' if note else ''}records: {store.path} (nothing was run)"))
    return 0


def _plain_cells(cells: Sequence[Cell], to_run: Mapping[str, ExpectedTime], store: Store) -> dict[str, object]:
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
