"""Charts of any sweep on a page: the time of a step by phase, and the measured ceilings of the machine."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainstep.grouping import grouped
from trainstep.report.kit.charts import (
    FAILURE_COLOUR,
    INK,
    MAXIMUM_PANELS,
    PHASE_COLOURS,
    SERIES,
    Chart,
    Panels,
    Trace,
    bar,
    error_bars,
    label,
    level_labels_fit,
    lines_of,
    panel_columns,
    short_labels,
    text_marks,
)
from trainstep.report.kit.forms import failure_sentence, failure_word, in_ms, milliseconds
from trainstep.report.kit.ranking import median_and_range, median_of
from trainstep.report.kit.rows import PHASES, Row, needless, quantities, varying, words
from trainstep.report.kit.tables import TITLES

_LABELLED_BARS = 40
_HOW_TO_READ = (
    "Each bar is the median of the timed steps, phase on phase; the line across it with its whisker is the whole step's "
    "median ± half the interquartile range."
)


def phases_charts(rows: Sequence[Row]) -> list[Chart]:
    """Stacked bars of the phases: a panel per model, a bar per context and other varying value; a failure is a word.

    Empty if no step was timed.
    """
    steps = _with_most_warmups(rows)
    if not any("step" in row.record.samples for row in steps):
        return []
    models = by_model(steps)
    bars = max(map(len, models.values()))
    if len(models) > bars == 1:
        return [_models_chart(steps[: len(models)])]
    others = [name for name in varying(steps) if name not in ("model", "context", *needless(steps))]
    widest = max([4, *(len(line) for row in steps for line in _lines(values_words(row, others)))])
    panels = model_panels(models, others, y_title="time of a step (ms)", label_characters=widest)
    if level_labels_fit(bars, widest):
        panels.x_axis = {**panels.x_axis, "tickangle": 0}
    for panel, group in enumerate(models.values()):
        panels.ranges[panel] = (0.0, _headroom(group))
        below = [lines_of(*_lines(text)) for text in short_labels([values_words(row, others) for row in group])]
        for trace in _phase_traces(group, bar_places(group, below), len(steps) <= _LABELLED_BARS):
            panels.add(panel, trace)
    most = (
        " Of cells that differ only in warm-ups, the one with the most is drawn." if "warmups" in varying(rows) else ""
    )
    caption = f"{_HOW_TO_READ} Each size has its own scale.{most}"
    return [panels.chart("Time of a step by phase", caption, barmode="stack", bargap=0.25 if bars > 2 else 0.6)]


def _models_chart(rows: Sequence[Row]) -> Chart:
    """One panel with the models side by side, for sweeps with one cell per model."""
    panels = Panels(titles=[""], columns=1, x_title="model", y_title="time of a step (ms)", x_axis={"type": "category"})
    panels.ranges[0] = (0.0, _headroom(rows))
    for trace in _phase_traces(rows, short_labels([words(row.point.get("model")) for row in rows]), labelled=True):
        panels.add(0, trace)
    return panels.chart("Time of a step by phase", _HOW_TO_READ, barmode="stack", bargap=0.5)


def by_model(rows: Sequence[Row]) -> dict[Any, list[Row]]:
    """The rows of each model, for at most as many models as a chart has panels."""
    return dict(list(grouped(rows, lambda row: row.point.get("model")).items())[:MAXIMUM_PANELS])


def model_panels(
    models: Mapping[Any, Sequence[Row]], others: Sequence[str], *, y_title: str, label_characters: int
) -> Panels:
    """A panel per model with bars by context and, on a second level of labels, by the other names."""
    return Panels(
        titles=short_labels([words(model) for model in models]),
        columns=panel_columns(len(models), max(map(len, models.values())), label_characters=label_characters),
        x_title=", ".join(["context (tokens)", *map(label, others)]),
        y_title=y_title,
        x_axis={"type": "multicategory" if others else "category", "tickfont": {"size": 12}},
    )


def bar_places(rows: Sequence[Row], below: Sequence[str]) -> list[Any]:
    """The places of these rows' bars on the x axis of such a panel: one label each, or two levels of labels."""
    contexts = [words(row.point.get("context")) for row in rows]
    return [contexts, below] if any(below) else contexts


def values_words(row: Row, names: Sequence[str]) -> str:
    """`bf16_autocast · flash`"""
    return " · ".join(words(row.point.get(name)) for name in names)


def _with_most_warmups(rows: Sequence[Row]) -> list[Row]:
    """The row with the most warm-ups among rows that differ only in warm-ups; timed steps of the others contain warming up."""
    if "warmups" not in varying(rows):
        return list(rows)
    alike = grouped(rows, lambda row: row.rest("warmups")).values()
    return [max(group, key=lambda row: int(row.point["warmups"])) for group in alike]


