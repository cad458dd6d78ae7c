"""Small multiples of attention's charts: which configuration is drawn into which figure, which panel, at which place.

Panels are by direction and head_dim, the x axis is the length; what else varies (dtype, mask...) makes figures of their own. Where
lengths do not make lines (a list of shapes, one length each), the shapes stand side by side instead.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainstep.report.attention_rows import Configuration
from trainstep.report.charts import MAXIMUM_PANELS, Panels, label, lines_of, logarithmic, panel_columns, short_labels
from trainstep.report.rows import words

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


def groups_left_out(found: Sequence[Configuration]) -> int:
    return max(0, len(_split(found)) - MAXIMUM_GROUPS)


def _split(found: Sequence[Configuration]) -> dict[Any, list[Configuration]]:
    """Configurations by what makes charts of their own: dtype, mask, machine..."""
    groups: dict[Any, list[Configuration]] = {}
    for one in found:
        groups.setdefault(one.rest("seq", *_PANEL), []).append(one)
    return groups


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
    made: dict[Any, list[Configuration]] = {}
    for one in sorted(mine, key=lambda each: [_order(each.point.get(name)) for name in names]):
        made.setdefault(tuple(words(one.point.get(name)) for name in names), []).append(one)
    return made


def _order(value: Any) -> tuple[float, str]:
    """Numbers by size, then words; forward before backward before both."""
    if isinstance(value, int | float):
        return float(value), ""
    places = {"forward": "0", "backward": "1", "both": "2"}
    return math.inf, places.get(str(value), str(value))


def panels_of(group: Group, y_title: str, values: Sequence[float], *, logarithmic_y: bool = True) -> Panels:
    titles = [
        ", ".join(_worded(name, value) for name, value in zip(group.names, key, strict=True)) for key in group.panels
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


def _worded(name: str, value: str) -> str:
    return value if name == "direction" else f"{name.replace('_', ' ')} {value}"


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
