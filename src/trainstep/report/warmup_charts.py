"""Charts of warming up: every step from the first, the mean against w, where the first step's extra time goes."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainstep.records.record import Record, Samples
from trainstep.report.charts import (
    Chart,
    Panels,
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
from trainstep.report.forms import in_ms, milliseconds, percent, times_words
from trainstep.report.rows import Row, grouped, needless, step_means, varying, words
from trainstep.report.sweep_page import by_model
from trainstep.report.tables import Line

Found = list[Line]
"""Each row with its `FirstStep`."""
PARTS = {
    "compile_s": "compiling",
    "allocation_s": "device memory (cudaMalloc)",
    "clock_s": "SM clock still climbing",
    "rest_s": "the rest: lazy loading of kernels and libraries",
}
"""Part -> its name. The last is what the others leave; on a CPU also pages of memory touched for the first time."""
_TOLERANCE = 0.02
_FAR_OUT = 3.0
"""Interquartile ranges above the upper quartile from which on a value is far out (Tukey): one in a million of normal noise."""
_NOISY = 0.5
_STEADY_IN_A_ROW = 3
_PART_COLOURS = ("theme:purple", "theme:sky", "theme:green", "theme:orange")
SHOWN_STEPS = 30


@dataclass(frozen=True, kw_only=True)
class FirstStep:
    """The steps of a cell from the very first, and the split of what the first took over the steady median.

    Parts were measured on their own, so their sum may exceed the extra time: then `rest_s` is negative.
    """

    steps_s: tuple[float, ...]
    warmups: int
    steady_s: float
    """Median of the timed steps; without warm-ups, of those after the first."""
    compile_s: float | None
    allocation_s: float | None
    clock_s: float | None
    """None where it was not measured."""
    context_s: float | None
    """Creating the CUDA context: before the first step, so no part of it."""
    allocations: int | None
    """cudaMalloc calls during the first step."""

    @property
    def first_s(self) -> float:
        return self.steps_s[0]

    @property
    def extra_s(self) -> float:
        return self.first_s - self.steady_s

    @property
    def rest_s(self) -> float:
        return self.extra_s - sum(part or 0.0 for part in (self.compile_s, self.allocation_s, self.clock_s))

    @property
    def tolerance(self) -> float:
        """How far above the median a warm step may lie: 2 %, or where the timed steps call a value far out, or their largest but
        for one in twenty."""
        timed = sorted(self.steps_s[max(self.warmups, 1) :])
        lower, _, upper = statistics.quantiles(timed, n=4, method="inclusive")
        most = timed[round(0.95 * (len(timed) - 1))]
        return max(_TOLERANCE, max(most, upper + _FAR_OUT * (upper - lower)) / self.steady_s - 1)

    @property
    def is_noisy(self) -> bool:
        """Whether warm steps vary so much that slow ones at the beginning are no sign of warming up."""
        return self.tolerance > _NOISY

    @property
    def is_slow(self) -> bool:
        """Whether the first step is slower than warm ones may be."""
        return self.first_s > self.steady_s * (1 + self.tolerance)

    @property
    def settled(self) -> int | None:
        """Number (from 1) of the first steady step from which on steps stay so, by the median of three in a row; None where there
        is none."""
        most_s = self.steady_s * (1 + self.tolerance)
        runs = (
            self.steps_s[start : start + _STEADY_IN_A_ROW] for start in range(len(self.steps_s) - _STEADY_IN_A_ROW + 1)
        )
        steady = (number for number, run in enumerate(runs, 1) if max(run[0], statistics.median(run)) <= most_s)
        return next(steady, None)

    def bias_after(self, warmups: int) -> float:
        """How far above the steady median the mean lies if timing begins after so many warm-ups, with as many timed steps."""
        timed = self.steps_s[warmups : warmups + len(self.steps_s) - self.warmups]
        return statistics.fmean(timed) / self.steady_s - 1


def first_step(record: Record) -> FirstStep | None:
    """The split, or None where single steps from the first on are not known (failed, windows of k steps, too few).

    Of several processes the first; none where they compiled, since the time told is that of the last, with its warm cache.
    """
    samples = _process(record, "step")
    if record.failure is not None or samples is None or isinstance(record.config.get("sync"), int):
        return None
    if len(samples.values) < len(record.samples["step"].values) and "compile_s" in record.facts:
        return None
    steps = (*samples.warmups, *samples.values)
    after_first = steps[max(len(samples.warmups), 1) :]
    if len(after_first) < 2:
        return None
    steady_s = statistics.median(after_first)
    reallocated_s = record.fact("reallocated_step_s")
    allocations = _series(record, "device_allocations")
    return FirstStep(
        steps_s=steps,
        warmups=len(samples.warmups),
        steady_s=steady_s,
        compile_s=record.fact("compile_s"),
        allocation_s=None if reallocated_s is None else max(0.0, reallocated_s - steady_s),
        clock_s=_clock_s(_series(record, "sm_clock"), len(samples.warmups), steady_s),
        context_s=record.fact("context_s"),
        allocations=round(allocations[0]) if allocations else None,
    )


def _name(row: Row, rows: Sequence[Row]) -> str:
    """What tells a row from the others of its model: `context 256`."""
    names = [name for name in varying(rows) if name not in ("model", "warmups", *needless(rows))]
    return ", ".join(f"{name} {words(row.point.get(name))}" for name in names) or "every step"


def _lines(rows: Sequence[Row]) -> Iterator[tuple[int, str, tuple[str, str], list[Row]]]:
    """(panel, name, style, rows) of each line: a panel a model, and in all of them one style for rows of one name."""
    groups = by_model(rows)
    names = {id(row): _name(row, group) for group in groups.values() for row in group}
    ordered = list(dict.fromkeys(names[id(row)] for row in rows if id(row) in names))
    shown = short_labels(ordered)
    for panel, group in enumerate(groups.values()):
        by_name = grouped(group, lambda row: ordered.index(names[id(row)]))
        for index in sorted(by_name):
            yield panel, shown[index], series_style(index), by_name[index]


def curve_chart(chosen: Found) -> Chart:
    """Each step's time from the very first: warm-ups hollow, timed steps filled."""
    rows = [row for row, _ in chosen]
    steps_of = {id(row): found for row, found in chosen}
    models = by_model(rows)
    panels = Panels(
        titles=short_labels([words(model) for model in models]),
        columns=panel_columns(len(models), 9),
        x_title="step, from the very first",
        y_title="time of the step (ms)",
        x_axis={"range": [0.4, min(SHOWN_STEPS, max(len(found.steps_s) for _, found in chosen)) + 0.6]},
    )
    for panel, its_rows in enumerate(models.values()):
        panels.own[panel] = {"y": logarithmic([in_ms(step) for row in its_rows for step in steps_of[id(row)].steps_s])}
    for panel, name, style, its_rows in _lines(rows):
        for row in its_rows:
            found = steps_of[id(row)]
            numbers = list(range(1, len(found.steps_s) + 1))[:SHOWN_STEPS]
            hover = [
                lines_of(
                    label(row.label(without=["warmups"])),
                    f"step {number} ({'warm-up' if number <= found.warmups else 'timed'}): {milliseconds(step)} ms",
                    f"{times_words(step / found.steady_s)} the steady median",
                )
                for number, step in zip(numbers, found.steps_s, strict=False)
            ]
            symbols = ["circle-open" if number <= found.warmups else "circle" for number in numbers]
            y = [in_ms(step) for step in found.steps_s[:SHOWN_STEPS]]
            panels.add(panel, line(name, numbers, y, style=style, hover=hover, marker={"symbol": symbols}))
    return panels.chart(
        "Time of every step, from the very first",
        "Hollow marks are warm-ups, filled ones the timed steps. The scale is logarithmic.",
    )


