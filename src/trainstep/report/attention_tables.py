"""Attention as tables: implementations side by side a quantity, every cell with its doubts, what memory is made of.

Ours by tile is also a map of time over query and key tiles: a tile that cannot run is a cell with its reason.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainstep.config.attention import TILE_FIELDS
from trainstep.records.summary import doubts
from trainstep.report.attention_rows import (
    HOST,
    NOT_THE_WORK,
    OURS,
    TIME,
    Configuration,
    by_work,
    chosen,
    configuration_names,
    configurations,
    failure_cell,
    failure_reason,
    flops_per_s,
    implementations,
    median_s,
    ratio_tables,
)
from trainstep.report.charts import MAXIMUM_PANELS, Chart, Panels, crosses, label, lines_of, panel_columns, short_labels
from trainstep.report.forms import (
    ABSENT,
    COLUMN_SIZE,
    ERROR,
    MS,
    MS_STD,
    SIZE,
    TEXT,
    Form,
    failure_sentence,
    milliseconds,
    three_digits,
)
from trainstep.report.ratios import mean_column, median_and_range, median_words
from trainstep.report.rows import Row, facts_in, grouped, quantities, words
from trainstep.report.tables import Column, Line, Table, doubts_column, point_columns

_ASIDE = (
    "Where trainstep ran at several tiles, its default tiles stand here, or its fastest where those did not run; {} cells stand "
    "below only."
)
_REASONS = 6
_ACCOUNTED = ("inputs", "scores", "softmax", "lse", "output", "gradients", "needed")
_MOST_OF_A_NAME = 60
_TILE_REASONS = 4
Side = int | str
"""A tile's queries or keys, or `rule`: as many as the length says."""


@dataclass(frozen=True, kw_only=True)
class TileMap:
    """One piece of work by tile: (block_q, block_k) -> its row, the fastest of those that differ in warps or stages."""

    row: Row
    """Any of its rows, its point without what all maps share."""
    cells: Mapping[tuple[Side, Side], Row]

    @property
    def queries(self) -> list[Side]:
        return _sorted(block_q for block_q, _ in self.cells)

    @property
    def keys(self) -> list[Side]:
        return _sorted(block_k for _, block_k in self.cells)


def plain_tables(rows: Sequence[Row]) -> list[Table]:
    """As attention_tables, without ours against each."""
    return attention_tables(rows, compared=False)


def attention_tables(rows: Sequence[Row], *, compared: bool = True) -> list[Table]:
    """Implementations side by side, ours against each (where `compared`), tiles, every cell, the memory accounting."""
    works = configurations(rows)
    against = ratio_tables(works) if compared else []
    return [*side_by_side(works), *against, *tile_tables(rows), cells_table(rows), *accounting_tables(rows)]


def side_by_side(works: Sequence[Configuration]) -> list[Table]:
    """Time, rate and memory, a table each: a row a configuration, a column an implementation. None with a single one."""
    names = implementations(name for work in works for name in work.cells)
    names.sort(key=lambda name: name != OURS)  # ours beside the configuration: a wide table scrolls
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
    """Whether some cell has the quantity, or none ran: a forward pass alone holds nothing, a row of failures says so."""
    ran = [row for row in work.cells.values() if row.record.failure is None]
    return not ran or any(_has(row, column) for row in ran)


def _has(row: Row, column: Column) -> bool:
    return row.record.failure is None and column.read(row) is not None


def _reasons(rows: Sequence[Row], most: int) -> list[str]:
    """What short words of failures in cells stand for."""
    reasons = list(dict.fromkeys(failure_reason(row.record) for row in rows if row.record.failure))
    told = [f"{reason.rstrip('.')}." for reason in reasons[:most]]
    return told if len(reasons) <= most else [*told, "The others stand in the table of every cell."]


