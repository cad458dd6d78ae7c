"""Charts of attention: time, rate, memory, and our time over each peer's, with a line per implementation.

Panels are by direction and head_dim, and the x axis is the length; other values that vary (dtype, mask...) have their own figures.
If lengths do not form lines (a list of shapes with one length each), the shapes stand side by side on the x axis instead.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainstep.grouping import grouped
from trainstep.report.attention.rows import flops_per_s, implementations
from trainstep.report.kit.charts import (
    MAXIMUM_PANELS,
    STOPPED,
    Chart,
    Panels,
    Trace,
    crosses,
    dotted_at_one,
    label,
    line,
    lines_of,
    logarithmic,
    panel_columns,
    series_style,
    short_labels,
)
from trainstep.report.kit.forms import byte_unit, in_ms, needed_words, three_digits
from trainstep.report.kit.peers import OURS, TIME, Configuration, failure_cell, median_s
from trainstep.report.kit.ranking import median_words
from trainstep.report.kit.ratio_charts import HOW_TO_READ, hollow, ratio_axis, whiskers
from trainstep.report.kit.rows import Row, words

_STYLES = {
    OURS: ("theme:blue", "solid", "circle"),
    "plain": ("theme:grey", "solid", "square"),
    "plain_compiled": ("theme:grey", "dash", "square-open"),
    "sdpa_math": ("theme:ink", "dot", "cross"),
    "sdpa_efficient": ("theme:green", "solid", "diamond"),
    "sdpa_flash": ("theme:vermilion", "solid", "triangle-up"),
    "sdpa_cudnn": ("theme:orange", "solid", "triangle-down"),
    "flex": ("theme:purple", "solid", "star"),
    "flash_attn": ("theme:sky", "solid", "hexagon"),
    "flash_attn_4": ("theme:sky", "dash", "hexagon-open"),
}
"""Colour, dash and mark; each two implementations differ in at least two of them."""
_BETWEEN = 1.5
"""The place of a mark without a value, as a multiple of the largest value."""
MAXIMUM_GROUPS = 6
_SHAPE = ("batch", "heads", "key_heads", "seq", "keys", "head_dim")
"""Names of a shape, in the order in which people write them."""
_PANEL = ("direction", "batch", "heads", "key_heads", "keys", "head_dim")
_LEVEL_SHAPES = 14
"""The most names of shapes that fit horizontally under a panel as wide as the page."""
_MOST_TICKS = 6


@dataclass(frozen=True, kw_only=True)
class Group:
    """The configurations of one figure. `by_length`: the x axis is the length, else the names of the shapes."""

    name: str
    panels: Mapping[Any, Sequence[Configuration]]
    names: tuple[str, ...]
    """The names of the values in the keys of `panels`."""
    by_length: bool

    @property
    def configurations(self) -> list[Configuration]:
        return [work for panel in self.panels.values() for work in panel]


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A quantity of a chart: a row's positive number and its words."""

    title: str
    caption: str
    axis: str
    value: Callable[[Row], float]
    """The number; 0 if the row has none."""
    words: Callable[[Row], str]
    logarithmic: bool = True


def attention_charts(works: Sequence[Configuration]) -> list[Chart]:
    """Charts of time, rate, peak memory and held memory for each group with numbers."""
    rows = [row for work in works for row in work.cells.values()]
    quantities = [*_SPEED, *(_memory(*words, rows) for words in _MEMORY)]
    return [chart for group in groups_of(works) for quantity in quantities if (chart := _chart(group, quantity))]


def ratio_charts(works: Sequence[Configuration]) -> list[Chart]:
    """Charts of our time over each peer's, with intervals."""
    return [_ratio_chart(group) for group in groups_of([work for work in works if work.ratios])]


def _chart(group: Group, quantity: Quantity) -> Chart | None:
    # Panels without a value are left out, such as the memory that a forward pass alone would hold.
    group = replace(group, panels={key: works for key, works in group.panels.items() if _values(works, quantity)})
    if not group.panels:
        return None
    values = _values(group.configurations, quantity)
    panels = panels_of(group, quantity.axis, values, logarithmic_y=quantity.logarithmic)
    names = implementations(name for work in group.configurations for name in work.cells)
    for panel, works in enumerate(group.panels.values()):
        for index, name in enumerate(names):
            panels.add(panel, *_line(group, works, name, quantity, index))
        panels.add(panel, *_stopped(group, works, quantity))
    crossed = " × did not run: hover for why." if any(trace["name"] == STOPPED for trace in panels.data) else ""
    return panels.chart(titled(quantity.title, group), quantity.caption + crossed, scattermode="group")


def _values(works: Sequence[Configuration], quantity: Quantity) -> list[float]:
    return [value for work in works for row in work.cells.values() if (value := quantity.value(row))]


def _line(group: Group, works: Sequence[Configuration], name: str, quantity: Quantity, index: int) -> list[Trace]:
    """The line of an implementation in a panel; empty if it has no number there."""
    rows = [(work, work.cells[name]) for work in works if name in work.cells]
    points = [(work, row, value) for work, row in rows if (value := quantity.value(row))]
    hover = [lines_of(label(f"{name}: {work.row.label()}"), label(quantity.words(row))) for work, row, _ in points]
    x, y = [x_of(group, work) for work, *_ in points], [value for *_, value in points]
    return [_styled(name, x, y, hover, index, group.by_length)] if points else []


