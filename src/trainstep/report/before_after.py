"""Two files of records, cell by cell: before and after in ms, their ratio with its interval, and the verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainstep.records.compare import Comparison
from trainstep.records.record import Record
from trainstep.report.forms import MS, RATIO, failure_word, ratio_words
from trainstep.report.ratios import summary_of
from trainstep.report.rows import Row, flat_config, needless, rows_of, words
from trainstep.report.tables import Column, Entry, Table

_VALUES_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class Change:
    """One cell, as the first file has it and as the second does. `row`: the first's."""

    row: Row
    label: str
    """What tells the cell from the others of the comparison, without its machine where that is not needed."""
    after: Record
    found: Comparison

    def median_s(self, record: Record) -> float | None:
        """The median of the compared quantity, which the ratio is made of; None where it was not measured."""
        summary = summary_of(record, self.found.quantity)
        return summary.median if summary else None

    def failure(self, percent: float) -> str:
        """Why a change that may cost `percent` of the time must not be taken, or nothing.

        A slower verdict whose whole interval lies beyond that share; a cell that ran before and fails now.
        """
        found, broken = self.found, self.after.failure
        if broken is not None and self.row.record.failure is None:
            return f"{self.label}: {failure_word(broken)} in {broken.phase}, where it ran before"
        if found.verdict == "slower" and found.low is not None and found.low > 1 + percent / 100:
            return f"{self.label}: slower, ratio {ratio_words(found.ratio or 0.0)}"
        return ""

    def plain(self) -> dict[str, Any]:
        """The cell for a program."""
        medians = {"before_s": self.median_s(self.row.record), "after_s": self.median_s(self.after)}
        return {"config": flat_config(self.row.record), **medians, **asdict(self.found)}


def changes_of(compared: Sequence[tuple[Record, Record, Comparison]]) -> list[Change]:
    """Each cell before and after, named by what tells it from the others."""
    rows = rows_of([("", before) for before, _, _ in compared])
    without = needless(rows)
    return [
        Change(row=row, label=row.label(without=without), after=after, found=found)
        for row, (_, after, found) in zip(rows, compared, strict=True)
    ]


def changes_table(changes: Sequence[Change], quantity: str) -> Table:
    """A line a cell; under the table why a verdict is 'cannot tell'."""
    cells = Column("cell", get=lambda change: change.label, failed=None)
    before = Column("before (ms)", MS, lambda change: _time(change, change.row.record), failed=None)
    after = Column("after (ms)", MS, lambda change: _time(change, change.after), failed=None)
    ratio = Column("ratio", RATIO, lambda change: change.found.ratio, failed=None)
    interval = Column("99 % interval", get=_interval, failed=None)
    verdict = Column("verdict", get=lambda change: change.found.verdict, failed=None)
    return Table.of(f"Medians of {quantity}", changes, [cells, before, after, ratio, interval, verdict])


def changes_notes(changes: Sequence[Change]) -> list[str]:
    """Why each 'cannot tell' is one, and what a verdict on files that did not take turns leaves open."""
    reasons = [f"{one.label}: {one.found.reason}" for one in changes if one.found.verdict == "cannot tell"]
    if any(one.found.verdict != "cannot tell" and one.found.interleaving == "none" for one in changes):
        return [*reasons, "The files did not take turns, so what changed on the machine between them counts too."]
    return reasons


def nothing_in_common(before: Sequence[Record], after: Sequence[Record]) -> str:
    """By which fields no cell is common: `they differ in steps (20; 30)`; those of the two nearest cells, where none alone is."""
    workloads = [list(dict.fromkeys(record.workload for record in side)) for side in (before, after)]
    if not set(workloads[0]) & set(workloads[1]):
        return f"they differ in {_listed({'workload': (workloads[0], workloads[1])})}"
    sides = [_configs(before), _configs(after)]
    names = dict.fromkeys(name for side in sides for config in side for name in config)
    values = {name: [list(dict.fromkeys(_value(config, name) for config in side)) for side in sides] for name in names}
    apart = {name: (a, b) for name, (a, b) in values.items() if not set(a) & set(b)}
    if not apart:
        first, second = min(
            ((a, b) for a in sides[0][:200] for b in sides[1][:200]), key=lambda pair: len(_differ(*pair))
        )
        apart = {name: ([_value(first, name)], [_value(second, name)]) for name in _differ(first, second)}
        if not apart:
            return "their configs look alike, but another version of trainstep wrote one of them; run it again"
        return f"the nearest two differ in {_listed(apart)}"
    return f"they differ in {_listed(apart)}"


def _configs(records: Sequence[Record]) -> list[dict[str, Any]]:
    return [{"workload": record.workload, **flat_config(record)} for record in records]


def _differ(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return [name for name in {**a, **b} if _value(a, name) != _value(b, name)]


def _value(config: Mapping[str, Any], name: str) -> str:
    return words(config[name]) if name in config else "no such field"


def _listed(apart: Mapping[str, tuple[list[str], list[str]]]) -> str:
    """`steps (20; 30), context (128, 256; 512)`"""
    sides = {name: [_few(values) for values in both] for name, both in apart.items()}
    return ", ".join(f"{name} ({'; '.join(both)})" for name, both in sides.items())


def _few(values: Sequence[str]) -> str:
    return ", ".join([*values[:_VALUES_NAMED], "…"] if len(values) > _VALUES_NAMED else values)


def _time(change: Change, record: Record) -> float | Entry | None:
    if record.failure is not None:
        return Entry(text=failure_word(record.failure), failure=record.failure)
    return change.median_s(record)


def _interval(change: Change) -> str | None:
    low, high = change.found.low, change.found.high
    return None if low is None or high is None else f"{ratio_words(low)} to {ratio_words(high)}"
