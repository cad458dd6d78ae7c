"""The results of `trainstep tune`: tables of candidate tiles for each cell, and new rows for the table of tiles.

A row of the table of tiles serves every length and mask, so it takes the tile with the least geometric mean, over the cells of its
kernel, arithmetic and head width, of its time over the best tile's time.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainstep.config.attention import KERNEL_TILE_FIELDS
from trainstep.grouping import grouped
from trainstep.records.record import Record
from trainstep.records.tables import table_lines
from trainstep.report.kit.charts import Section
from trainstep.report.kit.forms import COUNT, FLOP_RATE, MS, RATIO, TEXT, Form, ratio_words
from trainstep.report.kit.rows import Row, facts_in
from trainstep.report.kit.tables import Column, Line, Table

_LABEL = ("kernel", "arithmetic", "head_dim", "mask", "shape")
_ROW_NAMES = {"forward": "_FORWARD", "key_gradients": "_KEYS", "query_gradients": "_QUERIES"}
_ARITHMETICS = {"bf16": "_HALF", "fp16": "_HALF"} | {
    name: f"_{name.upper()}" for name in ("ieee", "tf32", "tf32x3", "fp16x3")
}

Tile = tuple[int, ...]
Candidate = Mapping[str, Any]
"""A line of a record's table of candidates."""


def tile_tables(rows: Sequence[Row], *, most: int | None = None) -> list[Table]:
    """The candidates of each cell, best first and those without a time last; at most `most` of them, and the tile in use."""
    return [_candidate_table(row.record, most) for row in _tuned(rows)]


def tuning_tables(rows: Sequence[Row]) -> list[Table]:
    """A table with a line per cell, then a table of candidates per cell."""
    return [*summary_table(rows), *tile_tables(rows)]


def summary_table(rows: Sequence[Row]) -> list[Table]:
    """A line per cell: the best tile, its rate, and its time over that of the tile in use."""
    lines = [Line(row, _best(row.record)) for row in _tuned(rows)]
    note = "A tile is block_q x block_k x warps x stages x heads together."
    return [Table.of("Best tiles against those in use", lines, _SUMMARY, note=note)] if lines else []


def tile_sections(rows: Sequence[Row]) -> list[Section]:
    """The section of the page: every cell's best tile, and folded tables of candidates."""
    tables = (*summary_table(rows), *(replace(table, folded=True) for table in tile_tables(rows)))
    return [Section(title="Tiles of the attention kernels", tables=tables)] if tables else []


def table_rows(rows: Sequence[Row], *, record: str) -> str:
    """Lines for TABLE in ops/flash_attention/portable/tiles.py, each after comments on its tiles with the keys of their cells."""

    def line_of(tuned: Record) -> tuple[str, str, str]:
        arithmetic, kernel = _ARITHMETICS[tuned.config["arithmetic"]], _ROW_NAMES[tuned.config["kernel"]]
        return tuned.fact("architecture", "any"), arithmetic, kernel

    groups = grouped((row.record for row in _tuned(rows)), line_of)
    lines = []
    for (architecture, arithmetic, kernel), alike in groups.items():
        chosen = []
        for width, records in sorted(grouped(alike, lambda record: record.config["head_dim"]).items()):
            tile, comment = _choice(records)
            lines.append(f"    # {width}: {comment}; cells {' '.join(record.key for record in records)}")
            if tile:
                numbers = tile if tile[4] != 1 else tile[:4]
                chosen.append(f"{width}: ({', '.join(map(str, numbers))})")
        if chosen:
            lines.append(f'    *_rows("{architecture}", {arithmetic}, {kernel}, {{{", ".join(chosen)}}}, "{record}"),')
    return "\n".join(lines)


def _tuned(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if table_lines(row.record.tables.get("candidates"))]


def _candidates(record: Record) -> list[Candidate]:
    """The lines of the record's table of candidates, best first."""
    lines = table_lines(record.tables["candidates"])
    return sorted(lines, key=lambda candidate: math.inf if candidate["time_s"] is None else candidate["time_s"])


