"""Ranks cells by time: a cell is fastest only if the intervals of its ratios separate it from the others.

A cell is slower than another if the 99 % interval of their time ratio excludes 1 and the ratio exceeds the minimum effect
(records/compare.py). With fewer than five samples, or between different environments, there is no verdict.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from trainstep.config.parsing import fields_of
from trainstep.config.run import RunConfig
from trainstep.grouping import grouped
from trainstep.records.compare import MINIMUM_PAIRS, Comparison, compare_records
from trainstep.records.record import Failure, Record
from trainstep.records.summary import Summary, summarize
from trainstep.report.kit.forms import (
    MS_STD,
    failure_word,
    listed,
    milliseconds,
    percent,
    ratio_words,
    seconds_words,
    three_digits,
)
from trainstep.report.kit.rows import Row, host_limit, words
from trainstep.report.kit.tables import Column, row_of
from trainstep.traces.verdict import LAUNCH_BOUND

_NAMED = 4
"""The most cells named in a sentence."""
_WIDEST = 3.0
"""High end over low end of an interval that contains 1: a wider interval does not show that two cells are alike."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A row's time compared with the time of a base row."""

    base: Row
    row: Row
    comparison: Comparison | None = None
    trouble: str = ""
    """Why there is no ratio; empty if there is a ratio."""

    @property
    def ratio(self) -> float | None:
        """The row's time over the base row's time."""
        return self.comparison.ratio if self.comparison else None

    @property
    def failure(self) -> Failure | None:
        """The row's failure, or else the base row's."""
        return self.row.record.failure or self.base.record.failure

    @property
    def interval(self) -> tuple[float, float, float] | None:
        """Low end, ratio and high end; None if too few values leave no interval."""
        comparison = self.comparison
        if comparison is None or comparison.ratio is None or comparison.low is None or comparison.high is None:
            return None
        return comparison.low, comparison.ratio, comparison.high

    @property
    def known(self) -> Comparison | None:
        """The comparison if it has a ratio; with few samples it may have a ratio but no interval."""
        return self.comparison if self.ratio is not None else None

    @property
    def reason(self) -> str:
        """Why there is no verdict, or what the comparison says about its verdict."""
        return self.comparison.reason if self.comparison else self.trouble

    def numbers(self) -> dict[str, Any]:
        """The ratio for programs; the row's key says which cell it is."""
        comparison = self.comparison
        return {
            "ratio": comparison and comparison.ratio,
            "ratio_low": comparison and comparison.low,
            "ratio_high": comparison and comparison.high,
            "verdict": comparison.verdict if comparison else "cannot tell",
            "reason": self.reason,
            "key": self.row.record.key,
        }


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Cells ordered by a quantity of time. `first`: the cell with which the others are compared."""

    first: Row
    quantity: str
    alike: tuple[Ratio, ...]
    """No difference to the first is measurable."""
    unknown: tuple[Ratio, ...]
    """No verdict: too few samples, too wide an interval, or different environments."""
    slower: tuple[Ratio, ...]
    """Slower by the interval; the least slow comes first."""

    @property
    def leaders(self) -> list[Row]:
        """The first row, and the rows without a measurable difference to it."""
        return [self.first, *(ratio.row for ratio in self.alike)]


def ranking_of(rows: Sequence[Row], quantity: str) -> Ranking | None:
    """The ranking of the rows that have the quantity; None if no row has it."""
    timed = [row for row in rows if median_of(row.record, quantity) is not None]
    if not timed:
        return None
    first = min(timed, key=lambda row: median_of(row.record, quantity) or 0.0)
    ratios = _ratios_to(first, timed, quantity)
    # Interleaved pairs cancel drift that both cells share, so they may show a cell to be faster than the one with the least median.
    faster = [ratio for ratio in ratios if _judged_as(ratio, "faster")]
    if faster:
        first = min(faster, key=_number).row
        ratios = _ratios_to(first, timed, quantity)
    slower = [ratio for ratio in ratios if _judged_as(ratio, "slower")]
    alike = [ratio for ratio in ratios if ratio not in slower and is_judged(ratio)]
    alike.sort(key=lambda ratio: median_of(ratio.row.record, quantity) or 0.0)
    return Ranking(
        first=first,
        quantity=quantity,
        alike=tuple(alike),
        unknown=tuple(ratio for ratio in ratios if not is_judged(ratio)),
        slower=tuple(sorted(slower, key=_number)),
    )


def is_judged(ratio: Ratio) -> bool:
    """Whether there is an interval (from five samples or pairs) narrow enough to support a verdict."""
    if ratio.interval is None or ratio.comparison is None:
        return False
    low, _, high = ratio.interval
    return ratio.comparison.verdict != "cannot tell" or high <= _WIDEST * low


def timed_quantity(rows: Sequence[Row]) -> str:
    """`step` if a row has it, else the first quantity of time in these rows."""
    names = [name for row in rows for name, samples in row.record.samples.items() if samples.unit == "s"]
    return "step" if "step" in names else next(iter(names), "step")


def ranking_words(ranking: Ranking, *, per: str = "", name: Callable[[Row], str] = Row.label) -> str:
    """The ranking in a sentence: `Fastest: a, 12.3 ms; b takes 1.08 times as long (99 % interval 1.05 to 1.11).`"""
    leaders = ranking.leaders
    times = [seconds_words(median_of(row.record, ranking.quantity) or 0.0) for row in leaders]
    slower = f"; {name(ranking.slower[0].row)} takes {longer_words(ranking.slower[0])}" if ranking.slower else ""
    unknown = _unknown_words(ranking, name)
    if ranking.alike:
        interval = f", ratio {interval_words(ranking.alike[0])}" if len(leaders) == 2 else ""
        return (
            f"No difference measured between {listed(map(name, leaders), most=_NAMED)}: {listed(times, most=_NAMED)}{per}"
            f"{interval}{slower}{unknown}."
        )
    if ranking.unknown:
        return f"Cannot tell which is fastest: {name(ranking.first)} takes {times[0]}{per}{unknown}{slower}."
    if ranking.slower:
        return f"Fastest: {name(ranking.first)}, {times[0]}{per}{slower}."
    return f"{name(ranking.first)} takes {times[0]}{per}."


def _unknown_words(ranking: Ranking, name: Callable[[Row], str]) -> str:
    """The cells without a verdict, and why; empty if there are none."""
    if not ranking.unknown:
        return ""
    few = [ratio for ratio in ranking.unknown if ratio.known and ratio.known.each]
    if few and len(few) == len(ranking.unknown):
        pairs = {len(ratio.known.each) for ratio in few if ratio.known}
        count = f"{max(pairs)} pair{'s' if max(pairs) > 1 else ''}"
        least, *more = ((name(ratio.row), _each_words(ratio)) for ratio in sorted(few, key=_number))
        each = [f"{least[0]} took {least[1]} times as long", *(" ".join(other) for other in more)]
        return f"; no verdict from {count} (at least {MINIMUM_PAIRS} are needed): {', '.join(each)}"
    ratio = ranking.unknown[0]
    others = f" and {len(ranking.unknown) - 1} more" if len(ranking.unknown) > 1 else ""
    return f"; no verdict on {name(ratio.row)}{others} ({_no_verdict_reason(ratio)})"


def _each_words(ratio: Ratio) -> str:
    """The ratio of each pair, or the range of more than two: `1.13 and 1.19`."""
    each = sorted(ratio.known.each) if ratio.known else []
    numbers = [f"{number:.2f}" for number in each]
    return listed(numbers) if len(numbers) < 3 else f"{numbers[0]} to {numbers[-1]}"


def _no_verdict_reason(ratio: Ratio) -> str:
    """Why there is no verdict, after the ratio if there is one."""
    return f"{ratio_words(ratio.ratio)} times as long; {ratio.reason}" if ratio.ratio is not None else ratio.reason


def interval_words(ratio: Ratio) -> str:
    """`1.08 (99 % interval 1.05 to 1.11)`."""
    low, middle, high = ratio.interval or (0.0, 0.0, 0.0)
    return f"{ratio_words(middle)} (99 % interval {ratio_words(low)} to {ratio_words(high)})"


def longer_words(ratio: Ratio) -> str:
    """`1.08 times as long (99 % interval 1.05 to 1.11)`."""
    return interval_words(ratio).replace(" (", " times as long (")


def against_words(axis: str, ratios: Sequence[Ratio]) -> str:
    """The verdict along a compared axis: how the cells of each value compare with those of the axis's first value."""
    first = words(ratios[0].base.point.get(axis))
    by_value = grouped(ratios, lambda ratio: words(ratio.row.point.get(axis)))
    # A value alone, such as `step`, would read like another field's. Switches take no value.
    field = fields_of(RunConfig).get(axis)
    is_option = field is not None and not isinstance(field.default, bool)
    named = {value: f"`--{axis.replace('_', '-')} {value}`" if is_option else value for value in by_value}
    verdicts = [f"{named[value]} {counted_words(alike)}" for value, alike in by_value.items()]
    return f"Against {axis.replace('_', ' ')} {first}: {'; '.join(verdicts)}."


