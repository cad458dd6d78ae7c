"""What a page shows of numerics: error beside cost, dtypes, fp16's range, sums; each with the sentence that it shows."""

import dataclasses
import math
from collections.abc import Sequence

from trainstep.report.charts import (
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
from trainstep.report.numerics_tables import (
    ERRORS,
    dtype_tables,
    errors_table,
    fp32_of,
    groups_of,
    precision_of,
    range_tables,
    sum_tables,
    trade_sentences,
    worst_table,
)
from trainstep.report.ratio_charts import ratio_chart
from trainstep.report.ratios import ratio_of
from trainstep.report.rows import Row
from trainstep.report.tables import filled

_SYMBOLS = ("circle", "square", "diamond", "triangle-up")


def numerics_sections(rows: Sequence[Row]) -> list[Section]:
    """The parts of the page that these records fill."""
    charts = tuple(filter(None, (error_chart(rows), cost_chart(rows))))
    errors = dataclasses.replace(errors_table(rows), title="Numbers of the charts")
    made = [
        Section(
            title="Numerics: error and cost",
            paragraphs=tuple(trade_sentences(rows)),
            charts=charts,
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
    """A panel a model, errors on a logarithmic axis over the same powers of ten."""
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
        panels.own[place] = {"x": {"categoryorder": "array", "categoryarray": [precision_of(row) for row in group]}}
        _add_errors(panels, place, group)
    caption = "Relative error against the reference: smaller is better, each line ten times the one below."
    return panels.chart("Error by precision", caption)


def cost_chart(rows: Sequence[Row]) -> Chart | None:
    """A line a model and precision: its step's time over fp32's."""
    groups = groups_of(rows)
    named = [
        (f"{name} {precision_of(row)}" if len(groups) > 1 else precision_of(row), ratio_of(fp32, row, "step"))
        for name, group in groups.items()
        if (fp32 := fp32_of(group))
        for row in group
        if row is not fp32
    ]
    return ratio_chart("Cost by precision", "", "time of a step ÷ fp32's", {"step": named})


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
