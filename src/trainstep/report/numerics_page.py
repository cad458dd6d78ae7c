"""What a page shows of numerics: error beside cost, dtypes, fp16's range, sums; each with the sentence that it shows."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from trainstep.report.charts import (
    MAXIMUM_PANELS,
    SERIES,
    Chart,
    Panels,
    Section,
    bar,
    error_bars,
    label,
    lines_of,
    short_labels,
)
from trainstep.report.forms import in_ms, milliseconds
from trainstep.report.numerics_tables import (
    ERRORS,
    dtype_tables,
    errors_table,
    groups_of,
    precision_of,
    range_tables,
    sum_tables,
    trade_sentences,
    worst_table,
)
from trainstep.report.rows import Row, step_times
from trainstep.report.tables import filled

_SYMBOLS = ("circle", "square", "diamond", "triangle-up")


def numerics_sections(rows: Sequence[Row]) -> list[Section]:
    """The parts of the page that these records fill."""
    chart = error_chart(rows)
    errors = dataclasses.replace(errors_table(rows), title="Numbers of the chart")
    made = [
        Section(
            title="Numerics: error and cost",
            paragraphs=tuple(trade_sentences(rows)),
            charts=(chart,) if chart else (),
            tables=tuple(filled(errors, worst_table(rows))),
        )
    ]
    parts = {
        "Numerics: dtypes": dtype_tables(rows),
        "Numerics: what fp16's range takes from gradients": range_tables(rows),
        "Numerics: why sums stay in fp32": sum_tables(rows),
    }
    return made + [Section(title=title, tables=tuple(tables)) for title, tables in parts.items() if tables]


def error_chart(rows: Sequence[Row]) -> Chart | None:
    """A line of two panels a model: errors on a logarithmic axis, and the time of a step."""
    groups = groups_of([row for row in rows if row.record.failure is None and _errors(row)])
    if not groups:
        return None
    groups = dict(list(groups.items())[: MAXIMUM_PANELS // 2])
    names = short_labels(list(groups))
    panels = Panels(
        titles=[title for name in names for title in (f"{name}: error", f"{name}: time of a step")],
        columns=2,
        x_title="precision",
        y_title="relative error",
        x_axis={"type": "category"},
    )
    for place, group in enumerate(groups.values()):
        _add_errors(panels, 2 * place, group)
        _add_times(panels, 2 * place + 1, group)
    chart = panels.chart(
        "Error and cost by precision",
        "Left: relative error against the reference, smaller is better, each line ten times the one below. Right: mean time of "
        "a whole step ± standard deviation.",
        bargap=0.45,
    )
    return dataclasses.replace(chart, layout=_with_axes(chart, list(groups.values())))


def _errors(row: Row) -> dict[str, float]:
    """Its facts that are errors; zero has no place on a logarithmic axis."""
    return {name: error for name in ERRORS if (error := row.record.fact(name) or 0) > 0}


def _add_errors(panels: Panels, panel: int, group: Sequence[Row]) -> None:
    for index, (fact, name) in enumerate(ERRORS.items()):
        found = [(row, errors[fact]) for row in group if fact in (errors := _errors(row))]
        panels.add(
            panel,
            {
                "type": "scatter",
                "mode": "markers",
                "name": f"error of {name}",
                "x": [precision_of(row) for row, _ in found],
                "y": [error for _, error in found],
                "marker": {"color": SERIES[index], "symbol": _SYMBOLS[index], "size": 11},
                "cliponaxis": False,
                "hovertext": [lines_of(label(row.label()), f"{name}: {error:.2e}") for row, error in found],
                "hoverinfo": "text",
            },
        )


def _add_times(panels: Panels, panel: int, group: Sequence[Row]) -> None:
    found = step_times(group)
    panels.ranges[panel] = (0.0, 1.08 * max((in_ms(time[0] + (time[1] or 0.0)) for _, time in found), default=1.0))
    drawn = bar(
        "total step",
        [precision_of(row) for row, _ in found],
        [in_ms(time[0]) for _, time in found],
        colour=SERIES[5],
        hover=[lines_of(label(row.label()), f"{milliseconds(*time)} ms") for row, time in found],
        error_y=error_bars([in_ms(time[1] or 0.0) for _, time in found]),
        showlegend=False,
    )
    panels.add(panel, drawn)


def _with_axes(chart: Chart, groups: Sequence[Sequence[Row]]) -> dict[str, Any]:
    """Left panels logarithmic over the same powers of ten; right ones in milliseconds, with a title of their own."""
    errors = [error for group in groups for row in group for error in _errors(row).values()]
    powers = range(math.floor(math.log10(min(errors))), math.ceil(math.log10(max(errors))) + 1)
    layout = dict(chart.layout)
    for place in range(len(groups)):
        left, right = (f"yaxis{number}" if number > 1 else "yaxis" for number in (2 * place + 1, 2 * place + 2))
        layout[left] = {
            **layout[left],
            "type": "log",
            "rangemode": "normal",
            "range": [powers[0] - 0.2, powers[-1] + 0.2],
            "tickmode": "array",
            "tickvals": [10.0**power for power in powers],
            "ticktext": [f"10<sup>{power}</sup>" for power in powers],
        }
        layout[right] = {**layout[right], "title": {"text": "time of a step (ms)", "font": {"size": 13}}}
        for axis in (left.replace("y", "x", 1), right.replace("y", "x", 1)):
            order = [precision_of(row) for row in groups[place]]
            layout[axis] = {**layout[axis], "categoryorder": "array", "categoryarray": order}
    return layout
