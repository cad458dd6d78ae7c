"""The budget of each cell of a file, with its verdict and its table.

    explained = explain_rows(rows, calibration)
    explain_answers(explained), explain_tables(explained)

A run of somebody's script is explained as a whole, its records together; every other record is a step of its own. Without a
calibration of the user's, that of the record's GPU is taken (plan/time/calibration.py).
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainstep.config.machine import machine_spec
from trainstep.explain.budget import AS_THEY_RUN, Budget, Finding, step_budget
from trainstep.explain.causes import CAUSES, page_of
from trainstep.explain.evidence import evidence_of
from trainstep.explain.script_evidence import script_evidence
from trainstep.plan.time.calibration import Calibration, calibration_for
from trainstep.plan.time.interval import Interval
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.charts import Section
from trainstep.report.kit.forms import MS, PERCENT, TEXT, ms_words, percent
from trainstep.report.kit.rows import Row
from trainstep.report.kit.tables import Column, Line, Table
from trainstep.report.run.runs import main_runs, runs_of

_RUN = "run"
_FLOOR, _FINDING, _UNEXPLAINED = "floor", "finding", "unexplained"


@dataclass(frozen=True, kw_only=True)
class Explained:
    """A cell or a run with its budget. `label`: what tells it from the others of its file."""

    row: Row
    label: str
    budget: Budget


def explain_rows(rows: Sequence[Row], calibration: Calibration | None = None) -> tuple[list[Explained], dict[str, int]]:
    """The budgets in the rows' order, runs last; and the reasons why there is none -> number of records."""
    done, refusals = list[Explained](), dict[str, int]()
    for row in rows:
        record = row.record
        if record.workload == _RUN:
            continue
        try:
            chosen = calibration or _calibration(record.environment.gpu)
            budget = step_budget(evidence_of(record), chosen)
        except ValueError as error:
            refusals[str(error)] = refusals.get(str(error), 0) + 1
            continue
        done.append(Explained(row=row, label=row.label(), budget=budget))
    for run in main_runs(runs_of([row for row in rows if row.record.workload == _RUN])):
        try:
            budget = step_budget(script_evidence([row.record for row in run.rows]), None)
        except ValueError as error:
            refusals[str(error)] = refusals.get(str(error), 0) + 1
            continue
        done.append(Explained(row=run.row, label=run.name, budget=budget))
    return done, refusals


@functools.cache
def _calibration(gpu: str | None) -> Calibration | None:
    return calibration_for(machine_spec(gpu))


def explain_answers(explained: Sequence[Explained]) -> list[Answer]:
    """One answer: a step's first cause and the change to make; of several steps, those of the one furthest above its floor."""
    if not explained:
        return []
    worst = max(explained, key=lambda one: 1 - one.budget.floor_s / one.budget.measured_s)
    several = (
        f"Of {len(explained)} steps, the one furthest above its floor is {worst.label}. " if len(explained) > 1 else ""
    )
    return [
        Answer(workload="explain", verdict=several + verdict_of(worst.budget), suggestion=suggestion_of(worst.budget))
    ]


def verdict_of(budget: Budget) -> str:
    """`The step takes 39.3 ms, and the hardware needs at least 3.7 ms. First of the rest: precision, 22.1 ms (62 % of it): ...`"""
    takes = f"The step takes {ms_words(budget.measured_s)}"
    above_s = budget.measured_s - budget.floor_s
    if not budget.findings:
        return f"{takes}, and nothing was found that it waits for."
    first = budget.findings[0]
    least = "takes" if AS_THEY_RUN in budget.floor else "needs at least"
    needs = f"{takes}, and its work {least} {ms_words(budget.floor_s)}" if budget.floor_s else takes
    share = f"{percent(first.excess.time_s / above_s)} % of the rest" if above_s else ""
    where = f" ({first.place})" if first.place else ""
    return (
        f"{needs}. First of the excesses: {CAUSES[first.cause].title}, {ms_words(first.excess.time_s)}, {share}{where}: "
        f"{first.evidence}."
    )


