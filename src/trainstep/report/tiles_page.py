"""What `trainstep tune` found: a table of candidates for each cell, best first, and rows for the table of tiles.

A row serves every length and mask, so it takes the tile whose time over the best one's, as a geometric mean over the cells of its
kernel, arithmetic and head width, is least.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainstep.config.attention_tiles import KERNEL_TILE_FIELDS
from trainstep.records.record import Record
from trainstep.report.forms import ABSENT, milliseconds, rate_words, ratio_words
from trainstep.report.hand_built import Column
from trainstep.report.rows import Row, of_workload
from trainstep.report.section import Section
from trainstep.report.tables import Entry, Table

_LABEL = ("kernel", "arithmetic", "head_dim", "mask", "shape")
_ROW_NAMES = {"forward": "_FORWARD", "key_gradients": "_KEYS", "query_gradients": "_QUERIES"}
_ARITHMETICS = {"bf16": "_HALF", "fp16": "_HALF"} | {
    name: f"_{name.upper()}" for name in ("ieee", "tf32", "tf32x3", "fp16x3")
}

Tile = tuple[int, ...]
Seen = Mapping[str, Any]


def tile_tables(rows: Sequence[Row], *, most: int | None = None) -> list[Table]:
    """The candidates of each cell, best first, then those without a time; with `most`, so many, and the one in use."""
    return [_candidate_table(row.record, most) for row in _tuned(rows)]


def tuning_tables(rows: Sequence[Row]) -> list[Table]:
    """A line a cell, then each cell's candidates."""
    return [*summary_table(rows), *tile_tables(rows)]


def summary_table(rows: Sequence[Row]) -> list[Table]:
    """A line a cell: the best tile, its rate, and how it compares with the one in use."""
    tuned = _tuned(rows)
    if not tuned:
        return []
    columns = (
        "kernel",
        "arithmetic",
        "head_dim",
        "mask",
        "shape",
        "best tile",
        "time (ms)",
        "rate",
        "in use",
        "time, best / in use",
    )
    numbers = ("head_dim", "time (ms)", "rate", "time, best / in use")
    return [
        Table(
            title="Best tiles against those in use",
            columns=tuple(Column(title=title, number=title in numbers) for title in columns),
            entries=tuple(_summary(row.record) for row in tuned),
            note="A tile is block_q x block_k x warps x stages x heads together.",
        )
    ]


def tile_sections(rows: Sequence[Row]) -> list[Section]:
    """The page's part: every cell's best tile, and its candidates on request."""
    tables = (*summary_table(rows), *(replace(table, folded=True) for table in tile_tables(rows)))
    return [Section(title="Tiles of the attention kernels", tables=tables)] if tables else []


def table_rows(rows: Sequence[Row], *, record: str) -> str:
    """Lines for TABLE in ops/flash_attention/tiles.py; above each, as comments, how good its tiles are and whose cells say so."""
    groups: dict[tuple[str, str, str], dict[int, list[Record]]] = {}
    for row in _tuned(rows):
        config = row.record.config
        line = (
            row.record.fact("architecture", "any"),
            _ARITHMETICS[config["arithmetic"]],
            _ROW_NAMES[config["kernel"]],
        )
        groups.setdefault(line, {}).setdefault(config["head_dim"], []).append(row.record)
    lines = []
    for (architecture, arithmetic, kernel), by_width in groups.items():
        chosen = []
        for width, records in sorted(by_width.items()):
            tile, comment = _choice(records)
            lines.append(f"    # {width}: {comment}; cells {' '.join(record.key for record in records)}")
            if tile:
                numbers = tile if tile[4] != 1 else tile[:4]
                chosen.append(f"{width}: ({', '.join(map(str, numbers))})")
        if chosen:
            lines.append(f'    *_rows("{architecture}", {arithmetic}, {kernel}, {{{", ".join(chosen)}}}, "{record}"),')
    return "\n".join(lines)


def _tuned(rows: Sequence[Row]) -> list[Row]:
    return [row for row in of_workload(rows, "attention_tiles") if "candidates" in row.record.tables]


def _candidates(record: Record) -> Iterator[Seen]:
    """The rows of the record's table."""
    columns = record.tables["candidates"]
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


def _ranked(record: Record) -> list[Seen]:
    return sorted(_candidates(record), key=lambda one: math.inf if one["time_s"] is None else one["time_s"])


