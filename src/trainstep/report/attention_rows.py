"""Attention's records side by side: a configuration is one piece of work, and each implementation has a cell in it.

Tiles, warm-ups and timed calls are no part of the work, so ours at several tiles is one cell: the tiles chosen by default
where they ran, else the fastest. All of them stand in the tables of tiles and of cells. Ours against each: the ratio of times with
its interval where both ran, and the geometric means of these ratios.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainstep.config.attention import IMPLEMENTATIONS, TILE_FIELDS
from trainstep.records.compare import VERDICTS, Comparison
from trainstep.records.record import Failure, Record
from trainstep.records.summary import Summary, summarize
from trainstep.report.forms import COUNT, RATIO, Form, failure_word, needed_words, ratio_words
from trainstep.report.ratios import Ratio, ratio_of
from trainstep.report.rows import Row, grouped, words
from trainstep.report.tables import Column, Entry, Line, Table, point_columns

OURS = "trainstep"
TIME, HOST = "time_s", "host_s"
NOT_THE_WORK = ("implementation", *TILE_FIELDS, "warmups", "steps")
_SAME_AS = {"keys": "seq", "key_heads": "heads"}
"""Names that say nothing new where they are unset or equal to these in every row."""
_SHORT = 44


SIZES = ("seq", "keys", "head_dim", "batch", "heads", "key_heads")
"""Names along which a geometric mean goes; along the others there is one for each value."""
LONG_SEQ = 4096
"""Tokens; from here on the kernels are the time, and neither launches nor a part-filled GPU."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One piece of work. `point`: its values that vary in the report. `cells`: implementation -> its row."""

    point: Mapping[str, Any]
    cells: Mapping[str, Row]
    left_aside: int = 0
    """Rows of the same work and implementation at other tiles."""

    @property
    def row(self) -> Row:
        """Any of its rows: they agree in the point."""
        return next(iter(self.cells.values()))

    def rest(self, *names: str) -> tuple[tuple[str, str], ...]:
        """The point without these names, as words."""
        return tuple((name, words(value)) for name, value in self.point.items() if name not in names)

    def label(self) -> str:
        return " ".join(words(value) for value in self.point.values()) or self.row.record.workload


def configurations(rows: Sequence[Row]) -> list[Configuration]:
    """One for each piece of work, in the order of appearance."""
    names = configuration_names(rows)
    found = []
    for group in grouped(rows, lambda row: tuple(words(row.point.get(name)) for name in names)).values():
        cells = {name: _chosen(mine) for name, mine in grouped(group, implementation).items()}
        point = {name: group[0].point.get(name) for name in names}
        found.append(Configuration(point=point, cells=cells, left_aside=len(group) - len(cells)))
    return found


def configuration_names(rows: Sequence[Row]) -> list[str]:
    """The names that tell one piece of work from another."""
    names = dict.fromkeys(name for row in rows for name in row.point if name not in NOT_THE_WORK)
    return [name for name in names if not (name in _SAME_AS and _says_nothing(name, rows))]


def configuration_columns(found: Sequence[Configuration]) -> list[Column]:
    """The columns that name configurations."""
    return point_columns(found, without={name for one in found for name in one.row.point} - {*found[0].point})


def implementations(rows: Sequence[Row]) -> list[str]:
    """The names present: plain first, ours last, then whatever is not known here."""
    present = dict.fromkeys(map(implementation, rows))
    known = [name for name in IMPLEMENTATIONS if name in present]
    return [*known, *(name for name in present if name not in known)]


def implementation(row: Row) -> str:
    return words(row.record.config.get("implementation"))


def time_summary(record: Record, name: str = TIME) -> Summary | None:
    """Of a sample series in seconds, or None where the cell failed or timed nothing."""
    samples = record.samples.get(name)
    return None if record.failure or samples is None or not samples.values else summarize(samples)


def flops_per_s(record: Record) -> float | None:
    """FLOPs of the direction over the median time."""
    flops, time = record.fact("flops"), time_summary(record)
    return None if flops is None or time is None or not time.median else flops / time.median


