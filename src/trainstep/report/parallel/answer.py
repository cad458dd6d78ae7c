"""The answers for parallel strategies, collectives and ceilings: the fastest, its limit, and what to try next."""

import itertools
from collections.abc import Mapping, Sequence

from trainstep.config.machine import machine_spec
from trainstep.costs.strategies import BASELINE, Part, strategy_named
from trainstep.grouping import grouped
from trainstep.records.compare import MINIMUM_PAIRS
from trainstep.records.derive import bandwidth
from trainstep.records.record import Record
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.forms import (
    byte_words,
    in_percent,
    listed,
    percent,
    rate_words,
    seconds_words,
    three_digits,
    times_words,
)
from trainstep.report.kit.ranking import (
    Ranking,
    is_judged,
    longer_words,
    median_of,
    ranking_of,
    ranking_words,
    ratio_of,
)
from trainstep.report.kit.rows import Row
from trainstep.report.parallel.collectives import fit_of, series_of, size_words, transport_words
from trainstep.report.parallel.links import level_words, slowest_words
from trainstep.report.parallel.tables import StrategyRow, strategies_of
from trainstep.report.step.recomputation import chosen_sentence
from trainstep.traces.verdict import LAUNCH_BOUND, step_limit

_STEP, _WINDOW = "step", "window_step"
_PLACES = 3
"""The most combinations of model, size and machine that get a sentence each."""
_SERIES = 3
"""The most series of collectives that get a sentence each."""
_WORTH_SHARE = 0.05
"""The least share of the step, or of the peak, for which a change is suggested."""
_NEAR_FULL = 0.8
"""The share of the best bandwidth beyond which larger messages gain little."""


def parallel_answer(rows: Sequence[Row]) -> Answer | None:
    """The fastest strategy for each model and size, what its communication costs, and what to try next."""
    by_place = grouped(strategies_of(rows), lambda strategy: strategy.place)
    verdicts, suggestions = [], []
    for place, strategies in by_place.items():
        strategies_by_row = {id(strategy.row): strategy for strategy in strategies}
        communicating = [strategy for strategy in strategies if strategy.sync != BASELINE]
        ranking = ranking_of([strategy.row for strategy in communicating or strategies], _STEP)
        if ranking is None:
            continue
        first = strategies_by_row[id(ranking.first)]
        words = ranking_words(ranking, per=" a step", name=lambda row: strategies_by_row[id(row)].name)  # noqa: B023
        prefix = f"{place}: " if len(by_place) > 1 else ""
        chosen = chosen_sentence(first.record)
        verdicts.append(f"{prefix}{words}{_cost(first)}{f' {chosen}' if chosen else ''}")
        suggestions.append(
            " ".join(filter(None, (_more_pairs(ranking), _next_try(ranking, first, communicating, strategies_by_row))))
        )
    if not verdicts:
        return None
    more = [f"The tables have {len(verdicts) - _PLACES} more."] if len(verdicts) > _PLACES else []
    return Answer(
        workload="parallel",
        verdict=" ".join([*verdicts[:_PLACES], *more]),
        suggestion=next(filter(None, suggestions), ""),
    )


def _more_pairs(ranking: Ranking) -> str:
    """How to settle a ranking with too few pairs; empty if it has enough."""
    few = [ratio for ratio in ranking.unknown if ratio.known and ratio.known.paired and ratio.known.n < MINIMUM_PAIRS]
    return f"Repeat with `--rounds {MINIMUM_PAIRS}` for a verdict." if few else ""


