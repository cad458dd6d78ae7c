"""A chart's own numbers as a table, made from what is drawn: a row a place on its axis, a column a series."""

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainstep.report.charts import Chart, Trace
from trainstep.report.forms import ABSENT
from trainstep.report.hand_built import Column
from trainstep.report.tables import Entry, Table

_MOST_ROWS = 200
"""Of a chart with more places, such as a timeline of thousands, evenly chosen ones stand in the table."""
_OUR_TAGS = re.compile(r"</?(?:b|sup|i)>")
Place = tuple[str, Any, int]
"""Panel, x, and which of several marks of one series at that x."""


def chart_table(chart: Chart) -> Table:
    """The numbers of a chart. Text that a chart carries as a label becomes plain text again."""
    places: dict[Place, dict[str, Entry]] = {}
    names: dict[str, None] = {}
    for trace in chart.data:
        name = plain_text(str(trace.get("name") or "value"))
        seen: dict[tuple[str, Any], int] = {}
        for x, entry in _marks(trace):
            where = (_panel(chart, trace), x)
            seen[where] = seen.get(where, -1) + 1
            names[name] = None
            places.setdefault((*where, seen[where]), {})[name] = entry
    several = len([title for title in chart.panels if title]) > 1
    rows = list(places.items())
    step = -(-len(rows) // _MOST_ROWS) or 1
    entries = []
    for (panel, x, _), found in rows[::step]:
        start = (Entry(text=panel),) if several else ()
        entries.append((*start, _x_entry(x), *(found.get(name, Entry(text=ABSENT)) for name in names)))
    columns = [Column(title="panel")] if several else []
    columns += [Column(title=_x_title(chart), number=all(isinstance(x, int | float) for (_, x, _) in places))]
    columns += [Column(title=name, number=True) for name in names]
    note = f"Every {step}th place of {len(rows)}." if step > 1 else ""
    return Table(title=_title(chart), columns=tuple(columns), entries=tuple(entries), note=note, folded=True)


def plain_text(text: str) -> str:
    """What a label reads as: our tags away, the record's own characters back."""
    return html.unescape(_OUR_TAGS.sub("", text.replace("<br>", " "))).strip()


def _marks(trace: Trace) -> Iterator[tuple[Any, Entry]]:
    """Where each mark stands and what it says; bars that lie on their side are read as if they stood."""
    along, up = ("y", "x") if trace.get("orientation") == "h" else ("x", "y")
    if "z" in trace:
        for y, line in zip(trace["y"], trace["z"], strict=True):
            yield from (((f"{_flat(x)} × {_flat(y)}"), _entry(z, None)) for x, z in zip(trace["x"], line, strict=True))
        return
    places = _levels(trace[along])
    spread = (trace.get("error_y") or {}).get("array") or [None] * len(places)
    # A word where a number would stand: what failed, or where a mark had to leave its panel.
    texts = trace.get("text") if trace.get("mode") == "text" else None
    for index, (x, y) in enumerate(zip(places, trace[up], strict=True)):
        if texts:
            yield x, Entry(text=plain_text(texts[index]))
        elif y is not None:
            yield x, _entry(y, spread[index])


def _levels(values: Sequence[Any]) -> list[Any]:
    """Places of an axis; two levels of labels become one."""
    if values and isinstance(values[0], list):
        return [", ".join(_flat(one) for one in levels) for levels in zip(*values, strict=True)]
    return [value if isinstance(value, int | float) else _flat(value) for value in values]


def _flat(value: Any) -> str:
    return plain_text(str(value))


def _entry(value: Any, spread: float | None) -> Entry:
    if not isinstance(value, int | float):
        return Entry(text=ABSENT if value is None else _flat(value))
    return Entry(text=f"{value:,.4g} ± {spread:,.2g}" if spread else f"{value:,.4g}", sort=float(value))


def _x_entry(x: Any) -> Entry:
    return Entry(text=f"{x:,.6g}", sort=float(x)) if isinstance(x, int | float) else Entry(text=str(x))


def _panel(chart: Chart, trace: Mapping[str, Any]) -> str:
    number = int(str(trace.get("xaxis", "x"))[1:] or 1)
    return plain_text(chart.panels[number - 1]) if number <= len(chart.panels) else ""


def _title(chart: Chart) -> str:
    """With the quantity and its unit, where all panels show the same."""
    side = "x" if _lies(chart) else "y"
    found = dict.fromkeys(_axis_titles(chart, side))
    return "Numbers of this chart" + (f": {next(iter(found))}" if len(found) == 1 else "")


def _x_title(chart: Chart) -> str:
    return next(iter(_axis_titles(chart, "y" if _lies(chart) else "x")), "what")


def _lies(chart: Chart) -> bool:
    return any(trace.get("orientation") == "h" for trace in chart.data)


def _axis_titles(chart: Chart, side: str) -> list[str]:
    axes = [axis for name, axis in chart.layout.items() if re.fullmatch(rf"{side}axis\d*", name)]
    titles = [axis.get("title", {}).get("text", "") for axis in axes]
    return [plain_text(title) for title in titles if title]