def failure_cell(record: Record) -> str:
    """A failure as it stands in a cell: `OOM (needs 68.7 GiB)`, `illegal tile: …`, `not for fp32`; nothing of one that ran."""
    failure = record.failure
    if failure is None:
        return ""
    if failure.kind == "out_of_memory":
        needed = record.fact("needed_bytes")
        if needed is not None:
            return f"{failure_word(failure)} (needs {needed_words(needed)})"
        asked = failure.asked_bytes
        return failure_word(failure) + (f" (asked for {needed_words(asked)})" if asked is not None else "")
    return _refusal(record, failure) or failure_word(failure)


def failure_reason(record: Record) -> str:
    """The sentence under a table for what `failure_cell` says in it; the same one for whatever ran out of memory."""
    failure = record.failure
    if failure is None:
        return ""
    if failure.kind == "out_of_memory":
        return "OOM (needs …): out of memory; what inputs, scores, softmax, output and gradients would take together"
    said, cell = _without_field(record, failure), failure_cell(record)
    return said if cell in said else f"{cell}: {said}"


def _refusal(record: Record, failure: Failure) -> str:
    """The first clause of a sentence that refuses a shape, a dtype or a tile, without the names that the cell's place says."""
    said = _without_field(record, failure).removeprefix(f"{record.config.get('implementation')} ").removeprefix("is ")
    if failure.kind != "unsupported" and not said.startswith(("illegal tile", "not installed")):
        return ""
    clause = re.split(r"; | \(", said, maxsplit=1)[0]
    return clause if len(clause) <= _SHORT else f"{clause[: _SHORT - 1].rstrip()}…"


def _without_field(record: Record, failure: Failure) -> str:
    """The message without the config's field that it begins with."""
    said = " ".join(failure.message.split())
    field, _, after = said.partition(": ")
    return after if field in record.config and after else said


def _chosen(rows: Sequence[Row]) -> Row:
    """Of one implementation's rows of the same work: that of the default tiles if it ran, else the fastest, else the first."""
    ran = [row for row in rows if time_summary(row.record)]
    default = [row for row in ran if all(row.record.config.get(name) is None for name in TILE_FIELDS)]
    return min(default or ran, key=median_s) if ran else rows[0]


def median_s(row: Row) -> float:
    """Infinite where nothing was timed."""
    time = time_summary(row.record)
    return time.median if time else float("inf")


def _says_nothing(name: str, rows: Sequence[Row]) -> bool:
    configs = [row.record.config for row in rows]
    return all(one.get(name) is None or one.get(name) == one.get(_SAME_AS[name]) for one in configs)


class PeerRatio(NamedTuple):
    """Our time over a peer's in one configuration, or why there is none."""

    configuration: Configuration
    peer: str
    ratio: Ratio

    @property
    def ours(self) -> Row:
        return self.ratio.row

    @property
    def theirs(self) -> Row:
        return self.ratio.base

    @property
    def found(self) -> Comparison | None:
        return self.ratio.found


def ratios(found: Sequence[Configuration]) -> list[PeerRatio]:
    """Of every configuration that has ours and a peer, peer by peer."""
    return [
        PeerRatio(one, peer, ratio_of(one.cells[peer], one.cells[OURS], TIME))
        for one in found
        if OURS in one.cells
        for peer in implementations([*one.cells.values()])
        if peer != OURS
    ]


def ratio_tables(found: Sequence[PeerRatio]) -> list[Table]:
    """The geometric means, then a row a configuration and a column a peer; none where ours met nobody."""
    if not found:
        return []
    any_ratio = any(one.found and one.found.ratio for one in found)
    return [*([_means_table(found)] if any_ratio else []), _ratio_table(found)]


