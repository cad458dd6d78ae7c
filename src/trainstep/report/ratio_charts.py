"""Ratios of times as marks around one: what takes 3 % longer stands visibly beside the dotted line, which absolute times hide.

A whisker is the 99 % interval of a ratio; a hollow mark means: cannot tell.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from trainstep.records.compare import MINIMUM_PAIRS, Comparison
from trainstep.report.charts import (
    FAILURE_COLOUR,
    INK,
    SERIES,
    Chart,
    Panels,
    Trace,
    error_bars,
    label,
    lines_of,
    logarithmic,
    short_labels,
    text_marks,
)
from trainstep.report.forms import failure_word, listed, ratio_words
from trainstep.report.ratios import Ratio

HOW_TO_READ = (
    f"Whiskers are 99 % intervals of the ratio, which fewer than {MINIMUM_PAIRS} pairs or samples do not have; a hollow mark "
    "means: cannot tell."
)
_MOST_LINES = 40
_LINE_PX, _AROUND_PX = 30, 150
_LINEAR_TO = 3.0
"""The largest ratio that a linear axis shows beside one."""
_ROOM = 0.12
"""Beyond what an axis must show, of its span."""
_LEAST_SPAN = 0.1


def ratio_axis(ratios: Sequence[Ratio]) -> dict[str, Any]:
    """An axis from the least to the greatest of these, one among them, and as much of their whiskers as leaves the marks apart."""
    marks = [1.0, *(ratio.ratio for ratio in ratios if ratio.ratio)]
    low, high = min(marks), max(marks)
    if high > _LINEAR_TO:
        return logarithmic([low, high])
    span = max(high - low, _LEAST_SPAN)
    ends = [end for ratio in ratios if ratio.interval for end in ratio.interval]
    low, high = max(low - span / 2, min([low, *ends])), min(high + span / 2, max([high, *ends]))
    return {"rangemode": "normal", "range": [max(0.0, low - _ROOM * span), high + _ROOM * span]}


def whiskers(ratios: Sequence[Ratio]) -> dict[str, Any]:
    """Around the marks of ratios that came to a number; none where too few values leave no interval."""
    ends = [ratio.interval or (0.0, 0.0, 0.0) for ratio in ratios]
    return error_bars([high - middle for _, middle, high in ends], [middle - low for low, middle, _ in ends])


def hollow(symbol: str, ratio: Ratio) -> str:
    """The mark's symbol: of `cannot tell` its outline."""
    filled = symbol.removesuffix("-open")
    return f"{filled}-open" if ratio.found is None or ratio.found.verdict == "cannot tell" else filled


def ratio_chart(
    title: str, caption: str, x_title: str, series: Mapping[str, Sequence[tuple[str, Ratio]]]
) -> Chart | None:
    """A line a name, from top to bottom, with a mark of each series; what failed as a word at one. None without any ratio."""
    names = list(dict.fromkeys(name for named in series.values() for name, _ in named))
    shown = dict(zip(names[:_MOST_LINES], short_labels(names[:_MOST_LINES]), strict=True))
    ratios = [ratio for named in series.values() for name, ratio in named if name in shown and ratio.ratio]
    if not ratios:
        return None
    panels = Panels(titles=[""], columns=1, x_title=x_title, y_title="", x_axis=ratio_axis(ratios))
    panels.axis = {"type": "category", "autorange": "reversed", "categoryarray": list(shown.values())}
    for index, (what, named) in enumerate(series.items()):
        places = [(shown[name], ratio) for name, ratio in named if name in shown]
        known = [(place, ratio) for place, ratio in places if ratio.ratio]
        colour = SERIES[index % len(SERIES)]
        if known:
            panels.add(0, _marks(what, known, colour))
        if without := [(place, ratio) for place, ratio in places if not ratio.ratio]:
            panels.add(0, _words(what, without))
    left_out = f" The first {len(shown)} of {len(names)}; the table has all." if len(shown) < len(names) else ""
    at_one = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": 1, "x1": 1}
    return panels.chart(
        title,
        f"Left of the dotted line is faster. {caption}{HOW_TO_READ}{left_out}",
        height=_AROUND_PX + _LINE_PX * len(shown) * len(series),
        horizontal=True,
        scattermode="group",
        shapes=[{**at_one, "line": {"color": INK, "width": 1.5, "dash": "dot"}}],
    )


def _marks(what: str, known: Sequence[tuple[str, Ratio]], colour: str) -> Trace:
    ratios = [ratio for _, ratio in known]
    return {
        "type": "scatter",
        "name": label(what),
        "orientation": "h",
        "mode": "markers+text",
        "x": [ratio.ratio for ratio in ratios],
        "y": [place for place, _ in known],
        **({"error_x": {**whiskers(ratios), "color": colour}} if any(ratio.interval for ratio in ratios) else {}),
        "marker": {"color": colour, "size": 10, "symbol": [hollow("circle", ratio) for ratio in ratios]},
        "text": [ratio_words(ratio.ratio or 0.0) for ratio in ratios],
        "textposition": "top center",
        "textfont": {"size": 12},
        "cliponaxis": False,
        "offsetgroup": label(what),
        "hovertext": [_hover(ratio) for ratio in ratios],
        "hoverinfo": "text",
    }


def _words(what: str, without: Sequence[tuple[str, Ratio]]) -> Trace:
    texts = [f"<b>{failure_word(ratio.failure)}</b>" if ratio.failure else "?" for _, ratio in without]
    hover = [_hover(ratio) for _, ratio in without]
    places = [place for place, _ in without]
    made = text_marks(label(what), [1.0] * len(without), [], texts, colour=FAILURE_COLOUR, hover=hover)
    return {**made, "y": places, "orientation": "h", "textposition": "middle right", "offsetgroup": label(what)}


def _hover(ratio: Ratio) -> str:
    name = label(ratio.row.label())
    if ratio.found is None or ratio.ratio is None:
        return lines_of(name, label(ratio.trouble))
    low, _, high = map(ratio_words, ratio.interval) if ratio.interval else ("", "", "")
    interval = f" (99 % interval {low} to {high})" if ratio.interval else _each(ratio.found)
    return lines_of(name, f"{ratio_words(ratio.ratio)}{interval}", ratio.found.verdict, label(ratio.found.reason))


def _each(found: Comparison) -> str:
    return f" (of pairs {listed(map(ratio_words, found.each))})" if found.each else ""