def _cost(strategy: StrategyRow) -> str:
    """What communication costs the whole step, by comparison with ranks that do not communicate, else by one profiled step."""
    ratio = strategy.ratio(_STEP)
    if ratio is not None and is_judged(ratio):
        compared = f"its step takes {longer_words(ratio)} as without communication"
        if share := _cost_share(strategy):
            return f" Communication costs {strategy.name} {percent(share)} % of its step: {compared}.{_in_windows(strategy)}"
        return f" Whether communication costs {strategy.name} anything cannot be told: {compared}."
    times = strategy.communication
    exposed_s, in_flight_s, waiting_s = (times.get(f"{name}_s") for name in ("exposed", "communication", "waiting"))
    if exposed_s is None or not in_flight_s or strategy.sync == BASELINE:
        return ""
    waits = f" ({seconds_words(waiting_s)} of it waiting for the slowest rank)" if waiting_s else ""
    rank = f" on rank {times['rank']:.0f}, which waits least" if times.get("rank") is not None else ""
    return (
        f" In one profiled step of {strategy.name}{rank}, messages were in flight for {seconds_words(in_flight_s)}{waits}; "
        f"{seconds_words(exposed_s)} was exposed, with no computation at the same time."
    )


def _in_windows(strategy: StrategyRow) -> str:
    """The cost of communication in windows of steps, if they do not confirm a single step's cost.

    A single step ends with a wait for the device, which charges it for messages that the next step would hide.
    """
    ratio = strategy.ratio(_WINDOW)
    if ratio is None or not is_judged(ratio) or (ratio.known and ratio.known.verdict == "slower"):
        return ""
    return f" Windows of several steps, without a wait between them, show no certain cost: {longer_words(ratio)}."


def _cost_share(strategy: StrategyRow) -> float:
    """The share of the step that communication costs, from the median of the pairs; 0 if the interval shows no cost."""
    ratio = strategy.ratio(_STEP)
    if ratio is None or not is_judged(ratio) or ratio.known is None or ratio.known.verdict != "slower":
        return 0.0
    return 1 - 1 / (ratio.known.ratio or 1.0)


def _next_try(
    ranking: Ranking,
    first: StrategyRow,
    communicating: Sequence[StrategyRow],
    strategies_by_row: dict[int, StrategyRow],
) -> str:
    """The strategy with the least memory among equally fast ones, then a way to save time; else less memory for more time."""
    leaders = [strategies_by_row[id(row)] for row in ranking.leaders if not _is_slower_in_windows(first, row)]
    smallest, largest = (choose(leaders, key=_peak_bytes) for choose in (min, max))
    alike = ""
    if _saves(smallest, largest):
        alike = (
            f"Take {smallest.name}: {byte_words(_peak_bytes(smallest))} at the peak where {largest.name} has "
            f"{byte_words(_peak_bytes(largest))}, with no difference measured in time."
        )
    faster = _captured(smallest if alike else first, communicating)
    faster = faster or _fewer_bytes(first, communicating)
    return " ".join(filter(None, (alike, faster))) or _less_memory(ranking, first, strategies_by_row)


def _is_slower_in_windows(first: StrategyRow, row: Row) -> bool:
    """Whether a row that single steps cannot tell from the first is slower in windows of steps, which training consists of."""
    known = None if row is first.row else ratio_of(first.row, row, _WINDOW).known
    return known is not None and known.verdict == "slower"


def _captured(strategy: StrategyRow, communicating: Sequence[StrategyRow]) -> str:
    """The gain of a CUDA graph per step, if the step is launch-bound by the GPU time of a rank that does not communicate."""
    step_s, enqueue_s = (median_of(strategy.record, name) for name in (_STEP, "enqueue"))
    busy_s = strategy.base.record.fact("device_busy_s") if strategy.base else None
    tried = any(other.record.config.get("capture", "none") != "none" for other in communicating)
    counts_on_the_host = strategy.record.config.get("adamw") in ("loop", "foreach")
    if tried or counts_on_the_host or not step_s or not busy_s or enqueue_s is None:
        return ""
    if step_limit(busy_s=busy_s, enqueue_s=enqueue_s, step_s=step_s) != LAUNCH_BOUND:
        return ""
    messages = strategy.communication
    left_s = max(busy_s, messages.get("transfer_s") or 0.0)
    exposed_s = messages.get("exposed_s") or 0.0
    as_now = step_s / (busy_s + exposed_s)
    # A strategy that shards the optimizer updates fewer parameters than the rank without messages: that is no bound for it.
    most = "about" if Part.OPTIMIZER_STATE in strategy_named(strategy.sync).shards else "at most"
    exposed = f", or {times_words(as_now)} if messages stay as exposed as now" if exposed_s and as_now > 1 else ""
    return (
        f"The host limits {strategy.name}, launching for {percent(enqueue_s / step_s)} % of its step: `--capture auto` can make "
        f"it {most} {times_words(step_s / left_s)} as fast{exposed}, because the GPU of a rank without messages works for "
        f"{seconds_words(busy_s)}."
    )


