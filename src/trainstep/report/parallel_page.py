"""What a page shows of ways of going parallel: their steps, bucket sizes against a prediction, what a rank holds, and in words how
the two sharded optimizers differ.

Predicted by bucket size is what follows from a message's cost on the same machine: latency and bandwidth are fitted to all-reduces
that the page's own records of collectives timed (records/bandwidth.py); the time of a size is costs/bucket_size.py's overhead over
a step in which ranks do not talk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainstep.config.sync import USED_BY
from trainstep.costs.bucket_size import best_bucket_bytes, bucket_overhead_s
from trainstep.costs.strategies import YARDSTICK, strategy_named
from trainstep.records.bandwidth import LatencyFit
from trainstep.report.charts import (
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
from trainstep.report.collectives_tables import fit_of, series_of
from trainstep.report.forms import byte_words, in_gib, in_ms, milliseconds, seconds_words, three_digits
from trainstep.report.parallel_rows import Way, ways_of
from trainstep.report.parallel_tables import CATEGORIES, held_by, memory_tables, message_tables, time_tables
from trainstep.report.ratio_charts import ratio_chart
from trainstep.report.ratios import median_of, summary_of
from trainstep.report.rows import Row, grouped

_PREDICTED = "predicted"
_POINTS = 40
_MIB = 2**20
_TIMED = {"step": "a step alone", "window_step": "a step in a row of steps"}
_COLOURS = ("theme:blue", "theme:orange", "theme:green", "theme:purple", "theme:sky")
_MOST_MESSAGE_TABLES = 16


def parallel_sections(rows: Sequence[Row], collectives: Sequence[Row] = ()) -> list[Section]:
    """The parts of the page that these records fill; collectives predict the best bucket size."""
    ways = ways_of(rows)
    timed = [way for way in ways if median_of(way.record, "step") is not None]
    holding = [way for way in timed if held_by(way)]
    charts = (_ratios_chart(timed), _steps_chart(timed) if timed else None, bucket_chart(timed, collectives))
    times = Section(
        title="Ways of going parallel",
        paragraphs=tuple(bucket_sentences(timed, collectives)),
        charts=tuple(filter(None, charts)),
        tables=(*time_tables(ways), *message_tables(timed)[:_MOST_MESSAGE_TABLES]),
    )
    memory = Section(
        title="Memory of ways of going parallel",
        paragraphs=tuple(sharding_sentences(holding)),
        charts=(_memory_chart(holding),) if holding else (),
        tables=tuple(memory_tables(ways)),
    )
    return [times, *([memory] if memory.tables else [])]


def _places(ways: Sequence[Way]) -> list[tuple[str, list[Way]]]:
    """Ways side by side: those of the same model, context and so on, in the order of their appearance."""
    return list(grouped(ways, lambda way: way.place).items())


def _window_s(way: Way) -> float:
    return median_of(way.record, "window_step") or median_of(way.record, "step") or 0.0


def _panels(ways: Sequence[Way], y_title: str, *, bars: int) -> tuple[Panels, list[list[Way]]]:
    """A panel a place, so many bars a way; and the ways of each."""
    places = dict(_places(ways)[:MAXIMUM_PANELS])
    names = [name for alike in places.values() for name in short_labels([way.name for way in alike])]
    widest = max(map(len, places.values()))
    panels = Panels(
        titles=short_labels(list(places)),
        columns=panel_columns(len(places), bars * widest, label_characters=max(map(len, names))),
        x_title="way",
        y_title=y_title,
        x_axis={"type": "category"},
    )
    return panels, list(places.values())


def _ratios_chart(ways: Sequence[Way]) -> Chart | None:
    """A line a way, a mark for each time: what it takes of a step in which ranks do not talk."""
    several = len({way.place for way in ways}) > 1
    series = {
        name: [
            (f"{way.place} {way.name}" if several else way.name, ratio)
            for way in ways
            if (ratio := way.ratio(quantity))
        ]
        for quantity, name in _TIMED.items()
    }
    return ratio_chart(
        "What going parallel costs", "", f"time ÷ that of {YARDSTICK}, in which ranks do not talk", series
    )


def _steps_chart(ways: Sequence[Way]) -> Chart:
    """A panel a place, a pair of bars a way."""
    panels, places = _panels(ways, "time of a step (ms)", bars=2)
    for index, alike in enumerate(places):
        x = short_labels([way.name for way in alike])
        for place, (quantity, name) in enumerate(_TIMED.items()):
            times = _medians(alike, quantity, said=f"{name}: ")
            panels.add(index, bar(name, x, colour=SERIES[place], **times, offsetgroup=name))
    caption = (
        "Lower is better. Medians of the slowest rank, with half the interquartile range; none: ranks that do not talk."
    )
    return panels.chart("Time of a step by way", caption, barmode="group")


def _medians(ways: Sequence[Way], quantity: str, *, said: str = "") -> dict[str, Any]:
    """What a trace shows of a time of these ways: medians in ms, half their interquartile ranges, the words under the pointer."""
    times = [summary_of(way.record, quantity) for way in ways]
    words = [f"{said}{milliseconds(time.median, time.half_range)} ms" if time else "not seen" for time in times]
    return {
        "y": [in_ms(time.median) if time else 0.0 for time in times],
        "hover": [lines_of(label(way.name), text) for way, text in zip(ways, words, strict=True)],
        "error_y": error_bars([in_ms(time.half_range) if time else 0.0 for time in times]),
    }


def _memory_chart(ways: Sequence[Way]) -> Chart:
    """A panel a place, a stack a way: the point at which most of it is held."""
    panels, places = _panels(ways, "held by a rank (GiB)", bars=1)
    for index, alike in enumerate(places):
        x = short_labels([way.name for way in alike])
        fullest = [_fullest(way) for way in alike]
        for category, colour in zip(CATEGORIES, _COLOURS, strict=True):
            sizes = [lines.get(category, 0) for _, lines in fullest]
            hover = [
                lines_of(label(way.name), f"{category} {point}: {byte_words(size)}")
                for way, (point, _), size in zip(alike, fullest, sizes, strict=True)
            ]
            panels.add(index, bar(category, x, [in_gib(size) for size in sizes], colour=colour, hover=hover))
    caption = "Rank 0 at the fullest of four points: after init, forward, backward and the step."
    return panels.chart("What a rank holds by way", caption, barmode="stack")


def _fullest(way: Way) -> tuple[str, dict[str, int]]:
    points = {
        point: {name: lines[name][0] for name in CATEGORIES if name in lines} for point, lines in held_by(way).items()
    }
    return max(points.items(), key=lambda item: sum(item[1].values()))


def sharding_sentences(ways: Sequence[Way]) -> list[str]:
    """How sharding whole tensors' state differs from sharding flat buffers (ZeRO-1 and 2), from the run's own numbers."""
    said = []
    for place, alike in _places(ways):
        by_sync = {way.sync: way for way in alike}
        whole, flat = by_sync.get("sharded"), by_sync.get("sharded_flat")
        if whole is None or flat is None:
            continue
        ranks = whole.record.config["ranks"]
        said.append(
            f"{place}: how the two sharded optimizers differ, for P bytes of parameters on N = {ranks} ranks. sharded gives whole "
            "tensors to owners: gradients are all-reduced, 2 P (N - 1) / N on the wire, then owners broadcast what they updated, "
            f"P more in all: {_sent(whole)} of tensors a step. sharded_flat is ZeRO-1 with ZeRO-2's gradients: a reduce-scatter "
            f"and an all-gather, P (N - 1) / N each, as much as one all-reduce: {_sent(flat)}. After backward a rank of sharded "
            f"holds {_held(whole, 'gradients')} of gradients, whole, one of sharded_flat {_held(flat, 'gradients')}, its 1/N; of "
            f"optimizer state {_held(whole, 'optimizer state')} and {_held(flat, 'optimizer state')}. Both update about 1/N of the "
            f"elements; a step in a row of steps takes {_ms(whole)} in sharded and {_ms(flat)} in sharded_flat, whose all-gather "
            "runs behind the update and the next forward."
        )
    return said


def _ms(way: Way) -> str:
    return f"{milliseconds(_window_s(way))} ms"


def _sent(way: Way) -> str:
    sent = way.record.fact("wire_bytes")
    return "not counted" if sent is None else byte_words(sent)


def _held(way: Way, category: str) -> str:
    return byte_words(held_by(way).get("after backward", {}).get(category, (0, None))[0])


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step by its bucket size: one without messages, and what messages of that size add."""

    alone_s: float
    gradient_bytes: int
    """All that is averaged in a step."""
    fit: LatencyFit

    @property
    def best_mib(self) -> float:
        return best_bucket_bytes(self.gradient_bytes, self.fit.alpha_s, self.fit.beta_bytes_per_s) / _MIB

    def step_s(self, bucket_mib: float) -> float:
        latency_s, bytes_per_s = self.fit.alpha_s, self.fit.beta_bytes_per_s
        return self.alone_s + bucket_overhead_s(self.gradient_bytes, bucket_mib * _MIB, latency_s, bytes_per_s)