def _styled(name: str, x: list[Any], y: list[float], hover: list[str], index: int, joined: bool) -> Trace:
    """An implementation's trace, thick for ours; only marks, side by side at each place, if the x axis is no quantity."""
    colour, dash, symbol = _STYLES.get(name, (*series_style(index), "circle"))
    marker = {"symbol": symbol, "size": (10 if name == OURS else 7) + (0 if joined else 3)}
    trace = line(short_labels([name])[0], x, y, style=(colour, dash), hover=hover, marker=marker)
    trace["line"] = {**trace["line"], "width": 4 if name == OURS else 1.6}
    return trace if joined else {**trace, "mode": "markers", "offsetgroup": trace["name"]}


def _stopped(group: Group, works: Sequence[Configuration], quantity: Quantity) -> list[Trace]:
    """A mark at each place with failures. An implementation without any number in the panel is left to the tables, unless it ran
    out of memory."""
    ran = {name for work in works for name, row in work.cells.items() if quantity.value(row)}
    failures: dict[Any, list[str]] = {}
    for work in works:
        for name, row in work.cells.items():
            if row.record.failure and (name in ran or row.record.failure.kind == "out_of_memory"):
                failures.setdefault(x_of(group, work), []).append(label(f"{name}: {failure_cell(row.record)}"))
    above = max(_values(works, quantity)) * (_BETWEEN if quantity.logarithmic else 1.08)
    hover = [lines_of(*texts) for texts in failures.values()]
    return [crosses(failures, [above] * len(failures), size=9, hover=hover)] if failures else []


def _ratio_chart(group: Group) -> Chart:
    """Our time over each peer's; each panel has its own scale, so that a few percent stay visible beside large ratios."""
    all_ratios = [ratio for work in group.configurations for ratio in work.ratios.values()]
    panels = replace(panels_of(group, "trainstep's time ÷ peer's", [1.0]), axis=ratio_axis(all_ratios))
    peers = implementations(peer for work in group.configurations for peer in work.ratios)
    for panel, works in enumerate(group.panels.values()):
        axis = ratio_axis([ratio for work in works for ratio in work.ratios.values()])
        if "range" in panels.axis and "range" in axis:
            panels.ranges[panel] = axis["range"]
        for index, peer in enumerate(peers):
            panels.add(panel, *_ratio_line(group, works, peer, index))
    shapes = [dotted_at_one(panel) for panel in range(len(group.panels))]
    caption = f"Below the dotted line trainstep is faster. {HOW_TO_READ}"
    return panels.chart(titled("trainstep against each peer", group), caption, shapes=shapes, scattermode="group")


def _ratio_line(group: Group, works: Sequence[Configuration], peer: str, index: int) -> list[Trace]:
    """The ratios to a peer in a panel; empty if there are none."""
    points = [(work, work.ratios[peer]) for work in works if peer in work.ratios]
    if not points:
        return []
    ratios = [ratio for _, ratio in points]
    hover = [
        lines_of(
            label(f"{OURS} / {peer}: {work.row.label()}"), label(ratio.comparison.reason if ratio.comparison else "")
        )
        for work, ratio in points
    ]
    x, y = [x_of(group, work) for work, _ in points], [ratio.ratio or 0.0 for ratio in ratios]
    trace = _styled(peer, x, y, hover, index, group.by_length)
    symbol, colour = trace["marker"]["symbol"], trace["marker"]["color"]
    trace["error_y"] = {**whiskers(ratios), "color": colour}
    trace["marker"] = {**trace["marker"], "symbol": [hollow(symbol, ratio) for ratio in ratios]}
    return [trace]


def _memory(title: str, caption: str, name: str, rows: Sequence[Row]) -> Quantity:
    """A quantity of memory, in the unit that suits its largest value."""

    def size(row: Row) -> float | None:
        return None if row.record.failure else row.record.fact(name)

    unit = byte_unit(map(size, rows))
    return Quantity(
        title=title,
        caption=caption,
        axis=f"memory ({unit.name})",
        value=lambda row: (size(row) or 0.0) / unit.byte_count,
        words=lambda row: needed_words(size(row) or 0.0),
    )


def groups_left_out(works: Sequence[Configuration]) -> int:
    return max(0, len(_split(works)) - MAXIMUM_GROUPS)


def _split(works: Sequence[Configuration]) -> dict[Any, list[Configuration]]:
    """Configurations by the values that need a figure of their own: dtype, mask, machine..."""
    return grouped(works, lambda work: work.row.rest("seq", *_PANEL))


def groups_of(works: Sequence[Configuration]) -> list[Group]:
    """The figures for these configurations, at most MAXIMUM_GROUPS."""
    split = list(_split(works).items())[:MAXIMUM_GROUPS]
    varying = {name for key, _ in split for name, value in key if len({dict(other)[name] for other, _ in split}) > 1}
    return [_group(", ".join(value for name, value in key if name in varying), works) for key, works in split]


