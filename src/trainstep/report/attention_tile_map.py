"""Ours by tile: a map of time over query and key tiles, and its table. A tile that cannot run is a cell with its reason."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainstep.config.attention import TILE_FIELDS
from trainstep.report.attention_rows import configuration_names, failure_cell, failure_reason, time_summary
from trainstep.report.charts import INK, MAXIMUM_PANELS, Chart, Panels, label, lines_of, panel_columns, short_labels
from trainstep.report.forms import MS, Form, failure_sentence, milliseconds
from trainstep.report.rows import Row, grouped, words
from trainstep.report.tables import Column, Line, Table, point_columns

_REASONS = 4
Side = int | str
"""A tile's queries or keys, or `rule`: as many as the length says."""


@dataclass(frozen=True, kw_only=True)
class TileMap:
    """One piece of work by tile: (block_q, block_k) -> its row, the fastest of those that differ in warps or stages."""

    row: Row
    """Any of its rows: they agree in the point's `names`."""
    names: tuple[str, ...]
    cells: Mapping[tuple[Side, Side], Row]

    @property
    def queries(self) -> list[Side]:
        return _sorted({block_q for block_q, _ in self.cells})

    @property
    def keys(self) -> list[Side]:
        return _sorted({block_k for _, block_k in self.cells})

    def label(self) -> str:
        return " · ".join(f"{name} {words(self.row.point.get(name))}" for name in self.names) or "all tiles"


def tile_maps(rows: Sequence[Row]) -> list[TileMap]:
    """One for each piece of work that has two tiles or more."""
    tiled = [row for row in rows if _tile(row)]
    names = tuple(name for name in configuration_names(rows) if len({words(row.point.get(name)) for row in tiled}) > 1)
    groups = grouped(tiled, lambda row: tuple(words(row.point.get(name)) for name in names))
    made = [_map(names, mine) for mine in groups.values()]
    return [one for one in made if len(one.cells) > 1]


def tile_tables(rows: Sequence[Row]) -> list[Table]:
    """A row a query tile, a column a key tile, of each piece of work; none where no tile was asked for."""
    maps = tile_maps(rows)
    if not maps:
        return []
    keys = _sorted({key for one in maps for key in one.keys})
    note = "Median time of a call in ms."
    if sum(len(one.cells) for one in maps) < sum(_tile(row) is not None for row in rows):
        note += " Of several numbers of warps and stages at one tile: the fastest."
    reasons = dict.fromkeys(
        failure_reason(row.record) for one in maps for row in one.cells.values() if row.record.failure
    )
    note = " ".join([note, *(f"{reason.rstrip('.')}." for reason in list(reasons)[:_REASONS])])
    if len(reasons) > _REASONS:
        note += " The others stand in the table of every cell."
    columns = [
        *point_columns(maps, without={*maps[0].row.point} - {*maps[0].names}),
        Column("query tile", _SIDE, lambda line: line.of[1], failed=None),
        *map(_key_column, keys),
    ]
    lines = [Line(one.row, (one, query)) for one in maps for query in one.queries]
    return [Table.of("Attention: time by tile (ms)", lines, columns, note=note)]


def _key_column(key: Side) -> Column:
    def get(line: Line) -> Any:
        one, query = line.of
        return _TIME.read(one.cells[query, key]) if (query, key) in one.cells else None

    return Column(f"key tile {key}", MS, get, failed=None)


def tile_chart(rows: Sequence[Row]) -> Chart | None:
    """Heat maps, coloured by time over the fastest of the map, so that maps of unlike sizes share one scale."""
    maps = tile_maps(rows)[:MAXIMUM_PANELS]
    if not maps:
        return None
    panels = Panels(
        titles=short_labels([one.label() for one in maps]),
        columns=panel_columns(len(maps), max(len(one.keys) for one in maps), label_characters=6),
        x_title="key tile (tokens)",
        y_title="query tile (tokens)",
        axis={"type": "category"},
        x_axis={"type": "category"},
    )
    for panel, one in enumerate(maps):
        for trace in _traces(one):
            panels.add(panel, trace)
    scale = {"colorscale": "Cividis", "reversescale": True, "cmin": 1, "cmax": 2}
    bar = {"title": {"text": "time ÷<br>fastest"}, "len": 0.9, "thickness": 14, "tickvals": [1, 1.25, 1.5, 1.75, 2]}
    bar["ticktext"] = ["1", "1.25", "1.5", "1.75", "≥ 2"]
    return panels.chart(
        "Time by tile",
        "Numbers are median times in ms; dark is slow against the fastest tile of the same panel, which stands in bold. × did "
        "not run: hover for why.",
        coloraxis={**scale, "colorbar": bar},
        margin={"l": 64, "r": 90, "t": 66, "b": 60},
        showlegend=False,
    )


