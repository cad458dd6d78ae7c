"""Grades of predicted peaks as tables: by kind of step, the worst cells, and by term where a record has a ledger."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainstep.config.parallel import RanksConfig
from trainstep.plan.grade import Grade, TermError
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.forms import COUNT, GIB, MINUS, SIZE, TEXT, Form, listed
from trainstep.report.kit.tables import Column, Table, filled

_WORST = 15
_FAULT = 0.1
"""A term with a larger error counts as a fault of its formula."""
_LEAST_SHARE = 0.001
"""Terms below this share of the peak are not judged."""
SIGNED = Form(text=lambda error: f"{error * 100:+.2f} %".replace("-", MINUS), sort=lambda error: error * 100)
SHARE = Form(text=lambda error: f"{error * 100:.2f} %", sort=lambda error: error * 100)


@dataclass(frozen=True, kw_only=True)
class FiledGrade:
    """A grade with the name of its file of records."""

    file: str
    grade: Grade


def grade_answer(grades: Sequence[FiledGrade]) -> Answer:
    """How far predictions are off, and which step and terms are off most."""
    allocated = [abs(item.grade.allocated_error) for item in grades]
    reserved = [abs(item.grade.reserved_error) for item in grades]
    worst = max(grades, key=lambda item: abs(item.grade.allocated_error))
    faults = sorted({term.term for item in grades for term in _faults(item.grade)})
    verdict = (
        f"Predicted peaks of {len(grades)} steps: allocated {_percent(statistics.median(allocated))} off in the median and "
        f"{_percent(max(allocated))} at worst ({step_words(worst.grade.config)}); reserved "
        f"{_percent(statistics.median(reserved))} and {_percent(max(reserved))}."
    )
    if not faults:
        return Answer(workload="plan", verdict=verdict, suggestion="No term of a ledger is more than 10 % off.")
    return Answer(workload="plan", verdict=verdict, suggestion=f"More than 10 % off in a ledger: {listed(faults)}.")


def grade_tables(grades: Sequence[FiledGrade]) -> list[Table]:
    """The tables, those with the widest view first."""
    return filled(_by_kind(grades), _worst(grades), _by_term(grades))


def refusal_lines(refusals: Mapping[str, int]) -> list[str]:
    """Why cells were not graded."""
    return [f"Not graded, {count} cell{'s' * (count > 1)}: {reason}." for reason, count in refusals.items()]


def plain(item: FiledGrade) -> dict[str, Any]:
    """A grade for programs."""
    grade = item.grade
    return {
        "file": item.file,
        "key": grade.record.key,
        "step": step_words(item.grade.config),
        "predicted_allocated_bytes": grade.memory.peak.allocated_bytes,
        "measured_allocated_bytes": grade.allocated_bytes,
        "predicted_reserved_bytes": grade.memory.peak.reserved_bytes,
        "measured_reserved_bytes": grade.reserved_bytes,
        "terms": [vars(term) for term in grade.terms],
    }


def _by_kind(grades: Sequence[FiledGrade]) -> Table:
    kinds: dict[str, list[FiledGrade]] = {"all": list(grades)}
    for item in grades:
        for kind in step_kinds(item.grade.config):
            kinds.setdefault(kind, []).append(item)
    rows = [
        {
            "steps": kind,
            "count": len(items),
            **sizes_of("allocated ", (item.grade.allocated_error for item in items)),
            **sizes_of("reserved ", (item.grade.reserved_error for item in items)),
        }
        for kind, items in sorted(kinds.items(), key=lambda kind: (kind[0] != "all", kind[0]))
    ]
    columns = [
        Column("steps", TEXT, names=True),
        Column("count", COUNT),
        *(
            Column(f"{which}, {what}", SHARE, f"{which} {what}")
            for which in ("allocated", "reserved")
            for what in ("median", "95 %", "worst")
        ),
    ]
    return Table.of("Errors of predicted peaks", rows, columns, note="Without signs, relative to what was measured.")


def step_kinds(config: RanksConfig) -> Iterable[str]:
    """The options of a step by which errors are grouped."""
    run = config.run
    yield f"precision {run.precision}"
    yield f"attention {run.attention}"
    yield f"compile {run.compile}"
    if run.mode != "step":
        yield f"mode {run.mode}"
    if run.capture != "none":
        yield "captured"
    if run.recompute != "none":
        yield f"recompute {run.recompute}"
    if run.ops != "plain":
        yield f"ops {run.ops}"
    if config.ranks > 1:
        yield f"sync {config.sync.name}"


def sizes_of(name: str, errors: Iterable[float]) -> dict[str, float]:
    """The median, the 95th percentile and the maximum of the errors' absolute values; `name` is the prefix of their keys."""
    ordered = sorted(map(abs, errors))
    return {
        f"{name}median": statistics.median(ordered),
        f"{name}95 %": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        f"{name}worst": ordered[-1],
    }


