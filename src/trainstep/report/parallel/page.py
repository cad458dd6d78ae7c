"""The sections on parallel strategies of a page: step times, bucket sizes with a prediction, memory.

The time of a step by bucket size is predicted from the cost of a message on the same machine: latency and bandwidth are fitted to
the all-reduces in the page's records of collectives (records/derive.py), and costs/collectives.py's overhead of the bucket size is
added to a step whose ranks do not communicate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainstep.config.parallel import USED_BY
from trainstep.costs.collectives import best_bucket_bytes, bucket_overhead_s
from trainstep.costs.strategies import BASELINE, strategy_named
from trainstep.grouping import grouped
from trainstep.records.derive import LatencyFit
from trainstep.report.kit.charts import (
    MAXIMUM_PANELS,
    SERIES,
    Chart,
    Panels,
    Section,
    bar,
    error_bars,
    label,
    line,
    lines_of,
    logarithmic,
    panel_columns,
    series_style,
    short_labels,
)
from trainstep.report.kit.forms import byte_words, in_gib, in_ms, milliseconds, seconds_words, three_digits
from trainstep.report.kit.ranking import median_of, summary_of
from trainstep.report.kit.ratio_charts import ratio_chart
from trainstep.report.kit.rows import Row
from trainstep.report.parallel.collectives import fit_of, series_of
from trainstep.report.parallel.tables import (
    CATEGORIES,
    StrategyRow,
    held_by,
    memory_tables,
    message_tables,
    strategies_of,
    time_tables,
)

_PREDICTED = "predicted"
_POINTS = 40
_MIB = 2**20
_TIMED = {"step": "synchronised step", "window_step": "step of an unsynchronised window"}
_COLOURS = ("theme:blue", "theme:orange", "theme:green", "theme:purple", "theme:sky")
_MOST_MESSAGE_TABLES = 16


def parallel_sections(rows: Sequence[Row], collectives: Sequence[Row] = ()) -> list[Section]:
    """The sections that these records fill; `collectives` predict the best bucket size."""
    strategies = strategies_of(rows)
    timed = [strategy for strategy in strategies if median_of(strategy.record, "step") is not None]
    holding = [strategy for strategy in timed if held_by(strategy)]
    charts = (_ratios_chart(timed), _steps_chart(timed) if timed else None, bucket_chart(timed, collectives))
    times = Section(
        title="Parallel strategies",
        paragraphs=tuple(bucket_sentences(timed, collectives)),
        charts=tuple(filter(None, charts)),
        tables=(*time_tables(strategies), *message_tables(timed)[:_MOST_MESSAGE_TABLES]),
    )
    memory = Section(
        title="Memory of parallel strategies",
        paragraphs=tuple(sharding_sentences(holding)),
        charts=(_memory_chart(holding),) if holding else (),
        tables=tuple(memory_tables(strategies)),
    )
    return [times, *([memory] if memory.tables else [])]


def _panels(strategies: Sequence[StrategyRow], y_title: str, *, bars: int) -> tuple[Panels, list[list[StrategyRow]]]:
    """A panel per place (model, context and so on) with room for `bars` bars per strategy, and the strategies of each panel."""
    by_place = grouped(strategies, lambda strategy: strategy.place)
    places = dict(list(by_place.items())[:MAXIMUM_PANELS])
    names = [name for alike in places.values() for name in short_labels([strategy.name for strategy in alike])]
    widest = max(map(len, places.values()))
    panels = Panels(
        titles=short_labels(list(places)),
        columns=panel_columns(len(places), bars * widest, label_characters=max(map(len, names))),
        x_title="strategy",
        y_title=y_title,
        x_axis={"type": "category"},
    )
    return panels, list(places.values())


def _ratios_chart(strategies: Sequence[StrategyRow]) -> Chart | None:
    """A line per strategy with a mark per quantity of time: its ratio to a step whose ranks do not communicate."""
    several = len({strategy.place for strategy in strategies}) > 1
    series = {
        name: [
            (f"{strategy.place} {strategy.name}" if several else strategy.name, ratio)
            for strategy in strategies
            if (ratio := strategy.ratio(quantity))
        ]
        for quantity, name in _TIMED.items()
    }
    return ratio_chart(
        "Cost of parallel strategies", "", f"time ÷ time of {BASELINE}, whose ranks do not communicate", series
    )


def _steps_chart(strategies: Sequence[StrategyRow]) -> Chart:
    """A panel per place with a pair of bars per strategy."""
    panels, places = _panels(strategies, "time of a step (ms)", bars=2)
    for index, alike in enumerate(places):
        x = short_labels([strategy.name for strategy in alike])
        for place, (quantity, name) in enumerate(_TIMED.items()):
            times = _medians(alike, quantity, prefix=f"{name}: ")
            panels.add(index, bar(name, x, colour=SERIES[place], **times, offsetgroup=name))
    caption = "Lower is better. Medians of the slowest rank, with half the interquartile range; in none, ranks do not communicate."
    return panels.chart("Time of a step by strategy", caption, barmode="group")


def _medians(strategies: Sequence[StrategyRow], quantity: str, *, prefix: str = "") -> dict[str, Any]:
    """A trace's values of a time of these strategies: medians in ms, half their interquartile ranges, and hover text."""
    times = [summary_of(strategy.record, quantity) for strategy in strategies]
    words = [f"{prefix}{milliseconds(time.median, time.half_range)} ms" if time else "not measured" for time in times]
    return {
        "y": [in_ms(time.median) if time else 0.0 for time in times],
        "hover": [lines_of(label(strategy.name), text) for strategy, text in zip(strategies, words, strict=True)],
        "error_y": error_bars([in_ms(time.half_range) if time else 0.0 for time in times]),
    }


