"""Plotly figures as plain data: panels of stacked bars, of bars with intervals, of lines. The page's script draws them.

Colours are names such as `theme:forward`: the script puts in the palette (Okabe and Ito's, told apart by the colour-blind)
for a light or a dark page. Text from records goes through `label`, since plotly reads some HTML tags in it. A chart's own numbers
as a table (`chart_table`) are made from what is drawn: a row a place on its axis, a column a series.
"""

import html
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainstep.report.forms import ABSENT, TEXT, Form
from trainstep.report.tables import Column, Table

PHASE_COLOURS = {
    "forward": "theme:sky",
    "backward": "theme:orange",
    "grad_sync": "theme:purple",
    "optimizer": "theme:green",
}
SERIES = ("theme:blue", "theme:vermilion", "theme:green", "theme:purple", "theme:orange", "theme:sky", "theme:grey")
FAILURE_COLOUR = "theme:vermilion"
INK = "theme:ink"
PANEL_HEIGHT = 330
MAXIMUM_PANELS = 24
_PAGE_PX = 1240
_NARROWEST_PX, _PANEL_PX, _WIDEST_PX = 560, 260, 1200
_CELL_PX = 76
"""The width of a map's cell with a number in it, its share of the axis' labels included."""
_LEGEND_PX, _CHARACTER_PX = 60, 8
"""The widths of a legend's entry without its text, and of a character in it."""
_LONGEST_LABEL = 32
_TOP = 66
"""Pixels above the first line of panels: legend and titles."""

