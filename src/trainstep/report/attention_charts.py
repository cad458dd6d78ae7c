"""Charts of attention: time, rate, memory and ours over each, one line an implementation, ours thick.

Panels are by direction and head_dim, the x axis is the length; what else varies (dtype, mask...) makes figures of their own. Where
lengths do not make lines (a list of shapes, one length each), the shapes stand side by side instead.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainstep.records.record import Record
from trainstep.report.attention_rows import (
    OURS,
    Configuration,
    PeerRatio,
    failure_cell,
    flops_per_s,
    implementations,
    time_summary,
)
from trainstep.report.charts import (
    INK,
    MAXIMUM_PANELS,
    Chart,
    Panels,
    Trace,
    error_bars,
    label,
    line,
    lines_of,
    logarithmic,
    panel_columns,
    series_style,
    short_labels,
)
from trainstep.report.forms import byte_unit, in_ms, milliseconds, needed_words, three_digits
from trainstep.report.rows import grouped, words

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
"""Colour, dash and mark: told apart without any one of them."""
_BETWEEN = 1.5
"""How far beyond the largest value a mark stands that has no value."""
_STOPPED = "did not run"
MAXIMUM_GROUPS = 6
_SHAPE = ("batch", "heads", "key_heads", "keys", "head_dim")
_PANEL = ("direction", *_SHAPE)
_LEVEL_SHAPES = 14
"""Names of shapes that stand level under a panel as wide as the page."""
_MOST_TICKS = 6


@dataclass(frozen=True, kw_only=True)
class Group:
    """What is drawn into one figure. `by_length`: the x axis is the length, else the shapes' names."""

    name: str
    panels: Mapping[Any, Sequence[Configuration]]
    names: tuple[str, ...]
    """Of `panels`' keys."""
    by_length: bool

    @property
    def configurations(self) -> list[Configuration]:
        return [one for panel in self.panels.values() for one in panel]


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """What a chart shows of a record: a positive number and its words."""

    title: str
    caption: str
    axis: str
    value: Callable[[Record], float | None]
    words: Callable[[Record], str]
    logarithmic: bool = True


def attention_charts(found: Sequence[Configuration]) -> list[Chart]:
    """Time, rate, peak and held memory of each group that ran."""
    records = [row.record for one in found for row in one.cells.values()]
    quantities = [*_SPEED, *(_memory(*words, records) for words in _MEMORY)]
    return [chart for group in groups_of(found) for quantity in quantities if (chart := _chart(group, quantity))]


def ratio_charts(found: Sequence[PeerRatio]) -> list[Chart]:
    """Our time over each peer's, with its interval."""
    met = [one for one in found if one.found and one.found.ratio]
    of_configuration = grouped(met, lambda one: id(one.configuration))
    drawn = [mine[0].configuration for mine in of_configuration.values()]
    return [_ratio_chart(group, of_configuration) for group in groups_of(drawn)]


def _chart(group: Group, quantity: Quantity) -> Chart | None:
    group = _with_values(group, quantity)
    values = [
        value for one in group.configurations for row in one.cells.values() if (value := quantity.value(row.record))
    ]
    if not values:
        return None
    panels = panels_of(group, quantity.axis, values, logarithmic_y=quantity.logarithmic)
    names = implementations([row for one in group.configurations for row in one.cells.values()])
    for panel, mine in enumerate(group.panels.values()):
        for index, name in enumerate(names):
            trace = _line(group, mine, name, quantity, index)
            if trace:
                panels.add(panel, trace)
        stopped = _stopped(group, mine, quantity)
        if stopped:
            panels.add(panel, stopped)
    crossed = " × did not run: hover for why." if any(trace["name"] == _STOPPED for trace in panels.data) else ""
    return panels.chart(titled(quantity.title, group), quantity.caption + crossed)


def _with_values(group: Group, quantity: Quantity) -> Group:
    """Without panels that would stand empty: a forward pass alone holds nothing."""
    kept = {
        key: mine
        for key, mine in group.panels.items()
        if any(quantity.value(row.record) for one in mine for row in one.cells.values())
    }
    return replace(group, panels=kept)


