"""Progress of long work on stderr: a live line with the time left for a person; for a log a line a cell, and while
none ends what is at work, every half minute at most."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from trainstep.config.cell import Cell
from trainstep.records.record import Record

_SILENCE_S = 30
"""Of a log, at most, while something goes on."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would end the whole program."""
        raise BrokenPipeError


class CellProgress:
    """`with CellProgress(cells) as progress:` then `tell(cell, stage)` and `finished(done, of, records)` as they happen."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._labels = {cell.key: cell.label for cell in cells}
        self._console = _Console(stderr=True)
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
            self._bar.update(self._task, description=f"{cell.label}: {stage}")
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
        print(line, file=sys.stderr, flush=True)
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


@contextlib.contextmanager
def outliving_reader(stream: TextIO) -> Iterator[None]:
    """Whoever read the stream may leave (`2>&1 | head`): we go on, and what is said from then on goes nowhere."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