_MOST_ROWS = 200
"""Of a chart with more places, such as a timeline of thousands, evenly chosen ones stand in the table."""
_PLACE = " place"
"""Where a line of that table keeps its place: no series is called so, since names are stripped."""
_POWERS_ALONE, _EVERY_DIGIT = 1000, 8
"""A logarithmic axis that spans more than this many times has ticks at powers of ten alone; one of fewer, at every digit."""
STOPPED = "did not run"
_OUR_TAGS = re.compile(r"</?(?:b|sup|i)>")
Trace = dict[str, Any]
Place = tuple[str, Any, int]
"""Panel, x, and which of several marks of one series at that x."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure, the sentence under it that says how to read it, and what a reader who cannot see it is told."""

    title: str
    caption: str
    data: Sequence[Trace]
    layout: Mapping[str, Any]
    panels: tuple[str, ...] = ()
    """Their titles, in the order of their axes."""

    @property
    def least_px(self) -> int:
        """The width below which it would not be legible: a narrower page scrolls it."""
        columns = int(self.layout.get("grid", {}).get("columns", 1))
        cells = [len(trace["x"]) * _CELL_PX for trace in self.data if trace["type"] == "heatmap"]
        cells += [_places_px(trace["x"]) for trace in self.data if trace.get("orientation") != "h"]
        legend = {trace["name"]: 0 for trace in self.data if trace.get("name") and trace.get("showlegend", True)}
        legend_px = sum(_LEGEND_PX + _CHARACTER_PX * len(plain_text(name)) for name in legend)
        return min(_WIDEST_PX, max(_NARROWEST_PX, max([_PANEL_PX, *cells]) * columns, legend_px // 2))


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page. `paragraphs`: what the numbers say. A chart's numbers stand in a table of its section."""

    title: str
    paragraphs: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()


@dataclass(kw_only=True)
class Panels:
    """Small multiples of one chart, being drawn: one panel a title, each with axes of its own, one legend."""

    titles: Sequence[str]
    columns: int
    x_title: str
    y_title: str
    data: list[Trace] = field(default_factory=list)
    axis: Mapping[str, Any] = field(default_factory=dict)
    """What every y axis is: log, from zero..."""
    x_axis: Mapping[str, Any] = field(default_factory=dict)
    ranges: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Panel -> the range of its y axis, where plotly's own choice would not do."""
    own: dict[int, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    """Panel -> what its axis x or y has beside, or in place of, what all have."""
    _named: set[str] = field(default_factory=set)

    def add(self, panel: int, *traces: Trace) -> None:
        """Put traces into a panel; a name stands in the legend once and toggles its traces in every panel."""
        axes = {"xaxis": f"x{_axis_number(panel)}", "yaxis": f"y{_axis_number(panel)}"}
        for trace in traces:
            name = trace.get("name", "")
            shown = bool(name) and name not in self._named and trace.get("showlegend", True)
            self._named.add(name)
            self.data.append({**trace, **axes, "legendgroup": name, "showlegend": shown})

    def chart(self, title: str, caption: str, **layout: Any) -> Chart:
        """The finished chart."""
        lines = -(-len(self.titles) // self.columns)
        axes: dict[str, Any] = {}
        for panel in range(len(self.titles)):
            number = _axis_number(panel)
            last_in_column, first_in_line = panel + self.columns >= len(self.titles), panel % self.columns == 0
            x_axis = _axis(self.x_title if last_in_column else "")
            y_axis = {**_axis(self.y_title if first_in_line else ""), "rangemode": "tozero"}
            ranged = {"range": self.ranges[panel]} if panel in self.ranges else {}
            own = self.own.get(panel, {})
            axes[f"xaxis{number}"] = {**x_axis, **self.x_axis, **own.get("x", {})}
            axes[f"yaxis{number}"] = {**y_axis, **self.axis, **ranged, **own.get("y", {})}
        titles = [_panel_title(text, panel) for panel, text in enumerate(self.titles)]
        made = {
            "height": _TOP + PANEL_HEIGHT * lines,
            "grid": {"rows": lines, "columns": self.columns, "pattern": "independent", "xgap": 0.16, "ygap": 0.32},
            "margin": {"l": 64, "r": 12, "t": _TOP, "b": 60},
            "legend": {"orientation": "h", "x": 0, "xref": "container", "y": 1, "yref": "container", "yanchor": "top"},
            "showlegend": len(self._named - {""}) > 1,
            "annotations": titles if any(self.titles) else [],
            **axes,
        }
        return Chart(title=title, caption=caption, data=self.data, layout=made | layout, panels=tuple(self.titles))


def level_labels_fit(bars_each: int, label_characters: int) -> bool:
    """Whether labels under the bars of a panel as wide as the page stand level without touching."""
    return _label_px(bars_each, label_characters) <= _PAGE_PX


def _places_px(x: Sequence[Any]) -> int:
    """What labels of these places need to stand level; of two levels those nearer to the axis, of a quantity nothing."""
    nearest = list(x[-1]) if x and isinstance(x[0], list) else [place for place in x if isinstance(place, str)]
    return _label_px(len(nearest), max((len(part) for text in nearest for part in text.split("<br>")), default=0))


def _label_px(bars: int, characters: int) -> int:
    return bars * max(26, 7 * characters + 8)


def label(text: str) -> str:
    """Text that plotly shows as it stands: it would read `<b>` as bold and `<br>` as a new line."""
    flat = " ".join(text.split())
    return flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def short_labels(texts: Sequence[str]) -> list[str]:
    """Labels for axes and legends: long ones lose their middle, and stay apart from each other all the same."""
    shortened: dict[str, str] = {}
    for text in dict.fromkeys(texts):
        short = " ".join(text.split())
        if len(short) > _LONGEST_LABEL:
            short = f"{short[: _LONGEST_LABEL // 2]}…{short[-_LONGEST_LABEL // 2 + 1 :]}"
        numbered = (f"{short} ({number})" for number in itertools.count(2))
        shortened[text] = next(free for free in itertools.chain([short], numbered) if free not in shortened.values())
    return [label(shortened[text]) for text in texts]


def lines_of(*texts: str) -> str:
    """Several labels, one under the other."""
    return "<br>".join(texts)


def panel_columns(panels: int, bars_each: int, *, label_characters: int = 4) -> int:
    """Panels side by side, so that the labels under the bars stay level and apart."""
    fitting = max(1, min(panels, 4, _PAGE_PX // _label_px(bars_each, label_characters)))
    lines = -(-panels // fitting)
    return -(-panels // lines)


def series_style(index: int) -> tuple[str, str]:
    """(colour, dash) of the i-th line: seven colours, then the same again dashed."""
    dashes = ("solid", "dash", "dot", "dashdot")
    return SERIES[index % len(SERIES)], dashes[index // len(SERIES) % len(dashes)]


def _axis_number(panel: int) -> str:
    """What plotly writes behind `x` and `y` for a panel's axes: nothing for the first."""
    return "" if panel == 0 else str(panel + 1)


def bar(name: str, x: Any, y: Sequence[Any], *, colour: str, hover: Sequence[str], **more: Any) -> Trace:
    """Bars with their hover text; `more` is plotly's own."""
    marker = {"color": colour, **more.pop("marker", {})}
    return {"type": "bar", "name": name, "x": x, "y": list(y), "marker": marker, **_hover(hover), **more}


def text_marks(
    name: str, x: Any, y: Sequence[float], texts: Sequence[str], *, colour: str, hover: Sequence[str]
) -> Trace:
    """Words standing in a chart where a number would: what failed."""
    font = {"color": colour, "size": 12}
    style = {"mode": "text", "textposition": "top center", "textfont": font, "cliponaxis": False}
    made = {"type": "scatter", "name": name, "x": x, "y": list(y), "text": list(texts), "showlegend": False}
    return {**made, **style, **_hover(hover)}


def crosses(x: Iterable[Any], y: Iterable[Any], *, size: int, hover: Sequence[str]) -> Trace:
    """Marks where a number would stand, of what did not run; the pointer tells why."""
    marker = {"symbol": "x-thin", "size": size, "color": INK, "line": {"color": INK, "width": 2}}
    return {
        "type": "scatter",
        "name": STOPPED,
        "mode": "markers",
        "x": [*x],
        "y": [*y],
        "marker": marker,
        **_hover(hover),
    }


def line(
    name: str, x: Any, y: Sequence[float | None], *, style: tuple[str, str], hover: Sequence[str], **more: Any
) -> Trace:
    """A line with a mark at each point."""
    colour, dash = style
    drawn = {"mode": "lines+markers", "line": {"color": colour, "dash": dash, "width": 2}}
    marker = {"color": colour, "size": 7, **more.pop("marker", {})}
    return {"type": "scatter", "name": name, "x": x, "y": list(y), "marker": marker, **drawn, **_hover(hover), **more}


def dotted_at_one(panel: int) -> dict[str, Any]:
    """A line across a panel where two times are equal: a shape of the chart's layout."""
    ink = {"color": INK, "width": 1.5, "dash": "dot"}
    axes = {"xref": f"x{_axis_number(panel)} domain", "yref": f"y{_axis_number(panel)}"}
    return {"type": "line", "line": ink, **axes, "x0": 0, "x1": 1, "y0": 1, "y1": 1}


def error_bars(above: Sequence[float], below: Sequence[float] | None = None) -> dict[str, Any]:
    """Intervals around points, in the text's colour."""
    made = {"type": "data", "array": list(above), "color": INK, "thickness": 1.4, "width": 4}
    return made if below is None else {**made, "symmetric": False, "arrayminus": list(below)}


def logarithmic(values: Sequence[float], *, digits: Sequence[int] = ()) -> dict[str, Any]:
    """A logarithmic axis with ticks, in plain numbers, at these digits times the powers of ten that the values span; without
    digits, at as many as leave their labels apart."""
    positive = [value for value in values if value > 0] or [1.0]
    spanned = max(positive) / min(positive)
    digits = digits or ((1,) if spanned > _POWERS_ALONE else (1, 2, 5) if spanned > _EVERY_DIGIT else range(1, 10))
    powers = range(math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive))) + 1)
    ticks = [digit * 10.0**power for power in powers for digit in digits]
    words = [f"{tick:,.12g}" for tick in ticks]
    return {"type": "log", "rangemode": "normal", "tickmode": "array", "tickvals": ticks, "ticktext": words}


def powers_of_ten(low: float, high: float) -> dict[str, Any]:
    """A logarithmic axis with a tick at each power of ten."""
    return logarithmic((low, high), digits=(1,))


def _hover(texts: Sequence[str]) -> dict[str, Any]:
    return {"hovertext": list(texts), "hoverinfo": "text"}


def _axis(title: str) -> dict[str, Any]:
    return {"title": {"text": title, "font": {"size": 13}}, "automargin": True}


def _panel_title(text: str, panel: int) -> dict[str, Any]:
    number = _axis_number(panel)
    place = {"xref": f"x{number} domain", "yref": f"y{number} domain", "x": 0, "y": 1.0}
    corner = {"xanchor": "left", "yanchor": "bottom"}
    return {"text": f"<b>{text}</b>", "showarrow": False, "font": {"size": 14}, **place, **corner}


def chart_table(chart: Chart) -> Table:
    """The numbers of a chart. Text that a chart carries as a label becomes plain text again."""
    places: dict[Place, dict[str, Any]] = {}
    names: dict[str, None] = {}
    for trace in chart.data:
        name = plain_text(str(trace.get("name") or "value"))
        seen: dict[tuple[str, Any], int] = {}
        for x, mark in _marks(trace):
            where = (_panel(chart, trace), x)
            seen[where] = seen.get(where, -1) + 1
            names[name] = None
            places.setdefault((*where, seen[where]), {})[name] = mark
    step = -(-len(places) // _MOST_ROWS) or 1
    several = len([title for title in chart.panels if title]) > 1
    x_form = replace(_X, number=all(isinstance(x, int | float) for _, x, _ in places))
    lie = any(trace.get("orientation") == "h" for trace in chart.data)
    x_titles, shown = (_axis_titles(chart, side) for side in (("y", "x") if lie else ("x", "y")))
    columns = [
        *([Column("panel", TEXT, lambda line: line[_PLACE][0])] if several else []),
        Column(next(iter(x_titles), "what"), x_form, lambda line: line[_PLACE][1]),
        *(Column(name, _MARK) for name in names),
    ]
    # With the quantity and its unit, where all panels show the same.
    title = "Numbers of this chart" + (f": {shown[0]}" if len(set(shown)) == 1 else "")
    lines = [{**marks, _PLACE: place} for place, marks in places.items()]
    note = f"Every {step}th place of {len(places)}." if step > 1 else ""
    return Table.of(title, lines[::step], columns, note=note, folded=True)


def plain_text(text: str) -> str:
    """What a label reads as: our tags away, the record's own characters back."""
    return html.unescape(_OUR_TAGS.sub("", text.replace("<br>", " "))).strip()


def _marks(trace: Trace) -> Iterator[tuple[Any, Any]]:
    """Where each mark stands, and its word or its number with the spread; bars that lie on their side are read as if they stood."""
    along, up = ("y", "x") if trace.get("orientation") == "h" else ("x", "y")
    if "z" in trace:
        for y, line in zip(trace["y"], trace["z"], strict=True):
            yield from (((f"{_flat(x)} × {_flat(y)}"), (z, None)) for x, z in zip(trace["x"], line, strict=True))
        return
    places = _levels(trace[along])
    error = trace.get(f"error_{up}") or {}
    above = error.get("array") or [None] * len(places)
    spread = list(zip(error["arrayminus"], above, strict=True)) if "arrayminus" in error else above
    # A word where a number would stand: what failed, or where a mark had to leave its panel.
    texts = trace.get("text") if trace.get("mode") == "text" else None
    for index, (x, y) in enumerate(zip(places, trace[up], strict=True)):
        if texts:
            yield x, (texts[index], None)
        elif y is not None:
            yield x, (y, spread[index])


def _levels(values: Sequence[Any]) -> list[Any]:
    """Places of an axis; two levels of labels become one."""
    if values and isinstance(values[0], list):
        return [", ".join(_flat(one) for one in levels) for levels in zip(*values, strict=True)]
    return [value if isinstance(value, int | float) else _flat(value) for value in values]


def _flat(value: Any) -> str:
    return plain_text(str(value))


def _mark_words(mark: tuple[Any, float | tuple[float, float] | None]) -> str:
    value, spread = mark
    if not isinstance(value, int | float):
        return ABSENT if value is None else _flat(value)
    if isinstance(spread, tuple):
        return (
            f"{value:,.4g} ({value - spread[0]:,.4g} to {value + spread[1]:,.4g})" if any(spread) else f"{value:,.4g}"
        )
    return f"{value:,.4g} ± {spread:,.2g}" if spread else f"{value:,.4g}"


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


_X = Form(text=lambda x: f"{x:,.6g}" if isinstance(x, int | float) else str(x), sort=_number)
_MARK = Form(text=_mark_words, sort=lambda mark: _number(mark[0]))


def _panel(chart: Chart, trace: Mapping[str, Any]) -> str:
    number = int(str(trace.get("xaxis", "x"))[1:] or 1)
    return plain_text(chart.panels[number - 1]) if number <= len(chart.panels) else ""


def _axis_titles(chart: Chart, side: str) -> list[str]:
    axes = [axis for name, axis in chart.layout.items() if re.fullmatch(rf"{side}axis\d*", name)]
    titles = [axis.get("title", {}).get("text", "") for axis in axes]
    return [plain_text(title) for title in titles if title]
