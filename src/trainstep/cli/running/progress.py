"""Show the progress of running cells on standard error: a live line on a terminal, lines for each cell in a log.

The live line has the time left. A log gets a line when a cell ends, and between these a line with the current stage, at most every
half minute.
"""

import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType, TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from trainstep.cli.streams import outliving_reader
from trainstep.config.grid import Cell
from trainstep.records.durations import LIKE, ROUGH, SAME, ExpectedTime
from trainstep.records.record import Record
from trainstep.report.kit.visible import VisibleConsole, one_line

_LOG_INTERVAL_S = 30
"""A log is silent for no longer than this while a stage makes progress."""
_COUNTED = re.compile(r" ?(\d+)(?:/| of )(\d+)$")
"""The end of a stage's name that says how much of it is done, as `steps 3/10`."""
_PROCESS = re.compile(r"process (\d+) of (\d+)")
"""The stage of interleaved cells that says which of a group's processes begins; the stages of its steps follow."""


class CellProgress:
    """`with CellProgress(cells) as progress:` then `tell(cell, stage)` and `finished(done, of, records)` as they happen.

    `expected`: the expected time of each cell that is to run, by its key; without it, no time left is shown before a cell has
    ended. `quiet`: show nothing.
    """

    def __init__(
        self, cells: Sequence[Cell], expected: Mapping[str, ExpectedTime] = MappingProxyType({}), *, quiet: bool = False
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
        self._started_s = self._logged_s = self._rated_s = self._stage_began_s = self._shown_s = time.monotonic()
        self._stage = ""
        self._cell_and_stage = ("", "")
        """Key of the running cell, and its stage without the count."""
        self._processes: tuple[int, int] = (0, 0)
        """Number of the process that runs of an interleaved group, and how many there are to be."""
        self._first_process, self._processes_began_s, self._process_began_s = 0, 0.0, 0.0
        """The first number that was told of the group, and when it and the last one were."""
        self._reported = False
        self._done, self._of = 0, len(cells)
        self._ended: set[str] = set()
        self._rated: frozenset[str] = frozenset()
        """The cells that had ended at `_rated_s`, the last time when no interleaved group was half done."""

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
        """Seconds since the start of the first cell."""
        return time.monotonic() - self._started_s

    def tell(self, cell: Cell, stage: str) -> None:
        """Show the current stage of a cell."""
        self._stage, self._shown_s = stage, time.monotonic()
        cell_and_stage = (cell.key, _COUNTED.sub("", stage))
        if cell_and_stage != self._cell_and_stage:
            self._cell_and_stage, self._stage_began_s = cell_and_stage, self._shown_s
        if process := _PROCESS.match(stage):
            number = int(process[1])
            if number <= self._processes[0] or not self._processes[0]:  # another group
                self._first_process, self._processes_began_s = number, self._shown_s
            self._processes, self._process_began_s = (number, int(process[2])), self._shown_s
        if self._quiet:
            return
        with outliving_reader(sys.stderr):
            self._bar.update(self._task, description=one_line(f"{cell.label}: {stage}"))
            if not self._live and time.monotonic() - self._logged_s >= _LOG_INTERVAL_S:
                self._log(f"{cell.label}: {stage}{_after_comma(self._time_left())}")

    def finished(self, done: int, of: int, records: Sequence[Record], *, whole: bool = True) -> None:
        """Show that some cells are done; cells from before this run do not count for the rate.

        `whole` is false while other cells of an interleaved group are still running: they are almost done too, so the rate would
        be too low, and no time left is shown.
        """
        self._done, self._of = done, of
        self._ended |= {record.key for record in records}
        if whole:
            self._processes = (0, 0)
            self._rated = frozenset(self._ended)
            self._rated_s = time.monotonic()
        if not self._quiet:
            with outliving_reader(sys.stderr):
                self._tell_finished(records, whole=whole)

    def _tell_finished(self, records: Sequence[Record], *, whole: bool) -> None:
        first, self._reported = not self._reported, True
        if first and self._done:
            self._console.print(f"{self._done} of {self._of} cells are done already", markup=False, highlight=False)
        if first and self._expected and not self._live:
            self._log(f"{cell_count(len(self._expected))} to run, {time_words(self._expected.values())}")
        self._bar.update(self._task, completed=self._done, total=self._of)
        if not self._live:
            for record in records:
                left = _after_comma(self._time_left()) if whole else ""
                outcome = f"done in {record.duration_s:.1f} s" if record.failure is None else record.failure.message
                self._log(f"[{self._done}/{self._of}] {self._labels.get(record.key, record.key)}: {outcome}{left}")

    def _log(self, line: str) -> None:
        print(one_line(line), file=sys.stderr, flush=True)
        self._logged_s = time.monotonic()

    def _time_left(self) -> str:
        """The expected time of the remaining cells, corrected by the pace of the cells that ended; empty if unknown or over."""
        if self._ended != self._rated or self._done >= self._of or not (self._expected or self._rated):
            return ""
        now_s = time.monotonic()
        expected_s = sum(map(self._seconds, self._rated))
        pace = (self._rated_s - self._started_s) / expected_s if expected_s else 1.0
        to_run = self._expected.keys() - self._ended if self._expected else range(self._of - self._done)
        all_s = pace * sum(map(self._seconds, to_run))
        later_s = all_s - pace * self._seconds(self._cell_and_stage[0])
        # The running cell's stage may show that the cell takes longer than expected.
        stage_s = max(self._stage_left_s(now_s), self._processes_left_s(now_s))
        seconds = max(all_s - (now_s - self._rated_s), later_s + stage_s)
        return f"about {duration_words(max(seconds, 1))} left" if seconds > 0 else ""

    def _seconds(self, key: object) -> float:
        """The expected time of a cell; without expectations every cell counts the same."""
        return self._expected[str(key)].seconds if key in self._expected else 1.0

    def _stage_left_s(self, now_s: float) -> float:
        """The seconds left of a stage with a count (`steps 3/10`), by its pace until it was last shown; 0 for other stages."""
        counted = _COUNTED.search(self._stage)
        if counted is None or not int(counted[1]):
            return 0.0
        each_s = (self._shown_s - self._stage_began_s) / int(counted[1])
        return max(each_s * (int(counted[2]) - int(counted[1])) - (now_s - self._shown_s), 0.0)

    def _processes_left_s(self, now_s: float) -> float:
        """The seconds left of an interleaved group, by the pace of its processes: a noisy machine gets more of them."""
        number, count = self._processes
        if number <= self._first_process:
            return 0.0
        each_s = (self._process_began_s - self._processes_began_s) / (number - self._first_process)
        return max(each_s * (count - number + 1) - (now_s - self._process_began_s), 0.0)


class _TimeLeft(ProgressColumn):
    """A column with the time left, computed whenever the line is drawn."""

    def __init__(self, words: Callable[[], str]) -> None:
        super().__init__()
        self._words = words

    def render(self, task: Task) -> Text:
        """The time left in words; the task does not matter."""
        return Text(self._words())


def cell_count(count: int) -> str:
    """`1 cell`, `12 cells`."""
    return f"{count} cell{'' if count == 1 else 's'}"


def duration_words(seconds: float) -> str:
    """`45 s`, `12 min`, `3.5 h`."""
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def time_words(expected: Iterable[ExpectedTime]) -> str:
    """`about 2 min by earlier records for 3 of the same cells, and a rough guess of 10 s for each of 4`."""
    expected = list(expected)
    counts = Counter(item.source for item in expected)
    known = [
        f"{counts[source]} {words}"
        for source, words in ((SAME, "of the same cells"), (LIKE, "of the same workload and model"))
        if counts[source]
    ]
    guesses = sorted({item.seconds for item in expected if item.source == ROUGH})
    parts = [f"earlier records for {' and '.join(known)}"] if known else []
    if guesses:
        each = " or ".join(f"{seconds:g}" for seconds in guesses)
        parts.append(
            "a rough guess" if len(expected) == 1 else f"a rough guess of {each} s for each of {counts[ROUGH]}"
        )
    return f"about {duration_words(sum(item.seconds for item in expected))} by {', and '.join(parts)}"


def _after_comma(words: str) -> str:
    return f", {words}" if words else ""
