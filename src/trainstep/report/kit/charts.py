"""Builds Plotly figures (bars, lines, marks) as plain data, and the table of each chart's numbers.

The page's script draws the figures. Colours are names such as `theme:sky`: the script puts in the palette of Okabe and Ito, which
colour-blind readers can tell apart, for a light or a dark page. Text from records goes through `label`, because plotly reads some
HTML tags in it. `chart_table` reads a chart's numbers from its figure: a row per place on the axis, a column per series.
"""

import html
import itertools
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainstep.report.kit.forms import ABSENT, TEXT, Form
from trainstep.report.kit.tables import Column, Table

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
_NARROWEST_PX, _PANEL_PX, _WIDEST_PX = 340, 260, 1200
_CELL_PX = 76
"""The width of a heat map's cell with a number in it, including its share of the axis labels."""
_LEGEND_PX, _CHARACTER_PX = 60, 8
"""The widths of a legend entry without its text, and of a character of the text."""
_AROUND_TITLE_PX = 40
"""The width beside the title of an axis, which is centred under its panel."""
_LONGEST_LABEL, _MOST_LABEL_LINES = 32, 3
_TOP = 66
"""Pixels above the first line of panels, for the legend and the titles."""

_MOST_ROWS = 200
"""The most rows in a chart's table; of a chart with more places, such as a timeline, the table has every nth place."""
_PLACE = " place"
"""The key of a line's place in that table. Series names are stripped, so none begins with a space."""
_POWERS_ALONE, _EVERY_DIGIT = 1000, 8
"""Ratios of largest to smallest value: above the first only powers of ten have ticks, up to the second every digit has one."""
STOPPED = "did not run"
_OUR_TAGS = re.compile(r"</?(?:b|sup|i)>")
Trace = dict[str, Any]
Place = tuple[str, Any, int]
"""Panel, x, and which of several marks of one series at that x."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure, and the sentence under it that says how to read it."""

    title: str
    caption: str
    data: Sequence[Trace]
    layout: Mapping[str, Any]
    panels: tuple[str, ...] = ()
    """The panels' titles, in the order of their axes."""

    @property
    def least_px(self) -> int:
        """The least legible width in pixels; a narrower page scrolls the chart."""
        columns = int(self.layout.get("grid", {}).get("columns", 1))
        cells = [len(trace["x"]) * _CELL_PX for trace in self.data if trace["type"] == "heatmap"]
        cells += [_places_px(trace["x"]) for trace in self.data if trace.get("orientation") != "h"]
        cells += [_PANEL_PX + _names_px(trace["y"]) for trace in self.data if "y" in trace]
        titles = [axis["title"]["text"] for name, axis in self.layout.items() if name.startswith("xaxis")]
        cells += [_AROUND_TITLE_PX + _CHARACTER_PX * len(title) for title in titles]
        legend = {trace["name"]: 0 for trace in self.data if trace.get("name") and trace.get("showlegend", True)}
        legend_px = sum(_LEGEND_PX + _CHARACTER_PX * len(plain_text(name)) for name in legend)
        return min(_WIDEST_PX, max(_NARROWEST_PX, max([_PANEL_PX, *cells]) * columns, legend_px // 2))


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page. `paragraphs` say what the numbers show; a table of the section has the numbers of each chart."""

    title: str
    paragraphs: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()


@dataclass(kw_only=True)
class Panels:
    """A chart under construction, made of small multiples: one panel per title, each with its own axes, and one legend."""

    titles: Sequence[str]
    columns: int
    x_title: str
    y_title: str
    data: list[Trace] = field(default_factory=list)
    axis: Mapping[str, Any] = field(default_factory=dict)
    """Options of every y axis, such as a logarithmic scale."""
    x_axis: Mapping[str, Any] = field(default_factory=dict)
    """Options of every x axis."""
    ranges: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Panel -> the range of its y axis, where plotly's choice is unsuitable."""
    axes: dict[int, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    """Panel -> options of its axis x or y alone, which override the common options."""
    _named: set[str] = field(default_factory=set)

    def add(self, panel: int, *traces: Trace) -> None:
        """Put traces into a panel; a name appears in the legend once and toggles its traces in every panel."""
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
            options = self.axes.get(panel, {})
            axes[f"xaxis{number}"] = {**x_axis, **self.x_axis, **options.get("x", {})}
            axes[f"yaxis{number}"] = {**y_axis, **self.axis, **ranged, **options.get("y", {})}
        titles = [_panel_title(text, panel) for panel, text in enumerate(self.titles)]
        common = {
            "height": _TOP + PANEL_HEIGHT * lines,
            "grid": {"rows": lines, "columns": self.columns, "pattern": "independent", "xgap": 0.16, "ygap": 0.32},
            "margin": {"l": 64, "r": 12, "t": _TOP, "b": 60},
            "legend": {"orientation": "h", "x": 0, "xref": "container", "y": 1, "yref": "container", "yanchor": "top"},
            "showlegend": len(self._named - {""}) > 1,
            "annotations": titles if any(self.titles) else [],
            **axes,
        }
        return Chart(title=title, caption=caption, data=self.data, layout=common | layout, panels=tuple(self.titles))


def level_labels_fit(bars_each: int, label_characters: int) -> bool:
    """Whether horizontal labels under the bars of a panel as wide as the page do not overlap."""
    return _label_px(bars_each, label_characters) <= _PAGE_PX


def _places_px(x: Sequence[Any]) -> int:
    """The width of horizontal labels of these places: of two levels the one nearer to the axis; 0 for numbers."""
    nearest = list(x[-1]) if x and isinstance(x[0], list) else [place for place in x if isinstance(place, str)]
    return _label_px(len(nearest), max((len(part) for text in nearest for part in text.split("<br>")), default=0))


def _names_px(y: Sequence[Any]) -> int:
    """The width of the names along a vertical axis; 0 for numbers."""
    lines = [part for name in y if isinstance(name, str) for part in name.split("<br>")]
    return _CHARACTER_PX * max((len(plain_text(part)) for part in lines), default=0)


def _label_px(bars: int, characters: int) -> int:
    return bars * max(26, 7 * characters + 8)


def label(text: str) -> str:
    """Text escaped for plotly, which would read `<b>` as bold and `<br>` as a new line."""
    flat = " ".join(text.split())
    return flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def short_labels(texts: Sequence[str]) -> list[str]:
    """Labels for axes and legends: a long label gets a second and third line, so that no number in it is cut.

    One that is still too long, such as a kernel's name, loses its middle; equal results get a number to keep them distinct.
    """
    shortened: dict[str, str] = {}
    for text in dict.fromkeys(texts):
        flat = " ".join(text.split())
        lines = textwrap.wrap(flat, _LONGEST_LABEL, break_long_words=False, break_on_hyphens=False) or [""]
        if len(lines) > _MOST_LABEL_LINES or max(map(len, lines)) > _LONGEST_LABEL:
            lines = [f"{flat[: _LONGEST_LABEL // 2]}…{flat[-_LONGEST_LABEL // 2 + 1 :]}"]
        short = "\n".join(lines)
        numbered = (f"{short} ({number})" for number in itertools.count(2))
        shortened[text] = next(free for free in itertools.chain([short], numbered) if free not in shortened.values())
    return [lines_of(*map(label, shortened[text].split("\n"))) for text in texts]


def lines_of(*texts: str) -> str:
    """Several labels, each on a line of its own."""
    return "<br>".join(texts)


def panel_columns(panels: int, bars_each: int, *, label_characters: int = 4) -> int:
    """The number of panels side by side that leaves room for horizontal labels under the bars."""
    fitting = max(1, min(panels, 4, _PAGE_PX // _label_px(bars_each, label_characters)))
    lines = -(-panels // fitting)
    return -(-panels // lines)


def series_style(index: int) -> tuple[str, str]:
    """(colour, dash) of the i-th line: seven colours, then the same again dashed."""
    dashes = ("solid", "dash", "dot", "dashdot")
    return SERIES[index % len(SERIES)], dashes[index // len(SERIES) % len(dashes)]


def _axis_number(panel: int) -> str:
    """The suffix of plotly's `x` and `y` for a panel's axes: empty for the first panel."""
    return "" if panel == 0 else str(panel + 1)


def bar(name: str, x: Any, y: Sequence[Any], *, colour: str, hover: Sequence[str], **more: Any) -> Trace:
    """Bars with their hover text; `more` are plotly's options."""
    marker = {"color": colour, **more.pop("marker", {})}
    return {"type": "bar", "name": name, "x": x, "y": list(y), "marker": marker, **_hover(hover), **more}


def text_marks(
    name: str, x: Any, y: Sequence[float], texts: Sequence[str], *, colour: str, hover: Sequence[str]
) -> Trace:
    """Words in a chart in place of numbers, for cells that failed."""
    font = {"color": colour, "size": 12}
    style = {"mode": "text", "textposition": "top center", "textfont": font, "cliponaxis": False}
    trace = {"type": "scatter", "name": name, "x": x, "y": list(y), "text": list(texts), "showlegend": False}
    return {**trace, **style, **_hover(hover)}


def crosses(x: Iterable[Any], y: Iterable[Any], *, size: int, hover: Sequence[str]) -> Trace:
    """Marks in place of the numbers of cells that did not run; the hover text says why."""
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
    looks = {"mode": "lines+markers", "line": {"color": colour, "dash": dash, "width": 2}}
    marker = {"color": colour, "size": 7, **more.pop("marker", {})}
    return {"type": "scatter", "name": name, "x": x, "y": list(y), "marker": marker, **looks, **_hover(hover), **more}


def dotted_at_one(panel: int) -> dict[str, Any]:
    """A dotted line across a panel at y = 1, where two times are equal: a shape of the chart's layout."""
    ink = {"color": INK, "width": 1.5, "dash": "dot"}
    axes = {"xref": f"x{_axis_number(panel)} domain", "yref": f"y{_axis_number(panel)}"}
    return {"type": "line", "line": ink, **axes, "x0": 0, "x1": 1, "y0": 1, "y1": 1}


def error_bars(above: Sequence[float], below: Sequence[float] | None = None) -> dict[str, Any]:
    """Intervals around points, in the colour of the text; symmetric if `below` is not given."""
    bars = {"type": "data", "array": list(above), "color": INK, "thickness": 1.4, "width": 4}
    return bars if below is None else {**bars, "symmetric": False, "arrayminus": list(below)}


def logarithmic(values: Sequence[float], *, digits: Sequence[int] = ()) -> dict[str, Any]:
    """A logarithmic axis with ticks in plain numbers at `digits` times the powers of ten that the values span; by default as
    many digits as leave the labels apart."""
    positive = [value for value in values if 0 < value < math.inf] or [1.0]  # a rate in no time at all is infinite
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
    """The numbers of a chart as a table. Text that the chart carries as a label becomes plain text again."""
    places: dict[Place, dict[str, Any]] = {}
    names: dict[str, None] = {}
    for trace in chart.data:
        name = plain_text(str(trace.get("name") or "value"))
        panel = int(str(trace.get("xaxis", "x"))[1:] or 1) - 1
        panel_title = plain_text(chart.panels[panel]) if panel < len(chart.panels) else ""
        counts: dict[Any, int] = {}
        for x, mark in _marks(trace):
            counts[x] = counts.get(x, -1) + 1
            names[name] = None
            places.setdefault((panel_title, x, counts[x]), {})[name] = mark
    step = -(-len(places) // _MOST_ROWS) or 1
    several = len([title for title in chart.panels if title]) > 1
    x_form = replace(_X, number=all(isinstance(x, int | float) for _, x, _ in places))
    horizontal = any(trace.get("orientation") == "h" for trace in chart.data)
    x_titles, y_titles = (_axis_titles(chart, side) for side in (("y", "x") if horizontal else ("x", "y")))
    columns = [
        *([Column("panel", TEXT, lambda line: line[_PLACE][0])] if several else []),
        Column(next(iter(x_titles), "what"), x_form, lambda line: line[_PLACE][1]),
        *(Column(name, _MARK) for name in names),
    ]
    # The title names the quantity and its unit if all panels show the same.
    title = "Numbers of this chart" + (f": {y_titles[0]}" if len(set(y_titles)) == 1 else "")
    lines = [{**marks, _PLACE: place} for place, marks in places.items()]
    note = f"One in {step} of the {len(places)} places is listed." if step > 1 else ""
    return Table.of(title, lines[::step], columns, note=note, folded=True)


def plain_text(text: str) -> str:
    """The text that a label shows: our tags removed, escaped characters restored."""
    return html.unescape(_OUR_TAGS.sub("", text.replace("<br>", " "))).strip()


def _marks(trace: Trace) -> Iterator[tuple[Any, Any]]:
    """The place of each mark, and its word, or its number with the spread; horizontal bars are read like vertical ones."""
    along, up = ("y", "x") if trace.get("orientation") == "h" else ("x", "y")
    if "z" in trace:
        for y, line in zip(trace["y"], trace["z"], strict=True):
            yield from (((f"{_flat(x)} × {_flat(y)}"), (z, None)) for x, z in zip(trace["x"], line, strict=True))
        return
    values = trace[along]
    places: list[Any]
    if values and isinstance(values[0], list):  # two levels of labels become one
        places = [", ".join(map(_flat, levels)) for levels in zip(*values, strict=True)]
    else:
        places = [value if isinstance(value, int | float) else _flat(value) for value in values]
    error = trace.get(f"error_{up}") or {}
    above = error.get("array") or [None] * len(places)
    spread = list(zip(error["arrayminus"], above, strict=True)) if "arrayminus" in error else above
    # Text marks are failures, or marks outside the range of their panel.
    texts = trace.get("text") if trace.get("mode") == "text" else None
    for index, (x, y) in enumerate(zip(places, trace[up], strict=True)):
        if texts:
            yield x, (texts[index], None)
        elif y is not None:
            yield x, (y, spread[index])


def _flat(value: Any) -> str:
    return plain_text(str(value))


def _mark_words(mark: tuple[Any, float | tuple[float, float] | None]) -> str:
    value, spread = mark
    if not isinstance(value, int | float):
        return ABSENT if value is None else _flat(value)
    number = f"{value:,.4g}"
    if isinstance(spread, tuple):
        return f"{number} ({value - spread[0]:,.4g} to {value + spread[1]:,.4g})" if any(spread) else number
    return f"{number} ± {spread:,.2g}" if spread else number


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


_X = Form(text=lambda x: f"{x:,.6g}" if isinstance(x, int | float) else str(x), sort=_number)
_MARK = Form(text=_mark_words, sort=lambda mark: _number(mark[0]))


def _axis_titles(chart: Chart, side: str) -> list[str]:
    axes = [axis for name, axis in chart.layout.items() if re.fullmatch(rf"{side}axis\d*", name)]
    titles = [axis.get("title", {}).get("text", "") for axis in axes]
    return [plain_text(title) for title in titles if title]
