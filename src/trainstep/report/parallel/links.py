"""Levels of a cell over several nodes: their names, the links that were measured one by one, and the slowest link and rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from trainstep.records.derive import fit_latency
from trainstep.records.ranks import node_of_rank, rank_spread
from trainstep.records.record import Record
from trainstep.report.kit.forms import COUNT, DIGITS, TEXT, percent, rate_words, seconds_words
from trainstep.report.kit.rows import Row
from trainstep.report.kit.tables import Column, Line, Table

_NOTE = (
    "A link: two neighbouring ranks of a level's ring, alone; half the time of a tensor there and back, median. Latency and "
    "bandwidth are fitted over the sizes of one run; without a fit the bandwidth is the largest size's. Slowest first."
)
_WORTH = 0.05
"""The least difference of two ranks, or of two links, for which there is a sentence."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link of two ranks. `bytes_per_s`: fitted, else of the largest size; `latency_s`: None without a fit."""

    level: str
    ranks: tuple[int, int]
    nodes: tuple[str, str]
    sizes: int
    bytes_per_s: float
    latency_s: float | None

    @property
    def name(self) -> str:
        """`n1 - n2`; inside a node `n1, ranks 0 - 1`."""
        first, second = self.nodes
        return f"{first} - {second}" if first != second else f"{first}, ranks {self.ranks[0]} - {self.ranks[1]}"


def level_words(config: Mapping[str, Any]) -> str:
    """`across nodes`; empty for a cell on one node."""
    if config.get("nodes", 1) == 1:
        return ""
    name = config.get("level", "all")
    return "all nodes" if name == "all" else name.replace("_", " ")


def links_of(rows: Sequence[Row]) -> list[Link]:
    """The links of a series, slowest first."""
    times: dict[tuple[int, int], dict[int, float]] = {}
    for row in rows:
        table = row.record.tables.get("links", {}) if row.record.failure is None else {}
        for first, second, size, values in zip(
            *(table.get(name, ()) for name in ("rank", "to_rank", "bytes", "times_s")), strict=True
        ):
            times.setdefault((first, second), {})[size] = median(values)
    record = rows[0].record
    links = [_link(record, pair, of_sizes) for pair, of_sizes in times.items()]
    return sorted(links, key=lambda link: link.bytes_per_s)


def _link(record: Record, pair: tuple[int, int], time_of_size: Mapping[int, float]) -> Link:
    fit = fit_latency(list(time_of_size), list(time_of_size.values()))
    largest = max(time_of_size)
    return Link(
        level=level_words(record.config),
        ranks=pair,
        nodes=(node_of_rank(record, pair[0]) or "", node_of_rank(record, pair[1]) or ""),
        sizes=len(time_of_size),
        bytes_per_s=fit.beta_bytes_per_s if fit else largest / time_of_size[largest],
        latency_s=fit.alpha_s if fit else None,
    )


def links_tables(series: Sequence[Sequence[Row]]) -> list[Table]:
    """One row per link of each series; empty where no links were measured."""
    lines = [Line(rows[0], link) for rows in series for link in links_of(rows)]
    columns = [
        Column("operation", TEXT, lambda line: line.row.record.config["operation"], names=True, failed=None),
        Column("level", TEXT, "level", names=True),
        Column("link", TEXT, "name", names=True),
        Column("sizes", COUNT),
        Column("latency (µs)", DIGITS, lambda line: None if (s := line.value.latency_s) is None else s * 1e6),
        Column("bandwidth (GB/s)", DIGITS, lambda line: line.value.bytes_per_s / 1e9),
    ]
    return [Table.of("Links", lines, columns, note=_NOTE)] if lines else []


def slowest_words(rows: Sequence[Row]) -> str:
    """The slowest link of a series, and the slowest rank of its largest size; empty on one node, or if there are no others."""
    record = max((row.record for row in rows if row.record.failure is None), key=_size, default=None)
    if record is None or not level_words(record.config):
        return ""
    parts = []
    if links := links_of(rows):
        first = links[0]
        others = f"; the fastest {rate_words(links[-1].bytes_per_s, 'bytes/s')}" if len(links) > 1 else ""
        seconds = first.latency_s or 0.0
        latency = f" and {seconds_words(seconds)} latency" if seconds > 0 else ""
        parts.append(f"slowest link {first.name}: {rate_words(first.bytes_per_s, 'bytes/s')}{latency}{others}")
    if (spread := rank_spread(record, "time")) is not None:
        more = spread.slowest_value / spread.fastest_value - 1 if spread.fastest_value else 0.0
        node = node_of_rank(record, spread.slowest)
        if more >= _WORTH and node is not None:
            parts.append(f"slowest rank {spread.slowest} ({node}), {percent(more)} % longer than rank {spread.fastest}")
    return "; ".join(parts)


def _size(record: Record) -> float:
    return float(record.config["mib"])
