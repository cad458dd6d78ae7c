"""Charts of warming up: every step from the first, the mean against w, where the first step's extra time goes."""

from collections.abc import Callable, Sequence
from typing import Any

from trainstep.report.charts import (
    MAXIMUM_PANELS,
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
from trainstep.report.first_step import PARTS, FirstStep
from trainstep.report.forms import in_ms, milliseconds, percent, times_words
from trainstep.report.quantities import quantities, time_of
from trainstep.report.rows import Row, needless, varying, words

Found = list[tuple[Row, FirstStep]]
"""Each row with the split of its first step."""
PART_COLOURS = {
    "compile_s": "theme:purple",
    "allocation_s": "theme:sky",
    "clock_s": "theme:green",
    "rest_s": "theme:orange",
}
SHOWN_STEPS = 30


def _name(row: Row, rows: Sequence[Row]) -> str:
    """What tells a row from the others of its model: `context 256`."""
    names = [name for name in varying(rows) if name not in ("model", "warmups", *needless(rows))]
    return ", ".join(f"{name} {words(row.point.get(name))}" for name in names) or "every step"


def _by_model(rows: Sequence[Row]) -> list[Any]:
    return list(dict.fromkeys(row.point.get("model") for row in rows))[:MAXIMUM_PANELS]


def _line_panels(rows: Sequence[Row], draw: Callable[[Panels, int, str, list[Row], int], None], panels: Panels) -> None:
    """Call `draw` for each group of rows with one name, a colour a name and a panel a model."""
    name_of = {
        id(row): _name(row, [one for one in rows if one.point.get("model") == row.point.get("model")]) for row in rows
    }
    names = list(dict.fromkeys(name_of.values()))
    shown = short_labels(names)
    for panel, model in enumerate(_by_model(rows)):
        for index, name in enumerate(names):
            mine = [row for row in rows if row.point.get("model") == model and name_of[id(row)] == name]
            if mine:
                draw(panels, panel, shown[index], mine, index)


def curve_chart(chosen: Found) -> Chart:
    """Each step's time from the very first: warm-ups hollow, timed steps filled."""
    rows = [row for row, _ in chosen]
    steps_of = {id(row): found for row, found in chosen}
    models = _by_model(rows)
    panels = Panels(
        titles=short_labels([words(model) for model in models]),
        columns=panel_columns(len(models), 9),
        x_title="step, from the very first",
        y_title="time of the step (ms)",
        x_axis={"range": [0.4, min(SHOWN_STEPS, max(len(found.steps_s) for _, found in chosen)) + 0.6]},
        axis=logarithmic([in_ms(step) for _, found in chosen for step in found.steps_s]),
    )

    def draw(panels: Panels, panel: int, name: str, mine: list[Row], index: int) -> None:
        for row in mine:
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
            panels.add(
                panel, line(name, numbers, y, style=series_style(index), hover=hover, marker={"symbol": symbols})
            )

    _line_panels(rows, draw, panels)
    return panels.chart(
        "Time of every step, from the very first",
        "Hollow marks are warm-ups, filled ones the timed steps. The scale is logarithmic.",
    )


def by_w_chart(rows: Sequence[Row]) -> Chart | None:
    """Mean ± std of the timed steps against the number of warm-ups."""
    timed = [row for row in rows if time_of(quantities(row), "step")]
    if not timed:
        return None
    models = _by_model(timed)
    panels = Panels(
        titles=short_labels([words(model) for model in models]),
        columns=panel_columns(len(models), 7),
        x_title="warm-ups w",
        y_title="mean of the timed steps (ms)",
        x_axis={"type": "category"},
    )

    def draw(panels: Panels, panel: int, name: str, mine: list[Row], index: int) -> None:
        ordered = sorted(mine, key=lambda row: int(row.point["warmups"]))
        times = [time_of(quantities(row), "step") or (0.0, None) for row in ordered]
        x = [words(row.point["warmups"]) for row in ordered]
        said = [f"w = {w}: {milliseconds(*time)} ms" for w, time in zip(x, times, strict=True)]
        hover = [lines_of(label(row.label()), text) for row, text in zip(ordered, said, strict=True)]
        low, high = panels.ranges[panel]
        inside = [in_ms(mean) < high for mean, _ in times]
        y = [
            in_ms(mean) if shown else low + 0.93 * (high - low) for (mean, _), shown in zip(times, inside, strict=True)
        ]
        spread = [in_ms(std or 0.0) if shown else 0.0 for (_, std), shown in zip(times, inside, strict=True)]
        above = {**error_bars(spread), "color": series_style(index)[0]}
        symbols = ["circle" if shown else "triangle-up" for shown in inside]
        marks = {"symbol": symbols, "size": [7 if shown else 12 for shown in inside]}
        texts = ["" if shown else f"  {milliseconds(mean)}" for (mean, _), shown in zip(times, inside, strict=True)]
        drawn = line(name, x, y, style=series_style(index), hover=hover, error_y=above, marker=marks)
        panels.add(panel, {**drawn, "mode": "lines+markers+text", "text": texts, "textposition": "middle right"})

    for panel, model in enumerate(models):
        panels.ranges[panel] = _warmed_range([row for row in timed if row.point.get("model") == model])
    _line_panels(timed, draw, panels)
    return panels.chart(
        "Mean ± standard deviation against the number of warm-ups",
        "A mean that falls and a whisker that shrinks with w say that warming up was still going on in the timed steps. "
        "Scales do not begin at zero; a triangle stands for a mean far above its panel, with its number.",
    )


def _warmed_range(rows: Sequence[Row]) -> tuple[float, float]:
    """The span of means ± std with at least one warm-up: with none, a mean holds the whole first step and hides the rest."""
    warmed = [row for row in rows if row.point["warmups"]] or rows
    times = [time for row in warmed if (time := time_of(quantities(row), "step"))]
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
    for part, title in PARTS.items():
        seconds = [getattr(found, part) or 0.0 for _, found in chosen]
        if not any(seconds):
            continue
        shares = [
            second / found.extra_s if found.extra_s else 0.0 for second, (_, found) in zip(seconds, chosen, strict=True)
        ]
        said = [f"{title}: {milliseconds(s)} ms, {percent(share)} %" for s, share in zip(seconds, shares, strict=True)]
        hover = [lines_of(name, text) for name, text in zip(names, said, strict=True)]
        lengths = [in_ms(max(0.0, second)) for second in seconds]
        panels.add(0, bar(title, lengths, names, colour=PART_COLOURS[part], hover=hover, orientation="h"))
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
