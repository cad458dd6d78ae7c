"""The budget of each cell of a file, with its verdict and its table.

    explained = explain_rows(rows, calibration)
    explain_answers(explained), explain_tables(explained)

All records of a script's run are explained together; every other record is a step of its own. If the user gives no calibration,
that of the record's GPU is taken (plan/time/calibration.py).
"""

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainstep.config.machine import machine_spec
from trainstep.explain.budget import AS_THEY_RUN, Budget, step_budget
from trainstep.explain.causes import CAUSES, page_of
from trainstep.explain.evidence import evidence_of
from trainstep.explain.floor import check_calibration
from trainstep.explain.script_changes import ScriptPlace, place_of, script_change
from trainstep.explain.script_evidence import script_evidence
from trainstep.explain.trace_evidence import is_of_trace, trace_evidence
from trainstep.plan.time.calibration import Calibration, calibration_for
from trainstep.plan.time.interval import Interval
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.charts import INK, Chart, Panels, Section, bar, lines_of, short_labels
from trainstep.report.kit.finding_words import change_words, evidence_words, excess_words
from trainstep.report.kit.forms import MS, PERCENT, TEXT, ms_words, percent
from trainstep.report.kit.rows import Row
from trainstep.report.kit.tables import Column, Line, Table
from trainstep.report.run.runs import main_runs, runs_of

_RUN = "run"
_COLOURS = ("theme:vermilion", "theme:orange", "theme:blue", "theme:green", "theme:purple", "theme:sky")
"""Colours of the causes in a chart; if there are more causes than colours, the last colour is for all the others."""
_MOST_BARS = 6
"""The most steps in a chart: those furthest above their floor."""
_FEW = 5
"""Steps whose tables a terminal shows by default."""
_MINOR = 0.1
"""If all findings together take less than this share of a step, the verdict names its kernels first."""
_NAMED = 3
"""Groups of kernels that a verdict names."""
_WITH_ABOVE = "with the above"
_FLOOR, _FINDING, _UNEXPLAINED = "floor", "finding", "unexplained"


@dataclass(frozen=True, kw_only=True)
class Explained:
    """A cell or a run with its budget. `label`: the values that tell it from the others in its file."""

    row: Row
    label: str
    budget: Budget
    calibration: Calibration | None = None
    """The calibration behind the budget's floor and predictions."""
    script: ScriptPlace | None = None
    """Where a run of a script took place; None for other steps."""


def explain_rows(rows: Sequence[Row], calibration: Calibration | None = None) -> tuple[list[Explained], dict[str, int]]:
    """The budgets in the rows' order, runs of scripts last; and reason for no budget -> how often it applied."""
    done, refusals = list[Explained](), dict[str, int]()
    for row in rows:
        record = row.record
        if record.workload == _RUN:
            continue
        try:
            evidence = trace_evidence(record) if is_of_trace(record) else evidence_of(record)
            gpu = record.environment.gpu
            if calibration is not None:
                device = str(record.config.get("device"))
                check_calibration(calibration, device=device, gpu=gpu, has_formulas=evidence.config is not None)
            speeds = calibration or _calibration(gpu)
            budget = step_budget(evidence, speeds)
        except ValueError as error:
            refusals[str(error)] = refusals.get(str(error), 0) + 1
            continue
        done.append(Explained(row=row, label=row.label(), budget=budget, calibration=speeds))
    done = _without_machines(done)
    for run in main_runs(runs_of([row for row in rows if row.record.workload == _RUN])):
        try:
            evidence = script_evidence([row.record for row in run.rows])
            if calibration is not None:
                check_calibration(
                    calibration, device="cuda" if evidence.on_device else "cpu", gpu=None, has_formulas=False
                )
            budget = step_budget(evidence, None)
        except ValueError as error:
            refusals[str(error)] = refusals.get(str(error), 0) + 1
            continue
        done.append(Explained(row=run.row, label=run.name, budget=budget, script=place_of(run.last)))
    return done, refusals