def _worst(grades: Sequence[FiledGrade]) -> Table:
    def size(item: FiledGrade) -> float:
        return max(abs(item.grade.allocated_error), abs(item.grade.reserved_error))

    rows = [
        {
            "step": step_words(item.grade.config),
            "file": item.file,
            "allocated": item.grade.allocated_bytes,
            "allocated off": item.grade.allocated_error,
            "reserved": item.grade.reserved_bytes,
            "reserved off": item.grade.reserved_error,
        }
        for item in sorted(grades, key=size, reverse=True)[:_WORST]
    ]
    columns = [
        Column("step", TEXT, names=True),
        Column("records", TEXT, "file"),
        Column("allocated (GiB)", GIB, "allocated"),
        Column("predicted", SIGNED, "allocated off"),
        Column("reserved (GiB)", GIB, "reserved"),
        Column("predicted ", SIGNED, "reserved off"),
    ]
    return Table.of("The steps that are furthest off", rows, columns)


def _by_term(grades: Sequence[FiledGrade]) -> Table:
    terms: dict[tuple[str, str], list[TermError]] = {}
    for item in grades:
        for term in item.grade.terms:
            terms.setdefault((term.moment, term.term), []).append(term)
    rows = []
    for (moment, name), errors in terms.items():
        worst = max(errors, key=lambda term: abs(term.predicted_bytes - term.measured_bytes))
        rows.append(
            {
                "moment": moment,
                "term": name,
                "count": len(errors),
                "predicted": worst.predicted_bytes,
                "measured": worst.measured_bytes,
                "off": worst.predicted_bytes / worst.measured_bytes - 1 if worst.measured_bytes else None,
            }
        )
    columns = [
        Column("moment", TEXT, names=True),
        Column("term", TEXT, names=True),
        Column("ledgers", COUNT, "count"),
        Column("predicted ({unit})", SIZE, "predicted"),
        Column("measured ({unit})", SIZE, "measured"),
        Column("off", SIGNED, "off"),
    ]
    note = "Each row is the ledger in which the term is furthest off."
    return Table.of("Terms of ledgers", rows, columns, note=note)


def _faults(grade: Grade) -> Iterable[TermError]:
    for term in grade.terms:
        wrong = abs(term.predicted_bytes - term.measured_bytes)
        if wrong > _FAULT * max(term.measured_bytes, 1) and wrong > _LEAST_SHARE * grade.allocated_bytes:
            yield term


def step_words(config: RanksConfig) -> str:
    """A step in a few words: `xl, 4 x 512, fp32, plain`."""
    run = config.run
    words = [run.model.name, f"{run.batch_size} x {run.context}", run.precision, run.attention]
    words += [f"compile {run.compile}"] if run.compile != "none" else []
    words += [f"mode {run.mode}"] if run.mode != "step" else []
    words += [f"ops {run.ops}"] if run.ops != "plain" else []
    words += [f"recompute {run.recompute}"] if run.recompute != "none" else []
    words += [f"{run.narrow_blocks} narrow blocks"] if run.narrow_blocks else []
    words += [f"update {run.update}"] if run.update != "after_backward" else []
    words += ["captured"] if run.capture != "none" else []
    words += [f"{config.ranks} ranks {config.sync.name}"] if config.ranks > 1 else []
    return ", ".join(words)


def _percent(error: float) -> str:
    return f"{error * 100:.2f} %"
