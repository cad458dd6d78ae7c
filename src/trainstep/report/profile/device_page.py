"""The sections on the device of a page: the roofline of each profiled cell, and the limits of its work."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainstep.report.kit.charts import INK, SERIES, Chart, Panels, Section, Trace, label, line, lines_of, powers_of_ten
from trainstep.report.kit.forms import (
    BYTE_RATE,
    DIGITS,
    FLOP_RATE,
    GIGA,
    MS,
    PERCENT,
    TEXT,
    Form,
    milliseconds,
    percent,
    rate_words,
    three_digits,
)
from trainstep.report.kit.rows import Row
from trainstep.report.kit.tables import Column, Line, Table, filled, point_columns
from trainstep.report.profile.device_words import bound_words, device_sentences
from trainstep.report.profile.device_work import Ceilings, CountedWork, ceilings_of, roof_name, work_of
from trainstep.report.profile.tables import DETAILED_CELLS, HELP

_SYMBOLS = {"forward": "circle", "backward": "square", "optimizer": "diamond"}
_HEIGHT, _WIDTH = 470, 1150
"""The assumed size of the drawing in pixels, at which labels do not overlap; on a narrower screen they may."""
_LABEL_PX, _LINE_PX, _TOGETHER_PX = 6.6, 17, 40
_PLACES = ("middle right", "middle left", "top center", "bottom center", "top right", "bottom left", "bottom right")
_DASHES = ("solid", "dash", "dot", "dashdot")
_WORK = (
    Column("work", TEXT, "name", help="kinds of work with a formula for FLOPs and bytes"),
    Column("phase"),
    Column("calls", Form(text=lambda calls: f"{calls:,.4g}"), help="kernels of a step; on a CPU ops"),
    Column("time (ms)", MS, "time_s", help="of a step"),
    Column("GFLOP", GIGA, "flops", help=HELP["flops"]),
    Column("GB", GIGA, "bytes", help=HELP["bytes"]),
    Column("FLOP/byte", DIGITS, "intensity"),
    Column("FLOP/s", FLOP_RATE, "flops_per_s", help="achieved"),
    Column("bytes/s", BYTE_RATE, "bytes_per_s", help="achieved"),
)


class _Roof(NamedTuple):
    """The horizontal roof of a dtype's arithmetic, and the bandwidth that makes the slope left of its ridge."""

    words: str
    source: str
    flops_per_s: float
    bytes_per_s: float
    ridge: float


@dataclass(frozen=True, kw_only=True)
class _Plane:
    """The ranges of a roofline's axes; y is in units of `scale` FLOP/s."""

    x: tuple[float, float]
    y: tuple[float, float]
    scale: float

    def pixel(self, work: CountedWork) -> tuple[float, float]:
        """The place of the work's mark in pixels, from the left and from the top."""
        across = math.log(work.intensity / self.x[0]) / math.log(self.x[1] / self.x[0])
        up = math.log(work.flops_per_s / self.scale / self.y[0]) / math.log(self.y[1] / self.y[0])
        return _WIDTH * across, _HEIGHT * (1 - up)


def device_sections(rows: Sequence[Row], ceilings: Sequence[Row] = ()) -> list[Section]:
    """A section with a roofline per cell; of many cells, one section with the table of their numbers."""
    ran = [row for row in rows if row.record.failure is None and row.record.tables.get("classes")]
    if not ran:
        return []
    if len(ran) > DETAILED_CELLS:
        note = f"Rooflines are drawn for up to {DETAILED_CELLS} cells; this table has the numbers of all {len(ran)}."
        tables = tuple(filled(work_table(ran, ceilings)))
        return [Section(title="What bounds the device", paragraphs=(note,), tables=tables)]
    return [_cell(row, ceilings, alone=len(ran) == 1) for row in ran]


def work_table(cells: Sequence[Row], rows: Sequence[Row]) -> Table:
    """Each kind of work of these cells against its ceiling; `rows`: all records, with those of measured ceilings."""
    ceilings_by_row = {id(row): ceilings_of(row.record, rows) for row in cells}
    lines = [Line(row, work) for row in cells for work in work_of(row.record)]

    def share(line: Line) -> float | None:
        ceilings = ceilings_by_row[id(line.row)]
        return ceilings.share(line.value) if ceilings else None

    def bound(line: Line) -> str | None:
        ceilings = ceilings_by_row[id(line.row)]
        return bound_words(line.value, ceilings) if ceilings else None

    of_roof = "share of the most FLOP/s that the device allows at its FLOP per byte"
    columns = [
        *point_columns(cells),
        *_WORK,
        Column("of the roof (%)", PERCENT, share, help=of_roof),
        Column("bound by", TEXT, bound),
    ]
    return Table.of("Work against its ceilings", lines, columns)