def _without_machines(done: Sequence[Explained]) -> list[Explained]:
    """The same steps, with machine and commit left out of their labels if the labels stay distinct."""
    labels = [step.row.label(without=("machine",)) for step in done]
    return (
        [replace(step, label=label) for step, label in zip(done, labels, strict=True)] if _differ(labels) else [*done]
    )


def _differ(labels: Sequence[str]) -> bool:
    return len(set(labels)) == len(labels)


@functools.cache
def _calibration(gpu: str | None) -> Calibration | None:
    return calibration_for(machine_spec(gpu))


def explain_answers(explained: Sequence[Explained]) -> list[Answer]:
    """One answer: a step's first cause and the change to make.

    For several steps it says how often each cause is first, and then answers for the step furthest above its floor.
    """
    if not explained:
        return []
    worst = furthest(explained)[0]
    several = f"{_first_causes(explained)} Furthest above its floor: {worst.label}. " if len(explained) > 1 else ""
    return [
        Answer(workload="explain", verdict=several + verdict_of(worst.budget), suggestion=suggestion_of(worst.budget))
    ]


def furthest(explained: Sequence[Explained]) -> list[Explained]:
    """The steps, those with the largest share above the floor first."""
    return sorted(explained, key=lambda step: step.budget.floor_s / step.budget.measured_s)


def _first_causes(explained: Sequence[Explained]) -> str:
    """`In 56 of 60 steps precision is first; in 4 host launches.`"""
    firsts = Counter(CAUSES[step.budget.findings[0].cause].title for step in explained if step.budget.findings)
    if not firsts:
        return f"No excess was found in any of {len(explained)} steps."
    (title, count), *others = firsts.most_common()
    rest = "".join(f"; in {number} {name}" for name, number in others)
    without = len(explained) - firsts.total()
    none = f"; in {without} nothing was found" if without else ""
    return f"In {count} of {len(explained)} steps {title} {_is(title)} first{rest}{none}."


def _is(title: str) -> str:
    words = title.split()
    return "are" if any(word.endswith("s") and not word.endswith("ss") for word in (words[0], words[-1])) else "is"


def verdict_of(budget: Budget) -> str:
    """`The step takes 39.3 ms, and its work needs at least 3.7 ms. Longest excess: precision, 22.1 ms, ...`"""
    takes = f"The step takes {ms_words(budget.measured_s)}"
    above_s = budget.measured_s - budget.floor_s
    if not budget.findings:
        return f"{takes}{_without_findings(budget)}"
    first = budget.findings[0]
    where = f" ({first.place})" if first.place else ""
    seen = f"{where}: {evidence_words(first)}."
    if (
        AS_THEY_RUN in budget.floor
        and sum(finding.excess.time_s for finding in budget.findings) < _MINOR * budget.measured_s
    ):
        return f"{takes}; {_as_it_runs(budget)} Longest excess: {excess_words(first, budget.measured_s, 'step')}{seen}"
    least = "takes" if AS_THEY_RUN in budget.floor else "needs at least"
    needs = f"{takes}, and its work {least} {ms_words(budget.floor_s)}" if budget.floor_s else takes
    return f"{needs}. Longest excess: {excess_words(first, above_s, 'rest')}{seen}"


def _as_it_runs(budget: Budget) -> str:
    """`91.8 % is its kernels as they run (matmul 23.38 ms, attention 4.785 ms); ...`; on a CPU ops, with the longest phase."""
    pieces = "kernels" if budget.on_device else "ops"
    phase = f", of which {_longest_phase(budget, 'is')}" if budget.phases_s else ""
    longest = [f"{group} {ms_words(time_s)}" for group, time_s in _kernels(budget)[:_NAMED]]
    groups = f" ({', '.join(longest)})" if longest else ""
    share = percent(budget.floor[AS_THEY_RUN] / budget.measured_s)
    return f"{share} % is its {pieces} as they run{groups}{phase}; `trainstep profile` shows them."


