"""The answer of parallel strategies: which is the quickest, what communication costs it, and what to try next."""

from collections.abc import Sequence

from trainstep.costs.strategies import YARDSTICK, strategy_named
from trainstep.report.answers import Answer
from trainstep.report.forms import byte_words, percent, seconds_words
from trainstep.report.parallel_rows import Way, ways_of
from trainstep.report.ranking import Ranking, is_judged, longer_words, ranking_of, ranking_words
from trainstep.report.ratios import median_of
from trainstep.report.rows import Row, grouped
from trainstep.traces.launch_bound import ENQUEUE_SHARE

_STEP = "step"
_PLACES = 3
"""Models, sizes or machines that are spoken of one by one."""
_WORTH_SHARE = 0.05
"""Of the step, or of the peak: what is less is not worth a change."""


def parallel_answer(rows: Sequence[Row]) -> Answer | None:
    """The quickest strategy for each model and size, what its communication costs, and the next to try."""
    by_place = grouped(ways_of(rows), lambda way: way.place)
    verdicts, suggestions = [], []
    for place, ways in by_place.items():
        ways_by_row = {id(way.row): way for way in ways}
        talking = [way for way in ways if way.sync != YARDSTICK]
        ranking = ranking_of([way.row for way in talking or ways], _STEP)
        if ranking is None:
            continue
        first = ways_by_row[id(ranking.first)]
        said = ranking_words(ranking, of=" a step", name=lambda row: ways_by_row[id(row)].name)  # noqa: B023
        named = f"{place}: " if len(by_place) > 1 else ""
        verdicts.append(f"{named}{said}{_cost(first)}")
        suggestions.append(_next_try(ranking, first, talking, ways_by_row))
    if not verdicts:
        return None
    more = [f"The tables have {len(verdicts) - _PLACES} more."] if len(verdicts) > _PLACES else []
    return Answer(
        workload="parallel",
        verdict=" ".join([*verdicts[:_PLACES], *more]),
        suggestion=next(filter(None, suggestions), ""),
    )


def _cost(way: Way) -> str:
    """What its communication costs the whole step, against ranks that do not talk; without these, what one trace saw."""
    ratio = way.ratio(_STEP)
    if ratio is not None and is_judged(ratio):
        seen = f"its step takes {longer_words(ratio)} as without any"
        if share := _cost_share(way):
            return f" Communication costs {way.name} {percent(share)} % of its step: {seen}."
        return f" No cost of communication is seen in {way.name}: {seen}."
    exposed_s, under_way_s = way.record.fact("exposed_s"), way.record.fact("communication_s")
    if exposed_s is None or not under_way_s or way.sync == YARDSTICK:
        return ""
    return (
        f" In one profiled step of {way.name}, {seconds_words(exposed_s)} of {seconds_words(under_way_s)} of communication had no "
        f"computing beside it, waiting for the slowest rank included."
    )


def _cost_share(way: Way) -> float:
    """The share of the step that communication costs, by the median of the pairs; 0 where the interval shows none."""
    ratio = way.ratio(_STEP)
    if ratio is None or not is_judged(ratio) or ratio.known is None or ratio.known.verdict != "slower":
        return 0.0
    return 1 - 1 / (ratio.known.ratio or 1.0)


def _next_try(ranking: Ranking, first: Way, talking: Sequence[Way], ways_by_row: dict[int, Way]) -> str:
    """The change that the records say most for: less memory for the same time, fewer bytes, fewer launches, less memory."""
    leaders = [ways_by_row[id(row)] for row in ranking.leaders]
    smallest = min(leaders, key=_peak_bytes)
    if _saves(smallest, first) or (len(leaders) > 1 and _saves(smallest, max(leaders, key=_peak_bytes))):
        largest = max(leaders, key=_peak_bytes)
        return (
            f"Take {smallest.name}: {byte_words(_peak_bytes(smallest))} at the peak where {largest.name} has "
            f"{byte_words(_peak_bytes(largest))}, with no difference in time seen."
        )
    return _fewer_bytes(first, talking) or _fewer_launches(first) or _less_memory(ranking, first, ways_by_row)


def _fewer_bytes(way: Way, talking: Sequence[Way]) -> str:
    """Gradients averaged in bf16, where communication costs enough and nobody tried."""
    tried = any(other.record.config.get("reduce_dtype") == "bf16" for other in talking)
    has_option = "reduce_dtype" in strategy_named(way.sync).options and way.record.config.get("precision") != "bf16"
    share = _cost_share(way)
    if tried or not has_option or share < 2 * _WORTH_SHARE:
        return ""
    cost_s = share * (median_of(way.record, _STEP) or 0.0)
    return (
        f"`--reduce-dtype bf16` halves the bytes of gradients: it should take up to {seconds_words(cost_s / 2)} off {way.name}, "
        f"{percent(share / 2)} % of its step, half of what communication costs."
    )


def _fewer_launches(way: Way) -> str:
    step_s, enqueue_s = median_of(way.record, _STEP), median_of(way.record, "enqueue")
    if (
        not step_s
        or enqueue_s is None
        or enqueue_s < ENQUEUE_SHARE * step_s
        or way.record.config.get("compile") != "none"
    ):
        return ""
    share = percent(enqueue_s / step_s)
    return f"`--compile block` launches less: the host launches for {share} % of the step of {way.name}, so it limits the step."


def _less_memory(ranking: Ranking, first: Way, ways_by_row: dict[int, Way]) -> str:
    """The least memory among slower strategies, and what it costs in time."""
    others = [(ways_by_row[id(ratio.row)], ratio) for ratio in ranking.slower]
    way, ratio = min(others, key=lambda other: _peak_bytes(other[0]), default=(first, None))
    if ratio is None or not _saves(way, first):
        return ""
    return (
        f"Where memory is short, {way.name} has {byte_words(_peak_bytes(way))} at the peak for {first.name}'s "
        f"{byte_words(_peak_bytes(first))}, and takes {longer_words(ratio)}."
    )


def _saves(way: Way, other: Way) -> bool:
    return 0 < _peak_bytes(way) < (1 - _WORTH_SHARE) * _peak_bytes(other)


def _peak_bytes(way: Way) -> float:
    return float(way.record.fact("peak_allocated_bytes", way.record.fact("peak_rss_bytes", 0)))
