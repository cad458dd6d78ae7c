"""Draws ratios of times as marks around a line at 1, which shows differences that absolute times hide.

A whisker is the 99 % interval of a ratio; a hollow mark means: cannot tell.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from trainstep.records.compare import MINIMUM_PAIRS
from trainstep.report.kit.charts import (
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
from trainstep.report.kit.forms import failure_word, listed, ratio_words
from trainstep.report.kit.ranking import Ratio

HOW_TO_READ = (
    f"Whiskers are 99 % intervals of the ratio; with fewer than {MINIMUM_PAIRS} pairs or samples there is none. A hollow mark "
    "means: cannot tell."
)
_MOST_LINES = 40
_LINE_PX, _AROUND_PX = 30, 150
_LINEAR_TO = 3.0
"""The largest ratio drawn on a linear axis; beyond it the axis is logarithmic."""
_ROOM = 0.12
"""Free space at each end of an axis, as a share of its span."""
_LEAST_SPAN = 0.1


def ratio_axis(ratios: Sequence[Ratio]) -> dict[str, Any]:
    """An axis that contains 1 and all ratios; whiskers are cut off where they would press the marks together."""
    marks = [1.0, *(ratio.ratio for ratio in ratios if ratio.ratio)]
    low, high = min(marks), max(marks)
    if high > _LINEAR_TO:
        return logarithmic([low, high])
    span = max(high - low, _LEAST_SPAN)
    ends = [end for ratio in ratios if ratio.interval for end in ratio.interval]
    low, high = max(low - span / 2, min([low, *ends])), min(high + span / 2, max([high, *ends]))
    return {"rangemode": "normal", "range": [max(0.0, low - _ROOM * span), high + _ROOM * span]}


def whiskers(ratios: Sequence[Ratio]) -> dict[str, Any]:
    """Error bars of ratios; of length 0 for a ratio without an interval."""
    ends = [ratio.interval or (0.0, 0.0, 0.0) for ratio in ratios]
    return error_bars([high - middle for _, middle, high in ends], [middle - low for low, middle, _ in ends])


def hollow(symbol: str, ratio: Ratio) -> str:
    """The mark's symbol, as an outline if the verdict is neither faster nor slower."""
    filled = symbol.removesuffix("-open")
    return f"{filled}-open" if ratio.comparison is None or ratio.comparison.verdict == "cannot tell" else filled


def ratio_chart(
    title: str, caption: str, x_title: str, series: Mapping[str, Sequence[tuple[str, Ratio]]]
) -> Chart | None:
    """A chart with a line per name and a mark per series; a failure is a word at 1. None if there is no ratio."""
    names = list(dict.fromkeys(name for pairs in series.values() for name, _ in pairs))
    shown = dict(zip(names[:_MOST_LINES], short_labels(names[:_MOST_LINES]), strict=True))
    ratios = [ratio for pairs in series.values() for name, ratio in pairs if name in shown and ratio.ratio]
    if not ratios:
        return None
    panels = Panels(titles=[""], columns=1, x_title=x_title, y_title="", x_axis=ratio_axis(ratios))
    panels.axis = {"type": "category", "autorange": "reversed", "categoryarray": list(shown.values())}
    for index, (what, pairs) in enumerate(series.items()):
        places = [(shown[name], ratio) for name, ratio in pairs if name in shown]
        known = [(place, ratio) for place, ratio in places if ratio.ratio]
        if known:
            panels.add(0, _marks(what, known, SERIES[index % len(SERIES)]))
        if without := [(place, ratio) for place, ratio in places if not ratio.ratio]:
            panels.add(0, _words(what, without))
    left_out = (
        f" Only the first {len(shown)} of {len(names)} are drawn; the table has all." if len(shown) < len(names) else ""
    )
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
    marks = text_marks(label(what), [1.0] * len(without), [], texts, colour=FAILURE_COLOUR, hover=hover)
    return {**marks, "y": places, "orientation": "h", "textposition": "middle right", "offsetgroup": label(what)}


def _hover(ratio: Ratio) -> str:
    name, comparison = label(ratio.row.label()), ratio.comparison
    if comparison is None or comparison.ratio is None:
        return lines_of(name, label(ratio.trouble))
    spread = ""
    if ratio.interval:
        low, _, high = map(ratio_words, ratio.interval)
        spread = f" (99 % interval {low} to {high})"
    elif comparison.each:
        spread = f" (of pairs {listed(map(ratio_words, comparison.each))})"
    return lines_of(name, f"{ratio_words(comparison.ratio)}{spread}", comparison.word, label(comparison.reason))
