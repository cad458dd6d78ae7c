"""What `bench` and `sweep` share: run groups of cells into a store, show progress, then the table, and say where it all is."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from trainstep.cli.progress import CellProgress
from trainstep.config.cell import Cell
from trainstep.records.record import Environment, Record
from trainstep.records.store import Store

Execute = Callable[[Sequence[Sequence[Cell]], Callable[[Cell, str], None]], Iterator[list[Record]]]
_FAULTS = ("crash", "timeout", "import_error")


def run_cells(
    groups: Sequence[Sequence[Cell]],
    store: Store,
    execute: Execute,
    *,
    here: Environment | None,
    allow_mixed: bool = False,
    retry_failed: bool = False,
) -> list[Record]:
    """Run what the store does not hold yet; the records of all cells asked for, in their order."""
    from trainstep.measure.sweep import run_sweep

    cells = [cell for group in groups for cell in group]
    with CellProgress(cells) as progress:
        steps = run_sweep(
            groups,
            store,
            lambda waiting: execute(waiting, progress.tell),
            here=here,
            allow_mixed=allow_mixed,
            retry_failed=retry_failed,
        )
        for step in steps:
            progress.finished(step.done, step.of, step.records)
    latest = store.latest()
    return [latest[cell.key] for cell in cells if cell.key in latest]


def show(records: Sequence[Record], store: Store, page: Path | None) -> int:
    """Print the table, the last words of what crashed, and where the records are; write the page. Returns the exit code."""
    from trainstep.report.notes import notes
    from trainstep.report.rows import rows_of
    from trainstep.report.tables import cell_tables
    from trainstep.report.terminal import print_tables

    rows = rows_of([(str(store.path), record) for record in records])
    print_tables(cell_tables(rows), notes(rows), sys.stdout)
    faults = [(row, failure) for row in rows if (failure := row.record.failure) and failure.kind in _FAULTS]
    for row, failure in faults:
        print("\n    ".join([f"{row.label()}: {failure.message}", *failure.last_lines[-3:]]), file=sys.stderr)
    print(f"records: {store.path}")
    if page is not None:
        write_page(records, store, page)
    return 3 if faults else 0


def check_page(page: Path | None) -> None:
    """Refuse a page that cannot be written before hours of measuring, not after."""
    if page is None:
        return
    folder = next(folder for folder in page.absolute().parents if folder.exists())
    if page.is_dir() or not folder.is_dir() or not os.access(page if page.exists() else folder, os.W_OK):
        raise ValueError(f"page: {page} cannot be written; name a file in a folder that can be")


def write_page(records: Sequence[Record], store: Store, page: Path) -> None:
    """Write the records' page and print its path."""
    from trainstep.report.page import page as make_page
    from trainstep.report.rows import rows_of

    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(make_page(rows_of([(str(store.path), record) for record in records])), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"page: {page} cannot be written: {error.strerror}") from None
    print(f"page: {page}")