def fastest_words(axis: str, ratios: Sequence[Ratio]) -> str:
    """`Fastest: model in 2 of 3 cells (small 256 and large 256), model or block in 1 (medium 256).`; empty for two values.

    `ratios`: to the axis's first value. Where no difference is measurable, all values without one are named.
    """
    by_leaders: dict[str, list[str]] = {}
    groups = grouped(ratios, lambda ratio: id(ratio.base)).values()
    for group in groups:
        rows = [group[0].base, *(ratio.row for ratio in group)]
        ranking = ranking_of(rows, timed_quantity(rows)) if len(rows) > 2 else None
        if ranking is not None and not ranking.unknown:
            leaders = " or ".join(words(row.point.get(axis)) for row in ranking.leaders)
            by_leaders.setdefault(leaders, []).append(group[0].base.label(without=[axis]))
    if not by_leaders:
        return ""
    of, parts = f" of {len(groups)} cells", []
    for leaders, cells in by_leaders.items():
        named = f" ({listed(cells)})" if len(cells) <= _NAMED and len(groups) > 1 else ""
        parts.append(f"{leaders} in {len(cells)}{of}{named}")
        of = ""
    return f"Fastest: {listed(parts)}."


def counted_words(ratios: Sequence[Ratio]) -> str:
    """`is faster: it takes 0.171 (...) of the time`, or in how many cells it is faster, slower, or shows no difference."""
    judged = [ratio for ratio in ratios if is_judged(ratio)]
    if len(ratios) == 1:
        [ratio] = ratios
        if ratio not in judged:
            return f"has no verdict ({_no_verdict_reason(ratio)})"
        word = ratio.known.word if ratio.known else ""
        what = f"is {word}" if word in ("faster", "slower") else _unlike_words(word)
        return f"{what}: it takes {interval_words(ratio)} of the time{_host_words(word, ratios)}"
    parts = []
    by_word = grouped(judged, lambda ratio: ratio.known.word if ratio.known else "")
    for word in sorted(by_word, key=lambda word: ("faster", "slower", "cannot tell", word).index(word)):
        alike = by_word[word]
        what = f"is {word}" if word in ("faster", "slower") else _unlike_words(word)
        low, high = (three_digits(choose(map(_number, alike))) for choose in (min, max))
        span = low if low == high else f"{low} to {high}"
        parts.append(f"{what} in {len(alike)} of {len(ratios)} cells ({span} of the time{_host_words(word, alike)})")
    unsure = grouped([ratio for ratio in ratios if ratio not in judged], no_verdict_words)
    for reason, alike in unsure.items():
        seen = [ratio_words(ratio.ratio) for ratio in alike if ratio.ratio is not None]
        numbers = f"{listed(seen, most=_NAMED)} of the time; " if seen else ""
        parts.append(f"has no verdict in {len(alike)} ({numbers}{reason})")
    return listed(parts)