def _cell(row: Row, rows: Sequence[Row], *, alone: bool) -> Section:
    work, ceilings = work_of(row.record), ceilings_of(row.record, rows)
    kind = str(row.record.config.get("device"))
    chip = row.record.environment.gpu if kind == "cuda" else row.record.environment.cpu
    return Section(
        title=f"The device, {chip}" if alone else f"The device, {chip}: {row.label()}",
        paragraphs=tuple(device_sentences(row.record, work, ceilings)),
        charts=(roofline(work, ceilings, name=row.label(), kind=kind),) if work else (),
        tables=tuple(filled(work_table([row], rows))),
    )


def roofline(work: Sequence[CountedWork], ceilings: Ceilings | None, *, name: str, kind: str) -> Chart:
    """The roofline of a cell. `name`: the cell; `kind`: the device, cpu or cuda. Without ceilings no roof is drawn."""
    unit, scale = ("TFLOP/s", 1e12) if kind == "cuda" else ("GFLOP/s", 1e9)
    roofs = _roofs(work, ceilings, kind)
    x = _span([item.intensity for item in work] + [roof.ridge for roof in roofs], 2.5)
    y = _span([item.flops_per_s / scale for item in work] + [roof.flops_per_s / scale for roof in roofs], 2.0)
    plane = _Plane(x=x, y=y, scale=scale)
    panels = Panels(titles=[""], columns=1, x_title="FLOP per byte moved", y_title=f"achieved {unit}")
    for trace in (*_roof_lines(roofs, plane), *_points(work, ceilings, plane)):
        panels.add(0, trace)
    return panels.chart(
        f"{name}: Roofline" if name else "Roofline",
        "Each mark is one kind of work of a step: further right it computes more per byte, further up it is faster. The slope "
        "is the limit of memory, the horizontal lines are the limits of arithmetic; a mark far below both wastes the device. "
        "Circles: forward, squares: backward, diamond: optimizer."
        if ceilings
        else "Each mark is one kind of work of a step. No ceiling of this device is known, so there is no roof.",
        height=_HEIGHT + 100,
        showlegend=False,
        annotations=_roof_words(roofs, kind, plane),
        xaxis=_axis("FLOP per byte moved", *x),
        yaxis=_axis(f"achieved {unit}", *y),
    )


def _roofs(work: Sequence[CountedWork], ceilings: Ceilings | None, kind: str) -> list[_Roof]:
    """The roofs of this work's dtypes, highest first."""
    if ceilings is None:
        return []
    used = {item.dtype for item in work} & ceilings.arithmetic.keys()
    roofs = []
    for dtype in sorted(used, key=lambda dtype: -ceilings.arithmetic[dtype].rate):
        rate, source = ceilings.arithmetic[dtype].rate, ceilings.arithmetic[dtype].source
        words = f"{roof_name(dtype, kind)}: {rate_words(rate, 'flop/s')}"
        roofs.append(_Roof(words, source, rate, ceilings.memory.rate, ceilings.ridge(dtype)))
    return roofs


def _roof_lines(roofs: Sequence[_Roof], plane: _Plane) -> Iterator[Trace]:
    """A horizontal line per roof; the slope of memory leads to the highest."""
    for index, roof in enumerate(roofs):
        level, (low, high) = roof.flops_per_s / plane.scale, plane.x
        x, y = [roof.ridge, high], [level, level]
        if index == 0:
            x, y = [low, *x], [low * (roof.bytes_per_s / plane.scale), *y]
        hover = [lines_of(roof.words, label(roof.source))] * len(x)
        trace = line(roof.words, x, y, style=(INK, _DASHES[index % 4]), hover=hover, showlegend=False)
        yield {**trace, "mode": "lines", "line": {**trace["line"], "width": 1.6}}