def _fewer_bytes(strategy: StrategyRow, communicating: Sequence[StrategyRow]) -> str:
    """The gain of averaging gradients in bf16, if communication costs enough and no record has tried it."""
    tried = any(other.record.config.get("reduce_dtype") == "bf16" for other in communicating)
    has_option = "reduce_dtype" in strategy_named(strategy.sync).options and strategy.record.config.get(
        "precision"
    ) not in ("bf16", "bf16_master")
    share = _cost_share(strategy)
    if tried or not has_option or share < 2 * _WORTH_SHARE:
        return ""
    cost_s = share * (median_of(strategy.record, _STEP) or 0.0)
    return (
        f"`--reduce-dtype bf16` halves the bytes of gradients: it can take at most {seconds_words(cost_s / 2)} off "
        f"{strategy.name}, {percent(share / 2)} % of its step, which is half the cost of communication."
    )


def _less_memory(ranking: Ranking, first: StrategyRow, strategies_by_row: dict[int, StrategyRow]) -> str:
    """The slower strategy with the least memory, and its cost in time."""
    others = [(strategies_by_row[id(ratio.row)], ratio) for ratio in ranking.slower]
    strategy, ratio = min(others, key=lambda other: _peak_bytes(other[0]), default=(first, None))
    if ratio is None or not _saves(strategy, first):
        return ""
    return (
        f"If memory is short, {strategy.name} has {byte_words(_peak_bytes(strategy))} at the peak for {first.name}'s "
        f"{byte_words(_peak_bytes(first))}, and takes {longer_words(ratio)}."
    )


def _saves(strategy: StrategyRow, other: StrategyRow) -> bool:
    return 0 < _peak_bytes(strategy) < (1 - _WORTH_SHARE) * _peak_bytes(other)


def _peak_bytes(strategy: StrategyRow) -> float:
    return float(strategy.record.fact("peak_allocated_bytes", strategy.record.fact("peak_rss_bytes", 0)))


def collectives_answer(rows: Sequence[Row]) -> Answer | None:
    """The bandwidth and latency of each series, and the message size that reaches most of the bandwidth."""
    series = [alike for alike in series_of(rows).values() if any(bandwidth(row.record) for row in alike)]
    if not series:
        alone = min(rows, key=lambda row: row.record.config["mib"])
        return Answer(workload="collective", verdict=f"{_name(alone)} sends nothing: there is only one rank.")
    more = [f"The tables have {len(series) - _SERIES} more."] if len(series) > _SERIES else []
    return Answer(
        workload="collective",
        verdict=" ".join([*map(_series_words, series[:_SERIES]), *more]),
        suggestion=_message_size([alike for alike in series if _link(alike) == _link(series[0])]),
    )


def _series_words(rows: Sequence[Row]) -> str:
    """`all_reduce of fp32 on 2 ranks by nccl: 370 GB/s on the bus at 1.00 GiB, 82.2 % of the link, plus 25 µs latency per call.`"""
    best, rate, share = _best(rows)
    link = f", {percent(share)} % of the link" if share else ""
    fit = fit_of(rows)
    latency = f", plus {seconds_words(fit.alpha_s)} latency per call" if fit and fit.alpha_s > 0 else ""
    slowest = f"; {words}" if (words := slowest_words(rows)) else ""
    return f"{_name(best)}: {rate_words(rate, 'bytes/s')} on the bus at {_size(best)}{link}{latency}{slowest}."


