"""Groups attention's records by configuration (the same work) and compares our kernel with each peer.

Tiles, warm-ups and timed calls are no part of the work, so our kernel at several tiles is one cell: at the default tiles if they
ran, else at the fastest. The tables of tiles and of cells have all of them. Our kernel is compared with each peer by the ratio of
times with its interval, if both ran, and by geometric means of these ratios.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from trainstep.config.attention import IMPLEMENTATIONS, TILE_FIELDS
from trainstep.records.compare import VERDICTS, Comparison
from trainstep.records.record import Failure, Record
from trainstep.report.kit.forms import COUNT, RATIO, Form, failure_word, needed_words, ratio_words, shortened
from trainstep.report.kit.ranking import Ratio, ratio_of, summary_of
from trainstep.report.kit.rows import Row, grouped, words
from trainstep.report.kit.tables import Column, Entry, Table, point_columns

OURS = "trainstep"
TIME, HOST = "time_s", "host_s"
NOT_THE_WORK = ("implementation", *TILE_FIELDS, "warmups", "steps")
_SAME_AS = {"keys": "seq", "key_heads": "heads"}
"""Names that are left out if they are unset or equal to these names' values in every row."""
_SHORT = 44
"""The most characters of a failure's message in a table's cell."""
SIZES = ("seq", "keys", "head_dim", "batch", "heads", "key_heads")
"""Names over which a geometric mean is taken; each combination of the other names has its own mean."""
LONG_SEQ = 4096
"""Tokens from which on kernels dominate the time, and neither launches nor a partly filled GPU do."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One piece of work. `cells`: implementation -> its row."""

    row: Row
    """Any of its rows, with a point reduced to the names of the work."""
    cells: Mapping[str, Row]
    left_aside: int
    """The number of rows of the same work and implementation at other tiles."""

    @cached_property
    def against(self) -> Mapping[str, Ratio]:
        """Peer -> our time over its time, or why there is no ratio; empty if our kernel has no cell."""
        peers = [name for name in implementations(self.cells) if name != OURS and OURS in self.cells]
        return {peer: ratio_of(self.cells[peer], self.cells[OURS], TIME) for peer in peers}

    @property
    def ratios(self) -> dict[str, Ratio]:
        """The entries of `against` that have a ratio."""
        return {peer: ratio for peer, ratio in self.against.items() if ratio.known}


def configurations(rows: Sequence[Row]) -> list[Configuration]:
    """The configurations of these rows, in the order of appearance."""
    works = []
    for row, alike in by_work(rows, configuration_names(rows)):
        cells = {name: chosen(tiled) for name, tiled in grouped(alike, implementation).items()}
        works.append(Configuration(row=row, cells=cells, left_aside=len(alike) - len(cells)))
    return works


def by_work(rows: Sequence[Row], names: Sequence[str]) -> list[tuple[Row, list[Row]]]:
    """Groups of rows with equal values of these names, each after a row whose point has only these names."""
    points = grouped(rows, lambda row: tuple((name, words(row.point.get(name))) for name in names))
    return [
        (replace(alike[0], point={name: alike[0].point.get(name) for name in names}), alike)
        for alike in points.values()
    ]


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
    present = dict.fromkeys(names)
    known = [name for name in IMPLEMENTATIONS if name in present]
    return [*known, *(name for name in present if name not in known)]


def implementation(row: Row) -> str:
    return words(row.record.config.get("implementation"))


def median_s(row: Row) -> float | None:
    """The median time of a call in seconds; None if no call was timed."""
    time = summary_of(row.record, TIME)
    return time.median if time else None


def flops_per_s(row: Row) -> float | None:
    """FLOPs of the direction over the median time."""
    flops, time_s = row.record.fact("flops"), median_s(row)
    return flops / time_s if flops is not None and time_s else None


def chosen(rows: Sequence[Row]) -> Row:
    """The row that represents an implementation in a configuration: at the default tiles, else the fastest, else the first."""
    timed = [(time_s, row) for row in rows if (time_s := median_s(row)) is not None]
    default = [pair for pair in timed if all(pair[1].record.config.get(name) is None for name in TILE_FIELDS)]
    return min(default or timed, key=lambda pair: pair[0])[1] if timed else rows[0]


