"""Progress of long work on stderr: a live line with the time left for a person; for a log a line a cell, and while
none ends what is at work, every half minute at most."""

import sys
import time
from collections.abc import Sequence
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from trainstep.cli.streams import outliving_reader
from trainstep.config.cell import Cell
from trainstep.records.record import Record
from trainstep.report.console import VisibleConsole
from trainstep.report.visible import one_line

_SILENCE_S = 30
"""Of a log, at most, while something goes on."""


class CellProgress:
    """`with CellProgress(cells) as progress:` then `tell(cell, stage)` and `finished(done, of, records)` as they happen."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._labels = {cell.key: cell.label for cell in cells}
        self._console = VisibleConsole(sys.stderr)
        self._live = self._console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            disable=not self._live,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=len(cells), left="")
        self._started_s = time.monotonic()
        self._logged_s = self._started_s
        self._found_done: int | None = None

    def __enter__(self) -> "CellProgress":
        with outliving_reader(sys.stderr):
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with outliving_reader(sys.stderr):
            self._bar.stop()

    def tell(self, cell: Cell, stage: str) -> None:
        """What is happening now."""
        with outliving_reader(sys.stderr):
            self._bar.update(self._task, description=one_line(f"{cell.label}: {stage}"))
            if not self._live and time.monotonic() - self._logged_s >= _SILENCE_S:
                self._log(f"{cell.label}: {stage}")

    def finished(self, done: int, of: int, records: Sequence[Record], *, whole: bool = True) -> None:
        """Some cells are done; those done before this run are not counted in the rate.

        Not `whole`: others that took turns with them are next to done, so that the rate says nothing: no time left.
        """
        with outliving_reader(sys.stderr):
            self._finished(done, of, records, whole=whole)

    def _finished(self, done: int, of: int, records: Sequence[Record], *, whole: bool) -> None:
        if self._found_done is None:
            self._found_done = done
            if done:
                self._console.print(f"{done} of {of} cells are there already", markup=False, highlight=False)
        left = self._time_left(done, of) if whole else ""
        self._bar.update(self._task, completed=done, total=of, left=left)
        if not self._live:
            for record in records:
                self._log(f"[{done}/{of}] {self._line(record)}{', ' + left if left else ''}")

    def _log(self, line: str) -> None:
        print(one_line(line), file=sys.stderr, flush=True)
        self._logged_s = time.monotonic()

    def _time_left(self, done: int, of: int) -> str:
        run = done - (self._found_done or 0)
        if not run or done >= of:
            return ""
        seconds = (time.monotonic() - self._started_s) / run * (of - done)
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"

    def _line(self, record: Record) -> str:
        label = self._labels.get(record.key, record.key)
        if record.failure is not None:
            return f"{label}: {record.failure.message}"
        return f"{label}: done in {record.duration_s:.1f} s"
