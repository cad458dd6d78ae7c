"""Attention's records side by side: a configuration is one piece of work, and each implementation has a cell in it.

Tiles, warm-ups and timed calls are no part of the work, so ours at several tiles is one cell: the tiles chosen by default
where they ran, else the fastest. All of them stand in the tables of tiles and of cells.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainstep.config.attention import IMPLEMENTATIONS, TILE_FIELDS
from trainstep.records.record import Failure, Record
from trainstep.records.summary import Summary, summarize
from trainstep.report.forms import ABSENT, failure_word, needed_words
from trainstep.report.hand_built import Column, point_columns
from trainstep.report.rows import Row, of_workload, words
from trainstep.report.tables import Entry

OURS = "trainstep"
TIME, HOST = "time_s", "host_s"
NOT_THE_WORK = ("implementation", *TILE_FIELDS, "warmups", "steps")
_SAME_AS = {"keys": "seq", "key_heads": "heads"}
"""Names that say nothing new where they are unset or equal to these in every row."""
_SHORT = 44


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


def attention_rows(rows: Sequence[Row]) -> list[Row]:
    return of_workload(rows, "attention")


def configurations(rows: Sequence[Row]) -> list[Configuration]:
    """One for each piece of work, in the order of appearance."""
    names = configuration_names(rows)
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(words(row.point.get(name)) for name in names), []).append(row)
    found = []
    for group in groups.values():
        by_name: dict[str, list[Row]] = {}
        for row in group:
            by_name.setdefault(implementation(row), []).append(row)
        cells = {name: _chosen(mine) for name, mine in by_name.items()}
        point = {name: group[0].point.get(name) for name in names}
        found.append(Configuration(point=point, cells=cells, left_aside=len(group) - len(cells)))
    return found


def configuration_names(rows: Sequence[Row]) -> list[str]:
    """The names that tell one piece of work from another."""
    names = dict.fromkeys(name for row in rows for name in row.point if name not in NOT_THE_WORK)
    return [name for name in names if not (name in _SAME_AS and _says_nothing(name, rows))]


def configuration_columns(found: Sequence[Configuration]) -> list[tuple[Column, list[Entry]]]:
    """The columns that name configurations, each with its entries."""
    rows = [one.row for one in found]
    hidden = {name for row in rows for name in row.point if name not in found[0].point}
    return [(column, [make(row) for row in rows]) for column, make in point_columns(rows, without=[*hidden])]


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
    flops, time = number(record, "flops"), time_summary(record)
    return None if flops is None or time is None or not time.median else flops / time.median


def number(record: Record, name: str) -> float | None:
    """A fact that is a number, whatever became of the cell."""
    value = record.fact(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def flag(record: Record, name: str) -> bool | None:
    """A fact that is a yes or a no (stored as a switch, or as 1 or 0), None where it was not seen."""
    value = record.fact(name)
    return bool(value) if isinstance(value, bool | int) else None


def failure_cell(record: Record) -> str:
    """A failure as it stands in a cell: `OOM (needs 68.7 GiB)`, `illegal tile: …`, `not for fp32`; nothing of one that ran."""
    failure = record.failure
    if failure is None:
        return ""
    if failure.kind == "out_of_memory":
        needed = number(record, "needed_bytes")
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


def failed_entry(record: Record) -> Entry:
    return Entry(text=failure_cell(record) or ABSENT, failure=record.failure)


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
    return min(default or ran, key=_median_s) if ran else rows[0]


def _median_s(row: Row) -> float:
    time = time_summary(row.record)
    return time.median if time else float("inf")


def _says_nothing(name: str, rows: Sequence[Row]) -> bool:
    configs = [row.record.config for row in rows]
    return all(one.get(name) is None or one.get(name) == one.get(_SAME_AS[name]) for one in configs)