def _group(name: str, works: Sequence[Configuration]) -> Group:
    names = tuple(name for name in _PANEL if len({words(work.row.point.get(name)) for work in works}) > 1)
    panels = _by(names, works)
    lengths = all(isinstance(work.row.point.get("seq"), int) and work.row.point["seq"] > 0 for work in works)
    some_line = any(len(panel) > 1 for panel in panels.values()) or len(panels) == 1
    if lengths and some_line and len(panels) <= MAXIMUM_PANELS:
        return Group(name=name, panels=panels, names=names, by_length=True)
    direction = ("direction",) if "direction" in names else ()
    return Group(name=name, panels=_by(direction, works), names=direction, by_length=False)


def _by(names: Sequence[str], works: Sequence[Configuration]) -> dict[Any, list[Configuration]]:
    ordered = sorted(works, key=lambda work: [_order(work.row.point.get(name)) for name in (*names, "seq")])
    return grouped(ordered, lambda work: tuple(words(work.row.point.get(name)) for name in names))


def _order(value: Any) -> tuple[float, str]:
    """A sort key: numbers by size, then words; forward before backward before both."""
    if isinstance(value, int | float):
        return float(value), ""
    places = {"forward": "0", "backward": "1", "both": "2"}
    return math.inf, places.get(str(value), str(value))


def panels_of(group: Group, y_title: str, values: Sequence[float], *, logarithmic_y: bool = True) -> Panels:
    """The empty panels of a figure, with axes that fit the values."""
    titles = [
        ", ".join(
            value if name == "direction" else f"{name.replace('_', ' ')} {value}"
            for name, value in zip(group.names, key, strict=True)
        )
        for key in group.panels
    ]
    columns = _columns(group)
    level = {"tickangle": 0} if max(map(len, group.panels.values())) <= _LEVEL_SHAPES else {}
    if group.by_length:
        x_title = "length S (tokens)"
        x_axis = _length_axis([work.row.point["seq"] for work in group.configurations], columns)
    else:
        x_title, x_axis = " × ".join(map(label, _shape_names(group))), {"type": "category", **level}
    return Panels(
        titles=short_labels(titles),
        columns=columns,
        x_title=x_title,
        y_title=y_title,
        axis=logarithmic(values) if logarithmic_y else {},
        x_axis=x_axis,
    )


def _columns(group: Group) -> int:
    """The number of panels side by side: a line per direction if all directions have equally many panels and these fit."""
    if not group.by_length:
        return 1
    first = [key[0] for key in group.panels] if group.names[:1] == ("direction",) else []
    each = first.count(first[0]) if first else 0
    if each and each <= 5 and all(first.count(value) == each for value in first) and (each > 1 or len(first) > 4):
        return each
    return panel_columns(len(group.panels), 8)


def x_of(group: Group, work: Configuration) -> Any:
    """The configuration's place on the x axis: its length, or the name of its shape on one or two lines."""
    if group.by_length:
        return work.row.point["seq"]
    parts = [label(words(work.row.point.get(name))) for name in _shape_names(group)]
    lines = [parts[:-2], parts[-2:]] if len(parts) > 2 else [parts]
    return lines_of(*(" × ".join(part) for part in lines))


def _shape_names(group: Group) -> list[str]:
    """The names of the shape that vary; only the length if none does."""
    varying = [name for name in _SHAPE if len({words(work.row.point.get(name)) for work in group.configurations}) > 1]
    return varying or ["seq"]


def titled(title: str, group: Group) -> str:
    against = f"{title} {'by length' if group.by_length else 'by shape'}"
    return f"{against}: {' '.join(group.name.split())}" if group.name else against


def _length_axis(lengths: Sequence[int], columns: int) -> dict[str, Any]:
    """A logarithmic axis with a tick at every measured length, or every second or third if panels are narrow."""
    ordered = sorted(set(lengths))
    most = _MOST_TICKS * (1 if columns > 2 else 2)
    ticks = ordered[:: -(-len(ordered) // most)]
    texts = [f"{tick // 1024}k" if tick % 1024 == 0 else f"{tick:,}" for tick in ticks]
    return {"type": "log", "tickmode": "array", "tickvals": ticks, "ticktext": texts, "tickangle": 0, "showgrid": True}


_SPEED = (
    Quantity(
        title="Time",
        caption="Median time of a call.",
        axis="time (ms)",
        value=lambda row: in_ms(median_s(row) or 0.0),
        words=lambda row: median_words(row.record, TIME),
    ),
    Quantity(
        title="Achieved rate",
        caption="FLOPs, counted from the shape without masked positions, over the median time.",
        axis="TFLOP/s",
        value=lambda row: (flops_per_s(row) or 0.0) / 1e12,
        words=lambda row: f"{three_digits((flops_per_s(row) or 0.0) / 1e12)} TFLOP/s",
        logarithmic=False,
    ),
)
_MEMORY = (
    ("Peak memory", "The most that was allocated during a call.", "peak_bytes"),
    ("Memory held before backward", "What the forward pass keeps for the backward pass.", "held_bytes"),
)
