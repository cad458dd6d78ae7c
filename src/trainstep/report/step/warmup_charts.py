"""Charts of warm-ups: the time of every step, the mean by warm-ups, the first step's extra time by part."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainstep.grouping import grouped
from trainstep.records.record import Record, Samples
from trainstep.report.kit.charts import (
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
from trainstep.report.kit.forms import in_ms, milliseconds, percent, times_words
from trainstep.report.kit.rows import Row, needless, step_means, varying, words
from trainstep.report.kit.tables import Line
from trainstep.report.step.phases import by_model

FirstSteps = list[Line]
"""Lines whose value is the row's `FirstStep`."""
PARTS = {
    "compile_s": "compiling",
    "allocation_s": "device memory (cudaMalloc)",
    "clock_s": "SM clock still climbing",
    "rest_s": "the rest: lazy loading of kernels and libraries",
}
"""Part -> its name. The last is the remainder; on a CPU it includes the first touch of memory pages."""
_TOLERANCE = 0.02
"""The least share by which a warm step may exceed the median."""
_FAR_OUT = 3.0
"""A value this many interquartile ranges above the upper quartile is far out (Tukey): one in a million of normal noise."""
_NOISY = 0.5
"""A cell with a larger tolerance is too noisy to show warming up."""
_STEADY_IN_A_ROW = 3
_PART_COLOURS = ("theme:purple", "theme:sky", "theme:green", "theme:orange")
SHOWN_STEPS = 30


@dataclass(frozen=True, kw_only=True)
class FirstStep:
    """The steps of a cell from the very first, and the parts of the first step's extra time over the steady median.

    The parts are measured separately, so their sum may exceed the extra time; `rest_s` is then negative.
    """

    steps_s: tuple[float, ...]
    warmups: int
    steady_s: float
    """Median of the timed steps; without warm-ups, of the steps after the first."""
    compile_s: float | None
    allocation_s: float | None
    clock_s: float | None
    """Parts of the first step's time; None if not measured."""
    context_s: float | None
    """Creating the CUDA context; this precedes the first step and is no part of it."""
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
        """How far a warm step may exceed the median, as a share of it: the largest of 2 %, the limit beyond which a value is far
        out, and the 95th percentile of the timed steps."""
        timed = sorted(self.steps_s[max(self.warmups, 1) :])
        lower, _, upper = statistics.quantiles(timed, n=4, method="inclusive")
        most = timed[round(0.95 * (len(timed) - 1))]
        return max(_TOLERANCE, max(most, upper + _FAR_OUT * (upper - lower)) / self.steady_s - 1)

    @property
    def is_noisy(self) -> bool:
        """Whether warm steps vary so much that slow steps at the beginning do not show warming up."""
        return self.tolerance > _NOISY

    @property
    def is_slow(self) -> bool:
        """Whether the first step is slower than a warm step may be."""
        return self.first_s > self.steady_s * (1 + self.tolerance)

    @property
    def settled(self) -> int | None:
        """Number (from 1) of the first step that is steady, and that begins three steps with a steady median; None if no step
        does."""
        most_s = self.steady_s * (1 + self.tolerance)
        for start in range(len(self.steps_s) - _STEADY_IN_A_ROW + 1):
            three = self.steps_s[start : start + _STEADY_IN_A_ROW]
            if max(three[0], statistics.median(three)) <= most_s:
                return start + 1
        return None

    def bias_after(self, warmups: int) -> float:
        """How far the mean exceeds the steady median, as a share, if timing begins after so many warm-ups."""
        timed = self.steps_s[warmups : warmups + len(self.steps_s) - self.warmups]
        return statistics.fmean(timed) / self.steady_s - 1


