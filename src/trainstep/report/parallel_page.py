"""What a page shows of ways of going parallel: their steps, bucket sizes against a prediction, what a rank holds, and in words how
the two sharded optimizers differ.

Predicted by bucket size is what follows from a message's cost on the same machine: latency and bandwidth are fitted to all-reduces
that the page's own records of collectives timed (records/bandwidth.py); the time of a size is costs/bucket_size.py's overhead over
a step in which ranks do not talk.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from trainstep.config.sync import USED_BY
from trainstep.costs.bucket_size import best_bucket_bytes, bucket_overhead_s
from trainstep.costs.strategies import YARDSTICK, strategy_named
from trainstep.records.bandwidth import LatencyFit
from trainstep.records.summary import summarize
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
from trainstep.report.forms import byte_words, in_gib, in_ms, milliseconds, ratio_words, seconds_words, three_digits
from trainstep.report.parallel_rows import Way, median_of, ways_of
from trainstep.report.parallel_tables import (
    CATEGORIES,
    communication_table,
    held_by,
    memory_tables,
    message_tables,
    ranks_table,
    steps_table,
    traffic_table,
)
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
    buckets = bucket_chart(timed, collectives)
    times = Section(
        title="Ways of going parallel",
        paragraphs=(*_step_sentences(timed), *bucket_sentences(timed, collectives)),
        charts=(*((_steps_chart(timed),) if timed else ()), *((buckets,) if buckets else ())),
        tables=(
            steps_table(ways),
            *communication_table(ways),
            *ranks_table(ways),
            *traffic_table(ways),
            *(dataclasses.replace(table, folded=True) for table in message_tables(timed)[:_MOST_MESSAGE_TABLES]),
        ),
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


def _step_sentences(ways: Sequence[Way]) -> list[str]:
    """The quickest way of each place, against the yardstick."""
    said = []
    for place, mine in _places(ways):
        talking = [way for way in mine if way.sync != YARDSTICK]
        if not talking:
            continue
        best = min(talking, key=_window_s)
        found = (ratio := best.ratio("window_step")) and ratio.known
        sentence = f"{place}: quickest in a row of steps is {best.name}, at {milliseconds(_window_s(best))} ms a step"
        if found and found.ratio and found.low and found.high:
            interval = f"99 % interval {ratio_words(found.low)} to {ratio_words(found.high)}"
            apart = "; they took no turns" if found.interleaving == "none" else ""
            sentence += (
                f", {ratio_words(found.ratio)} times as long as steps of ranks that do not talk ({interval}{apart})"
            )
        said.append(f"{sentence}.")
    return said


def _window_s(way: Way) -> float:
    return median_of(way.record, "window_step") or median_of(way.record, "step") or 0.0


def _panels(ways: Sequence[Way], y_title: str, *, bars: int) -> tuple[Panels, list[list[Way]]]:
    """A panel a place, so many bars a way; and the ways of each."""
    places = dict(_places(ways)[:MAXIMUM_PANELS])
    names = [name for mine in places.values() for name in short_labels([way.name for way in mine])]
    widest = max(map(len, places.values()))
    panels = Panels(
        titles=short_labels(list(places)),
        columns=panel_columns(len(places), bars * widest, label_characters=max(map(len, names))),
        x_title="way",
        y_title=y_title,
        x_axis={"type": "category"},
    )
    return panels, list(places.values())


def _steps_chart(ways: Sequence[Way]) -> Chart:
    """A panel a place, a pair of bars a way."""
    panels, places = _panels(ways, "time of a step (ms)", bars=2)
    for index, mine in enumerate(places):
        x = short_labels([way.name for way in mine])
        for place, (quantity, name) in enumerate(_TIMED.items()):
            seen = [way.record.samples.get(quantity) for way in mine]
            found = [summarize(samples) if samples and samples.values else None for samples in seen]
            y = [in_ms(one.median) if one else 0.0 for one in found]
            hover = [
                lines_of(label(way.name), f"{name}: {milliseconds(one.median, one.std)} ms" if one else "not seen")
                for way, one in zip(mine, found, strict=True)
            ]
            spread = error_bars([in_ms(one.std) if one else 0.0 for one in found])
            panels.add(index, bar(name, x, y, colour=SERIES[place], hover=hover, error_y=spread, offsetgroup=name))
    caption = "Lower is better. Medians of the slowest rank, with the standard deviation; none: ranks that do not talk."
    return panels.chart("Time of a step by way", caption, barmode="group")


def _memory_chart(ways: Sequence[Way]) -> Chart:
    """A panel a place, a stack a way: the point at which most of it is held."""
    panels, places = _panels(ways, "held by a rank (GiB)", bars=1)
    for index, mine in enumerate(places):
        x = short_labels([way.name for way in mine])
        fullest = [_fullest(way) for way in mine]
        for category, colour in zip(CATEGORIES, _COLOURS, strict=True):
            sizes = [lines.get(category, 0) for _, lines in fullest]
            hover = [
                lines_of(label(way.name), f"{category} {point}: {byte_words(size)}")
                for way, (point, _), size in zip(mine, fullest, sizes, strict=True)
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
    for place, mine in _places(ways):
        by_sync = {way.sync: way for way in mine}
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
class BucketSeries:
    """One way of one place at several bucket sizes, smallest first; with what a message costs there, where that is known."""

    place: str
    sync: str
    ways: Sequence[Way]
    fit: LatencyFit | None

    @property
    def gradient_bytes(self) -> int:
        """All that is averaged in a step; counted of ours, of torch's as much as the parameters in fp32."""
        table = self.ways[0].record.tables.get("traffic")
        if table is not None:
            return sum(
                size for name, size in zip(table["operation"], table["bytes"], strict=True) if name == "all_reduce"
            )
        return 4 * int(self.ways[0].record.fact("parameters", 0))

    @property
    def sizes_mib(self) -> list[float]:
        return [float(way.record.config["bucket_mib"]) for way in self.ways]

    def predicted_s(self, bucket_mib: float) -> float | None:
        """A step with buckets of this size; None without a fit, or a step that does not talk."""
        base = self.ways[0].base
        alone_s = None if base is None else median_of(base.record, "step")
        if self.fit is None or alone_s is None or self.fit.alpha_s <= 0 or not self.gradient_bytes:
            return None
        return alone_s + bucket_overhead_s(
            self.gradient_bytes, bucket_mib * _MIB, self.fit.alpha_s, self.fit.beta_bytes_per_s
        )

    @property
    def best_mib(self) -> float | None:
        """The size that is predicted to be the best."""
        if self.fit is None or self.predicted_s(self.sizes_mib[0]) is None:
            return None
        return best_bucket_bytes(self.gradient_bytes, self.fit.alpha_s, self.fit.beta_bytes_per_s) / _MIB