def failure_cell(record: Record) -> str:
    """The short words of a failure in a table's cell: `OOM (needs 68.7 GiB)`, `illegal tile: …`, `not for fp32`; empty if it ran.

    A message that refuses a shape, a dtype or a tile is reduced to its first clause, without names that the column repeats.
    """
    failure = record.failure
    if failure is None:
        return ""
    word = failure_word(failure)
    if failure.kind == "out_of_memory":
        needed = record.fact("needed_bytes")
        if needed is not None:
            return f"{word} (needs {needed_words(needed)})"
        return word if failure.asked_bytes is None else f"{word} (asked for {needed_words(failure.asked_bytes)})"
    message = (
        _without_field(record, failure).removeprefix(f"{record.config.get('implementation')} ").removeprefix("is ")
    )
    if failure.kind != "unsupported" and not message.startswith(("illegal tile", "not installed")):
        return word
    clause = re.split(r"; | \(", message, maxsplit=1)[0]
    return shortened(clause, _SHORT)


def failure_reason(record: Record) -> str:
    """The sentence under a table that explains `failure_cell`; all cells out of memory share one sentence."""
    failure = record.failure
    if failure is None:
        return ""
    if failure.kind == "out_of_memory":
        return (
            "OOM (needs …): out of memory; the size is that of inputs, scores, softmax, output and gradients together"
        )
    message, cell = _without_field(record, failure), failure_cell(record)
    return message if cell in message else f"{cell}: {message}"


def _without_field(record: Record, failure: Failure) -> str:
    """The message without the name of a config field at its beginning."""
    message = " ".join(failure.message.split())
    field, _, after = message.partition(": ")
    return after if field in record.config and after else message


def ratio_tables(works: Sequence[Configuration]) -> list[Table]:
    """The geometric means, then a row per configuration and a column per peer; empty if no configuration has a peer."""
    compared = [work for work in works if work.against]
    means = [_means_table(compared)] if any(work.ratios for work in compared) else []
    return [*means, _ratio_table(compared)] if compared else []


def _ratio_table(works: Sequence[Configuration]) -> Table:
    ratios = [ratio for work in works for ratio in work.against.values()]
    troubles = dict.fromkeys(ratio.trouble for ratio in ratios if ratio.trouble and not ratio.failure)
    few = dict.fromkeys(ratio.known.reason for ratio in ratios if ratio.known and not ratio.interval)
    note = " ".join(
        [
            "The time of trainstep over the peer's, with its 99 % interval: below 1, trainstep is faster. “?”: cannot tell; “=”: "
            "the interval lies within 2 % of 1.",
            *(f"No ratio: {trouble}." for trouble in list(troubles)[:3]),
            *(f"No interval: {reason}." for reason in few),
        ]
    )
    columns = [
        *point_columns(works),
        *map(_ratio_column, implementations(peer for work in works for peer in work.against)),
    ]
    numbers = [_ratio_numbers(work, peer) for work in works for peer in work.against]
    return Table.of("trainstep against each peer: ratio of times", works, columns, note=note, raw=numbers)


def _ratio_column(peer: str) -> Column:
    """The column of our time over a peer's; if one of them failed, it shows the failure."""

    def get(work: Configuration) -> Comparison | Entry | None:
        ratio = work.against.get(peer)
        if ratio is None:
            return None
        failed = next((row.record for row in (ratio.base, ratio.row) if row.record.failure), None)
        if failed is not None:
            return Entry(text=failure_cell(failed), failure=failed.failure)
        return ratio.known or Entry(text="no ratio")

    return Column(f"ours / {peer}", _RATIO, get, failed=None)


def _ratio_words(comparison: Comparison) -> str:
    ends = [ratio_words(end) for end in (comparison.low, comparison.high) if end is not None]
    interval = f" [{', '.join(ends)}]" if ends else ""
    mark = {"faster": "", "slower": "", "cannot tell": " ?"}.get(comparison.word, " =")
    return f"{ratio_words(comparison.ratio or 0.0)}{interval}{mark}"


_RATIO = Form(text=_ratio_words, sort=lambda comparison: comparison.ratio)


def _ratio_numbers(work: Configuration, peer: str) -> dict[str, Any]:
    """A ratio for programs; its keys name the two cells."""
    ratio = work.against[peer]
    return {
        **work.row.point,
        "compared_along": "implementation",
        "implementation": OURS,
        "against": peer,
        **ratio.numbers(),
        **({"reason": "one of the two failed"} if ratio.failure else {}),
        "against_key": ratio.base.record.key,
    }


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


def mean_ratio(ratios: Iterable[Ratio]) -> float:
    """The geometric mean of the ratios that have a number."""
    logs = [math.log(ratio.known.ratio) for ratio in ratios if ratio.known and ratio.known.ratio]
    return math.exp(sum(logs) / len(logs))


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