def _points(work: Sequence[CountedWork], ceilings: Ceilings | None, plane: _Plane) -> Iterator[Trace]:
    """The mark of each kind of work, with a label and a size that grows with its time."""
    names = list(dict.fromkeys(item.name for item in work))
    longest = max((item.time_s for item in work), default=1.0)
    pixels = [plane.pixel(item) for item in work]
    labels = _labels([item.name for item in work], pixels)
    places = _label_places(labels, pixels)
    for item, text_label, place in zip(work, labels, places, strict=True):
        colour = SERIES[names.index(item.name) % len(SERIES)]
        share = ceilings.share(item) if ceilings else None
        hover = lines_of(
            label(f"{item.name}, {item.phase}"),
            f"{rate_words(item.flops_per_s, 'flop/s')}, {rate_words(item.bytes_per_s, 'bytes/s')}",
            f"{three_digits(item.intensity)} FLOP per byte",
            f"{milliseconds(item.time_s)} ms of a step in {item.calls:,.4g} calls",
            *([] if share is None else [f"{percent(share)} % of the roof"]),
        )
        size = 9 + 11 * math.sqrt(item.time_s / longest)
        mark = {"symbol": _SYMBOLS.get(item.phase, "cross"), "size": size, "line": {"color": INK, "width": 1}}
        trace = line(
            f"{item.name}, {item.phase}",
            [item.intensity],
            [item.flops_per_s / plane.scale],
            style=(colour, "solid"),
            hover=[hover],
            marker=mark,
        )
        text = {"mode": "markers+text", "text": [label(text_label)], "textposition": place}
        yield {**trace, **text, "textfont": {"size": 12, "color": INK}, "cliponaxis": False}


def _labels(names: Sequence[str], pixels: Sequence[tuple[float, float]]) -> list[str]:
    """The label of each mark; marks with the same name that are close share one, because their shapes show the phases."""
    labelled: list[tuple[str, tuple[float, float]]] = []
    labels = []
    for name, pixel in zip(names, pixels, strict=True):
        is_near = any(other == name and math.dist(pixel, place) < _TOGETHER_PX for other, place in labelled)
        labels.append("" if is_near else name)
        labelled.append((name, pixel))
    return labels


def _label_places(texts: Sequence[str], pixels: Sequence[tuple[float, float]]) -> list[str]:
    """For each mark, the first place beside it where its label overlaps no other label and no mark."""
    taken = [(x - 10, y - 10, x + 10, y + 10) for x, y in pixels]
    places = []
    for index, (text, (x, y)) in enumerate(zip(texts, pixels, strict=True)):
        others = taken[:index] + taken[index + 1 :]
        boxes = {place: _box(place, x, y, _LABEL_PX * len(text)) for place in _PLACES}
        inside = [place for place in _PLACES if boxes[place][0] > 0 and boxes[place][2] < _WIDTH]
        free = (place for place in inside if not any(_overlap(boxes[place], other) for other in others))
        chosen = next(free, inside[0] if inside else _PLACES[0])
        taken.append(boxes[chosen])
        places.append(chosen)
    return places


def _box(place: str, x: float, y: float, width: float) -> tuple[float, float, float, float]:
    vertical, horizontal = place.split()
    left = {"right": x + 12, "left": x - 12 - width, "center": x - width / 2}[horizontal]
    top = {"middle": y - _LINE_PX / 2, "top": y - 12 - _LINE_PX, "bottom": y + 12}[vertical]
    return left, top, left + width, top + _LINE_PX


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _roof_words(roofs: Sequence[_Roof], kind: str, plane: _Plane) -> list[dict[str, Any]]:
    """The names of the roofs at their right ends, and the name of memory's roof along the slope."""
    if not roofs:
        return []
    looks = {"showarrow": False, "xanchor": "right", "yanchor": "bottom", "font": {"size": 12, "color": "theme:soft"}}
    end = math.log10(plane.x[1])
    words = [{**looks, "x": end, "y": math.log10(roof.flops_per_s / plane.scale), "text": roof.words} for roof in roofs]
    memory = roofs[0].bytes_per_s / plane.scale
    start = max(plane.x[0], plane.y[0] / memory)
    x = start**0.35 * roofs[0].ridge ** 0.65
    slope = {"x": math.log10(x), "y": math.log10(x * memory), "xshift": -8}
    slope_text = f"{'memory' if kind == 'cuda' else 'copying'}: {rate_words(roofs[0].bytes_per_s, 'bytes/s')}"
    return [*words, {**looks, **slope, "text": slope_text}]


def _span(values: Sequence[float], margin: float) -> tuple[float, float]:
    return min(values) / margin, max(values) * margin


def _axis(title: str, low: float, high: float) -> dict[str, Any]:
    options = {"title": {"text": title, "font": {"size": 13}}, "automargin": True, "showgrid": True}
    return {**powers_of_ten(low, high), **options, "range": [math.log10(low), math.log10(high)]}
