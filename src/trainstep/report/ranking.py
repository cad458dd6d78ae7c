"""Which cell is the quickest, by the intervals of `compare`: medians that overlap make nobody the quickest.

A cell is slower than another where the 99 % interval of their ratio says so and the ratio leaves the minimum effect
(records/compare.py). Below five samples, or between unlike environments, nothing can be told.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from trainstep.report.forms import listed, ratio_words, seconds_words, three_digits
from trainstep.report.ratios import Ratio, median_of, ratio_of
from trainstep.report.rows import Row, grouped, words

_NAMED = 4
"""Cells named in a sentence."""
_WIDEST = 3.0
"""High end over low end of an interval with 1 inside: a wider one is no sign of likeness."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Cells by a quantity of time. `first`: the one that the others are held to."""

    first: Row
    quantity: str
    alike: tuple[Ratio, ...]
    """No difference seen to the first."""
    unknown: tuple[Ratio, ...]
    """Nothing can be told: too few samples, too wide an interval, or unlike environments."""
    slower: tuple[Ratio, ...]
    """By the interval; the least slow first."""

    @property
    def leaders(self) -> list[Row]:
        """The first and all in which no difference to it is seen."""
        return [self.first, *(ratio.row for ratio in self.alike)]


def ranking_of(rows: Sequence[Row], quantity: str) -> Ranking | None:
    """The ranking of the rows that have the quantity; None where none has."""
    timed = [row for row in rows if median_of(row.record, quantity) is not None]
    if not timed:
        return None
    first = min(timed, key=lambda row: median_of(row.record, quantity) or 0.0)
    ratios = _held_to(first, timed, quantity)
    faster = [ratio for ratio in ratios if is_judged(ratio) and ratio.found and ratio.found.verdict == "faster"]
    if faster:  # by pairs of turns, which leave out what medians share
        first = min(faster, key=_ratio).row
        ratios = _held_to(first, timed, quantity)
    slower = [ratio for ratio in ratios if is_judged(ratio) and ratio.found and ratio.found.verdict == "slower"]
    alike = [ratio for ratio in ratios if ratio not in slower and is_judged(ratio)]
    alike.sort(key=lambda ratio: median_of(ratio.row.record, quantity) or 0.0)
    return Ranking(
        first=first,
        quantity=quantity,
        alike=tuple(alike),
        unknown=tuple(ratio for ratio in ratios if not is_judged(ratio)),
        slower=tuple(sorted(slower, key=_ratio)),
    )


def is_judged(ratio: Ratio) -> bool:
    """Whether there is an interval, which takes five samples or pairs, and one that says something."""
    if ratio.interval is None or ratio.found is None:
        return False
    low, _, high = ratio.interval
    return ratio.found.verdict != "cannot tell" or high <= _WIDEST * low


def timed_quantity(rows: Sequence[Row]) -> str:
    """`step` where a row has it, else what the first row timed first."""
    names = [name for row in rows for name, samples in row.record.samples.items() if samples.unit == "s"]
    return "step" if "step" in names else next(iter(names), "step")


def ranking_words(ranking: Ranking, *, of: str = "", name: Callable[[Row], str] = Row.label) -> str:
    """The ranking in a sentence: `Quickest: a, 12.3 ms; b takes 1.08 times as long (99 % interval 1.05 to 1.11).`"""
    leaders = ranking.leaders
    times = [seconds_words(median_of(row.record, ranking.quantity) or 0.0) for row in leaders]
    behind = f"; {name(ranking.slower[0].row)} takes {longer_words(ranking.slower[0])}" if ranking.slower else ""
    cannot = _cannot_tell(ranking, name)
    if ranking.alike:
        interval = f", ratio {interval_words(ranking.alike[0])}" if len(leaders) == 2 else ""
        return f"No difference seen between {_few(map(name, leaders))}: {_few(times)}{of}{interval}{behind}{cannot}."
    if ranking.unknown:
        return f"Cannot tell which is the quickest: {name(ranking.first)} takes {times[0]}{of}{cannot}{behind}."
    if ranking.slower:
        return f"Quickest: {name(ranking.first)}, {times[0]}{of}{behind}."
    return f"{name(ranking.first)} takes {times[0]}{of}."