def first_step(record: Record) -> FirstStep | None:
    """The first step and its parts, of the first process if there are several.

    None if single steps are not known from the first on: the cell failed, timed windows of k steps, or has too few steps or
    steps without a time.
    """
    samples = _of_first_process(record, "step")
    if record.failure is not None or samples is None or isinstance(record.config.get("sync"), int):
        return None
    if len(samples.values) < len(record.samples["step"].values) and "compile_s" in record.facts:
        return None  # of several processes, `compile_s` is from the last, whose compile cache is warm
    steps = (*samples.warmups, *samples.values)
    after_first = steps[max(len(samples.warmups), 1) :]
    if len(after_first) < 2:
        return None
    steady_s = statistics.median(after_first)
    if not steady_s:  # nothing can be compared with steps that take no time at all
        return None
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
    """The values that tell a row from the others of its model: `context 256`."""
    names = [name for name in varying(rows) if name not in ("model", "warmups", *needless(rows))]
    return ", ".join(f"{name} {words(row.point.get(name))}" for name in names) or "every step"


def _lines(rows: Sequence[Row]) -> Iterator[tuple[int, str, tuple[str, str], list[Row]]]:
    """(panel, name, style, rows) of each line: a panel per model; a name has the same style in every panel."""
    groups = by_model(rows)
    names = {id(row): _name(row, group) for group in groups.values() for row in group}
    ordered = list(dict.fromkeys(names[id(row)] for row in rows if id(row) in names))
    shown = short_labels(ordered)
    for panel, group in enumerate(groups.values()):
        by_name = grouped(group, lambda row: ordered.index(names[id(row)]))
        for index in sorted(by_name):
            yield panel, shown[index], series_style(index), by_name[index]