def no_verdict_words(ratio: Ratio) -> str:
    """Why there is no verdict, in a few words: `too few pairs: 2, and at least 5 are needed`."""
    if ratio.interval is not None:
        return "too wide an interval"
    return ratio.reason.split("; ", maxsplit=1)[0] or "too few samples"


def _host_words(word: str, ratios: Sequence[Ratio]) -> str:
    """`; limited by the host there: the GPU works for 30.2 % of the step`, if that alone may make cells slower."""
    limited = [ratio.row.record for ratio in ratios if host_limit(ratio.row.record) == LAUNCH_BOUND]
    if word != "slower" or not limited:
        return ""
    some = "there" if len(limited) == len(ratios) else f"in {len(limited)}"
    steps = [(record.fact("device_busy_s"), median_of(record, "step")) for record in limited]
    shares = sorted(busy_s / step_s for busy_s, step_s in steps if busy_s and step_s)
    span = (
        percent(shares[0]) if len(shares) == 1 else f"{percent(shares[0])} to {percent(shares[-1])}" if shares else ""
    )
    works = f": the GPU works for {span} % of {'the step' if len(shares) == 1 else 'each'}" if shares else ""
    return f"; limited by the host {some}{works}"


def _unlike_words(word: str) -> str:
    """Words for a verdict that is neither faster nor slower, with the same word as in the tables."""
    return "cannot be told apart" if word == "cannot tell" else f"differs by {word}"