def _prediction(way: Way, collectives: Sequence[Row]) -> Prediction | str:
    """For all bucket sizes of that way, or why there is none."""
    if strategy_named(way.sync).in_units:
        return "the formula of buckets is not of its messages"
    fit = _fit(way, collectives)
    if fit is None:
        return "with all-reduces of the same machine on this page (trainstep collectives) it would be predicted too"
    alone_s = median_of(way.base.record, "step") if way.base else None
    # Counted of ours; of torch's as much as the parameters in fp32.
    counted = [line["bytes"] for line in way.lines("traffic") if line["operation"] == "all_reduce"]
    size = sum(counted) if "traffic" in way.record.tables else 4 * int(way.record.fact("parameters", 0))
    if alone_s is None or fit.alpha_s <= 0 or not size:
        return "no prediction: the all-reduces on this page show no latency, or no step without messages is there"
    return Prediction(alone_s=alone_s, gradient_bytes=size, fit=fit)


def bucket_series(ways: Sequence[Way]) -> list[list[Way]]:
    """One way of one place at two bucket sizes or more each, smallest first."""
    bucketed = [
        way for way in ways if way.sync in USED_BY["bucket_mib"] and way.record.config["bucket_mib"] is not None
    ]
    series = grouped(bucketed, lambda way: (way.place, way.sync)).values()
    return [sorted(alike, key=_bucket_mib) for alike in series if len({*map(_bucket_mib, alike)}) > 1]