def bucket_series(ways: Sequence[Way], collectives: Sequence[Row]) -> list[BucketSeries]:
    """Ways that ran with at least two bucket sizes."""
    bucketed = [
        way for way in ways if way.sync in USED_BY["bucket_mib"] and way.record.config["bucket_mib"] is not None
    ]
    found = grouped(bucketed, lambda way: (way.place, way.sync))
    return [
        BucketSeries(
            place=place,
            sync=sync,
            ways=sorted(mine, key=lambda way: float(way.record.config["bucket_mib"])),
            fit=None if strategy_named(sync).in_units else _fit(mine[0], collectives),
        )
        for (place, sync), mine in found.items()
        if len({way.record.config["bucket_mib"] for way in mine}) > 1
    ]


def bucket_chart(ways: Sequence[Way], collectives: Sequence[Row]) -> Chart | None:
    """A panel a place, a line a way, a dotted one where a prediction can be made."""
    series = bucket_series(ways, collectives)
    if not series:
        return None
    places = list(dict.fromkeys(one.place for one in series))
    syncs = list(dict.fromkeys(one.sync for one in series))
    panels = Panels(
        titles=short_labels(places),
        columns=panel_columns(len(places), 10),
        x_title="bucket size (MiB)",
        y_title="time of a step (ms)",
        x_axis=logarithmic([size for one in series for size in one.sizes_mib]),
        axis={"rangemode": "normal"},
    )
    for one in series:
        summaries = [summarize(way.record.samples["step"]) for way in one.ways]
        y = [in_ms(found.median) for found in summaries]
        hover = [
            lines_of(label(way.name), f"{milliseconds(found.median, found.std)} ms")
            for way, found in zip(one.ways, summaries, strict=True)
        ]
        spread = error_bars([in_ms(found.std) for found in summaries])
        style = series_style(syncs.index(one.sync))
        panels.add(places.index(one.place), line(one.sync, one.sizes_mib, y, style=style, hover=hover, error_y=spread))
        if one.best_mib is not None:
            x, predicted = _curve(one)
            words = [
                f"predicted: {three_digits(ms)} ms at {three_digits(mib)} MiB"
                for mib, ms in zip(x, predicted, strict=True)
            ]
            drawn = line(f"{one.sync}, {_PREDICTED}", x, predicted, style=(style[0], "dot"), hover=words, mode="lines")
            panels.add(places.index(one.place), drawn)
    return panels.chart(
        "Time of a step by bucket size",
        "Lower is better. Medians of the slowest rank with the standard deviation. Dotted: a step without messages, and what "
        "messages of that size add: each one's latency, and the last bucket's time, by the all-reduces timed on this page.",
    )