def by_w_chart(rows: Sequence[Row]) -> Chart | None:
    """Mean ± std of the timed steps against the number of warm-ups."""
    timed = [row for row, _ in step_means(rows)]
    if not timed:
        return None
    models = by_model(timed)
    panels = Panels(
        titles=short_labels([words(model) for model in models]),
        columns=panel_columns(len(models), 7),
        x_title="warm-ups w",
        y_title="mean of the timed steps (ms)",
        x_axis={"type": "category"},
    )
    for panel, group in enumerate(models.values()):
        panels.ranges[panel] = _warmed_range(group)
    for panel, name, style, its_rows in _lines(timed):
        ordered = sorted(its_rows, key=lambda row: int(row.point["warmups"]))
        times = [time for _, time in step_means(ordered)]
        x = [words(row.point["warmups"]) for row in ordered]
        said = [f"w = {w}: {milliseconds(*time)} ms" for w, time in zip(x, times, strict=True)]
        hover = [lines_of(label(row.label()), text) for row, text in zip(ordered, said, strict=True)]
        low, high = panels.ranges[panel]
        inside = [in_ms(mean) < high for mean, _ in times]
        y = [in_ms(mean) if in_ms(mean) < high else low + 0.93 * (high - low) for mean, _ in times]
        spread = [in_ms(std or 0.0) if shown else 0.0 for (_, std), shown in zip(times, inside, strict=True)]
        above = {**error_bars(spread), "color": style[0]}
        symbols = ["circle" if shown else "triangle-up" for shown in inside]
        marks = {"symbol": symbols, "size": [7 if shown else 12 for shown in inside]}
        texts = ["" if shown else f"  {milliseconds(mean)}" for (mean, _), shown in zip(times, inside, strict=True)]
        drawn = line(name, x, y, style=style, hover=hover, error_y=above, marker=marks)
        panels.add(panel, {**drawn, "mode": "lines+markers+text", "text": texts, "textposition": "middle right"})
    return panels.chart(
        "Mean ± standard deviation against the number of warm-ups",
        "A mean that falls and a whisker that shrinks with w say that warming up was still going on in the timed steps. "
        "Scales do not begin at zero; a triangle stands for a mean far above its panel, with its number.",
    )


