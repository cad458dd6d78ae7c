"""Times of rows: the median of one, and one row's time over another's, a comparison with its interval or why there is none."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from trainstep.records.compare import Comparison, compare_records
from trainstep.records.record import Failure, Record
from trainstep.records.summary import Summary, summarize
from trainstep.report.forms import MS_STD, failure_word, milliseconds
from trainstep.report.rows import Row
from trainstep.report.tables import Column, row_of


def summary_of(record: Record, quantity: str) -> Summary | None:
    """The summary of its samples; None where the cell failed or has none."""
    samples = record.samples.get(quantity)
    return summarize(samples) if record.failure is None and samples and samples.values else None


def median_of(record: Record, quantity: str) -> float | None:
    """The median of its samples; None where the cell failed or has none."""
    samples = record.samples.get(quantity)
    return median(samples.values) if record.failure is None and samples and samples.values else None


def median_words(record: Record, quantity: str) -> str:
    """`62.10 ± 0.31 ms`, with half the interquartile range; empty where nothing was timed."""
    time = summary_of(record, quantity)
    return f"{milliseconds(time.median, time.half_range)} ms" if time else ""


def median_and_range(quantity: str) -> Callable[[Any], tuple[float, float | None] | None]:
    """What a column of times reads from a row of a table: the median, and half the interquartile range of several."""

    def get(row: Any) -> tuple[float, float | None] | None:
        time = summary_of(row_of(row).record, quantity)
        return (time.median, time.half_range if time.n > 1 else None) if time else None

    return get


def mean_column(quantity: str, named: str) -> Column:
    """Mean and standard deviation, for papers."""

    def get(row: Any) -> tuple[float, float | None] | None:
        time = summary_of(row_of(row).record, quantity)
        return (time.mean, time.std if time.n > 1 else None) if time else None

    return Column(f"{named}, mean ± std (ms)", MS_STD, get, optional=True, more=True)


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A row against the one that it is held to."""

    base: Row
    row: Row
    found: Comparison | None = None
    trouble: str = ""
    """Why there is no ratio; empty where there is one."""

    @property
    def ratio(self) -> float | None:
        """Its time over the other's."""
        return self.found.ratio if self.found else None

    @property
    def failure(self) -> Failure | None:
        """The row's, or else the other's."""
        return self.row.record.failure or self.base.record.failure

    @property
    def interval(self) -> tuple[float, float, float] | None:
        """Low end, ratio and high end, where there is a ratio."""
        found = self.found
        if found is None or found.ratio is None or found.low is None or found.high is None:
            return None
        return found.low, found.ratio, found.high

    @property
    def known(self) -> Comparison | None:
        """The comparison, where it came to a ratio; of few samples without an interval."""
        return self.found if self.found and self.found.ratio is not None else None

    def numbers(self) -> dict[str, Any]:
        """What a program reads of it; the row's own key says which cell it is."""
        found = self.found
        return {
            "ratio": found and found.ratio,
            "ratio_low": found and found.low,
            "ratio_high": found and found.high,
            "verdict": found.verdict if found else "cannot tell",
            "reason": found.reason if found else self.trouble,
            "key": self.row.record.key,
        }


def ratio_of(base: Row, row: Row, quantity: str) -> Ratio:
    """In that quantity of time."""
    made = Ratio(base=base, row=row)
    if made.failure is not None:
        return Ratio(base=base, row=row, trouble=failure_word(made.failure))
    try:
        found = compare_records(base.record, row.record, quantity=quantity)
    except ValueError as error:  # other machines, or code
        return Ratio(base=base, row=row, trouble=str(error))
    return Ratio(base=base, row=row, found=found, trouble="" if found.ratio else found.reason)
