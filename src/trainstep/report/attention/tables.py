"""Tables of attention: implementations side by side, every cell, memory accounting, and time by tile.

Our kernels' time by tile is also a heat map over query and key tiles; a tile that cannot run is a cell with its reason.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainstep.config.attention import TILE_FIELDS
from trainstep.grouping import grouped
from trainstep.report.attention.rows import (
    NOT_THE_WORK,
    chosen,
    configuration_names,
    configurations,
    flops_per_s,
    implementations,
    ratio_tables,
)
from trainstep.report.kit.charts import (
    MAXIMUM_PANELS,
    Chart,
    Panels,
    crosses,
    label,
    lines_of,
    panel_columns,
    short_labels,
)
from trainstep.report.kit.forms import (
    ERROR,
    MS,
    SIZE,
    Form,
    failure_sentence,
    milliseconds,
    three_digits,
)
from trainstep.report.kit.pass_columns import TIME_COLUMN, cell_columns, pass_doubts
from trainstep.report.kit.peers import OURS, TIME, Configuration, by_work, failure_cell, failure_reason, median_s
from trainstep.report.kit.ranking import median_words
from trainstep.report.kit.rows import Row, facts_in, quantities, words
from trainstep.report.kit.tables import Column, Line, Table, doubts_column, point_columns

_ASIDE = (
    "Where trainstep ran at several tiles, this table shows its default tiles, or the fastest if those did not run; {} more "
    "cells are in the table of every cell."
)
_REASONS = 6
_ACCOUNTED = ("inputs", "scores", "softmax", "lse", "output", "gradients", "needed")
_TILE_REASONS = 4
Side = int | str
"""The number of queries or keys of a tile, or `rule`: chosen by the length."""


@dataclass(frozen=True, kw_only=True)
class TileMap:
    """One configuration by tile: (block_q, block_k) -> its row, the fastest of the rows that differ in warps or stages."""

    row: Row
    """Any of its rows, with a point reduced to the names in which maps differ."""
    cells: Mapping[tuple[Side, Side], Row]

    @property
    def queries(self) -> list[Side]:
        return _sorted(block_q for block_q, _ in self.cells)

    @property
    def keys(self) -> list[Side]:
        return _sorted(block_k for _, block_k in self.cells)


def plain_tables(rows: Sequence[Row]) -> list[Table]:
    """`attention_tables` without the ratios to each peer."""
    return attention_tables(rows, compared=False)


def attention_tables(rows: Sequence[Row], *, compared: bool = True) -> list[Table]:
    """Implementations side by side, ratios to each peer (if `compared`), tiles, every cell, the memory accounting."""
    works = configurations(rows)
    against = ratio_tables(works) if compared else []
    return [*side_by_side(works), *against, *tile_tables(rows), cells_table(rows), *accounting_tables(rows)]


def side_by_side(works: Sequence[Configuration]) -> list[Table]:
    """Tables of time, rate and memory with a row per configuration and a column per implementation; none for only one
    implementation."""
    names = implementations(name for work in works for name in work.cells)
    names.sort(key=lambda name: name != OURS)  # ours first, beside the configuration, because a wide table scrolls
    if len(names) < 2:
        return []
    tables = []
    for column in _SIDE_BY_SIDE:
        shown = [work for work in works if _belongs(work, column)]
        if any(_has(row, column) for work in shown for row in work.cells.values()):
            columns = [*point_columns(shown), *(_of_implementation(name, column) for name in names)]
            reasons = _reasons([row for work in shown for row in work.cells.values()], _REASONS)
            aside = sum(work.left_aside for work in shown)
            note = " ".join(filter(None, [column.help, *reasons, _ASIDE.format(aside) if aside else ""]))
            tables.append(Table.of(f"Attention: {column.title}", shown, columns, note=note))
    return tables


def _of_implementation(name: str, column: Column) -> Column:
    def get(work: Configuration) -> Any:
        return column.read(work.cells[name]) if name in work.cells else None

    return Column(name, column.form, get, failed=None)


def _belongs(work: Configuration, column: Column) -> bool:
    """Whether a cell has the quantity, or none ran: a row of failures is shown, a forward pass without held memory is not."""
    ran = [row for row in work.cells.values() if row.record.failure is None]
    return not ran or any(_has(row, column) for row in ran)


def _has(row: Row, column: Column) -> bool:
    return row.record.failure is None and column.read(row) is not None


def _reasons(rows: Sequence[Row], most: int) -> list[str]:
    """Sentences that explain the short words of failures in cells."""
    reasons = list(dict.fromkeys(failure_reason(row.record) for row in rows if row.record.failure))
    sentences = [f"{reason.rstrip('.')}." for reason in reasons[:most]]
    return sentences if len(reasons) <= most else [*sentences, "The table of every cell has the other reasons."]


def cells_table(rows: Sequence[Row]) -> Table:
    """Every cell: time, error, NaN, determinism, the kernel that ran, the host's time, memory and doubts."""
    note = (
        "Error: the largest absolute error over the largest magnitude of a reference in higher precision. Launch-bound: the GPU "
        "waits for the host."
    )
    columns = [*point_columns(rows, without=_redundant_names(rows)), *_CELL, doubts_column(pass_doubts)]
    return Table.of("Attention: every cell", rows, columns, note=note, raw=map(_numbers, rows))


