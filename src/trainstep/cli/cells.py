"""What `bench` and `sweep` share: run groups of cells into a store, show progress, then the table, and say where it all is."""

import contextlib
import itertools
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainstep.cli.progress import CellProgress
from trainstep.cli.run_options import GridOptions, RunOptions
from trainstep.cli.streams import outliving_reader
from trainstep.config.cell import Cell
from trainstep.records.durations import earlier_durations, expected_time
from trainstep.records.record import Environment, Record
from trainstep.records.store import RUNS, Store
from trainstep.report.visible import one_line

if TYPE_CHECKING:
    from trainstep.measure.runner import Limits

Execute = Callable[[Sequence[Sequence[Cell]], Callable[[Cell, str], None]], Iterator[list[Record]]]
UNFINISHED = 4
"""The exit code where a budget left cells."""
_FAULTS = ("crash", "timeout", "import_error", "divergence")


def run_cells(
    groups: Sequence[Sequence[Cell]],
    store: Store,
    execute: Execute,
    *,
    here: Environment | None,
    how: RunOptions = RunOptions(),
    allow_mixed: bool = False,
    retry_failed: bool = False,
    anew: bool = False,
) -> list[Record]:
    """Run what the store does not hold yet (or all, `anew`), as far as the budget goes; the records of all cells asked for that
    there are then, in their order."""
    from trainstep.measure.runner import with_facts
    from trainstep.measure.sweep import pending, run_sweep

    command = shlex.join(["trainstep", *sys.argv[1:]])

    def execute_noting_command(waiting: Sequence[Sequence[Cell]]) -> Iterator[list[Record]]:
        for records in execute(waiting, progress.tell):
            yield [with_facts(record, command=command, defaults_from=how.defaults_from) for record in records]

    cells = [cell for group in groups for cell in group]
    before = store.latest() if anew else {}
    waiting = groups if anew else pending(groups, store, retry_failed=retry_failed)
    durations = earlier_durations([store.path, RUNS])
    expected = {cell.key: expected_time(cell, durations) for group in waiting for cell in group}
    kept: set[str] = set()
    with CellProgress(cells, expected, quiet=how.quiet) as progress:
        steps = run_sweep(
            groups,
            store,
            execute_noting_command,
            here=here,
            allow_mixed=allow_mixed,
            retry_failed=retry_failed,
            anew=anew,
        )
        with interrupt_says(lambda: _kept_words(cells, store, before, how)), contextlib.closing(steps):
            for step in steps:
                progress.finished(step.done, step.of, step.records, whole=step.whole)
                kept |= {record.key for record in step.records}
                if step.whole and _is_spent(how.budget_minutes, progress.elapsed_s, len(kept), waiting):
                    break
    latest = store.latest()
    done = kept if anew else latest.keys()
    return [latest[cell.key] for cell in cells if cell.key in done]


def _is_spent(minutes: float | None, elapsed_s: float, ran: int, waiting: Sequence[Sequence[Cell]]) -> bool:
    """Whether the next group would end after the budget, if its cells take as long as those that ran, which are the first ones."""
    if minutes is None or not ran:
        return False
    starts = itertools.accumulate(map(len, waiting), initial=0)
    size = next((len(group) for start, group in zip(starts, waiting, strict=False) if start >= ran), 0)
    return elapsed_s * (1 + size / ran) > minutes * 60


def unfinished(groups: Sequence[Sequence[Cell]], records: Sequence[Record], store: Store, how: RunOptions) -> int:
    """Say what the budget left, and the command that goes on. The exit code then, or 0 where nothing is left."""
    count = sum(map(len, groups))
    if how.budget_minutes is None or len(records) == count:
        return 0
    with outliving_reader(sys.stderr):
        print(
            f"{count - len(records)} of {count} cells are left: the budget of {how.budget_minutes:g} min is spent. To go on: "
            f"{_going_on(store, how)}",
            file=sys.stderr,
        )
    return UNFINISHED


def _going_on(store: Store, how: RunOptions) -> str:
    """The command line that runs the cells which the store does not hold: this one, with its file of records named."""
    words = sys.argv[1:]
    if words[:1] != ["sweep"] and not any(word.split("=")[0] == "--out" for word in words):
        words = [*words, "--out", str(store.path)]
    if isinstance(how, GridOptions) and "--resume" not in words:
        words = [*words, "--resume"]
    return one_line(shlex.join(["trainstep", *words]))