def curve_chart(chosen: FirstSteps) -> Chart:
    """Each step's time from the very first: warm-ups hollow, timed steps filled."""
    rows = [row for row, _ in chosen]
    first_steps = {id(row): first for row, first in chosen}
    models = by_model(rows)
    panels = Panels(
        titles=short_labels([words(model) for model in models]),
        columns=panel_columns(len(models), 9),
        x_title="step, from the very first",
        y_title="time of the step (ms)",
        x_axis={"range": [0.4, min(SHOWN_STEPS, max(len(first.steps_s) for _, first in chosen)) + 0.6]},
    )
    for panel, group in enumerate(models.values()):
        panels.axes[panel] = {"y": logarithmic([in_ms(step) for row in group for step in first_steps[id(row)].steps_s])}
    for panel, name, style, line_rows in _lines(rows):
        for row in line_rows:
            first = first_steps[id(row)]
            numbers = list(range(1, len(first.steps_s) + 1))[:SHOWN_STEPS]
            hover = [
                lines_of(
                    label(row.label(without=["warmups"])),
                    f"step {number} ({'warm-up' if number <= first.warmups else 'timed'}): {milliseconds(step)} ms",
                    f"{times_words(step / first.steady_s)} the steady median",
                )
                for number, step in zip(numbers, first.steps_s, strict=False)
            ]
            symbols = ["circle-open" if number <= first.warmups else "circle" for number in numbers]
            y = [in_ms(step) for step in first.steps_s[:SHOWN_STEPS]]
            panels.add(panel, line(name, numbers, y, style=style, hover=hover, marker={"symbol": symbols}))
    return panels.chart(
        "Time of every step, from the very first",
        "Hollow marks are warm-ups, filled marks are timed steps. The scale is logarithmic.",
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
    for panel, name, style, line_rows in _lines(timed):
        ordered = sorted(line_rows, key=lambda row: int(row.point["warmups"]))
        times = [time for _, time in step_means(ordered)]
        x = [words(row.point["warmups"]) for row in ordered]
        hover = [
            lines_of(label(row.label()), f"w = {w}: {milliseconds(*time)} ms")
            for row, w, time in zip(ordered, x, times, strict=True)
        ]
        # A mean far above the panel's range is drawn as a triangle at its top, with the number.
        low, high = panels.ranges[panel]
        inside = [in_ms(mean) < high for mean, _ in times]
        y = [in_ms(mean) if in_ms(mean) < high else low + 0.93 * (high - low) for mean, _ in times]
        spread = [in_ms(std or 0.0) if shown else 0.0 for (_, std), shown in zip(times, inside, strict=True)]
        above = {**error_bars(spread), "color": style[0]}
        symbols = ["circle" if shown else "triangle-up" for shown in inside]
        marks = {"symbol": symbols, "size": [7 if shown else 12 for shown in inside]}
        texts = ["" if shown else f"  {milliseconds(mean)}" for (mean, _), shown in zip(times, inside, strict=True)]
        trace = line(name, x, y, style=style, hover=hover, error_y=above, marker=marks)
        panels.add(panel, {**trace, "mode": "lines+markers+text", "text": texts, "textposition": "middle right"})
    return panels.chart(
        "Mean ± standard deviation against the number of warm-ups",
        "If the mean falls and the whisker shrinks with w, the timed steps still contain warming up. "
        "Scales do not begin at zero; a triangle with a number is a mean far above its panel.",
    )


def _warmed_range(rows: Sequence[Row]) -> tuple[float, float]:
    """The range of means ± std in ms with at least one warm-up: without any, a mean contains the first step and hides the rest."""
    times = [time for _, time in step_means([row for row in rows if row.point["warmups"]] or rows)]
    low = min(mean - (std or 0.0) for mean, std in times)
    high = max(mean + (std or 0.0) for mean, std in times)
    margin = 0.15 * (high - low) or 0.1 * high
    return in_ms(max(0.0, low - margin)), in_ms(high + 2 * margin)


def split_chart(chosen: FirstSteps) -> Chart:
    """Horizontal bars of the first step's extra time by part; the CUDA context has its own panel."""
    contexts = [first.context_s for _, first in chosen]
    titles = ["extra time of the first step over the steady median"]
    titles += ["CUDA context, before the first step"] if any(contexts) else []
    panels = Panels(titles=titles, columns=len(titles), x_title="ms", y_title="")
    panels.axis = {"type": "category", "autorange": "reversed"}
    unnamed = ["warmups", *needless([row for row, _ in chosen])]
    names = short_labels([row.label(without=unnamed) for row, _ in chosen])
    for (part, title), colour in zip(PARTS.items(), _PART_COLOURS, strict=True):
        seconds = [getattr(first, part) or 0.0 for _, first in chosen]
        if not any(seconds):
            continue
        hover = []
        for name, part_s, (_, first) in zip(names, seconds, chosen, strict=True):
            share = part_s / first.extra_s if first.extra_s else 0.0
            hover.append(lines_of(name, f"{title}: {milliseconds(part_s)} ms, {percent(share)} %"))
        lengths = [in_ms(max(0.0, part_s)) for part_s in seconds]
        panels.add(0, bar(title, lengths, names, colour=colour, hover=hover, orientation="h"))
    if any(contexts):
        hover = [f"{milliseconds(context_s or 0.0)} ms" for context_s in contexts]
        lengths = [in_ms(context_s or 0.0) for context_s in contexts]
        panels.add(1, bar("CUDA context", lengths, names, colour="theme:grey", hover=hover, orientation="h"))
    axis = {"automargin": True, "rangemode": "tozero"}
    height = 150 + 34 * len(chosen)
    return panels.chart(
        "Where the first step's extra time goes",
        "Compile time, a step after emptying the allocator's cache, and the SM clock are measured separately; the rest is the "
        "loading of kernels and libraries at their first call (on a CPU also the first touch of memory).",
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
    """steady_s x (f_steady / f_first - 1): the seconds that the first step lost to a clock below the steady clock."""
    after_first = clocks[max(warmups, 1) :]
    if not after_first or not clocks[0]:
        return None
    return steady_s * max(0.0, statistics.median(after_first) / clocks[0] - 1)


def _of_first_process(record: Record, name: str) -> Samples | None:
    """The samples of the first process: a record stores the samples of several processes one after the other."""
    samples = record.samples.get(name)
    steps_fact = "turn_steps" if record.fact("interleaving") == "rounds" else "process_steps"
    if samples is None or steps_fact not in record.facts:
        return samples
    length = record.fact(steps_fact)
    if not isinstance(length, int) or length < 1:
        return None
    processes = max(-(-len(samples.values) // length), 1)
    warmups = samples.warmups[: len(samples.warmups) // processes]
    return Samples(unit=samples.unit, values=samples.values[:length], warmups=warmups)


def _series(record: Record, name: str) -> tuple[float, ...]:
    samples = _of_first_process(record, name)
    return (*samples.warmups, *samples.values) if samples else ()