def accounting_tables(rows: Sequence[Row]) -> list[Table]:
    """The parts of the memory that each implementation needs, computed from the shapes."""
    known = [row for row in rows if any(row.record.fact(f"{part}_bytes") is not None for part in _ACCOUNTED)]
    note = "Computed from the shapes: the memory that each implementation must hold. Needed: the sum."
    columns = [*point_columns(known, without=_redundant_names(rows)), *_ACCOUNT]
    return [Table.of("Attention: memory accounting", known, columns, note=note, folded=True)] if known else []


def _redundant_names(rows: Sequence[Row]) -> set[str]:
    """The names of a point that other names determine."""
    return {name for row in rows for name in row.point} - {*configuration_names(rows), *NOT_THE_WORK}


def _numbers(row: Row) -> dict[str, Any]:
    """The row for programs: the whole config, the quantities, and the memory accounting even of a failed cell."""
    record = row.record
    numbers = quantities(row)
    config = {name: value for name, value in record.config.items() if name not in numbers}
    needed = facts_in(record, [f"{part}_bytes" for part in _ACCOUNTED])
    return {"workload": numbers.pop("workload"), **config, **numbers, **needed, "flops_per_s": flops_per_s(row)}


_PLAIN = "Plain PyTorch's: the error of attention written in PyTorch in the cell's dtype."
_TERA = Form(text=lambda rate: three_digits(rate / 1e12))
_RATE = Column(
    "TFLOP/s",
    _TERA,
    flops_per_s,
    help="FLOPs over the median time; FLOPs are counted from the shape, without the masked half of a causal mask.",
    failed=failure_cell,
)
_SIDE_BY_SIDE = (
    TIME_COLUMN,
    _RATE,
    Column("peak memory ({unit})", SIZE, "peak_bytes", failed=failure_cell),
    Column("memory held before backward ({unit})", SIZE, "held_bytes", failed=failure_cell),
)
_ACCOUNT = (
    *(Column(f"{part} ({{unit}})", SIZE, f"{part}_bytes", optional=True, failed=None) for part in _ACCOUNTED),
    Column("peak measured ({unit})", SIZE, "peak_bytes", failed=failure_cell),
)
_CELL = cell_columns(
    (_RATE,),
    (
        Column("error of output", ERROR, "error_output"),
        Column("plain PyTorch's error", ERROR, "error_same_dtype", more=True, note=_PLAIN),
    ),
    ("dq", "dk", "dv", "lse"),
)


def tile_maps(rows: Sequence[Row]) -> list[TileMap]:
    """A map for each configuration with at least two tiles."""
    tiled = [row for row in rows if _tile(row)]
    names = [name for name in configuration_names(rows) if len({words(row.point.get(name)) for row in tiled}) > 1]
    maps = []
    for row, alike in by_work(tiled, names):
        cells = {tile: chosen(same_tile) for tile, same_tile in grouped(alike, _tile).items() if tile}
        if len(cells) > 1:
            maps.append(TileMap(row=row, cells=cells))
    return maps


def tile_tables(rows: Sequence[Row]) -> list[Table]:
    """A table of times with a row per configuration and query tile and a column per key tile; none if no tile was requested."""
    maps = tile_maps(rows)
    cells = [row for tile_map in maps for row in tile_map.cells.values()]
    several = len(cells) < sum(_tile(row) is not None for row in rows)
    fastest = ["If a tile ran with several numbers of warps and stages, the fastest is shown."] if several else []
    columns = [
        *point_columns(maps),
        Column("query tile", _SIDE, lambda line: line.value[1], failed=None, names=True),
        *map(_key_column, _sorted(key for tile_map in maps for key in tile_map.keys)),
    ]
    lines = [Line(tile_map.row, (tile_map, query)) for tile_map in maps for query in tile_map.queries]
    note = " ".join(["Median time of a call in ms.", *fastest, *_reasons(cells, _TILE_REASONS)])
    return [Table.of("Attention: time by tile (ms)", lines, columns, note=note)] if maps else []


