"""The sections on numerics of a page: error and cost by precision, dtypes, fp16's range, and sums in 16 bits."""

import dataclasses
import math
from collections.abc import Sequence

from trainstep.report.kit.charts import (
    MAXIMUM_PANELS,
    SERIES,
    Chart,
    Panels,
    Section,
    label,
    lines_of,
    panel_columns,
    short_labels,
)
from trainstep.report.kit.ranking import ratio_of
from trainstep.report.kit.ratio_charts import ratio_chart
from trainstep.report.kit.rows import Row
from trainstep.report.kit.tables import filled
from trainstep.report.numerics.tables import (
    ERRORS,
    dtype_tables,
    errors_table,
    fp32_of,
    groups_of,
    precision_of,
    range_tables,
    sum_tables,
    worst_table,
)

_SYMBOLS = ("circle", "square", "diamond", "triangle-up")


def numerics_sections(rows: Sequence[Row]) -> list[Section]:
    """The sections that these records fill."""
    errors = dataclasses.replace(errors_table(rows), title="Numbers of the charts")
    error_and_cost = Section(
        title="Numerics: error and cost",
        charts=tuple(filter(None, (error_chart(rows), cost_chart(rows)))),
        tables=tuple(filled(errors, worst_table(rows))),
    )
    others = {
        "Numerics: dtypes": dtype_tables(rows),
        "Numerics: gradients lost to fp16's range": range_tables(rows),
        "Numerics: why sums stay in fp32": sum_tables(rows),
    }
    return [
        error_and_cost,
        *(Section(title=title, tables=tuple(tables)) for title, tables in others.items() if tables),
    ]


def error_chart(rows: Sequence[Row]) -> Chart | None:
    """Errors by precision, a panel per model, all on one logarithmic axis; None without errors."""
    groups = groups_of([row for row in rows if row.record.failure is None and _errors(row)])
    if not groups:
        return None
    groups = dict(list(groups.items())[:MAXIMUM_PANELS])
    errors = [error for group in groups.values() for row in group for error in _errors(row).values()]
    powers = range(math.floor(math.log10(min(errors))), math.ceil(math.log10(max(errors))) + 1)
    panels = Panels(
        titles=short_labels(list(groups)),
        columns=panel_columns(len(groups), max(map(len, groups.values())), label_characters=14),
        x_title="precision",
        y_title="relative error",
        x_axis={"type": "category"},
        axis={
            "type": "log",
            "rangemode": "normal",
            "range": [powers[0] - 0.2, powers[-1] + 0.2],
            "tickmode": "array",
            "tickvals": [10.0**power for power in powers],
            "ticktext": [f"10<sup>{power}</sup>" for power in powers],
        },
    )
    for place, group in enumerate(groups.values()):
        panels.axes[place] = {"x": {"categoryorder": "array", "categoryarray": [precision_of(row) for row in group]}}
        _add_errors(panels, place, group)
    caption = "Relative error against the reference: smaller is better; each grid line is ten times the line below."
    return panels.chart("Error by precision", caption)


def cost_chart(rows: Sequence[Row]) -> Chart | None:
    """A line per model and precision: the time of its step over fp32's; None without such a ratio."""
    groups = groups_of(rows)
    ratios = [
        (f"{name} {precision_of(row)}" if len(groups) > 1 else precision_of(row), ratio_of(fp32, row, "step"))
        for name, group in groups.items()
        if (fp32 := fp32_of(group))
        for row in group
        if row is not fp32
    ]
    return ratio_chart("Cost by precision", "", "time of a step ÷ fp32's", {"step": ratios})


def _errors(row: Row) -> dict[str, float]:
    """The row's errors, without zeros, which have no place on a logarithmic axis."""
    return {name: error for name in ERRORS if (error := row.record.fact(name) or 0) > 0}


def _add_errors(panels: Panels, panel: int, group: Sequence[Row]) -> None:
    for index, (fact, name) in enumerate(ERRORS.items()):
        points = [(row, errors[fact]) for row in group if fact in (errors := _errors(row))]
        panels.add(
            panel,
            {
                "type": "scatter",
                "mode": "markers",
                "name": f"error of {name}",
                "x": [precision_of(row) for row, _ in points],
                "y": [error for _, error in points],
                "marker": {"color": SERIES[index], "symbol": _SYMBOLS[index], "size": 11},
                "cliponaxis": False,
                "hovertext": [lines_of(label(row.label()), f"{name}: {error:.2e}") for row, error in points],
                "hoverinfo": "text",
            },
        )