def _kernels(budget: Budget) -> list[tuple[str, float]]:
    """The groups of kernels as they run with their times, the longest first."""
    return sorted(budget.as_they_run_s.items(), key=lambda item: -item[1])


def _longest_phase(budget: Budget, verb: str) -> str:
    """`backward takes 60.0 %`, as a share of all phases."""
    largest = max(budget.phases_s, key=lambda name: budget.phases_s[name])
    return f"{largest} {verb} {percent(budget.phases_s[largest] / sum(budget.phases_s.values()))} %"


def _without_findings(budget: Budget) -> str:
    """The end of a verdict without findings; it names the largest phase if no floor is known."""
    if AS_THEY_RUN not in budget.floor and budget.on_device:
        return ", and nothing was found that it waits for."
    where = "for this model or machine" if budget.on_device else "on a CPU"
    phase = f"; {_longest_phase(budget, 'takes')}" if budget.phases_s else ""
    is_said = budget.is_profiled or budget.to_see_more
    hint = "; `trainstep profile` shows the ops" if budget.phases_s and not is_said else ""
    return f". No floor is known {where}, so nothing is explained{phase}{hint}."


def suggestion_of(budget: Budget) -> str:
    """The change that should gain most, with its gain and page; without such a change, how to see more of the step."""
    best = max(budget.findings, key=lambda finding: finding.gain.time_s, default=None)
    if best is None or best.gain.time_s <= 0:
        return budget.to_see_more
    change = change_words(best, on_device=budget.on_device)
    change, less = (
        f"{change[:1].upper()}{change[1:]}",
        f"about {ms_words(best.gain.time_s)} less ({range_words(best.gain)})",
    )
    first = budget.findings[0]
    if best.cause == first.cause:
        return f"{change}: {less}; see {page_of(best.cause)}."
    # A change for another cause would otherwise read as one for the first.
    others = f"about {ms_words(first.gain.time_s)}" if first.gain.time_s > 0 else "no gain is predicted"
    return (
        f"{change}, against {CAUSES[best.cause].title}: {less}, the most of all changes (against {CAUSES[first.cause].title} "
        f"{others}); see {page_of(best.cause)}."
    )


def range_words(interval: Interval) -> str:
    """`10.1 ms to 25.3 ms`."""
    return f"{ms_words(interval.low_s)} to {ms_words(interval.high_s)}"


def explain_tables(explained: Sequence[Explained]) -> list[Table]:
    """A table for each budget: the floor, the excesses with the longest first, and the unexplained rest."""
    return [_table(step) for step in explained]


def first_tables(explained: Sequence[Explained]) -> tuple[list[Table], list[str]]:
    """The tables of the few steps furthest above their floors, as a terminal shows them, with a note about the others."""
    left = len(explained) - _FEW
    steps = f"{left} more step{'s' if left > 1 else ''}, nearer to the floor: add --all."
    return [_table(step) for step in furthest(explained)[:_FEW]], [steps] if left > 0 else []


def explain_sections(explained: Sequence[Explained]) -> list[Section]:
    """The section of the page: a bar for each step, then the budgets; the step furthest above its floor is first and open."""
    first = furthest(explained)
    if not first:
        return []
    tables = [_table(first[0]), *(replace(_table(step), folded=True) for step in first[1:])]
    title = "Where the time of the step goes" if len(first) == 1 else "Where the time of the steps goes"
    return [Section(title=title, charts=(budget_chart(first),), tables=tuple(tables))]