def _line(
    group: Group, mine: Sequence[Configuration], name: str, quantity: Quantity, index: int
) -> dict[str, Any] | None:
    rows = [(one, one.cells[name]) for one in in_order(mine) if name in one.cells]
    drawn = [(one, row, value) for one, row in rows if (value := quantity.value(row.record))]
    if not drawn:
        return None
    hover = [lines_of(label(f"{name}: {one.label()}"), label(quantity.words(row.record))) for one, row, _ in drawn]
    x, y = [x_of(group, one) for one, _, _ in drawn], [value for *_, value in drawn]
    return _styled(name, x, y, hover, index, group.by_length)


def _styled(name: str, x: list[Any], y: list[float], hover: list[str], index: int, joined: bool) -> Trace:
    """Ours thick and over the others; marks alone where the x axis is no quantity."""
    colour, dash, symbol = _STYLES.get(name, (*series_style(index), "circle"))
    marker = {"symbol": symbol, "size": (10 if name == OURS else 7) + (0 if joined else 3)}
    made = line(short_labels([name])[0], x, y, style=(colour, dash), hover=hover, marker=marker)
    made["line"] = {**made["line"], "width": 4 if name == OURS else 1.6}
    return made if joined else {**made, "mode": "markers"}


def _stopped(group: Group, mine: Sequence[Configuration], quantity: Quantity) -> Trace | None:
    """One mark for all that ended without a number at a place; what never ran in this panel is a refusal, which tables tell."""
    ran = {name for one in mine for name, row in one.cells.items() if quantity.value(row.record)}
    values = [value for one in mine for row in one.cells.values() if (value := quantity.value(row.record))]
    told: dict[Any, list[str]] = {}
    for one in in_order(mine):
        for name, row in one.cells.items():
            if row.record.failure and (name in ran or row.record.failure.kind == "out_of_memory"):
                told.setdefault(x_of(group, one), []).append(f"{name}: {failure_cell(row.record)}")
    if not told or not values:
        return None
    style = {"symbol": "x-thin", "size": 9, "color": INK, "line": {"color": INK, "width": 2}}
    return {
        "type": "scatter",
        "name": _STOPPED,
        "mode": "markers",
        "x": list(told),
        "y": [max(values) * (_BETWEEN if quantity.logarithmic else 1.08)] * len(told),
        "marker": style,
        "hovertext": [lines_of(*map(label, texts)) for texts in told.values()],
        "hoverinfo": "text",
    }


def _ratio_chart(group: Group, of_configuration: Mapping[int, Sequence[PeerRatio]]) -> Chart:
    drawn = [one for each in group.configurations for one in of_configuration[id(each)]]
    panels = panels_of(group, "our time ÷ theirs", [1.0, *(side for one in drawn for side in _interval(one))])
    peers = implementations([one.theirs for one in drawn])
    for panel, mine in enumerate(group.panels.values()):
        for index, peer in enumerate(peers):
            met = [one for each in in_order(mine) for one in of_configuration[id(each)] if one.peer == peer]
            if met:
                panels.add(panel, _ratio_line(group, met, index))
    shapes = [_at_one(panel) for panel in range(len(group.panels))]
    caption = "Below the dotted line ours is faster. Whiskers are 99 % intervals of the ratio; a hollow mark means: cannot tell."
    return panels.chart(titled("Ours against each", group), caption, shapes=shapes)


def _ratio_line(group: Group, met: Sequence[PeerRatio], index: int) -> Trace:
    low, middle, high = (list(side) for side in zip(*map(_interval, met), strict=True))
    hover = [
        lines_of(
            label(f"{OURS} / {one.peer}: {one.configuration.label()}"), label(one.found.reason if one.found else "")
        )
        for one in met
    ]
    made = _styled(met[0].peer, [x_of(group, one.configuration) for one in met], middle, hover, index, group.by_length)
    made["error_y"] = {
        **error_bars(
            [b - a for a, b in zip(middle, high, strict=True)], [a - b for a, b in zip(middle, low, strict=True)]
        ),
        "color": made["marker"]["color"],
    }
    filled = made["marker"]["symbol"].removesuffix("-open")
    undecided = [bool(one.found and one.found.verdict == "cannot tell") for one in met]
    made["marker"] = {**made["marker"], "symbol": [f"{filled}-open" if one else filled for one in undecided]}
    return made