def _tile_of(candidate: Candidate) -> Tile:
    return tuple(candidate[name] for name in KERNEL_TILE_FIELDS)


def _in_words(tile: Tile) -> str:
    return "x".join(map(str, tile))


def _choice(records: Sequence[Record]) -> tuple[Tile | None, str]:
    """The best tile over these cells, and a comment on it."""
    tried = [[candidate for candidate in _candidates(record) if candidate["time_s"] is not None] for record in records]
    times = [{_tile_of(candidate): candidate["time_s"] for candidate in timed} for timed in tried]
    common = [tile for tile in times[0] if all(tile in time_s for time_s in times)]
    if not common:
        return None, "no tile was timed in all cells"
    ratios = {tile: [time_s[tile] / min(time_s.values()) for time_s in times] for tile in common}
    tile = min(common, key=lambda tile: math.prod(ratios[tile]))  # the least product has the least geometric mean
    used = [record.fact("in_use") for record in records]
    used_s = [record.fact("in_use_time") for record in records]
    gains = [time_s[tile] / seconds for time_s, seconds in zip(times, used_s, strict=True) if seconds]
    comment = f"{_in_words(tile)} takes {_span(ratios[tile])} of the best time"
    return tile, comment + (f", {_span(gains)} of {'/'.join(dict.fromkeys(used))}'s, now in use" if gains else "")


def _span(ratios: Sequence[float]) -> str:
    low, high = (ratio_words(ratio) for ratio in (min(ratios), max(ratios)))
    return low if low == high else f"{low} to {high}"


def _candidate_table(record: Record, most: int | None) -> Table:
    ranked = _candidates(record)
    best_s = ranked[0]["time_s"]
    label = {name: record.config[name] for name in _LABEL}
    lines, raw = [], []
    for place, candidate in enumerate(ranked):
        in_use = _in_words(_tile_of(candidate)) == record.fact("in_use")
        if most is None or place < most or in_use:
            outcome, reason = candidate["outcome"].replace("_", " "), candidate["reason"]
            remarks = filter(None, (f"{outcome}: {reason}" if reason else "", "in use" if in_use else ""))
            ratio = candidate["time_s"] / best_s if candidate["time_s"] is not None and best_s else None
            lines.append({**candidate, "ratio": ratio, "remarks": "; ".join(remarks)})
            raw.append({**label, **candidate})
    note = f"{len(ranked) - len(lines)} more in the record." if len(lines) < len(ranked) else ""
    return Table.of("Tiles: " + " ".join(map(str, label.values())), lines, _CANDIDATE, raw=raw, note=note)


_PLAIN = Form(text=str)
_CANDIDATE = (
    *(Column(name, _PLAIN, names=True) for name in KERNEL_TILE_FIELDS),
    Column("time (ms)", MS, "time_s"),
    Column("time / best's", RATIO, "ratio"),
    Column("rounds", COUNT, more=True),
    Column("error / allowed", Form(text=lambda ratio: f"{ratio:.2f}"), "error_ratio"),
    Column("registers", COUNT, more=True),
    Column("spilled (B)", COUNT, "spilled_bytes", more=True),
    Column("shared (B)", COUNT, "shared_bytes", more=True),
    Column("remarks"),
)


def _best(record: Record) -> dict[str, Any]:
    """The cell's config, its best tile, and that tile's time over the time of the tile in use."""
    best_s, used_s = _candidates(record)[0]["time_s"], record.fact("in_use_time")
    ratio = best_s / used_s if best_s and used_s else None
    return {**record.config, **facts_in(record, ("best", "rate", "in_use")), "time_s": best_s, "ratio": ratio}


_SUMMARY = (
    *(Column(name, _PLAIN if name == "head_dim" else TEXT, names=True) for name in _LABEL),
    Column("best tile", TEXT, "best"),
    Column("time (ms)", MS, "time_s"),
    Column("rate", FLOP_RATE),
    Column("in use", TEXT, "in_use"),
    Column("time, best / in use", RATIO, "ratio"),
)