def _lines(text: str) -> list[str]:
    """The lines of a label under a bar: `bf16_autocast · flash` becomes `bf16`, `autocast`, `flash`."""
    return text.replace(" · ", "_").split("_")


def _headroom(rows: Sequence[Row]) -> float:
    """The upper end of a panel's y axis, with room above the tallest bar for its whisker and number."""
    tops = []
    for row in rows:
        stacked_s = sum(median_of(row.record, phase) or 0.0 for phase in PHASES)
        step = median_and_range("step")(row)
        tops.append(max(stacked_s, step[0] + (step[1] or 0.0) if step else 0.0))
    return in_ms(1.14 * max(tops)) or 1.0


def _phase_traces(rows: Sequence[Row], x: list[Any], labelled: bool) -> Iterator[Trace]:
    """The stacked bars of the phases, the marks of whole steps, and the words of failures; `x` is from `bar_places`."""
    for phase in PHASES:
        times = [*map(median_and_range(phase), rows)]
        if any(times):
            hover = [_hover(row, phase, time) for row, time in zip(rows, times, strict=True)]
            y = [in_ms(time[0]) if time else None for time in times]
            yield bar(TITLES.get(phase, phase), x, y, colour=PHASE_COLOURS[phase], hover=hover)
    steps = [(place, time) for place, time in enumerate(map(median_and_range("step"), rows)) if time]
    if steps:
        yield _step_marks(rows, steps, x, labelled)
    failed = [(place, row.record.failure) for place, row in enumerate(rows) if row.record.failure]
    if failed:
        yield text_marks(
            "failed",
            _at(x, [place for place, _ in failed]),
            [0.0] * len(failed),
            [f"<b>{failure_word(failure)}</b>" for _, failure in failed],
            colour=FAILURE_COLOUR,
            hover=[lines_of(label(rows[place].label()), label(failure_sentence(failure))) for place, failure in failed],
        )


def _step_marks(
    rows: Sequence[Row], steps: Sequence[tuple[int, tuple[float, float | None]]], x: list[Any], labelled: bool
) -> Trace:
    """A line across each bar at the whole step's median, with half its interquartile range and, if `labelled`, the number."""
    return {
        "type": "scatter",
        "name": "total step, median",
        "x": _at(x, [place for place, _ in steps]),
        "y": [in_ms(time[0]) for _, time in steps],
        "mode": "markers+text" if labelled else "markers",
        "text": [milliseconds(time[0]) for _, time in steps],
        "textposition": "top center",
        "textfont": {"color": INK, "size": 12},
        "cliponaxis": False,
        "marker": {"symbol": "line-ew", "size": 16, "line": {"color": INK, "width": 1.6}, "color": INK},
        "error_y": error_bars([in_ms(time[1] or 0.0) for _, time in steps]),
        "hovertext": [_hover(rows[place], "step", time) for place, time in steps],
        "hoverinfo": "text",
    }


def _at(x: Any, places: Sequence[int]) -> Any:
    if x and isinstance(x[0], list):
        return [[level[place] for place in places] for level in x]
    return [x[place] for place in places]


def _hover(row: Row, name: str, time: tuple[float, float | None] | None) -> str:
    return "" if time is None else lines_of(label(row.label()), f"{TITLES.get(name, name)}: {milliseconds(*time)} ms")


def ceilings_charts(rows: Sequence[Row]) -> list[Chart]:
    """Measured ceilings of the machine: one chart for arithmetic and one for copies, because their units differ."""
    measured = [(row, quantities(row)) for row in rows if "rate" in row.record.facts]
    kinds = {"flops": ("Fastest matmuls", "TFLOP/s", 1e12), "bytes": ("Fastest copies", "GB/s", 1e9)}
    charts = []
    for fact, (title, unit, scale) in kinds.items():
        cells = [(row, numbers) for row, numbers in measured if fact in numbers]
        if not cells:
            continue
        panels = Panels(titles=[""], columns=1, x_title="", y_title=unit, x_axis={"type": "category"})
        x = short_labels([row.label() for row, _ in cells])
        y = [numbers["rate"] / scale for _, numbers in cells]
        hover = [lines_of(name, f"{rate:,.4g} {unit}") for name, rate in zip(x, y, strict=True)]
        panels.add(0, bar(unit, x, y, colour=SERIES[0], hover=hover, showlegend=False))
        charts.append(panels.chart(title, "Median rate of the timed calls.", bargap=0.4))
    return charts