def budget_chart(explained: Sequence[Explained]) -> Chart:
    """A stacked bar for each of the first steps: the floor, each cause's excess, the unexplained rest; as shares of the step."""
    left = len(explained) - _MOST_BARS
    explained = explained[:_MOST_BARS]
    names = short_labels([step.label for step in explained])
    height = 150 + 24 * len(names)
    panels = Panels(titles=[""], columns=1, x_title="share of the step (%)", y_title="")
    panels.axis = {"type": "category", "autorange": "reversed", "categoryarray": names}
    parts = [
        (_FLOOR, [step.budget.floor_s for step in explained], "theme:grey"),
        *_excesses(explained),
        ("unexplained", [step.budget.unexplained_s for step in explained], INK),
    ]
    for title, times, colour in parts:
        if any(times):
            shares = [100 * time_s / step.budget.measured_s for time_s, step in zip(times, explained, strict=True)]
            hover = [lines_of(name, f"{title}: {ms_words(time_s)}") for name, time_s in zip(names, times, strict=True)]
            panels.add(0, bar(title, shares, names, colour=colour, hover=hover, orientation="h"))
    count = f" The tables have {left} more, nearer to the floor." if left > 0 else ""
    caption = f"Floor: the time that the work needs at least. The rest of a bar is what a change may remove.{count}"
    return panels.chart("Budget of each step", caption, barmode="stack", bargap=0.35, height=height, horizontal=True)


def _excesses(explained: Sequence[Explained]) -> Iterator[tuple[str, list[float], str]]:
    """The title of each cause, its time in every step and a colour; those with the largest shares first, the rest together."""
    shares = dict[str, float]()
    for step in explained:
        for finding in step.budget.findings:
            share = finding.excess.time_s / step.budget.measured_s
            shares[finding.cause] = shares.get(finding.cause, 0.0) + share
    causes = sorted(shares, key=lambda cause: -shares[cause])
    named = causes if len(causes) <= len(_COLOURS) else causes[: len(_COLOURS) - 1]
    groups = [(CAUSES[cause].title, {cause}) for cause in named]
    groups += [("other causes", set(causes) - set(named))] if len(causes) > len(named) else []
    for (title, alike), colour in zip(groups, _COLOURS, strict=False):
        times = [
            sum(finding.excess.time_s for finding in step.budget.findings if finding.cause in alike)
            for step in explained
        ]
        yield title, times, colour


def _table(step: Explained) -> Table:
    budget = step.budget
    notes = list(budget.notes)
    if budget.findings:
        notes.insert(0, f"The findings explain {percent(budget.explained_share)} % of measured - floor.")
    if any(finding.gain.time_s > finding.excess.time_s for finding in budget.findings):
        notes.append("A change also removes other causes, so that a gain may exceed its row.")
    note = " ".join(notes)
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
    lines = list(_lines(step))
    raw = [{"cell": step.label, **line} for line in lines]
    return Table.of(
        f"Budget of the step: {step.label}",
        [Line(step.row, line) for line in _once(lines)],
        columns,
        note=note,
        raw=raw,
    )


def _once(lines: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The lines; if several have the same change, only the first shows its gain."""
    seen = set[str | None]()
    for line in lines:
        change = line["change_words"]  # causes of a script have words of their own, whatever a proof would apply
        if change and not line["is_taken"] and change in seen:
            yield line | {"gain_s": None, "gain_low_s": None, "gain_high_s": None, "change_words": _WITH_ABOVE}
            continue
        seen.add(change)
        yield line


def _lines(step: Explained) -> Iterator[dict[str, Any]]:
    """The rows of a budget's table. Every row has all keys; their names give the units."""
    budget = step.budget
    for part, time_s in budget.floor.items():
        groups = _kernels(budget) if part == AS_THEY_RUN else []
        for group, group_s in groups:
            yield _line(budget, _FLOOR, group_s, title=f"floor: {group} (as it runs)")
        if not groups:
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
            change=(script_change(finding.cause, step.script) if step.script else dict(finding.change)) or None,
            is_taken=finding.is_taken,
            change_words=change_words(finding, on_device=budget.on_device).replace("`", ""),
            where=str(finding.place) if finding.place else None,
            evidence=evidence_words(finding),
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