def _memory_chart(strategies: Sequence[StrategyRow]) -> Chart:
    """A panel per place with a stack per strategy: the memory at the point of the step with the most."""
    panels, places = _panels(strategies, "held by a rank (GiB)", bars=1)
    for index, alike in enumerate(places):
        x = short_labels([strategy.name for strategy in alike])
        fullest = [_fullest(strategy) for strategy in alike]
        for category, colour in zip(CATEGORIES, _COLOURS, strict=True):
            sizes = [lines.get(category, 0) for _, lines in fullest]
            hover = [
                lines_of(label(strategy.name), f"{category} {point}: {byte_words(size)}")
                for strategy, (point, _), size in zip(alike, fullest, sizes, strict=True)
            ]
            panels.add(index, bar(category, x, [in_gib(size) for size in sizes], colour=colour, hover=hover))
    caption = "Rank 0 at the point with the most memory of four: after init, forward, backward and the step."
    return panels.chart("What a rank holds by strategy", caption, barmode="stack")


def _fullest(strategy: StrategyRow) -> tuple[str, dict[str, int]]:
    """The point of the step with the most memory, and the bytes of each category there."""
    points = {
        point: {name: lines[name][0] for name in CATEGORIES if name in lines}
        for point, lines in held_by(strategy).items()
    }
    return max(points.items(), key=lambda item: sum(item[1].values()))


