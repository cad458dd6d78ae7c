"""Grades of predicted step times as tables: by what limits the step, by its options, and the steps that are furthest off."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trainstep.plan.time.grade import CAPTURED, DEVICE, GROUPS, HOST, TimeGrade
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.forms import COUNT, MS, TEXT
from trainstep.report.kit.tables import Column, Table, filled
from trainstep.report.plan.grade import SHARE, SIGNED, sizes_of, step_kinds, step_words

_WORST = 15
_FAULT = 0.1
"""A term with a larger median error counts as a fault of its formula."""
_ENOUGH = 3
"""The fewest steps by which a term is judged: fewer may be off because of their machine."""


@dataclass(frozen=True, kw_only=True)
class FiledTimeGrade:
    """A grade with the name of its file of records."""

    file: str
    grade: TimeGrade


def time_answer(grades: Sequence[FiledTimeGrade], calibration: str) -> Answer:
    """How far predicted times are off by group, and how many are inside their interval."""
    inside = sum(item.grade.is_inside for item in grades)
    parts = []
    for group in (CAPTURED, DEVICE):
        errors = [abs(item.grade.error) for item in grades if item.grade.group == group]
        if errors:
            parts.append(
                f"{group} {100 * statistics.median(errors):.1f} % off in the median and {100 * max(errors):.1f} % at worst "
                f"({len(errors)})"
            )
    bound = [item.grade for item in grades if item.grade.group == HOST]
    if bound:
        parts.append(
            f"where the {HOST}, {sum(grade.is_inside for grade in bound)} of {len(bound)} are inside their interval"
        )
    width = statistics.median(item.grade.predicted.step.half_width for item in grades)
    return Answer(
        workload="plan",
        verdict=f"Predicted times of {len(grades)} steps: {'; '.join(parts)}.",
        suggestion=f"{inside} of {len(grades)} are inside their interval, whose half-width is {100 * width:.1f} % in the median. "
        f"Calibration: {calibration}.",
    )


def time_tables(grades: Sequence[FiledTimeGrade]) -> list[Table]:
    """The tables, those with the widest view first."""
    return filled(
        _errors("Errors of predicted step times, by what limits the step", grades, lambda grade: [grade.group]),
        _errors(
            "Errors of predicted step times, by options",
            [item for item in grades if item.grade.group != HOST],
            lambda grade: step_kinds(grade.predicted.config),
        ),
        _by_phase(grades),
        _worst(grades),
    )


def faulty_terms(grades: Sequence[FiledTimeGrade]) -> list[str]:
    """The terms whose median error is above 10 %: there the formula is wrong."""
    terms: dict[str, list[float]] = {}
    for item in grades:
        for phase, error in item.grade.phase_errors.items():
            terms.setdefault(f"device time of {phase}", []).append(error)
        if item.grade.group != HOST:
            for kind in step_kinds(item.grade.predicted.config):
                terms.setdefault(f"steps with {kind}", []).append(item.grade.error)
    return [
        f"{name}: {100 * statistics.median(errors):+.0f} % in the median of {len(errors)}"
        for name, errors in terms.items()
        if len(errors) >= _ENOUGH and statistics.median(map(abs, errors)) > _FAULT
    ]


def plain(item: FiledTimeGrade) -> dict[str, Any]:
    """A grade for programs."""
    grade = item.grade
    step = grade.predicted.step
    return {
        "file": item.file,
        "key": grade.record.key,
        "step": step_words(grade.predicted.config),
        "group": grade.group,
        "predicted_s": step.time_s,
        "interval_s": [step.low_s, step.high_s],
        "measured_s": grade.measured_s,
        "classes_s": dict(grade.predicted.classes),
    }


def _errors(title: str, grades: Sequence[FiledTimeGrade], kinds_of: Callable[[TimeGrade], Iterable[str]]) -> Table:
    kinds: dict[str, list[TimeGrade]] = {"all": [item.grade for item in grades]}
    for item in grades:
        for kind in kinds_of(item.grade):
            kinds.setdefault(kind, []).append(item.grade)
    names = sorted(kinds, key=lambda kind: (kind != "all", GROUPS.index(kind) if kind in GROUPS else 0, kind))
    rows = [
        {
            "steps": kind,
            "count": len(graded),
            **sizes_of("", (grade.error for grade in graded)),
            "bias": statistics.median(grade.error for grade in graded),
            "inside": sum(grade.is_inside for grade in graded) / len(graded),
            "half-width": statistics.median(grade.predicted.step.half_width for grade in graded),
        }
        for kind in names
        if (graded := kinds[kind])
    ]
    columns = [
        Column("steps", TEXT, names=True),
        Column("count", COUNT),
        *(Column(name, SHARE) for name in ("median", "95 %", "worst")),
        Column("bias", SIGNED),
        Column("inside the interval", SHARE, "inside"),
        Column("half-width", SHARE),
    ]
    note = "Errors without signs, relative to the measured time; bias and half-width of the interval: medians."
    return Table.of(title, rows, columns, note=note)


def _by_phase(grades: Sequence[FiledTimeGrade]) -> Table:
    phases: dict[str, list[float]] = {}
    for item in grades:
        for phase, error in item.grade.phase_errors.items():
            phases.setdefault(str(phase), []).append(error)
    rows = [
        {"phase": phase, "count": len(errors), **sizes_of("", errors), "bias": statistics.median(errors)}
        for phase, errors in phases.items()
    ]
    columns = [
        Column("phase", TEXT, names=True),
        Column("count", COUNT),
        *(Column(name, SHARE) for name in ("median", "95 %", "worst")),
        Column("bias", SIGNED),
    ]
    note = "The device's time by phase, of eager steps of one rank that the device limits."
    return Table.of("Errors of predicted device times, by phase", rows, columns, note=note)


def _worst(grades: Sequence[FiledTimeGrade]) -> Table:
    rows = [
        {
            "step": step_words(item.grade.predicted.config),
            "file": item.file,
            "group": item.grade.group,
            "measured": item.grade.measured_s,
            "predicted": item.grade.predicted.step.time_s,
            "low": item.grade.predicted.step.low_s,
            "high": item.grade.predicted.step.high_s,
            "error": item.grade.error,
        }
        for item in sorted(
            grades, key=lambda item: (item.grade.is_inside, item.grade.group == HOST, -abs(item.grade.error))
        )[:_WORST]
    ]
    columns = [
        Column("step", TEXT, names=True),
        Column("records", TEXT, "file"),
        Column("limited by", TEXT, "group"),
        *(Column(f"{name} (ms)", MS, name) for name in ("measured", "predicted", "low", "high")),
        Column("off", SIGNED, "error"),
    ]
    note = "First those outside their interval, then those furthest off of captured and device-bound steps."
    return Table.of("The steps whose times are furthest off", rows, columns, note=note)