def _few(names: Iterable[str]) -> str:
    """`a, b and c`, or `a, b, c, d and 2 more`."""
    every = list(names)
    return listed([*every[:_NAMED], *([f"{len(every) - _NAMED} more"] if len(every) > _NAMED else [])])


def _cannot_tell(ranking: Ranking, name: Callable[[Row], str]) -> str:
    """What nothing can be told of, and why."""
    if not ranking.unknown:
        return ""
    ratio = ranking.unknown[0]
    others = f" and {len(ranking.unknown) - 1} more" if len(ranking.unknown) > 1 else ""
    return f"; of {name(ratio.row)}{others} nothing can be told ({_untold(ratio)})"


def _untold(ratio: Ratio) -> str:
    """Why nothing can be told, beside the ratio where there is one."""
    why = ratio.found.reason if ratio.found else ratio.trouble
    return f"{ratio_words(ratio.ratio)} times as long; {why}" if ratio.ratio is not None else why


def interval_words(ratio: Ratio) -> str:
    """`1.08 (99 % interval 1.05 to 1.11)`."""
    low, middle, high = ratio.interval or (0.0, 0.0, 0.0)
    return f"{ratio_words(middle)} (99 % interval {ratio_words(low)} to {ratio_words(high)})"


def longer_words(ratio: Ratio) -> str:
    """`1.08 times as long (99 % interval 1.05 to 1.11)`."""
    return interval_words(ratio).replace(" (", " times as long (")


def against_words(axis: str, ratios: Sequence[Ratio]) -> str:
    """The verdict along a compared axis: of each value how its cells compare with those of the axis's first value."""
    first = words(ratios[0].base.point.get(axis))
    said = [
        f"{value} {counted_words(alike)}"
        for value, alike in grouped(ratios, lambda ratio: words(ratio.row.point.get(axis))).items()
    ]
    return f"Against {axis.replace('_', ' ')} {first}: {'; '.join(said)}."


def counted_words(ratios: Sequence[Ratio]) -> str:
    """`is faster, 0.171 (...) of its time`, or in how many cells it is."""
    judged = [ratio for ratio in ratios if is_judged(ratio)]
    if len(ratios) == 1:
        [ratio] = ratios
        if ratio not in judged:
            return f"cannot be told ({_untold(ratio)})"
        verdict = ratio.known.verdict if ratio.known else ""
        what = "shows no difference" if verdict == "cannot tell" else f"is {verdict}"
        return f"{what}: it takes {interval_words(ratio)} of the time"
    verdicts = grouped(judged, lambda ratio: ratio.known.verdict if ratio.known else "")
    parts = []
    for verdict, word in (("faster", "is faster"), ("slower", "is slower"), ("cannot tell", "shows no difference")):
        alike = verdicts.get(verdict, [])
        if alike:
            low, high = (three_digits(choose(map(_ratio, alike))) for choose in (min, max))
            span = low if low == high else f"{low} to {high}"
            parts.append(f"{word} in {len(alike)} of {len(ratios)} cells ({span} of the time)")
    if len(judged) < len(ratios):
        untold = [ratio_words(ratio.ratio) for ratio in ratios if ratio not in judged and ratio.ratio is not None]
        seen = f" ({_few(untold)} of the time, by too few pairs or too wide an interval)" if untold else ""
        parts.append(f"cannot be told in {len(ratios) - len(judged)}{seen}")
    return listed(parts)


def _held_to(first: Row, rows: Sequence[Row], quantity: str) -> list[Ratio]:
    return [ratio_of(first, row, quantity) for row in rows if row is not first]


def _ratio(ratio: Ratio) -> float:
    return ratio.interval[1] if ratio.interval else 1.0