def _key_column(key: Side) -> Column:
    def get(line: Line) -> Any:
        tile_map, query = line.value
        return _TILE_TIME.read(tile_map.cells[query, key]) if (query, key) in tile_map.cells else None

    return Column(f"key tile {key}", MS, get, failed=None)


def tile_chart(rows: Sequence[Row]) -> Chart | None:
    """Heat maps, coloured by the time over the map's fastest time, so that maps of different sizes share one scale."""
    maps = tile_maps(rows)[:MAXIMUM_PANELS]
    if not maps:
        return None
    titles = [" · ".join(f"{name} {words(value)}" for name, value in tile_map.row.point.items()) for tile_map in maps]
    panels = Panels(
        titles=short_labels([title or "all tiles" for title in titles]),
        columns=panel_columns(len(maps), max(len(tile_map.keys) for tile_map in maps), label_characters=6),
        x_title="key tile (tokens)",
        y_title="query tile (tokens)",
        axis={"type": "category"},
        x_axis={"type": "category"},
    )
    for panel, tile_map in enumerate(maps):
        panels.add(panel, *_traces(tile_map))
    scale = {"colorscale": "Cividis", "reversescale": True, "cmin": 1, "cmax": 2}
    bar = {"title": {"text": "time ÷<br>fastest"}, "len": 0.9, "thickness": 14, "tickvals": [1, 1.25, 1.5, 1.75, 2]}
    bar["ticktext"] = ["1", "1.25", "1.5", "1.75", "≥ 2"]
    return panels.chart(
        "Time by tile",
        "Numbers are median times in ms; a dark tile is slow against the panel's fastest, which is bold. × did not run: hover "
        "for why.",
        coloraxis={**scale, "colorbar": bar},
        margin={"l": 64, "r": 90, "t": 66, "b": 60},
        showlegend=False,
    )


def _traces(tile_map: TileMap) -> list[dict[str, Any]]:
    times = {tile: time_s for tile, row in tile_map.cells.items() if (time_s := median_s(row)) is not None}
    fastest_s = min(times.values(), default=0.0)
    words_of = {tile: milliseconds(time_s) for tile, time_s in times.items()}
    words_of |= {tile: f"<b>{words_of[tile]}</b>" for tile, time_s in times.items() if time_s == fastest_s}
    hover = {tile: _hover(row) for tile, row in tile_map.cells.items()}
    tiles = [[(query, key) for key in tile_map.keys] for query in tile_map.queries]
    heat = {
        "type": "heatmap",
        "name": "time",
        "x": [label(str(key)) for key in tile_map.keys],
        "y": [label(str(query)) for query in tile_map.queries],
        "z": [[times[tile] / fastest_s if tile in times else None for tile in line] for line in tiles],
        "text": [[words_of.get(tile, "") for tile in line] for line in tiles],
        "texttemplate": "%{text}",
        "textfont": {"size": 12},
        "hovertext": [[hover.get(tile, "") for tile in line] for line in tiles],
        "hoverinfo": "text",
        "hoverongaps": False,
        "coloraxis": "coloraxis",
        "xgap": 2,
        "ygap": 2,
    }
    stopped = [tile for tile in tile_map.cells if tile not in times]
    x, y = [label(str(key)) for _, key in stopped], [label(str(query)) for query, _ in stopped]
    return [heat, *([crosses(x, y, size=13, hover=[hover[tile] for tile in stopped])] if stopped else [])]


def _sorted(sides: Iterable[Side]) -> list[Side]:
    """Each side once: numbers in order, then `rule`."""
    return sorted(set(sides), key=lambda side: (isinstance(side, str), side if isinstance(side, int) else 0))


def _tile(row: Row) -> tuple[Side, Side] | None:
    query, key = (row.record.config.get(name) for name in ("block_q", "block_k"))
    return (query, key) if isinstance(query, int | str) and isinstance(key, int | str) else None


def _hover(row: Row) -> str:
    config, failure = row.record.config, row.record.failure
    tile = ", ".join(f"{name} {words(config[name])}" for name in TILE_FIELDS if config.get(name) is not None)
    result = (failure_cell(row.record), failure_sentence(failure)) if failure else (median_words(row.record, TIME),)
    return lines_of(*map(label, (tile, *filter(None, result))))


_SIDE = Form(text=str, sort=lambda side: side if isinstance(side, int) else None)
_TILE_TIME = Column("time", MS, median_s, failed=lambda record: failure_cell(record).split(":")[0])
"""A failure is cut at its first colon; the table's note has the rest."""