def cells_table(rows: Sequence[Row]) -> Table:
    """Every cell: beside its time the error, NaN, determinism, the kernel that ran, the host's time, the doubts."""
    note = (
        "Error: the largest, over the largest magnitude of a reference in higher precision. Plain PyTorch's: of the output "
        "that attention written out in PyTorch gives in the cell's own dtype. NaN: or infinity. Host: until the call returns. "
        "Launch-bound: the device waits for the host."
    )
    columns = [*point_columns(rows, without=_says_nothing_new(rows)), *_CELL, doubts_column(_doubts)]
    return Table.of("Attention: every cell", rows, columns, note=note, raw=map(_numbers, rows))


def accounting_tables(rows: Sequence[Row]) -> list[Table]:
    """What the memory of each configuration is made of, as its implementation needs it."""
    told = [row for row in rows if any(row.record.fact(f"{part}_bytes") is not None for part in _ACCOUNTED)]
    note = "From the shapes: what each implementation must hold. Needed: all of it together."
    columns = [*point_columns(told, without=_says_nothing_new(rows)), *_ACCOUNT]
    return [Table.of("Attention: memory accounting", told, columns, note=note, folded=True)] if told else []


def _says_nothing_new(rows: Sequence[Row]) -> set[str]:
    """The names of a point that say nothing new of a cell."""
    return {name for row in rows for name in row.point} - {*configuration_names(rows), *NOT_THE_WORK}


def _doubts(row: Row) -> str:
    """What makes the result itself doubtful, what could not be looked at, and what makes its time doubtful."""
    failed = row.record.fact("afterwards_failed")
    said = ["NaN or infinity"] if row.record.fact("has_nan") else []
    said += [f"not seen: {words(failed)}"] if failed else []
    return "; ".join([*said, *doubts(row.record)])


def _numbers(row: Row) -> dict[str, Any]:
    """What a program reads: the whole config, the quantities, the accounting of a failed cell too."""
    record = row.record
    numbers = quantities(row)
    config = {name: value for name, value in record.config.items() if name not in numbers}
    needed = facts_in(record, [f"{part}_bytes" for part in _ACCOUNTED])
    return {"workload": numbers.pop("workload"), **config, **numbers, **needed, "flops_per_s": flops_per_s(row)}


def _cut(value: Any) -> str:
    text = words(value)
    return text if len(text) <= _MOST_OF_A_NAME else f"{text[: _MOST_OF_A_NAME - 1]}…"


_WORDS = replace(TEXT, text=_cut)
_YES_NO = replace(TEXT, text=lambda value: words(bool(value)))
"""Stored as a switch, or as 1 or 0."""
_TERA = Form(text=lambda rate: three_digits(rate / 1e12))
_TIME = Column(
    "time (ms)",
    MS_STD,
    median_and_range(TIME),
    help="Median ± half the interquartile range of a call.",
    failed=failure_cell,
)
_RATE = Column(
    "TFLOP/s",
    _TERA,
    flops_per_s,
    help="Over the median time; FLOPs are counted from the shape, a causal mask's half left out.",
    failed=failure_cell,
)
_SIDE_BY_SIDE = (
    _TIME,
    _RATE,
    Column("peak memory ({unit})", SIZE, "peak_bytes", failed=failure_cell),
    Column("memory held before backward ({unit})", SIZE, "held_bytes", failed=failure_cell),
)
_ACCOUNT = (
    *(Column(f"{part} ({{unit}})", SIZE, f"{part}_bytes", optional=True, failed=None) for part in _ACCOUNTED),
    Column("peak seen ({unit})", SIZE, "peak_bytes", failed=failure_cell),
)
_CELL = (
    replace(_TIME, help=""),  # a failed row shows its failure here alone, and its reason at the end
    *(
        replace(column, help="", optional=True, failed=lambda _: ABSENT)
        for column in (
            _RATE,
            Column("error of output", ERROR, "error_output"),
            Column("plain PyTorch's error", ERROR, "error_same_dtype", more=True),
            *(Column(f"error of {name}", ERROR, f"error_{name}", more=True) for name in ("dq", "dk", "dv", "lse")),
            Column("NaN", _YES_NO, "has_nan", more=True),
            Column("deterministic", _YES_NO, "deterministic", more=True),
            Column("which ran", _WORDS, "which_ran", more=True),
            Column("host (ms)", MS_STD, median_and_range(HOST), more=True),
            Column("launch-bound", _YES_NO, "launch_bound", more=True),
            Column("peak ({unit})", COLUMN_SIZE, "peak_bytes"),
            Column("held ({unit})", COLUMN_SIZE, "held_bytes", more=True),
            mean_column(TIME, "time"),
        )
    ),
)