def sharding_sentences(strategies: Sequence[StrategyRow]) -> list[str]:
    """How sharding the state of whole tensors differs from sharding flat buffers (ZeRO-1 and 2), with the records' numbers."""
    sentences = []
    for place, alike in grouped(strategies, lambda strategy: strategy.place).items():
        by_sync = {strategy.sync: strategy for strategy in alike}
        whole, flat = by_sync.get("sharded"), by_sync.get("sharded_flat")
        if whole is None or flat is None:
            continue
        ranks = whole.record.config["ranks"]
        sentences.append(
            f"{place}: the two sharded optimizers with P bytes of parameters on N = {ranks} ranks. In sharded, each tensor "
            f"has an "
            "owner: gradients are all-reduced, 2 P (N - 1) / N bytes on the wire, then owners broadcast the tensors that they "
            f"updated, P bytes more: {_sent(whole)} of tensors a step. sharded_flat is ZeRO-1 with ZeRO-2's gradients: a "
            "reduce-scatter and an all-gather, P (N - 1) / N bytes each, together as much as one all-reduce: "
            f"{_sent(flat)}. After backward a rank of sharded holds all gradients, {_held(whole, 'gradients')}; a rank of "
            f"sharded_flat holds 1/N of them, {_held(flat, 'gradients')}. Optimizer state is "
            f"{_held(whole, 'optimizer state')} and {_held(flat, 'optimizer state')}. Both update about 1/N of the elements. "
            f"Without synchronisation between steps, a step takes {_window_words(whole)} in sharded and {_window_words(flat)} "
            "in sharded_flat, whose all-gather overlaps with the "
            "update and the next forward."
        )
    return sentences


def _window_words(strategy: StrategyRow) -> str:
    time_s = median_of(strategy.record, "window_step") or median_of(strategy.record, "step") or 0.0
    return f"{milliseconds(time_s)} ms"


def _sent(strategy: StrategyRow) -> str:
    sent = strategy.record.fact("wire_bytes")
    return "not counted" if sent is None else byte_words(sent)


