"""What `bench` and `sweep` share: run groups of cells into a store, show progress, then the table, and say where it all is."""

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
    here: Environment,
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
    """Print the table, what failed and where the records are; write the page if asked. Returns the exit code."""
    from trainstep.report.notes import notes
    from trainstep.report.rows import rows_of
    from trainstep.report.tables import cell_tables
    from trainstep.report.terminal import print_tables

    rows = rows_of([(str(store.path), record) for record in records])
    print_tables(cell_tables(rows), notes(rows), sys.stdout)
    failures = [record.failure for record in records if record.failure is not None]
    for failure in failures:
        print(f"{failure.kind.replace('_', ' ')}: {failure.message}", file=sys.stderr)
        for line in failure.last_lines[-3:] if failure.kind in _FAULTS else ():
            print(f"    {line}", file=sys.stderr)
    print(f"records: {store.path}")
    if page is not None:
        write_page(records, store, page)
    return 3 if any(failure.kind in _FAULTS for failure in failures) else 0


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
