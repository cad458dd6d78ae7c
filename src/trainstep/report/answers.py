"""The answer of a workload's cells, from its rows: what a reader asks first. None where no cell is done.

`answers(rows)` has an answer for each workload of a report; which function makes it stands in the workload's row of
config/instruments.py.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from trainstep.config.instruments import resolve
from trainstep.report.all_tables import instruments_of
from trainstep.report.forms import byte_words, seconds_words, times_words
from trainstep.report.numerics_tables import ERRORS
from trainstep.report.rows import Row, of_workload


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What stands over the tables of a workload, on a terminal, in Markdown, in JSON and on the page."""

    workload: str
    verdict: str
    """One sentence: what was found."""
    suggestion: str = ""
    """One sentence: what to do, with what it should gain; empty where nothing follows."""

    @property
    def text(self) -> str:
        """Both sentences."""
        return f"{self.verdict} {self.suggestion}".strip()


def answers(rows: Sequence[Row]) -> list[Answer]:
    """An answer for each workload that has one."""
    made = ((one.name, resolve(one.answer)(of_workload(rows, one.name))) for one in instruments_of(rows))
    return [Answer(workload=name, verdict=sentence) for name, sentence in made if sentence]


def quickest_step(rows: Sequence[Row]) -> str | None:
    """`Quickest: small 128, 12.3 ms a step, 2.10 times as fast as the slowest, small 512; 1 of 3 failed.`"""
    return _quickest(rows, ("step",), "a step")


def quickest_call(rows: Sequence[Row]) -> str | None:
    """The same of a call."""
    return _quickest(rows, ("time", "time_s"), "a call")


def fullest(rows: Sequence[Row]) -> str | None:
    """Which cell held most at its peak."""
    size, _, row = _largest(rows, ("peak_allocated_bytes", "peak_rss_bytes"))
    return f"Fullest: {row.label()}, {byte_words(size)} at the peak{_failures(rows)}." if row else None


def verdicts(rows: Sequence[Row]) -> str | None:
    """What limits how many cells."""
    found = Counter(str(kind) for row in _done(rows) if (kind := row.record.fact("verdict")))
    said = ", ".join(f"{count} {kind}" for kind, count in found.most_common()).capitalize()
    return f"{said}{_failures(rows)}." if found else None


def largest_error(rows: Sequence[Row]) -> str | None:
    """Which cell's numbers are furthest from the reference's, and in what."""
    error, name, row = _largest(rows, ERRORS)
    return f"Largest error: {error:.1e} in {ERRORS[name]}, {row.label()}{_failures(rows)}." if row else None


def tiles_kept(rows: Sequence[Row]) -> str | None:
    """How many cells' tiles in use are the fastest ones."""
    done = [row.record for row in _done(rows)]
    same = sum(record.fact("best") == record.fact("in_use") for record in done)
    return f"The tiles in use are the fastest in {same} of {len(done)} cells{_failures(rows)}." if done else None


def _largest(rows: Sequence[Row], names: Iterable[str]) -> tuple[float, str, Row | None]:
    """The largest of these facts in all rows, its name and its row; without a row where none has any."""
    facts = [(row.record.fact(name), name, row) for row in _done(rows) for name in names]
    return max((fact for fact in facts if fact[0] is not None), key=lambda fact: fact[0], default=(0.0, "", None))


def _quickest(rows: Sequence[Row], quantities: Sequence[str], of: str) -> str | None:
    timed = [(median(values), row) for row in _done(rows) if (values := _samples(row, quantities))]
    if not timed:
        return None
    (least_s, quickest), (most_s, slowest) = (choose(timed, key=lambda one: one[0]) for choose in (min, max))
    apart = least_s and most_s > least_s
    against = f", {times_words(most_s / least_s)} as fast as {slowest.label()}" if apart else ""
    return f"Quickest: {quickest.label()}, {seconds_words(least_s)} {of}{against}{_failures(rows)}."


def _samples(row: Row, quantities: Sequence[str]) -> Sequence[float]:
    found = (row.record.samples[name].values for name in quantities if name in row.record.samples)
    return next(filter(None, found), ())


def _done(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.record.failure is None]


def _failures(rows: Sequence[Row]) -> str:
    failed = len(rows) - len(_done(rows))
    return f"; {failed} of {len(rows)} failed" if failed else ""