def _held(strategy: StrategyRow, category: str) -> str:
    return byte_words(held_by(strategy).get("after backward", {}).get(category, (0, None))[0])


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted time of a step by bucket size: a step without messages, plus the overhead of messages of that size."""

    alone_s: float
    gradient_bytes: int
    """The bytes of all gradients that a step averages."""
    fit: LatencyFit

    @property
    def best_mib(self) -> float:
        return best_bucket_bytes(self.gradient_bytes, self.fit.alpha_s, self.fit.beta_bytes_per_s) / _MIB

    def step_s(self, bucket_mib: float) -> float:
        latency_s, bytes_per_s = self.fit.alpha_s, self.fit.beta_bytes_per_s
        return self.alone_s + bucket_overhead_s(self.gradient_bytes, bucket_mib * _MIB, latency_s, bytes_per_s)


def _prediction(strategy: StrategyRow, collectives: Sequence[Row]) -> Prediction | str:
    """The prediction for all bucket sizes of the strategy, or why there is none."""
    if strategy_named(strategy.sync).in_units or strategy.record.config.get("shard_ranks") is not None:
        return "the formula of buckets does not describe its messages"
    fit = _fit(strategy, collectives)
    if fit is None:
        return "a prediction needs all-reduces of the same machine on this page (trainstep collectives)"
    alone_s = median_of(strategy.base.record, "step") if strategy.base else None
    # Our strategies' bytes are counted; torch's average as many bytes as the parameters have in fp32.
    counted = [line["bytes"] for line in strategy.lines("traffic") if line["operation"] == "all_reduce"]
    size = sum(counted) if "traffic" in strategy.record.tables else 4 * int(strategy.record.fact("parameters", 0))
    if alone_s is None or fit.alpha_s <= 0 or not size:
        return "no prediction: the all-reduces on this page show no latency, or there is no step without messages"
    return Prediction(alone_s=alone_s, gradient_bytes=size, fit=fit)


def bucket_series(strategies: Sequence[StrategyRow]) -> list[list[StrategyRow]]:
    """The rows of each strategy and place with at least two bucket sizes, smallest first."""
    bucketed = [
        strategy
        for strategy in strategies
        if strategy.sync in USED_BY["bucket_mib"] and strategy.record.config["bucket_mib"] is not None
    ]
    series = grouped(bucketed, lambda strategy: (strategy.place, strategy.sync)).values()
    return [sorted(alike, key=_bucket_mib) for alike in series if len({*map(_bucket_mib, alike)}) > 1]


def _bucket_mib(strategy: StrategyRow) -> float:
    return float(strategy.record.config["bucket_mib"])


def bucket_chart(strategies: Sequence[StrategyRow], collectives: Sequence[Row]) -> Chart | None:
    """A panel per place with a line per strategy, and a dotted line for each prediction."""
    series = bucket_series(strategies)
    if not series:
        return None
    places = list(dict.fromkeys(first.place for first, *_ in series))
    syncs = list(dict.fromkeys(first.sync for first, *_ in series))
    panels = Panels(
        titles=short_labels(places),
        columns=panel_columns(len(places), 10),
        x_title="bucket size (MiB)",
        y_title="time of a step (ms)",
        x_axis=logarithmic([_bucket_mib(strategy) for alike in series for strategy in alike]),
        axis={"rangemode": "normal"},
    )
    for alike in series:
        sync, sizes_mib = alike[0].sync, [_bucket_mib(strategy) for strategy in alike]
        panel, style = places.index(alike[0].place), series_style(syncs.index(sync))
        panels.add(panel, line(sync, sizes_mib, style=style, **_medians(alike, "step")))
        predicted = _prediction(alike[0], collectives)
        if isinstance(predicted, Prediction):
            x = _curve(sizes_mib, predicted.best_mib)
            y = [in_ms(predicted.step_s(mib)) for mib in x]
            hover = [
                f"predicted: {three_digits(ms)} ms at {three_digits(mib)} MiB" for mib, ms in zip(x, y, strict=True)
            ]
            name, dotted = f"{sync}, {_PREDICTED}", (style[0], "dot")
            panels.add(panel, line(name, x, y, style=dotted, hover=hover, mode="lines"))
    return panels.chart(
        "Time of a step by bucket size",
        "Lower is better. Medians of the slowest rank with half the interquartile range. Dotted: the prediction, a step "
        "without messages plus the latency of each message and the time of the last bucket, from the all-reduces on this page.",
    )


def bucket_sentences(strategies: Sequence[StrategyRow], collectives: Sequence[Row]) -> list[str]:
    """The best bucket size of each series, measured and predicted."""
    sentences = []
    for alike in bucket_series(strategies):
        best = min(alike, key=lambda strategy: median_of(strategy.record, "step") or 0.0)
        size = three_digits(best.record.config["bucket_mib"])
        predicted = _prediction(alike[0], collectives)
        if isinstance(predicted, Prediction):
            fit, gradients = predicted.fit, three_digits(predicted.gradient_bytes / _MIB)
            prediction = (
                f"the prediction is {three_digits(predicted.best_mib)} MiB, the root of {gradients} MiB of gradients × "
                f"{seconds_words(fit.alpha_s)} per message × {three_digits(fit.beta_bytes_per_s / 1e9)} GB/s"
            )
        else:
            prediction = predicted
        sentences.append(
            f"{best.place}, {best.sync}: of the sizes tried, {size} MiB has the least median; {prediction}."
        )
    return sentences


def _curve(sizes_mib: Sequence[float], best_mib: float) -> list[float]:
    """Sizes from the smallest to the largest in equal ratios, and the best size if it lies between them."""
    first, last = sizes_mib[0], sizes_mib[-1]
    x = [first * (last / first) ** (step / _POINTS) for step in range(_POINTS + 1)]
    return sorted([*x, best_mib]) if first < best_mib < last else x


def _fit(strategy: StrategyRow, collectives: Sequence[Row]) -> LatencyFit | None:
    """Latency and bandwidth of all-reduces among as many ranks on the same kind of machine; None without such records."""
    config, environment = strategy.record.config, strategy.record.environment
    backend = "gloo" if config["device"] == "cpu" else "nccl"
    wanted = {"operation": "all_reduce", "backend": backend, "ranks": config["ranks"]}
    placed = {"nodes": config.get("nodes", 1), "level": "all"}
    matches = [
        row
        for row in collectives
        if all(row.record.config[name] == value for name, value in wanted.items())
        and all(row.record.config.get(name, value) == value for name, value in placed.items())
        and row.record.environment.difference(environment, "gpu", "cpu") is None
    ]
    return next(filter(None, map(fit_of, series_of(matches).values())), None)
