"""What a page shows of any sweep: the phases by size and context, and the ceilings of the machine."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainstep.report.charts import (
    FAILURE_COLOUR,
    INK,
    MAXIMUM_PANELS,
    PHASE_COLOURS,
    SERIES,
    Chart,
    Panels,
    bar,
    error_bars,
    label,
    level_labels_fit,
    lines_of,
    panel_columns,
    short_labels,
    text_marks,
)
from trainstep.report.forms import failure_sentence, failure_word, in_ms, milliseconds
from trainstep.report.rows import PHASES, Row, needless, quantities, time_of, varying, words
from trainstep.report.tables import TITLES

_LABELLED_BARS = 40
_HOW_TO_READ = (
    "Each bar is the mean of the timed steps, phase on phase; the line across it with its whisker is the whole step's mean ± "
    "standard deviation."
)


def phases_charts(rows: Sequence[Row]) -> list[Chart]:
    """The chart of phases, where a step was timed."""
    chart = phases_chart(rows)
    return [chart] if chart else []


def phases_chart(rows: Sequence[Row]) -> Chart | None:
    """Stacked bars of the phases: a panel a model, a bar a context (and whatever else varies); failures as words."""
    steps = _with_most_warmups(rows)
    if not any("step" in row.record.samples for row in steps):
        return None
    models = list(dict.fromkeys(row.point.get("model") for row in steps))[:MAXIMUM_PANELS]
    by_model = [[row for row in steps if row.point.get("model") == model] for model in models]
    if len(models) > 1 and max(map(len, by_model)) == 1:
        return _models_chart(steps[: len(models)])
    bars = max(map(len, by_model))
    level = {"tickangle": 0} if level_labels_fit(bars, _widest(steps)) else {}
    panels = Panels(
        titles=short_labels([words(model) for model in models]),
        columns=panel_columns(len(models), bars, label_characters=_widest(steps)),
        x_title=", ".join(["context (tokens)", *map(label, _others(steps))]),
        y_title="time of a step (ms)",
        x_axis={"type": "multicategory" if _others(steps) else "category", "tickfont": {"size": 12}, **level},
    )
    labelled = len(steps) <= _LABELLED_BARS
    most = " Of cells that differ in warm-ups only, the one with the most." if "warmups" in varying(rows) else ""
    for panel, mine in enumerate(by_model):
        panels.ranges[panel] = (0.0, _headroom(mine))
        contexts = [words(row.point.get("context")) for row in mine]
        rest = [lines_of(*_parts(one)) for one in short_labels([_rest(row, _others(steps)) for row in mine])]
        for trace in _phase_traces(mine, [contexts, rest] if _others(steps) else contexts, labelled):
            panels.add(panel, trace)
    return panels.chart(
        "Time of a step by phase",
        f"{_HOW_TO_READ} Each size has its own scale.{most}",
        barmode="stack",
        bargap=0.25 if bars > 2 else 0.6,
    )


def _models_chart(rows: Sequence[Row]) -> Chart:
    """One cell a model: one panel with the models side by side."""
    panels = Panels(titles=[""], columns=1, x_title="model", y_title="time of a step (ms)", x_axis={"type": "category"})
    panels.ranges[0] = (0.0, _headroom(rows))
    for trace in _phase_traces(rows, short_labels([words(row.point.get("model")) for row in rows]), labelled=True):
        panels.add(0, trace)
    return panels.chart("Time of a step by phase", _HOW_TO_READ, barmode="stack", bargap=0.5)


def _others(rows: Sequence[Row]) -> list[str]:
    """What varies besides the model and the context; the machine only where nothing else tells two bars apart."""
    return [name for name in varying(rows) if name not in ("model", "context", *needless(rows))]


def _with_most_warmups(rows: Sequence[Row]) -> list[Row]:
    """Of rows that differ in warm-ups only, the one with the most: the others time their own warming up."""
    if "warmups" not in varying(rows):
        return list(rows)
    most: dict[Any, Row] = {}
    for row in rows:
        rest = row.rest("warmups")
        if rest not in most or row.point["warmups"] > most[rest].point["warmups"]:
            most[rest] = row
    return list(most.values())


def _rest(row: Row, others: Sequence[str]) -> str:
    return " · ".join(words(row.point.get(name)) for name in others)


def _parts(text: str) -> list[str]:
    """Lines of a label under a bar: `bf16`, `autocast`, `flash`."""
    return text.replace(" · ", "_").split("_")


def _widest(rows: Sequence[Row]) -> int:
    """Characters of the widest line among the labels under bars."""
    others = _others(rows)
    return max([4, *(len(part) for row in rows for part in _parts(_rest(row, others)))]) if others else 4


def _headroom(rows: Sequence[Row]) -> float:
    """The top of a panel: above its tallest bar, its whisker and the number over that."""
    tops = []
    for one in map(quantities, rows):
        stacked = sum(found[0] for phase in PHASES if (found := time_of(one, phase)))
        step = time_of(one, "step")
        tops.append(max(stacked, step[0] + (step[1] or 0.0) if step else 0.0))
    return in_ms(1.14 * max(tops)) or 1.0


def _phase_traces(rows: Sequence[Row], x: list[Any], labelled: bool) -> list[dict[str, Any]]:
    """`x`: the bars' places, one label a row, or two levels of labels."""
    numbers = [quantities(row) for row in rows]
    traces = []
    for phase in PHASES:
        times = [time_of(one, phase) for one in numbers]
        if any(times):
            hover = [_hover(row, phase, found) for row, found in zip(rows, times, strict=True)]
            y = [in_ms(found[0]) if found else None for found in times]
            name = TITLES.get(phase, phase)
            traces.append(bar(name, x, y, colour=PHASE_COLOURS[phase], hover=hover))
    return [*traces, *_step_marks(rows, numbers, x, labelled), *_failure_marks(rows, x)]