def _message_size(series: Sequence[Sequence[Row]]) -> str:
    """The least size at which every operation reaches half of its best bandwidth, as advice for the size of buckets.

    `series`: one of each operation, on the same link.
    """
    shares: dict[float, dict[str, float]] = {}
    for rows in series:
        _, rate, _ = _best(rows)
        for row in rows:
            if speed := bandwidth(row.record):
                config = row.record.config
                shares.setdefault(config["mib"], {})[config["operation"]] = speed.bus_bytes_per_s / rate
    shared = {mib: reached for mib, reached in sorted(shares.items()) if len(reached) == len(series)}
    half, most = (_least_size(shared, share) for share in (0.5, _NEAR_FULL))
    if half is None or half == next(iter(shared)):
        return ""
    there = listed(f"{name} {three_digits(in_percent(share))} %" for name, share in shared[half].items())
    larger = ""
    if most is not None and half < most < max(shared):
        larger = f", and at {size_words(most * 2**20)} {three_digits(in_percent(min(shared[most].values())))} % or more"
    return (
        f"Send messages of {size_words(half * 2**20)} or more (`--bucket-mib {half:g}`, if the default is not larger), the first "
        f"size here at which half of the best rate is reached: {there}{larger}."
    )


def _least_size(shares: Mapping[float, Mapping[str, float]], least: float) -> float | None:
    """The size, in MiB, from which on every operation reaches this share at every measured size; None if there is none."""
    enough = list(itertools.takewhile(lambda mib: min(shares[mib].values()) >= least, sorted(shares, reverse=True)))
    return enough[-1] if enough else None


def _link(rows: Sequence[Row]) -> tuple[object, ...]:
    """What the series of all operations on one link share."""
    config = rows[0].record.config
    place = config.get("nodes", 1), level_words(config), transport_words(config)
    return config["backend"], config["ranks"], *place, config["dtype"], config["device"], rows[0].file


def _best(rows: Sequence[Row]) -> tuple[Row, float, float | None]:
    """The row with the highest bus bandwidth, that bandwidth, and its share of the link."""
    measured = [(row, speed) for row in rows if (speed := bandwidth(row.record))]
    row, best = max(measured, key=lambda pair: pair[1].bus_bytes_per_s)
    return row, best.bus_bytes_per_s, best.link_share


def _name(row: Row) -> str:
    config = row.record.config
    level = f" ({words})" if (words := level_words(config)) else ""
    sent = transport_words(config) or config["backend"]
    return f"{config['operation']} of {config['dtype']} on {config['ranks']} ranks{level} by {sent}"


def _size(row: Row) -> str:
    return size_words(row.record.fact("payload_bytes", 0))


def ceilings_answer(rows: Sequence[Row]) -> Answer | None:
    """The rate that each kind of work reached, and its share of the data sheet's."""
    reached = [row.record for row in rows if row.record.fact("rate")]
    if not reached:
        return None
    return Answer(
        workload="ceiling",
        verdict=f"This machine reaches {'; '.join(map(_ceiling_words, reached))}.",
        suggestion="A report of this file together with profiles draws their rooflines with these ceilings.",
    )


def _ceiling_words(record: Record) -> str:
    """`693 TFLOP/s in bf16 matmuls (70.0 % of the data sheet)`."""
    kind, dtype, rate = record.config["kind"], record.config.get("dtype"), record.fact("rate")
    spec = machine_spec(record.environment.gpu)
    if kind == "matmul":
        words, sheet = f"{rate_words(rate, 'flop/s')} in {dtype} matmuls", spec and spec.peak_flops.get(str(dtype))
    else:
        words = f"{rate_words(rate, 'bytes/s')} in {kind.replace('_', ' ')}"
        sheet = spec.memory_bytes_per_s if spec and kind == "copy" else None
    return f"{words} ({percent(rate / sheet)} % of the data sheet)" if sheet else words