def bucket_sentences(ways: Sequence[Way], collectives: Sequence[Row]) -> list[str]:
    """The best bucket of each series, measured and predicted."""
    said = []
    for one in bucket_series(ways, collectives):
        best = min(one.ways, key=lambda way: median_of(way.record, "step") or 0.0)
        size = three_digits(best.record.config["bucket_mib"])
        sentence = f"{one.place}, {one.sync}: of the sizes tried {size} MiB is quickest"
        if one.best_mib is not None and one.fit is not None:
            sentence += (
                f"; predicted is {three_digits(one.best_mib)} MiB, the root of {three_digits(one.gradient_bytes / _MIB)} MiB of "
                f"gradients × {seconds_words(one.fit.alpha_s)} a message × {three_digits(one.fit.beta_bytes_per_s / 1e9)} GB/s"
            )
        elif strategy_named(one.sync).in_units:
            sentence += "; the formula of buckets is not of its messages"
        elif one.fit is None:
            sentence += (
                "; with all-reduces of the same machine on this page (trainstep collectives) it would be predicted too"
            )
        else:
            sentence += (
                "; no prediction: the all-reduces on this page show no latency, or no step without messages is there"
            )
        said.append(f"{sentence}.")
    return said


def _curve(one: BucketSeries) -> tuple[list[float], list[float]]:
    """The prediction between the smallest and the largest size, at even steps of their ratio, with the best among them."""
    first, last = one.sizes_mib[0], one.sizes_mib[-1]
    x = [first * (last / first) ** (step / _POINTS) for step in range(_POINTS + 1)]
    if one.best_mib is not None and first < one.best_mib < last:
        x = sorted([*x, one.best_mib])
    found = [(mib, one.predicted_s(mib)) for mib in x]
    return [mib for mib, seconds in found if seconds is not None], [in_ms(s) for _, s in found if s is not None]


def _fit(way: Way, collectives: Sequence[Row]) -> LatencyFit | None:
    """Of all-reduces among as many ranks on the same kind of machine."""
    config, environment = way.record.config, way.record.environment
    backend = "gloo" if config["device"] == "cpu" else "nccl"
    like = [
        row
        for row in collectives
        if row.record.config["operation"] == "all_reduce"
        and row.record.config["backend"] == backend
        and row.record.config["ranks"] == config["ranks"]
        and row.record.environment.difference(environment, "gpu", "cpu") is None
    ]
    series = series_of(like)
    return next((fit for mine in series.values() if (fit := fit_of(mine)) is not None), None)