def _traces(one: TileMap) -> list[dict[str, Any]]:
    times = {place: time.median for place, row in one.cells.items() if (time := time_summary(row.record))}
    fastest = min(times.values(), default=0.0)
    x, y = [label(str(key)) for key in one.keys], [label(str(query)) for query in one.queries]
    places = [[(query, key) for key in one.keys] for query in one.queries]
    texts = [[_number(times.get(place), fastest) for place in line] for line in places]
    heat = {
        "type": "heatmap",
        "name": "time",
        "x": x,
        "y": y,
        "z": [[times[place] / fastest if place in times else None for place in line] for line in places],
        "text": texts,
        "texttemplate": "%{text}",
        "hovertext": [[_hover(one.cells.get(place)) for place in line] for line in places],
        "hoverinfo": "text",
        "hoverongaps": False,
        "coloraxis": "coloraxis",
        "xgap": 2,
        "ygap": 2,
    }
    stopped = [place for place, row in one.cells.items() if place not in times]
    crosses = {
        "type": "scatter",
        "name": "did not run",
        "mode": "markers",
        "x": [label(str(key)) for _, key in stopped],
        "y": [label(str(query)) for query, _ in stopped],
        "marker": {"symbol": "x-thin", "size": 13, "color": INK, "line": {"color": INK, "width": 2}},
        "hovertext": [_hover(one.cells[place]) for place in stopped],
        "hoverinfo": "text",
    }
    return [heat, crosses] if stopped else [heat]


def _sorted(sides: Iterable[Side]) -> list[Side]:
    return sorted(sides, key=lambda side: (isinstance(side, str), side if isinstance(side, int) else 0))


def _map(names: tuple[str, ...], rows: Sequence[Row]) -> TileMap:
    cells: dict[tuple[Side, Side], Row] = {}
    for row in rows:
        tile = _tile(row)
        if tile and (tile not in cells or _time_s(row) < _time_s(cells[tile])):
            cells[tile] = row
    return TileMap(row=rows[0], names=names, cells=cells)


def _tile(row: Row) -> tuple[Side, Side] | None:
    query, key = (row.record.config.get(name) for name in ("block_q", "block_k"))
    return (query, key) if isinstance(query, int | str) and isinstance(key, int | str) else None


def _time_s(row: Row) -> float:
    time = time_summary(row.record)
    return time.median if time else float("inf")


def _number(time_s: float | None, fastest_s: float) -> str:
    if time_s is None:
        return ""
    return f"<b>{milliseconds(time_s)}</b>" if time_s == fastest_s else milliseconds(time_s)


def _hover(row: Row | None) -> str:
    if row is None:
        return ""
    config = row.record.config
    tile = ", ".join(f"{name} {words(config[name])}" for name in TILE_FIELDS if config.get(name) is not None)
    time = time_summary(row.record)
    if time:
        return lines_of(label(tile), f"{milliseconds(time.median, time.std)} ms")
    failure = row.record.failure
    return lines_of(label(tile), *map(label, (failure_cell(row.record), failure_sentence(failure)) if failure else ()))


def _median_s(row: Row) -> float | None:
    time = time_summary(row.record)
    return time.median if time else None


_SIDE = Form(text=str, sort=lambda side: side if isinstance(side, int) else None)
_TIME = Column("time", MS, _median_s, failed=lambda record: failure_cell(record).split(":")[0])
"""A failure without what the table's note says of it."""