def _tile_of(one: Seen) -> Tile:
    return tuple(one[name] for name in KERNEL_TILE_FIELDS)


def _times(record: Record) -> dict[Tile, float]:
    return {_tile_of(one): one["time_s"] for one in _candidates(record) if one["time_s"] is not None}


def _in_words(tile: Tile) -> str:
    return "x".join(map(str, tile))


def _choice(records: Sequence[Record]) -> tuple[Tile | None, str]:
    """The tile that is best over these cells, and a comment on it."""
    times = [_times(record) for record in records]
    common = [tile for tile in times[0] if all(tile in one for one in times)]
    if not common:
        return None, "no tile was timed in all cells"
    worse = {tile: [one[tile] / min(one.values()) for one in times] for tile in common}
    tile = min(common, key=lambda one: math.prod(worse[one]))
    used = [record.fact("in_use") for record in records]
    gains = [
        one[tile] / record.fact("in_use_time")
        for one, record in zip(times, records, strict=True)
        if record.fact("in_use_time")
    ]
    comment = f"{_in_words(tile)} takes {_span(worse[tile])} of the best time"
    return tile, comment + (f", {_span(gains)} of {'/'.join(dict.fromkeys(used))}'s, now in use" if gains else "")


def _span(ratios: Sequence[float]) -> str:
    low, high = (ratio_words(ratio) for ratio in (min(ratios), max(ratios)))
    return low if low == high else f"{low} to {high}"


def _candidate_table(record: Record, most: int | None) -> Table:
    ranked = _ranked(record)
    best_s = ranked[0]["time_s"]
    used = record.fact("in_use")
    shown = [
        one for place, one in enumerate(ranked) if most is None or place < most or _in_words(_tile_of(one)) == used
    ]
    titles = (
        *KERNEL_TILE_FIELDS,
        "time (ms)",
        "time / best's",
        "rounds",
        "error / allowed",
        "registers",
        "spilled (B)",
        "shared (B)",
    )
    columns = (*(Column(title=title, number=True) for title in titles), Column(title="remarks"))
    entries = tuple(_candidate_entries(one, best_s, _in_words(_tile_of(one)) == used) for one in shown)
    left_out = len(ranked) - len(shown)
    return Table(
        title="Tiles: " + " ".join(str(record.config[name]) for name in _LABEL),
        columns=columns,
        entries=entries,
        raw=tuple({**{name: record.config[name] for name in _LABEL}, **one} for one in shown),
        note=f"{left_out} more in the record." if left_out else "",
    )


def _candidate_entries(one: Seen, best_s: float | None, in_use: bool) -> tuple[Entry, ...]:
    time_s = one["time_s"]
    remarks = [one["reason"] and f"{one['outcome'].replace('_', ' ')}: {one['reason']}", "in use" if in_use else ""]
    ratio = one["error_ratio"]
    return (
        *(Entry(text=str(one[name]), sort=one[name]) for name in KERNEL_TILE_FIELDS),
        Entry(text=ABSENT if time_s is None else milliseconds(time_s), sort=time_s and time_s * 1e3),
        Entry(text=ABSENT if time_s is None or not best_s else ratio_words(time_s / best_s), sort=time_s),
        _count(one["rounds"]),
        Entry(text=ABSENT if ratio is None else f"{ratio:.2f}", sort=ratio),
        *(_count(one[name]) for name in ("registers", "spilled_bytes", "shared_bytes")),
        Entry(text="; ".join(filter(None, remarks))),
    )


def _count(value: int | None) -> Entry:
    return Entry(text=ABSENT if value is None else f"{value:,}", sort=value)


def _summary(record: Record) -> tuple[Entry, ...]:
    best_s = _ranked(record)[0]["time_s"]
    used_s = record.fact("in_use_time")
    labels = (Entry(text=str(record.config[name])) for name in _LABEL)
    return (
        *labels,
        Entry(text=record.fact("best")),
        Entry(text=milliseconds(best_s), sort=best_s * 1e3),
        Entry(text=rate_words(record.fact("rate"), "flop/s"), sort=record.fact("rate")),
        Entry(text=record.fact("in_use")),
        Entry(text=ratio_words(best_s / used_s) if used_s else ABSENT),
    )