def suggestion_of(budget: Budget) -> str:
    """The change that should gain most, with its gain and its page."""
    if not budget.findings:
        return ""
    best = max(budget.findings, key=lambda finding: finding.gain.time_s)
    change = change_words(best)
    if best.gain.time_s <= 0:
        return ""
    about = f"{change[:1].upper()}{change[1:]}: about {ms_words(best.gain.time_s)} less ({span_words(best.gain)})"
    return f"{about}; see {page_of(best.cause)}."


def change_words(finding: Finding) -> str:
    """The change as options, or the cause's advice in words."""
    if not finding.change:
        return CAUSES[finding.cause].advice
    names = {"name": "sync"}
    options = " ".join(f"--{names.get(name, name).replace('_', '-')} {value}" for name, value in finding.change.items())
    return f"`{options}` is taken already; no other change is known" if finding.is_taken else f"`{options}`"


def span_words(interval: Interval) -> str:
    """`10.1 ms to 25.3 ms`."""
    return f"{ms_words(interval.low_s)} to {ms_words(interval.high_s)}"


def explain_tables(explained: Sequence[Explained]) -> list[Table]:
    """A table for each budget: the floor, the excesses from the longest on, what is unexplained."""
    return [_table(one) for one in explained]


def explain_sections(explained: Sequence[Explained]) -> list[Section]:
    """A section of the page for each budget."""
    return [
        Section(
            title=f"Why the step takes its time: {one.label}",
            paragraphs=(verdict_of(one.budget), suggestion_of(one.budget), *one.budget.notes),
            tables=(_table(one),),
        )
        for one in explained
    ]


def _table(one: Explained) -> Table:
    budget = one.budget
    share = percent(budget.explained_share)
    note = f"The findings explain {share} % of measured - floor. {' '.join(budget.notes)}".strip()
    columns = [
        Column("where the time goes", TEXT, "title", names=True),
        Column("time (ms)", MS, "time_s"),
        Column("of the step (%)", PERCENT, "share"),
        Column("gain (ms)", MS, "gain_s", optional=True),
        Column("from (ms)", MS, "gain_low_s", optional=True, help="the low end of the gain's interval"),
        Column("to (ms)", MS, "gain_high_s", optional=True, help="the high end of the gain's interval"),
        Column("change", TEXT, "change_words", optional=True),
        Column("where", TEXT, "where", optional=True),
        Column("evidence", TEXT, "evidence", optional=True, more=True),
        Column("page", TEXT, "page", optional=True, more=True),
    ]
    lines = list(_lines(budget))
    raw = [{"cell": one.label, **line} for line in lines]
    return Table.of(
        f"Budget of the step: {one.label}", [Line(one.row, line) for line in lines], columns, note=note, raw=raw
    )


def _lines(budget: Budget) -> Iterator[dict[str, Any]]:
    """The rows, with every key in each, in the units of their names."""
    for part, time_s in budget.floor.items():
        yield _line(budget, _FLOOR, time_s, title=f"floor: {part}")
    for finding in budget.findings:
        yield _line(
            budget,
            _FINDING,
            finding.excess.time_s,
            title=CAUSES[finding.cause].title,
            cause=finding.cause,
            low_s=finding.excess.low_s,
            high_s=finding.excess.high_s,
            gain_s=finding.gain.time_s,
            gain_low_s=finding.gain.low_s,
            gain_high_s=finding.gain.high_s,
            change=dict(finding.change) or None,
            is_taken=finding.is_taken,
            change_words=change_words(finding),
            where=str(finding.place) if finding.place else None,
            evidence=finding.evidence,
            page=page_of(finding.cause),
        )
    yield _line(budget, _UNEXPLAINED, budget.unexplained_s, title="unexplained")
    yield _line(budget, "measured", budget.measured_s, title="measured")


_KEYS = (
    *("cause", "low_s", "high_s", "gain_s", "gain_low_s", "gain_high_s"),
    *("change", "is_taken", "change_words", "where", "evidence", "page"),
)


def _line(budget: Budget, kind: str, time_s: float, *, title: str, **values: Any) -> dict[str, Any]:
    fields: Mapping[str, Any] = dict.fromkeys(_KEYS) | values
    return {"kind": kind, "title": title, "time_s": time_s, "share": time_s / budget.measured_s, **fields}