def _ratio_table(found: Sequence[PeerRatio]) -> Table:
    lines: dict[int, Line] = {}
    for one in found:
        lines.setdefault(id(one.configuration), Line(one.configuration.row, {})).of[one.peer] = one
    met = {id(one.configuration): one.configuration for one in found}
    columns = [
        *configuration_columns([*met.values()]),
        *map(_ratio_column, implementations([one.theirs for one in found])),
    ]
    troubles = dict.fromkeys(one.ratio.trouble for one in found if one.ratio.trouble and not one.ratio.failure)
    note = "Our time over theirs, with its 99 % interval: below 1 ours is faster. “?”: cannot tell."
    note = " ".join([note, *(f"No ratio: {trouble}." for trouble in list(troubles)[:3])])
    return Table.of(
        "Ours against each: ratio of times", lines.values(), columns, note=note, raw=map(_ratio_numbers, found)
    )


def _ratio_column(peer: str) -> Column:
    def get(line: Line) -> Comparison | Entry | None:
        one = line.of.get(peer)
        if one is None:
            return None
        failed = next((row.record for row in (one.theirs, one.ours) if row.record.failure), None)
        if failed is not None:
            return Entry(text=failure_cell(failed), failure=failed.failure)
        known: Comparison | None = one.ratio.known
        return known or Entry(text="no ratio")

    return Column(f"ours / {peer}", _RATIO, get, failed=None)


def _ratio_words(found: Comparison) -> str:
    ratio, low, high = (ratio_words(edge or 0.0) for edge in (found.ratio, found.low, found.high))
    return f"{ratio} [{low}, {high}]{' ?' if found.verdict == 'cannot tell' else ''}"


_RATIO = Form(text=_ratio_words, sort=lambda found: found.ratio)


def _ratio_numbers(one: PeerRatio) -> dict[str, Any]:
    """What a program reads of a ratio; the keys say which two cells it is of."""
    return {
        **one.configuration.point,
        "compared_along": "implementation",
        "implementation": OURS,
        "against": one.peer,
        **one.ratio.numbers(),
        **({"reason": "one of the two failed"} if one.ratio.failure else {}),
        "against_key": one.theirs.record.key,
    }


def _means_table(found: Sequence[PeerRatio]) -> Table:
    """A row for each peer and value of what is not a size, over all lengths and over the long ones."""
    met = [one for one in found if one.found and one.found.ratio]
    groups = grouped(met, lambda one: (one.configuration.rest(*SIZES), one.peer))
    lines = []
    for (rest, peer), mine in groups.items():
        long = [one for one in mine if _is_long(one)]
        lines.append({**dict(rest), "against": peer, **_means("all", mine)})
        if long and len(long) < len(mine):
            lines.append({**dict(rest), "against": peer, **_means(f"≥ {LONG_SEQ:,}", long)})
    columns = [
        *(Column(name) for name in found[0].configuration.point if name not in SIZES),
        Column("against"),
        Column("lengths"),
        Column("configurations", COUNT),
        *(Column(name, RATIO) for name in ("time, ours / theirs", "speed, ours / theirs")),
        *(Column(verdict, COUNT) for verdict in VERDICTS),
    ]
    note = "Only configurations where both ran; the verdicts are those of each configuration."
    return Table.of("Ours against each: geometric means", lines, columns, note=note)


def _is_long(one: PeerRatio) -> bool:
    seq = one.ours.record.config.get("seq")
    return isinstance(seq, int | float) and seq >= LONG_SEQ


def geometric_mean(found: Sequence[PeerRatio]) -> float | None:
    """Of the ratios that there are."""
    logs = [math.log(one.found.ratio) for one in found if one.found and one.found.ratio]
    return math.exp(sum(logs) / len(logs)) if logs else None


def _means(lengths: str, found: Sequence[PeerRatio]) -> dict[str, Any]:
    mean = geometric_mean(found) or 1.0
    verdicts = [one.found.verdict for one in found if one.found]
    return {
        "lengths": lengths,
        "configurations": len(found),
        "time, ours / theirs": mean,
        "speed, ours / theirs": 1 / mean,
        **{verdict: verdicts.count(verdict) for verdict in VERDICTS},
    }