def _bucket_mib(way: Way) -> float:
    return float(way.record.config["bucket_mib"])


def bucket_chart(ways: Sequence[Way], collectives: Sequence[Row]) -> Chart | None:
    """A panel a place, a line a way, a dotted one where a prediction can be made."""
    series = bucket_series(ways)
    if not series:
        return None
    places = list(dict.fromkeys(first.place for first, *_ in series))
    syncs = list(dict.fromkeys(first.sync for first, *_ in series))
    panels = Panels(
        titles=short_labels(places),
        columns=panel_columns(len(places), 10),
        x_title="bucket size (MiB)",
        y_title="time of a step (ms)",
        x_axis=logarithmic([_bucket_mib(way) for alike in series for way in alike]),
        axis={"rangemode": "normal"},
    )
    for alike in series:
        sync, sizes_mib = alike[0].sync, [_bucket_mib(way) for way in alike]
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
        "Lower is better. Medians of the slowest rank with half the interquartile range. Dotted: a step without messages, and what "
        "messages of that size add: each one's latency, and the last bucket's time, by the all-reduces timed on this page.",
    )


def bucket_sentences(ways: Sequence[Way], collectives: Sequence[Row]) -> list[str]:
    """The best bucket of each series, measured and predicted."""
    said = []
    for alike in bucket_series(ways):
        best = min(alike, key=lambda way: median_of(way.record, "step") or 0.0)
        size = three_digits(best.record.config["bucket_mib"])
        predicted = _prediction(alike[0], collectives)
        if isinstance(predicted, Prediction):
            fit, gradients = predicted.fit, three_digits(predicted.gradient_bytes / _MIB)
            beside = (
                f"predicted is {three_digits(predicted.best_mib)} MiB, the root of {gradients} MiB of gradients × "
                f"{seconds_words(fit.alpha_s)} a message × {three_digits(fit.beta_bytes_per_s / 1e9)} GB/s"
            )
        else:
            beside = predicted
        said.append(f"{best.place}, {best.sync}: of the sizes tried {size} MiB has the least median; {beside}.")
    return said


def _curve(sizes_mib: Sequence[float], best_mib: float) -> list[float]:
    """Between the smallest and the largest size, at even steps of their ratio, with the best among them."""
    first, last = sizes_mib[0], sizes_mib[-1]
    x = [first * (last / first) ** (step / _POINTS) for step in range(_POINTS + 1)]
    return sorted([*x, best_mib]) if first < best_mib < last else x


def _fit(way: Way, collectives: Sequence[Row]) -> LatencyFit | None:
    """Of all-reduces among as many ranks on the same kind of machine."""
    config, environment = way.record.config, way.record.environment
    backend = "gloo" if config["device"] == "cpu" else "nccl"
    asked = {"operation": "all_reduce", "backend": backend, "ranks": config["ranks"]}
    like = [
        row
        for row in collectives
        if all(row.record.config[name] == value for name, value in asked.items())
        and row.record.environment.difference(environment, "gpu", "cpu") is None
    ]
    return next(filter(None, map(fit_of, series_of(like).values())), None)
