"""Progress of long work on stderr: a live line with the time left for a person; for a log a line a cell, and while
none ends what is at work, every half minute at most."""

import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType, TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from trainstep.cli.streams import outliving_reader
from trainstep.config.cell import Cell
from trainstep.records.durations import LIKE, ROUGH, SAME, ExpectedTime
from trainstep.records.record import Record
from trainstep.report.console import VisibleConsole
from trainstep.report.visible import one_line

_SILENCE_S = 30
"""Of a log, at most, while something goes on."""


_COUNTED = re.compile(r" ?(\d+)(?:/| of )(\d+)$")
"""How a stage says how much of it is done."""


class CellProgress:
    """`with CellProgress(cells) as progress:` then `tell(cell, stage)` and `finished(done, of, records)` as they happen.

    `expected`: the time of each cell that is to run, by its key; without it no time left is told before a cell has ended.
    `quiet`: show nothing.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        expected: Mapping[str, ExpectedTime] = MappingProxyType({}),
        *,
        quiet: bool = False,
    ) -> None:
        self._labels = {cell.key: cell.label for cell in cells}
        self._expected = expected
        self._quiet = quiet
        self._console = VisibleConsole(sys.stderr)
        self._live = self._console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            _TimeLeft(self._time_left),
            console=self._console,
            disable=not self._live or quiet,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=len(cells))
        self._started_s = self._logged_s = self._whole_s = self._stage_s = self._told_s = time.monotonic()
        self._stage, self._uncounted = "", ("", "")
        self._begun = False
        self._done, self._of = 0, len(cells)
        self._ended: set[str] = set()
        self._rated: frozenset[str] = frozenset()
        """Cells that had ended when last no group was half done."""

    def __enter__(self) -> "CellProgress":
        with outliving_reader(sys.stderr):
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with outliving_reader(sys.stderr):
            self._bar.stop()

    @property
    def elapsed_s(self) -> float:
        """Since the first cell was begun."""
        return time.monotonic() - self._started_s

    def tell(self, cell: Cell, stage: str) -> None:
        """What is happening now."""
        uncounted, self._told_s = (cell.key, _COUNTED.sub("", stage)), time.monotonic()
        if uncounted != self._uncounted:
            self._uncounted, self._stage_s = uncounted, self._told_s
        self._stage = stage
        if self._quiet:
            return
        with outliving_reader(sys.stderr):
            self._bar.update(self._task, description=one_line(f"{cell.label}: {stage}"))
            if not self._live and time.monotonic() - self._logged_s >= _SILENCE_S:
                self._log(f"{cell.label}: {stage}{_after_comma(self._time_left())}")

    def finished(self, done: int, of: int, records: Sequence[Record], *, whole: bool = True) -> None:
        """Some cells are done; those done before this run are not counted in the rate.

        Not `whole`: others that took turns with them are next to done, so that the rate says nothing: no time left.
        """
        self._done, self._of = done, of
        self._ended |= {record.key for record in records}
        if whole:
            self._rated = frozenset(self._ended)
            self._whole_s = time.monotonic()
        if not self._quiet:
            with outliving_reader(sys.stderr):
                self._tell_finished(records, whole=whole)

    def _tell_finished(self, records: Sequence[Record], *, whole: bool) -> None:
        first, self._begun = not self._begun, True
        if first and self._done:
            self._console.print(f"{self._done} of {self._of} cells are there already", markup=False, highlight=False)
        if first and self._expected and not self._live:
            self._log(f"{cell_count(len(self._expected))} to run, {time_words(self._expected.values())}")
        self._bar.update(self._task, completed=self._done, total=self._of)
        if not self._live:
            for record in records:
                left = _after_comma(self._time_left()) if whole else ""
                self._log(f"[{self._done}/{self._of}] {self._line(record)}{left}")

    def _log(self, line: str) -> None:
        print(one_line(line), file=sys.stderr, flush=True)
        self._logged_s = time.monotonic()

    def _time_left(self) -> str:
        """By what cells were expected to take, held to what those that ended took; nothing where that is unknown or over."""
        if self._ended != self._rated or self._done >= self._of or not (self._expected or self._rated):
            return ""
        now_s = time.monotonic()
        rated_s = sum(map(self._seconds, self._rated))
        pace = (self._whole_s - self._started_s) / rated_s if rated_s else 1.0
        to_run = self._expected.keys() - self._ended if self._expected else range(self._of - self._done)
        all_s = pace * sum(map(self._seconds, to_run))
        later_s = all_s - pace * self._seconds(self._uncounted[0])
        seconds = max(all_s - (now_s - self._whole_s), later_s + self._stage_left_s(now_s))
        return f"about {span_words(max(seconds, 1))} left" if seconds > 0 else ""

    def _seconds(self, key: object) -> float:
        """What a cell was expected to take, or the same for all."""
        return self._expected[str(key)].seconds if key in self._expected else 1.0

    def _stage_left_s(self, now_s: float) -> float:
        """The seconds left of a stage that counts (`steps 3/10`), by the pace of what it had done when it last told."""
        counted = _COUNTED.search(self._stage)
        if counted is None or not int(counted[1]):
            return 0.0
        each_s = (self._told_s - self._stage_s) / int(counted[1])
        return max(each_s * (int(counted[2]) - int(counted[1])) - (now_s - self._told_s), 0.0)

    def _line(self, record: Record) -> str:
        label = self._labels.get(record.key, record.key)
        if record.failure is not None:
            return f"{label}: {record.failure.message}"
        return f"{label}: done in {record.duration_s:.1f} s"


class _TimeLeft(ProgressColumn):
    """The time left, worked out whenever the line is drawn."""

    def __init__(self, words: Callable[[], str]) -> None:
        super().__init__()
        self._words = words

    def render(self, task: Task) -> Text:
        """The words, whatever the task."""
        return Text(self._words())


def cell_count(count: int) -> str:
    """`1 cell`, `12 cells`."""
    return f"{count} cell{'' if count == 1 else 's'}"


def span_words(seconds: float) -> str:
    """`45 s`, `12 min`, `3.5 h`."""
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def time_words(expected: Iterable[ExpectedTime]) -> str:
    """`about 2 min by earlier records of 3 of the same cells and 2 like them, and a rough guess of 10 s for each of 4`."""
    expected = list(expected)
    counts = Counter(one.source for one in expected)
    known = [
        f"{counts[source]} {words}"
        for source, words in ((SAME, "of the same cells"), (LIKE, "of the same workload and model"))
        if counts[source]
    ]
    guesses = sorted({one.seconds for one in expected if one.source == ROUGH})
    parts = [f"earlier records for {' and '.join(known)}"] if known else []
    if guesses:
        each = " or ".join(f"{seconds:g}" for seconds in guesses)
        parts.append(f"a rough guess of {each} s for each of {counts[ROUGH]}")
    return f"about {span_words(sum(one.seconds for one in expected))} by {', and '.join(parts)}"


def _after_comma(words: str) -> str:
    return f", {words}" if words else ""