def _interval(one: PeerRatio) -> tuple[float, float, float]:
    found = one.found
    ratio = (found and found.ratio) or 1.0
    return (found and found.low) or ratio, ratio, (found and found.high) or ratio


def _at_one(panel: int) -> dict[str, Any]:
    number_of = "" if panel == 0 else str(panel + 1)
    ink = {"color": INK, "width": 1.5, "dash": "dot"}
    place = {"xref": f"x{number_of} domain", "yref": f"y{number_of}", "x0": 0, "x1": 1, "y0": 1, "y1": 1}
    return {"type": "line", "line": ink, **place}


def _ms(record: Record) -> float | None:
    time = time_summary(record)
    return in_ms(time.median) if time else None


def _ms_words(record: Record) -> str:
    time = time_summary(record)
    return f"{milliseconds(time.median, time.std)} ms" if time else ""


def _tflops(record: Record) -> float | None:
    rate = flops_per_s(record)
    return None if rate is None else rate / 1e12


def _memory(title: str, caption: str, name: str, records: Sequence[Record]) -> Quantity:
    """In the unit that the largest value has."""

    def held(record: Record) -> float | None:
        return None if record.failure else record.fact(name)

    unit = byte_unit(map(held, records))
    return Quantity(
        title=title,
        caption=caption,
        axis=f"memory ({unit.name})",
        value=lambda record: None if (found := held(record)) is None else found / unit.byte_count,
        words=lambda record: needed_words(held(record) or 0.0),
    )


def groups_left_out(found: Sequence[Configuration]) -> int:
    return max(0, len(_split(found)) - MAXIMUM_GROUPS)


def _split(found: Sequence[Configuration]) -> dict[Any, list[Configuration]]:
    """Configurations by what makes charts of their own: dtype, mask, machine..."""
    return grouped(found, lambda one: one.rest("seq", *_PANEL))


def groups_of(found: Sequence[Configuration]) -> list[Group]:
    split = list(_split(found).items())[:MAXIMUM_GROUPS]
    varying = {name for key, _ in split for name, value in key if len({dict(other)[name] for other, _ in split}) > 1}
    return [_group(", ".join(value for name, value in key if name in varying), mine) for key, mine in split]


def _group(name: str, mine: Sequence[Configuration]) -> Group:
    names = tuple(one for one in _PANEL if len({words(each.point.get(one)) for each in mine}) > 1)
    panels = _by(names, mine)
    lengths = all(isinstance(one.point.get("seq"), int) and one.point["seq"] > 0 for one in mine)
    some_line = any(len(panel) > 1 for panel in panels.values()) or len(panels) == 1
    if lengths and some_line and len(panels) <= MAXIMUM_PANELS:
        return Group(name=name, panels=panels, names=names, by_length=True)
    names = tuple(one for one in names if one == "direction")
    return Group(name=name, panels=_by(names, mine), names=names, by_length=False)


def _by(names: Sequence[str], mine: Sequence[Configuration]) -> dict[Any, list[Configuration]]:
    ordered = sorted(mine, key=lambda each: [_order(each.point.get(name)) for name in names])
    return grouped(ordered, lambda one: tuple(words(one.point.get(name)) for name in names))


def _order(value: Any) -> tuple[float, str]:
    """Numbers by size, then words; forward before backward before both."""
    if isinstance(value, int | float):
        return float(value), ""
    places = {"forward": "0", "backward": "1", "both": "2"}
    return math.inf, places.get(str(value), str(value))


