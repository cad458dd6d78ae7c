"""Step time by bucket size: as measured, and as it follows from what a message of that size costs on the same machine.

Latency and bandwidth are fitted to all-reduces that the page's own records of collectives timed (records/bandwidth.py); the time
of a size is costs/bucket_size.py's overhead over a step in which ranks do not talk.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainstep.config.sync import USED_BY
from trainstep.costs.bucket_size import best_bucket_bytes, bucket_overhead_s
from trainstep.costs.strategies import strategy_named
from trainstep.records.bandwidth import LatencyFit
from trainstep.records.summary import summarize
from trainstep.report.charts import (
    Chart,
    Panels,
    error_bars,
    label,
    line,
    lines_of,
    logarithmic,
    panel_columns,
    series_style,
    short_labels,
)
from trainstep.report.collectives_tables import collective_rows, fit_of, series_of
from trainstep.report.forms import in_ms, milliseconds, seconds_words, three_digits
from trainstep.report.parallel_rows import Way, median_of
from trainstep.report.rows import Row

_PREDICTED = "predicted"
_POINTS = 40
_MIB = 2**20


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


def bucket_series(ways: Sequence[Way], rows: Sequence[Row]) -> list[BucketSeries]:
    """Ways that ran with at least two bucket sizes."""
    found: dict[tuple[str, str], list[Way]] = {}
    for way in ways:
        if way.sync in USED_BY["bucket_mib"] and way.record.config["bucket_mib"] is not None:
            found.setdefault((way.place, way.sync), []).append(way)
    return [
        BucketSeries(
            place=place,
            sync=sync,
            ways=sorted(mine, key=lambda way: float(way.record.config["bucket_mib"])),
            fit=None if strategy_named(sync).in_units else _fit(mine[0], rows),
        )
        for (place, sync), mine in found.items()
        if len({way.record.config["bucket_mib"] for way in mine}) > 1
    ]


def bucket_chart(ways: Sequence[Way], rows: Sequence[Row]) -> Chart | None:
    """A panel a place, a line a way, a dotted one where a prediction can be made."""
    series = bucket_series(ways, rows)
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


def bucket_sentences(ways: Sequence[Way], rows: Sequence[Row]) -> list[str]:
    """The best bucket of each series, measured and predicted."""
    said = []
    for one in bucket_series(ways, rows):
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


def _fit(way: Way, rows: Sequence[Row]) -> LatencyFit | None:
    """Of all-reduces among as many ranks on the same kind of machine."""
    config, environment = way.record.config, way.record.environment
    backend = "gloo" if config["device"] == "cpu" else "nccl"
    like = [
        row
        for row in collective_rows(rows)
        if row.record.config["operation"] == "all_reduce"
        and row.record.config["backend"] == backend
        and row.record.config["ranks"] == config["ranks"]
        and row.record.environment.difference(environment, "gpu", "cpu") is None
    ]
    series = series_of(like)
    return next((fit for mine in series.values() if (fit := fit_of(mine)) is not None), None)
