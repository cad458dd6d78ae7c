"""Charts of attention: time, rate, memory and ours over each, one line an implementation, ours thick."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainstep.records.record import Record
from trainstep.report.attention_panels import Group, groups_of, in_order, panels_of, titled, x_of
from trainstep.report.attention_rows import (
    OURS,
    Configuration,
    Ratio,
    failure_cell,
    flops_per_s,
    implementations,
    number,
    time_summary,
)
from trainstep.report.charts import (
    INK,
    Chart,
    Trace,
    error_bars,
    label,
    line,
    lines_of,
    series_style,
    short_labels,
)
from trainstep.report.forms import byte_unit, in_ms, milliseconds, needed_words, three_digits

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


def ratio_charts(found: Sequence[Ratio]) -> list[Chart]:
    """Our time over each peer's, with its interval."""
    of_configuration: dict[int, list[Ratio]] = {}
    for one in found:
        if one.found and one.found.ratio:
            of_configuration.setdefault(id(one.configuration), []).append(one)
    drawn = list(
        {
            id(one.configuration): one.configuration for one in found if id(one.configuration) in of_configuration
        }.values()
    )
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


def _ratio_chart(group: Group, of_configuration: Mapping[int, Sequence[Ratio]]) -> Chart:
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


def _ratio_line(group: Group, met: Sequence[Ratio], index: int) -> Trace:
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


def _interval(one: Ratio) -> tuple[float, float, float]:
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
        return None if record.failure else number(record, name)

    unit = byte_unit(map(held, records))
    return Quantity(
        title=title,
        caption=caption,
        axis=f"memory ({unit.name})",
        value=lambda record: None if (found := held(record)) is None else found / unit.byte_count,
        words=lambda record: needed_words(held(record) or 0.0),
    )


_SPEED = (
    Quantity(
        title="Time",
        caption="Median time of a call.",
        axis="time (ms)",
        value=_ms,
        words=_ms_words,
    ),
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