def _warmed_range(rows: Sequence[Row]) -> tuple[float, float]:
    """The span of means ± std with at least one warm-up: with none, a mean holds the whole first step and hides the rest."""
    times = [time for _, time in step_means([row for row in rows if row.point["warmups"]] or rows)]
    low = min(mean - (std or 0.0) for mean, std in times)
    high = max(mean + (std or 0.0) for mean, std in times)
    margin = 0.15 * (high - low) or 0.1 * high
    return in_ms(max(0.0, low - margin)), in_ms(high + 2 * margin)


def split_chart(chosen: Found) -> Chart:
    """Horizontal bars: the first step's extra time by part; the CUDA context in a panel of its own."""
    contexts = [found.context_s for _, found in chosen]
    titles = ["extra time of the first step over the steady median"]
    titles += ["CUDA context, before the first step"] if any(contexts) else []
    panels = Panels(titles=titles, columns=len(titles), x_title="ms", y_title="")
    panels.axis = {"type": "category", "autorange": "reversed"}
    unnamed = ["warmups", *needless([row for row, _ in chosen])]
    names = short_labels([row.label(without=unnamed) for row, _ in chosen])
    for (part, title), colour in zip(PARTS.items(), _PART_COLOURS, strict=True):
        seconds = [getattr(found, part) or 0.0 for _, found in chosen]
        if not any(seconds):
            continue
        shares = [
            second / found.extra_s if found.extra_s else 0.0 for second, (_, found) in zip(seconds, chosen, strict=True)
        ]
        said = [f"{title}: {milliseconds(s)} ms, {percent(share)} %" for s, share in zip(seconds, shares, strict=True)]
        hover = [lines_of(name, text) for name, text in zip(names, said, strict=True)]
        lengths = [in_ms(max(0.0, second)) for second in seconds]
        panels.add(0, bar(title, lengths, names, colour=colour, hover=hover, orientation="h"))
    if any(contexts):
        hover = [f"{milliseconds(second or 0.0)} ms" for second in contexts]
        lengths = [in_ms(second or 0.0) for second in contexts]
        panels.add(1, bar("CUDA context", lengths, names, colour="theme:grey", hover=hover, orientation="h"))
    axis = {"automargin": True, "rangemode": "tozero"}
    height = 150 + 34 * len(chosen)
    return panels.chart(
        "Where the first step's extra time goes",
        "Compile time, one step after emptying the allocator's cache, and the SM clock were measured on their own; what they leave "
        "is the loading of kernels and libraries at their first call (and on a CPU, memory touched for the first time).",
        barmode="stack",
        bargap=0.35,
        height=max(260, height),
        horizontal=True,
        showlegend=True,
        xaxis={**axis, "title": {"text": "extra time (ms)"}, "domain": [0, 0.66 if any(contexts) else 1]},
        xaxis2={**axis, "title": {"text": "time (ms)"}, "domain": [0.72, 1]},
        yaxis2={"showticklabels": False, "type": "category", "autorange": "reversed"},
    )


def _clock_s(clocks: Sequence[float], warmups: int, steady_s: float) -> float | None:
    """steady_s x (f_steady / f_first - 1): what the first step lost to a clock below the steady one."""
    after_first = clocks[max(warmups, 1) :]
    if not after_first or not clocks[0]:
        return None
    return steady_s * max(0.0, statistics.median(after_first) / clocks[0] - 1)


def _process(record: Record, name: str) -> Samples | None:
    """A series as one process saw it: those of several processes stand end to end, and only the first of them is taken."""
    samples = record.samples.get(name)
    own = "turn_steps" if record.fact("interleaving") == "rounds" else "process_steps"
    if samples is None or own not in record.facts:
        return samples
    length = record.fact(own)
    if not isinstance(length, int) or length < 1:
        return None
    processes = max(-(-len(samples.values) // length), 1)
    warmups = samples.warmups[: len(samples.warmups) // processes]
    return Samples(unit=samples.unit, values=samples.values[:length], warmups=warmups)


def _series(record: Record, name: str) -> tuple[float, ...]:
    samples = _process(record, name)
    return (*samples.warmups, *samples.values) if samples else ()