def tile_maps(rows: Sequence[Row]) -> list[TileMap]:
    """One for each piece of work that has two tiles or more."""
    tiled = [row for row in rows if _tile(row)]
    names = [name for name in configuration_names(rows) if len({words(row.point.get(name)) for row in tiled}) > 1]
    made = [
        TileMap(
            row=row, cells={tile: chosen(alike_tiles) for tile, alike_tiles in grouped(alike, _tile).items() if tile}
        )
        for row, alike in by_work(tiled, names)
    ]
    return [tile_map for tile_map in made if len(tile_map.cells) > 1]


def tile_tables(rows: Sequence[Row]) -> list[Table]:
    """A row a query tile, a column a key tile, of each piece of work; none where no tile was asked for."""
    maps = tile_maps(rows)
    cells = [row for tile_map in maps for row in tile_map.cells.values()]
    several = len(cells) < sum(_tile(row) is not None for row in rows)
    fastest = ["Of several numbers of warps and stages at one tile: the fastest."] if several else []
    columns = [
        *point_columns(maps),
        Column("query tile", _SIDE, lambda line: line.of[1], failed=None, names=True),
        *map(_key_column, _sorted(key for tile_map in maps for key in tile_map.keys)),
    ]
    lines = [Line(tile_map.row, (tile_map, query)) for tile_map in maps for query in tile_map.queries]
    note = " ".join(["Median time of a call in ms.", *fastest, *_reasons(cells, _TILE_REASONS)])
    return [Table.of("Attention: time by tile (ms)", lines, columns, note=note)] if maps else []


def _key_column(key: Side) -> Column:
    def get(line: Line) -> Any:
        tile_map, query = line.of
        return _TILE_TIME.read(tile_map.cells[query, key]) if (query, key) in tile_map.cells else None

    return Column(f"key tile {key}", MS, get, failed=None)


def tile_chart(rows: Sequence[Row]) -> Chart | None:
    """Heat maps, coloured by time over the fastest of the map, so that maps of unlike sizes share one scale."""
    maps = tile_maps(rows)[:MAXIMUM_PANELS]
    if not maps:
        return None
    named = [" · ".join(f"{name} {words(value)}" for name, value in tile_map.row.point.items()) for tile_map in maps]
    panels = Panels(
        titles=short_labels([name or "all tiles" for name in named]),
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
        "Numbers are median times in ms; dark is slow against the fastest tile of the same panel, which stands in bold. × did "
        "not run: hover for why.",
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
    """Each side once: the numbers, then `rule`."""
    return sorted(set(sides), key=lambda side: (isinstance(side, str), side if isinstance(side, int) else 0))


def _tile(row: Row) -> tuple[Side, Side] | None:
    query, key = (row.record.config.get(name) for name in ("block_q", "block_k"))
    return (query, key) if isinstance(query, int | str) and isinstance(key, int | str) else None


def _hover(row: Row) -> str:
    config, failure = row.record.config, row.record.failure
    tile = ", ".join(f"{name} {words(config[name])}" for name in TILE_FIELDS if config.get(name) is not None)
    said = (failure_cell(row.record), failure_sentence(failure)) if failure else (median_words(row.record, TIME),)
    return lines_of(*map(label, (tile, *filter(None, said))))


_SIDE = Form(text=str, sort=lambda side: side if isinstance(side, int) else None)
_TILE_TIME = Column("time", MS, median_s, failed=lambda record: failure_cell(record).split(":")[0])
"""A failure without what the table's note says of it."""
