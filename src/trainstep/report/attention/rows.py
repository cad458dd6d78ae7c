"""Groups attention's records by configuration (the same work) and compares our kernel with each peer.

Tiles, warm-ups and timed calls are no part of the work, so our kernel at several tiles is one cell: at the default tiles if they
ran, else at the fastest. The tables of tiles and of cells have all of them. kit/peers.py compares our kernel with each peer.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from trainstep.config.attention import IMPLEMENTATIONS, TILE_FIELDS
from trainstep.grouping import grouped
from trainstep.records.compare import VERDICTS
from trainstep.report.kit.forms import COUNT, RATIO
from trainstep.report.kit.peers import (
    Configuration,
    by_work,
    implementation,
    mean_ratio,
    median_s,
    ordered,
    ratio_table,
)
from trainstep.report.kit.ranking import Ratio
from trainstep.report.kit.rows import Row
from trainstep.report.kit.tables import Column, Table

NOT_THE_WORK = ("implementation", *TILE_FIELDS, "warmups", "steps")
_SAME_AS = {"keys": "seq", "key_heads": "heads"}
"""Names that are left out if they are unset or equal to these names' values in every row."""
SIZES = ("seq", "keys", "head_dim", "batch", "heads", "key_heads")
"""Names over which a geometric mean is taken; each combination of the other names has its own mean."""
LONG_SEQ = 4096
"""Tokens from which on kernels dominate the time, and neither launches nor a partly filled GPU do."""


def configurations(rows: Sequence[Row]) -> list[Configuration]:
    """The configurations of these rows, in the order of appearance."""
    works = []
    for row, alike in by_work(rows, configuration_names(rows)):
        tiled = grouped(alike, implementation)
        cells = {name: chosen(tiled[name]) for name in implementations(tiled)}
        works.append(Configuration(row=row, cells=cells, left_aside=len(alike) - len(cells)))
    return works


def configuration_names(rows: Sequence[Row]) -> list[str]:
    """The names that tell one configuration from another."""
    configs = [row.record.config for row in rows]
    names = dict.fromkeys(name for row in rows for name in row.point if name not in NOT_THE_WORK)
    for name, other in _SAME_AS.items():
        if all(config.get(name) in (None, config.get(other)) for config in configs):
            names.pop(name, None)
    return list(names)


def implementations(names: Iterable[str]) -> list[str]:
    """Each of these names once: in the order of IMPLEMENTATIONS, then unknown names."""
    return ordered(names, IMPLEMENTATIONS)


def flops_per_s(row: Row) -> float | None:
    """FLOPs of the direction over the median time."""
    flops, time_s = row.record.fact("flops"), median_s(row)
    return flops / time_s if flops is not None and time_s else None


def chosen(rows: Sequence[Row]) -> Row:
    """The row that represents an implementation in a configuration: at the default tiles, else the fastest, else the first."""
    timed = [(time_s, row) for row in rows if (time_s := median_s(row)) is not None]
    default = [pair for pair in timed if all(pair[1].record.config.get(name) is None for name in TILE_FIELDS)]
    return min(default or timed, key=lambda pair: pair[0])[1] if timed else rows[0]


def ratio_tables(works: Sequence[Configuration]) -> list[Table]:
    """The geometric means, then a row per configuration and a column per peer; empty if no configuration has a peer."""
    compared = [work for work in works if work.against]
    peers = implementations(peer for work in compared for peer in work.against)
    means = [_means_table(compared)] if any(work.ratios for work in compared) else []
    return [*means, ratio_table(compared, peers)] if compared else []


def _means_table(works: Sequence[Configuration]) -> Table:
    """A row per peer and combination of names other than sizes, over all lengths and over long lengths."""
    compared = [(work.row.rest(*SIZES), peer, ratio) for work in works for peer, ratio in work.ratios.items()]
    lines = []
    for (rest, peer), ratios in grouped(compared, lambda line: line[:2]).items():
        every = [ratio for *_, ratio in ratios]
        long = [ratio for ratio in every if isinstance(seq := ratio.row.point.get("seq"), int) and seq >= LONG_SEQ]
        lines.append({**dict(rest), "against": peer, **_means("all", every)})
        if long and len(long) < len(every):
            lines.append({**dict(rest), "against": peer, **_means(f"≥ {LONG_SEQ:,}", long)})
    columns = [
        *(Column(name, names=True) for name in works[0].row.point if name not in SIZES),
        *(Column(name, names=True) for name in ("against", "lengths")),
        Column("configurations", COUNT),
        *(Column(name, RATIO) for name in ("time, ours / theirs", "speed, ours / theirs")),
        *(Column(verdict, COUNT) for verdict in ("faster", "slower")),
        Column("under 2 %", COUNT, optional=True),
        Column("cannot tell", COUNT),
    ]
    note = "Only configurations in which both ran. The last columns count the verdicts on single configurations."
    return Table.of("trainstep against each peer: geometric means", lines, columns, note=note)


def _means(lengths: str, ratios: Sequence[Ratio]) -> dict[str, Any]:
    verdicts = [ratio.known.word for ratio in ratios if ratio.known]
    return {
        "lengths": lengths,
        "configurations": len(ratios),
        "time, ours / theirs": mean_ratio(ratios),
        "speed, ours / theirs": 1 / mean_ratio(ratios),
        **{verdict: verdicts.count(verdict) for verdict in VERDICTS},
        "under 2 %": verdicts.count("under 2 %") or None,
    }