def panels_of(group: Group, y_title: str, values: Sequence[float], *, logarithmic_y: bool = True) -> Panels:
    named = [list(zip(group.names, key, strict=True)) for key in group.panels]
    titles = [
        ", ".join(value if name == "direction" else f"{name.replace('_', ' ')} {value}" for name, value in one)
        for one in named
    ]
    columns = _columns(group)
    made = Panels(
        titles=short_labels(titles),
        columns=columns,
        x_title="",
        y_title=y_title,
        axis=_log_axis(values) if logarithmic_y else {},
    )
    if group.by_length:
        made.x_title = "length S (tokens)"
        made.x_axis = _length_axis([one.point["seq"] for one in group.configurations], columns)
    else:
        made.x_title = " × ".join(label(name) for name in _shape_names(group))
        made.x_axis = {"type": "category"} | (
            {"tickangle": 0} if max(map(len, group.panels.values())) <= _LEVEL_SHAPES else {}
        )
    return made


def _columns(group: Group) -> int:
    """A line of panels a direction, where each has as many head_dims as the others and they fit."""
    if not group.by_length:
        return 1
    first = [key[0] for key in group.panels] if group.names[:1] == ("direction",) else []
    each = first.count(first[0]) if first else 0
    if each and each <= 5 and all(first.count(one) == each for one in first) and (each > 1 or len(first) > 4):
        return each
    return panel_columns(len(group.panels), 8)


def in_order(mine: Sequence[Configuration]) -> list[Configuration]:
    return sorted(mine, key=lambda one: _order(one.point.get("seq")))


def x_of(group: Group, one: Configuration) -> Any:
    if group.by_length:
        return one.point["seq"]
    parts = [label(words(one.point.get(name))) for name in _shape_names(group)]
    lines = [parts[:-2], parts[-2:]] if len(parts) > 2 else [parts]
    return lines_of(*(" × ".join(part) for part in lines))


def _shape_names(group: Group) -> list[str]:
    """In the order people write shapes; the length alone where nothing else varies."""
    mine = group.configurations
    order = ("batch", "heads", "key_heads", "seq", "keys", "head_dim")
    return [name for name in order if len({words(one.point.get(name)) for one in mine}) > 1] or ["seq"]


def titled(title: str, group: Group) -> str:
    against = f"{title} {'by length' if group.by_length else 'by shape'}"
    return f"{against}: {' '.join(group.name.split())}" if group.name else against


def _log_axis(values: Sequence[float]) -> dict[str, Any]:
    """Ticks at 1, 2, 5 over a few powers of ten, at the powers alone over many."""
    made = logarithmic(values)
    if math.log10(max(values) / min(values)) <= 2:
        return made
    powers = [(tick, text) for tick, text in zip(made["tickvals"], made["ticktext"], strict=True) if "1" in text]
    return {**made, "tickvals": [tick for tick, _ in powers], "ticktext": [text for _, text in powers]}


def _length_axis(lengths: Sequence[int], columns: int) -> dict[str, Any]:
    """A tick at every measured length, or at every second or third where panels are narrow."""
    ordered = sorted(set(lengths))
    most = _MOST_TICKS * (1 if columns > 2 else 2)
    ticks = ordered[:: -(-len(ordered) // most)]
    texts = [f"{tick // 1024}k" if tick % 1024 == 0 else f"{tick:,}" for tick in ticks]
    return {"type": "log", "tickmode": "array", "tickvals": ticks, "ticktext": texts, "tickangle": 0, "showgrid": True}


_SPEED = (
    Quantity(title="Time", caption="Median time of a call.", axis="time (ms)", value=_ms, words=_ms_words),
    Quantity(
        title="Achieved rate",
        caption="FLOPs counted from the shape over the median time; what a causal mask hides is not counted.",
        axis="TFLOP/s",
        value=_tflops,
        words=lambda record: f"{three_digits(_tflops(record) or 0.0)} TFLOP/s",
        logarithmic=False,
    ),
)
_MEMORY = (
    ("Peak memory", "The most that was allocated during a call.", "peak_bytes"),
    ("Memory held before backward", "What the forward pass keeps for the backward pass.", "held_bytes"),
)
