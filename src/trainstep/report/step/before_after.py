"""Compares two files of records cell by cell: times before and after, ratios with intervals, verdicts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainstep.records.compare import Comparison
from trainstep.records.record import Record
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.forms import MS, RATIO, failure_word, ratio_words
from trainstep.report.kit.ranking import Ratio, counted_words, is_judged, median_of
from trainstep.report.kit.rows import Row, flat_config, needless, rows_of, words
from trainstep.report.kit.script_cells import MORE_RUNS, cell_words, has_few_runs, is_of_runs
from trainstep.report.kit.tables import Column, Entry, Table

_VALUES_NAMED = 4
_INTERLEAVE = (
    "`trainstep bench --compare` interleaves the variants of one field, so that changes of the machine affect all of them "
    "alike."
)
_WHICH_RUNS = (
    "; runs are matched by the name of the script's file (in any folder), rank, number of ranks and device, and where a file has "
    "several variants of a script also by what tells these apart: give each variant a file of records of its own"
)


@dataclass(frozen=True, kw_only=True)
class Change:
    """One cell in both files. `row` is from the first file, `after` from the second."""

    row: Row
    label: str
    """The values that tell the cell from the others, without the machine if it is not needed for that."""
    after: Record
    comparison: Comparison

    def median_s(self, record: Record) -> float | None:
        """The median of the compared quantity in seconds; None if it was not measured."""
        return median_of(record, self.comparison.quantity)

    def failure(self, percent: float) -> str:
        """Why the change fails a limit of `percent` more time; empty if it passes.

        It fails if the verdict is slower and the whole interval lies beyond that share, or if the cell ran before and fails now.
        """
        comparison, broken = self.comparison, self.after.failure
        if broken is not None and self.row.record.failure is None:
            return f"{self.label}: {failure_word(broken)} in {broken.phase}, where it ran before"
        if comparison.verdict == "slower" and comparison.low is not None and comparison.low > 1 + percent / 100:
            return f"{self.label}: slower, ratio {ratio_words(comparison.ratio or 0.0)}"
        return ""

    def plain(self) -> dict[str, Any]:
        """The comparison for programs."""
        medians = {"before_s": self.median_s(self.row.record), "after_s": self.median_s(self.after)}
        return {"config": flat_config(self.row.record), **medians, **asdict(self.comparison)}


def changes_of(compared: Sequence[tuple[Record, Record, Comparison]]) -> list[Change]:
    """The changes of these (before, after, comparison), each with a label that tells it from the others."""
    rows = rows_of([("", before) for before, _, _ in compared])
    without = needless(rows)
    labels = [row.label(without=without) for row in rows]
    scripts = [
        cell_words(row.record) if is_of_runs(row.record) else label for row, label in zip(rows, labels, strict=True)
    ]
    if len(set(scripts)) == len(scripts):
        labels = scripts
    return [
        Change(row=row, label=label, after=after, comparison=comparison)
        for row, label, (_, after, comparison) in zip(rows, labels, compared, strict=True)
    ]


def changes_table(changes: Sequence[Change], quantity: str) -> Table:
    """A line per cell: medians before and after, ratio, interval, verdict."""
    cells = Column("cell", get=lambda change: change.label, failed=None)
    before = Column("before (ms)", MS, lambda change: _time(change, change.row.record), failed=None)
    after = Column("after (ms)", MS, lambda change: _time(change, change.after), failed=None)
    ratio = Column("ratio", RATIO, lambda change: change.comparison.ratio, failed=None)
    interval = Column("99 % interval", get=_interval, failed=None)
    verdict = Column("verdict", get=lambda change: change.comparison.word, failed=None)
    return Table.of(f"Medians of {quantity}", changes, [cells, before, after, ratio, interval, verdict])


def changes_notes(changes: Sequence[Change]) -> list[str]:
    """The reason of each 'cannot tell' and of each comparison of runs; for others a caution if they were not interleaved."""
    told = [change for change in changes if change.comparison.verdict == "cannot tell" or is_of_runs(change.after)]
    reasons = [f"{change.label}: {change.comparison.reason}" for change in told]
    if any(change.comparison.interleaving == "none" for change in changes if change not in told):
        return [
            *reasons,
            "The two files were not interleaved, so changes of the machine between them are part of the ratios.",
        ]
    return reasons


def changes_answer(changes: Sequence[Change], quantity: str) -> Answer:
    """In how many common cells the second file is faster or slower, and what would settle unclear ones."""
    broken = [change for change in changes if change.after.failure and not change.row.record.failure]
    judged = [change for change in changes if change.row.record.failure is None and change.after.failure is None]
    ratios = [Ratio(base=change.row, row=change.row, comparison=change.comparison) for change in judged]
    sentences = [f"The second file's {quantity} {counted_words(ratios)}"] if ratios else []
    if broken:
        change, failure = broken[0], broken[0].after.failure
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        sentences.append(
            f"{change.label}{more} ran before and fails in the second file ({failure_word(failure) if failure else ''})"
        )
    unclear = any(not is_judged(ratio) or (ratio.known and ratio.known.verdict == "cannot tell") for ratio in ratios)
    apart = any(change.comparison.interleaving == "none" for change in judged)
    few = any(has_few_runs(record) for change in judged for record in (change.row.record, change.after))
    return Answer(
        workload=changes[0].row.record.workload,
        verdict=f"{'; '.join(sentences) or 'No common cell ran in both files'}.",
        suggestion=MORE_RUNS if few else _INTERLEAVE if unclear and apart and not is_of_runs(changes[0].after) else "",
    )


def nothing_in_common(before: Sequence[Record], after: Sequence[Record]) -> str:
    """The fields in which no value is common, as `they differ in steps (20; 30)`; if there is none, those of the two nearest
    cells."""
    workloads = [list(dict.fromkeys(record.workload for record in side)) for side in (before, after)]
    if not set(workloads[0]) & set(workloads[1]):
        return f"they differ in {_listed({'workload': (workloads[0], workloads[1])})}"
    sides = [_configs(before), _configs(after)]
    names = dict.fromkeys(name for side in sides for config in side for name in config)
    values = {name: [list(dict.fromkeys(_value(config, name) for config in side)) for side in sides] for name in names}
    differing = {name: (a, b) for name, (a, b) in values.items() if not set(a) & set(b)}
    if differing:
        runs = all(names == ["run"] for names in workloads)
        return f"they differ in {_listed(differing)}{_WHICH_RUNS if runs else ''}"
    pairs = ((a, b) for a in sides[0][:200] for b in sides[1][:200])  # all pairs of large files would take too long
    first, second = min(pairs, key=lambda pair: len(_differing(*pair)))
    differing = {name: ([_value(first, name)], [_value(second, name)]) for name in _differing(first, second)}
    if not differing:
        return "their configs look alike, but another version of trainstep wrote one of the files; run it again"
    return f"the nearest two differ in {_listed(differing)}"


def _configs(records: Sequence[Record]) -> list[dict[str, Any]]:
    return [{"workload": record.workload, **flat_config(record)} for record in records]


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return [name for name in {**a, **b} if _value(a, name) != _value(b, name)]


def _value(config: Mapping[str, Any], name: str) -> str:
    return (words(config[name]) or "none") if name in config else "no such field"


def _listed(differing: Mapping[str, tuple[list[str], list[str]]]) -> str:
    """`steps (20; 30), context (128, 256; 512)`"""
    parts = []
    for name, both in differing.items():
        sides = [
            ", ".join([*values[:_VALUES_NAMED], "…"] if len(values) > _VALUES_NAMED else values) for values in both
        ]
        parts.append(f"{name} ({'; '.join(sides)})")
    return ", ".join(parts)


def _time(change: Change, record: Record) -> float | Entry | None:
    if record.failure is not None:
        return Entry(text=failure_word(record.failure), failure=record.failure)
    return change.median_s(record)


def _interval(change: Change) -> str | None:
    low, high = change.comparison.low, change.comparison.high
    return None if low is None or high is None else f"{ratio_words(low)} to {ratio_words(high)}"