def run_here(
    groups: Sequence[Sequence[Cell]], store: Store, bounds: "Limits", how: GridOptions, *, here: Environment
) -> list[Record]:
    """Run cells on this machine: all, or with `--resume` those that the store does not hold."""
    from trainstep.measure.executor_local import run_groups

    def execute(waiting: Sequence[Sequence[Cell]], tell: Callable[[Cell, str], None]) -> Iterator[list[Record]]:
        return run_groups(waiting, bounds, tell)

    return run_cells(groups, store, execute, here=here, how=how, anew=not how.resume)


@contextlib.contextmanager
def interrupt_says(words: Callable[[], str]) -> Iterator[None]:
    """Let a KeyboardInterrupt say what is kept. `words` are asked for then."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(words()) from None


def _kept_words(cells: Sequence[Cell], store: Store, before: Mapping[str, Record], how: RunOptions) -> str:
    """How many of the cells have a record in the store that was not there before, and the command that goes on."""
    latest = store.latest()
    count = sum(latest.get(cell.key) not in (None, before.get(cell.key)) for cell in cells)
    if not count:
        return "no cell was finished"
    left = f"; to go on: {_going_on(store, how)}" if count < len(cells) else ""
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
    """Print the answers, `paragraphs`, the table, verdicts along a compared axis, the last words of what crashed, and where the
    records are; write the page, under the sweep's title and description. Returns the exit code.
    """
    from trainstep.report.all_tables import all_tables
    from trainstep.report.answer_text import print_answers
    from trainstep.report.answers import answers
    from trainstep.report.comparison_page import comparison_tables
    from trainstep.report.notes import notes
    from trainstep.report.rows import rows_of
    from trainstep.report.terminal import print_paragraphs, print_tables
    from trainstep.report.visible import visible

    rows = rows_of([(str(store.path), record) for record in records])
    tables = [*all_tables(rows), *(comparison_tables(rows, compare) if compare else [])]
    found = answers(rows, compare)
    with outliving_reader(sys.stdout):
        if as_json:
            from trainstep.report.frames import json_text

            sys.stdout.write(json_text(tables, found))
        else:
            print_answers(found, sys.stdout)
            print_paragraphs([*paragraphs, ""] if paragraphs else [], sys.stdout)
            print_tables(tables, notes(rows), sys.stdout, every=every)
        sys.stdout.flush()
    faults = [(row, failure) for row in rows if (failure := row.record.failure) and failure.kind in _FAULTS]
    with outliving_reader(sys.stderr):
        for row, failure in faults:
            last = (visible(line).replace("\n", " ") for line in failure.last_lines[-3:])
            print("\n    ".join([one_line(f"{row.label()}: {failure.message}"), *last]), file=sys.stderr)
    where = sys.stderr if as_json else sys.stdout
    with outliving_reader(where):
        print(f"records: {store.path}", file=where, flush=True)
    if page is not None:
        write_page(records, store, page, title=title, description=description)
        with outliving_reader(where):
            print(f"page: {page}", file=where, flush=True)
    return 3 if faults else 0


def check_page(page: Path | None, records: Path) -> None:
    """Refuse a page that cannot be written, or in whose place there is another file, before hours of measuring, not after."""
    if page is None:
        return
    from trainstep.report.output_file import check_output

    if os.path.realpath(page) == os.path.realpath(records):
        raise ValueError(f"page: {page} is the file of records; give the page another name")
    check_output("page", page, "html")


def check_kept(cells: Sequence[Cell], field: str) -> None:
    """Refuse a folder in which the cells could not keep their files, as early as that."""
    from trainstep.measure.kept_files import kept_folder

    for folder in {str(cell.config[field]) for cell in cells if cell.config[field] is not None}:
        kept_folder(field, folder)


def write_page(
    records: Sequence[Record], store: Store, page: Path, *, title: str | None = None, description: str | None = None
) -> None:
    """Write the records' page. ValueError, saying that the records are kept, where it cannot be."""
    from trainstep.report.output_file import write_output
    from trainstep.report.page import page as make_page
    from trainstep.report.rows import rows_of

    text = make_page(rows_of([(str(store.path), record) for record in records]), title=title, description=description)
    try:
        write_output("page", page, "html", text)
    except ValueError as error:
        raise ValueError(f"{error}; {store.path} holds the records: trainstep report makes a page of them") from None