def _judged_as(ratio: Ratio, verdict: str) -> bool:
    return is_judged(ratio) and ratio.comparison is not None and ratio.comparison.verdict == verdict


def _ratios_to(first: Row, rows: Sequence[Row], quantity: str) -> list[Ratio]:
    return [ratio_of(first, row, quantity) for row in rows if row is not first]


def _number(ratio: Ratio) -> float:
    return ratio.ratio or 1.0


# Times of rows: medians and means of one row, and the ratio of two rows' times.


def summary_of(record: Record, quantity: str) -> Summary | None:
    """The summary of a quantity's samples; None if the cell failed or has no samples."""
    samples = record.samples.get(quantity)
    return summarize(samples) if record.failure is None and samples and samples.values else None


def median_of(record: Record, quantity: str) -> float | None:
    """The median of a quantity's samples; None if the cell failed or has no samples."""
    samples = record.samples.get(quantity)
    return median(samples.values) if record.failure is None and samples and samples.values else None


def median_words(record: Record, quantity: str) -> str:
    """`62.10 ± 0.31 ms`, with half the interquartile range; empty if nothing was timed."""
    time = summary_of(record, quantity)
    return f"{milliseconds(time.median, time.half_range)} ms" if time else ""


def median_and_range(quantity: str) -> Callable[[Any], tuple[float, float | None] | None]:
    """A function of a table's row for columns of times: the median, and half the interquartile range of several samples."""

    def get(row: Any) -> tuple[float, float | None] | None:
        time = summary_of(row_of(row).record, quantity)
        return (time.median, time.half_range if time.n > 1 else None) if time else None

    return get


def mean_column(quantity: str, named: str) -> Column:
    """A column of mean and standard deviation, as papers state them."""

    def get(row: Any) -> tuple[float, float | None] | None:
        time = summary_of(row_of(row).record, quantity)
        return (time.mean, time.std if time.n > 1 else None) if time else None

    return Column(f"{named}, mean ± std (ms)", MS_STD, get, optional=True, more=True)


def ratio_of(base: Row, row: Row, quantity: str) -> Ratio:
    """The ratio of two rows in a quantity of time, or why there is none."""
    failure = row.record.failure or base.record.failure
    if failure is not None:
        return Ratio(base=base, row=row, trouble=failure_word(failure))
    try:
        comparison = compare_records(base.record, row.record, quantity=quantity)
    except ValueError as error:  # another machine, or other code
        return Ratio(base=base, row=row, trouble=str(error))
    return Ratio(base=base, row=row, comparison=comparison, trouble="" if comparison.ratio else comparison.reason)
