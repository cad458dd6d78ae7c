"""The answer of parallel strategies: which is the quickest, what communication costs it, and what to try next."""

from collections.abc import Sequence

from trainstep.costs.strategies import YARDSTICK, strategy_named
from trainstep.report.answers import Answer
from trainstep.report.forms import byte_words, percent, seconds_words, times_words
from trainstep.report.parallel_rows import Way, ways_of
from trainstep.report.ranking import Ranking, is_judged, longer_words, ranking_of, ranking_words
from trainstep.report.ratios import median_of
from trainstep.report.rows import Row, grouped
from trainstep.traces.launch_bound import LAUNCH_BOUND, step_limit

_STEP = "step"
_PLACES = 3
"""Models, sizes or machines that are spoken of one by one."""
_WORTH_SHARE = 0.05
"""A share of the step, or of the peak: what is less is not worth a change."""


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
        return f" Whether communication costs {way.name} anything cannot be told: {seen}."
    exposed_s, under_way_s = way.record.fact("exposed_s"), way.record.fact("communication_s")
    if exposed_s is None or not under_way_s or way.sync == YARDSTICK:
        return ""
    waiting_s = way.record.fact("waiting_s")
    waits = f" ({seconds_words(waiting_s)} of them waiting for the slowest rank)" if waiting_s else ""
    return (
        f" In one profiled step of {way.name}, messages were under way for {seconds_words(under_way_s)}{waits}, "
        f"{seconds_words(exposed_s)} with no computing beside them."
    )


def _cost_share(way: Way) -> float:
    """The share of the step that communication costs, by the median of the pairs; 0 where the interval shows none."""
    ratio = way.ratio(_STEP)
    if ratio is None or not is_judged(ratio) or ratio.known is None or ratio.known.verdict != "slower":
        return 0.0
    return 1 - 1 / (ratio.known.ratio or 1.0)


def _next_try(ranking: Ranking, first: Way, talking: Sequence[Way], ways_by_row: dict[int, Way]) -> str:
    """Which of strategies that are alike in time to take; then fewer launches, fewer bytes, or less memory for more time."""
    leaders = [ways_by_row[id(row)] for row in ranking.leaders]
    smallest, largest = (choose(leaders, key=_peak_bytes) for choose in (min, max))
    alike = ""
    if _saves(smallest, largest):
        alike = (
            f"Take {smallest.name}: {byte_words(_peak_bytes(smallest))} at the peak where {largest.name} has "
            f"{byte_words(_peak_bytes(largest))}, with no difference in time seen."
        )
    faster = _captured(smallest if alike else first, talking) or _fewer_bytes(first, talking)
    return " ".join(filter(None, (alike, faster))) or _less_memory(ranking, first, ways_by_row)


def _captured(way: Way, talking: Sequence[Way]) -> str:
    """One CUDA graph a step, where the host launches for longer than the GPU of a rank that does not talk works."""
    step_s, enqueue_s = (median_of(way.record, name) for name in (_STEP, "enqueue"))
    busy_s = way.base.record.fact("device_busy_s") if way.base else None
    tried = any(other.record.config.get("capture", "none") != "none" for other in talking)
    counts_on_the_host = way.record.config.get("adamw") in ("loop", "foreach")
    if tried or counts_on_the_host or not step_s or not busy_s or enqueue_s is None:
        return ""
    if step_limit(busy_s=busy_s, enqueue_s=enqueue_s, step_s=step_s) != LAUNCH_BOUND:
        return ""
    left_s = max(busy_s, way.record.fact("transfer_s", 0.0))
    return (
        f"The host limits {way.name}, launching for {percent(enqueue_s / step_s)} % of its step: `--capture auto` should make it "
        f"up to {times_words(step_s / left_s)} as fast, for of {seconds_words(step_s)} a GPU works {seconds_words(busy_s)} without "
        "messages."
    )


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