def _step_marks(
    rows: Sequence[Row], numbers: Sequence[Mapping[str, Any]], x: Any, labelled: bool
) -> list[dict[str, Any]]:
    """The whole step across its bar, with its standard deviation and, while bars are few, its number."""
    found = [(place, time) for place, one in enumerate(numbers) if (time := time_of(one, "step"))]
    if not found:
        return []
    return [
        {
            "type": "scatter",
            "name": "total step ± std",
            "x": _at(x, [place for place, _ in found]),
            "y": [in_ms(time[0]) for _, time in found],
            "mode": "markers+text" if labelled else "markers",
            "text": [milliseconds(time[0]) for _, time in found],
            "textposition": "top center",
            "textfont": {"color": INK, "size": 11},
            "cliponaxis": False,
            "marker": {"symbol": "line-ew", "size": 16, "line": {"color": INK, "width": 1.6}, "color": INK},
            "error_y": error_bars([in_ms(time[1] or 0.0) for _, time in found]),
            "hovertext": [_hover(rows[place], "step", time) for place, time in found],
            "hoverinfo": "text",
        }
    ]


def _failure_marks(rows: Sequence[Row], x: Any) -> list[dict[str, Any]]:
    failed = [(place, row.record.failure) for place, row in enumerate(rows) if row.record.failure]
    if not failed:
        return []
    return [
        text_marks(
            "failed",
            _at(x, [place for place, _ in failed]),
            [0.0] * len(failed),
            [f"<b>{failure_word(failure)}</b>" for _, failure in failed],
            colour=FAILURE_COLOUR,
            hover=[lines_of(label(rows[place].label()), label(failure_sentence(failure))) for place, failure in failed],
        )
    ]


def _at(x: Any, places: Sequence[int]) -> Any:
    if x and isinstance(x[0], list):
        return [[level[place] for place in places] for level in x]
    return [x[place] for place in places]


def _hover(row: Row, name: str, found: tuple[float, float | None] | None) -> str:
    return "" if found is None else lines_of(label(row.label()), f"{TITLES.get(name, name)}: {milliseconds(*found)} ms")


def ceilings_charts(rows: Sequence[Row]) -> list[Chart]:
    """Measured ceilings of the machine: one chart for arithmetic, one for copies, since their units differ."""
    found = [(row, quantities(row)) for row in rows if "rate" in row.record.facts]
    kinds = {"flops": ("Fastest matmuls", "TFLOP/s", 1e12), "bytes": ("Fastest copies", "GB/s", 1e9)}
    made = []
    for fact, (title, unit, scale) in kinds.items():
        mine = [(row, numbers) for row, numbers in found if fact in numbers]
        if not mine:
            continue
        panels = Panels(titles=[""], columns=1, x_title="", y_title=unit, x_axis={"type": "category"})
        x = short_labels([row.label() for row, _ in mine])
        y = [numbers["rate"] / scale for _, numbers in mine]
        hover = [lines_of(name, f"{rate:,.4g} {unit}") for name, rate in zip(x, y, strict=True)]
        panels.add(0, bar(unit, x, y, colour=SERIES[0], hover=hover, showlegend=False))
        made.append(panels.chart(title, "Median rate of the timed calls.", bargap=0.4))
    return made
