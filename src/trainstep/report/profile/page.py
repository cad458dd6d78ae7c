"""The sections on profiles of a page: the limit of each cell, shares by class, phases and longest kernels."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from trainstep.grouping import grouped
from trainstep.records.tables import table_lines
from trainstep.report.kit.charts import (
    INK,
    PHASE_COLOURS,
    SERIES,
    Chart,
    Panels,
    Section,
    bar,
    label,
    lines_of,
    short_labels,
)
from trainstep.report.kit.forms import in_ms, in_percent, milliseconds, percent
from trainstep.report.kit.rows import Row, needless, varying
from trainstep.report.kit.tables import filled
from trainstep.report.profile.answer import sentences
from trainstep.report.profile.device_page import device_sections
from trainstep.report.profile.tables import (
    DETAILED_CELLS,
    TORCH_COLUMNS,
    class_shares,
    row_tables,
    shares_table,
    verdict_table,
)
from trainstep.report.step.phases import bar_places, by_model, model_panels, values_words
from trainstep.traces import kernel_classes as classes
from trainstep.traces.tables import REST, top_kernels

_BLUE, _VERMILION, _GREEN, _PURPLE, _ORANGE, _SKY, _GREY = SERIES
_LOOKS: dict[str, tuple[str, str]] = {
    classes.MATMUL: (_BLUE, ""),
    classes.ATTENTION: (_SKY, ""),
    classes.SOFTMAX: (_PURPLE, ""),
    classes.ELEMENT_WISE: (_ORANGE, ""),
    classes.REDUCTION: (_VERMILION, ""),
    classes.NORMALISATION: (_GREEN, ""),
    classes.OPTIMIZER: (_GREEN, "/"),
    classes.COMMUNICATION: (_PURPLE, "x"),
    classes.COPIES: (_GREY, ""),
    classes.OVERHEAD: (_GREY, "."),
    classes.OTHER: (INK, ""),
    classes.IDLE: ("theme:line", "-"),
}
"""Class -> colour and pattern."""
_KERNELS_DRAWN = 5
"""The number of kernels drawn for each phase."""


def profile_sections(rows: Sequence[Row], ceilings: Sequence[Row] = ()) -> list[Section]:
    """The sections that these records fill; `ceilings`: records of measured ceilings of the device."""
    shares = shares_chart(rows)
    by_class = dataclasses.replace(shares_table(rows), note=TORCH_COLUMNS[:1].upper() + TORCH_COLUMNS[1:])
    overview = Section(
        title="Where the time goes",
        charts=(shares,) if shares else (),
        tables=tuple(filled(verdict_table(rows), by_class)),
    )
    ran = [row for row in rows if row.record.failure is None]
    whole = [row for row in ran if all(row.record.tables.get(name) for name in ("classes", "kernels"))]
    cells = map(_cell, whole) if len(whole) <= DETAILED_CELLS else ()
    return [overview, *cells, *device_sections(rows, ceilings)]


def _cell(row: Row) -> Section:
    return Section(
        title=f"Profile of {row.label()}",
        paragraphs=tuple(sentences(row.record.tables, row.record.fact)),
        charts=(phases_by_class(row), kernels_chart(row)),
        tables=tuple(  # the first table, of kernels, is open
            dataclasses.replace(table, folded=table.folded and place > 0)
            for place, table in enumerate(row_tables(row, whole=True))
        ),
    )


def phases_by_class(row: Row) -> Chart:
    """A stacked bar per phase: the time of its classes, with its idle time on top."""
    lines = table_lines(row.record.tables["classes"])
    phases = list(dict.fromkeys(line["phase"] for line in lines))
    times = {(line["phase"], line["class"]): line["time_s"] for line in lines}
    panels = Panels(titles=[""], columns=1, x_title="phase", y_title="time of a step (ms)", x_axis={"type": "category"})
    for name in classes.CLASSES:
        seconds = [times.get((phase, name)) for phase in phases]
        if any(seconds):
            hover = [
                "" if time_s is None else lines_of(label(f"{phase}: {name}"), f"{milliseconds(time_s)} ms")
                for phase, time_s in zip(phases, seconds, strict=True)
            ]
            panels.add(0, _class_bar(name, phases, [in_ms(time_s or 0.0) for time_s in seconds], hover))
    caption = "Kernels and copies of a profiled step by class; idle: the GPU was idle before work of that phase."
    return panels.chart(f"{row.label()}: Time by phase and class", caption, barmode="stack", bargap=0.5)


def kernels_chart(row: Row) -> Chart:
    """The longest kernels of each phase, from top to bottom in the order of a step."""
    kernels = table_lines(top_kernels(row.record.tables["kernels"], _KERNELS_DRAWN))
    kernels = [kernel for kernel in kernels if kernel["phase"] in PHASE_COLOURS]
    names = short_labels([f"{place}. {_kernel_name(kernel)}" for place, kernel in enumerate(kernels, 1)])
    panels = Panels(titles=[""], columns=1, x_title="", y_title="")
    for phase, drawn in grouped(zip(names, kernels, strict=True), lambda pair: str(pair[1]["phase"])).items():
        hover = [
            lines_of(
                label(str(kernel["name"])[:100]),
                label(f"{phase}, {kernel['class']}, {kernel['span'] or 'no span'}"),
                f"{milliseconds(kernel['time_s'])} ms in {kernel['calls']:,.4g} calls, {percent(kernel['share'])} %",
            )
            for _, kernel in drawn
        ]
        times, labels = [in_ms(kernel["time_s"]) for _, kernel in drawn], [name for name, _ in drawn]
        panels.add(0, bar(phase, times, labels, colour=PHASE_COLOURS[phase], hover=hover, orientation="h"))
    return panels.chart(
        f"{row.label()}: Longest kernels",
        f"The {_KERNELS_DRAWN} longest kernels of each phase, by span and class, and the sum of its other kernels; times of a "
        "step.",
        height=120 + 24 * len(kernels),
        horizontal=True,
        xaxis={"title": {"text": "time of a step (ms)"}, "automargin": True, "rangemode": "tozero"},
        yaxis={"automargin": True, "autorange": "reversed", "type": "category", "categoryarray": names},
    )


def shares_chart(rows: Sequence[Row]) -> Chart | None:
    """A bar per cell with the classes' shares of device time, in a panel per model; None for a single cell."""
    ran = [row for row in rows if row.record.tables.get("classes")]
    if len(ran) < 2:
        return None
    models = by_model(ran)
    others = [name for name in varying(ran) if name not in ("model", "context", *needless(ran))]
    panels = model_panels(models, others, y_title="share of device time (%)", label_characters=8)
    for panel, group in enumerate(models.values()):
        panels.ranges[panel] = (0.0, 100.0)
        x = bar_places(group, [lines_of(*values_words(row, others).split("_")) for row in group])
        shares = [(row, class_shares(row.record.tables["classes"])) for row in group]
        for name in classes.CLASSES:
            if name != classes.IDLE and any(name in by_class for _, by_class in shares):
                drawn = [(row, by_class.get(name, 0.0)) for row, by_class in shares]
                hover = [lines_of(label(row.label()), f"{name}: {percent(share)} %") for row, share in drawn]
                panels.add(panel, _class_bar(name, x, [in_percent(share) for _, share in drawn], hover))
    caption = "Classes of kernels as shares of the GPU's busy time, so that modes can be compared."
    return panels.chart("How classes share the time", caption, barmode="stack", bargap=0.25)


def _class_bar(name: str, x: Any, y: Sequence[float], hover: Sequence[str]) -> dict[str, Any]:
    colour, pattern = _LOOKS[name]
    marker = {"pattern": {"shape": pattern, "fillmode": "replace", "solidity": 0.5}} if pattern else {}
    return bar(name, x, y, colour=colour, hover=hover, marker=marker)


def _kernel_name(kernel: Mapping[str, Any]) -> str:
    """The kernel's span and class; the name of a library's kernel says little and is in the hover text."""
    if kernel["class"] == REST:
        return f"{kernel['phase']}: {kernel['name']}"
    return f"{kernel['span'] or 'no span'}: {kernel['class']}"
