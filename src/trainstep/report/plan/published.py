"""Grades of predictions for tables that others published: an answer, a line per table, and every row beside its prediction."""

from collections.abc import Sequence
from typing import Any

from trainstep.plan.fleet.published import TableGrade
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.forms import COUNT, DIGITS, RATIO, TEXT, WHOLE, percent
from trainstep.report.kit.tables import Column, Table
from trainstep.report.plan.grade import SHARE, SIGNED

_SHOWN = ("context", "batch_size", "accumulation", "recompute", "compile", "global_batch")
"""Options of a row that tell rows apart."""


def published_answer(grades: Sequence[TableGrade]) -> Answer:
    """How far predictions are off, table by table, for the rows on which no factor was fitted."""
    parts = [
        f"{grade.table.words['title']}: {percent(grade.median)} % off in the median and {percent(abs(grade.error(grade.worst)))} % "
        f"at worst of {len(grade.others)} rows, tau {grade.tau:.2f}"
        for grade in grades
    ]
    return Answer(
        workload="plan",
        verdict=f"Predicted step times of published tables. {'; '.join(parts)}.",
        suggestion="One factor per table is fitted, on its smallest row; notes below the tables list what is unknown.",
    )


def published_tables(grades: Sequence[TableGrade]) -> list[Table]:
    """A line per table, then the rows of each table."""
    return [_summary(grades), *(_rows(grade) for grade in grades)]


def plain(grade: TableGrade) -> dict[str, Any]:
    """A table's grade for programs."""
    table = grade.table
    return {
        "table": table.name,
        **{name: table.words[name] for name in ("title", "repository", "file", "commit", "url")},
        "unknown": list(table.unknown),
        "factor": grade.factor,
        "median_error": grade.median,
        "worst_error": grade.error(grade.worst),
        "tau": grade.tau,
        "tau_of_utilisation": grade.utilisation_tau,
        "rows": [
            {
                "model": graded.row.model,
                "gpus": graded.row.gpus,
                "options": dict(graded.row.options),
                "measured_tokens_per_s": graded.row.tokens_per_s,
                "predicted_tokens_per_s": grade.tokens_per_s(graded),
                "error": grade.error(graded),
                "fitted": graded.fitted,
            }
            for graded in grade.rows
        ],
    }


def _summary(grades: Sequence[TableGrade]) -> Table:
    rows = [
        {
            "table": grade.table.words["title"],
            "rows": len(grade.others),
            "gpus": _range([graded.row.gpus for graded in grade.rows]),
            "factor": grade.factor,
            "median": grade.median,
            "worst": abs(grade.error(grade.worst)),
            "tau": grade.tau,
            "utilisation": grade.utilisation_tau,
        }
        for grade in grades
    ]
    columns = [
        Column("table", TEXT, names=True),
        Column("GPUs", TEXT, "gpus"),
        Column("predicted rows", COUNT, "rows"),
        Column("factor", RATIO),
        Column("median", SHARE),
        Column("worst", SHARE),
        Column("tau, tokens/s", DIGITS, "tau"),
        Column("tau, MFU", DIGITS, "utilisation"),
    ]
    note = (
        "Errors of predicted step times without signs. Factor: measured time over predicted on the smallest row, which then counts "
        "no more. Tau: Kendall's, of tokens a second of a GPU, and of model FLOPs a second, which models' sizes do not order."
    )
    return Table.of("Published tables", rows, columns, note=note)


def _range(gpus: Sequence[int]) -> str:
    return f"{min(gpus):,} to {max(gpus):,}" if min(gpus) < max(gpus) else f"{gpus[0]:,}"


def _rows(grade: TableGrade) -> Table:
    table = grade.table
    rows = [
        {
            "model": graded.row.model,
            "gpus": graded.row.gpus,
            "options": _words(graded.row.options),
            "measured": graded.row.tokens_per_s,
            "predicted": grade.tokens_per_s(graded),
            "error": None if graded.fitted else grade.error(graded),
        }
        for graded in grade.rows
    ]
    columns = [
        Column("model", TEXT, names=True),
        Column("GPUs", COUNT, "gpus"),
        Column("options", TEXT),
        Column("measured tokens/s of a GPU", WHOLE, "measured"),
        Column("predicted", WHOLE),
        Column("time off", SIGNED, "error"),
    ]
    words = table.words
    note = (
        f"{words['repository']}, {words['file']}, commit {words['commit'][:12]}. {words['hardware']}. "
        f"Measured: {words['measured']}. "
        f"Unknown: {'; '.join(table.unknown)}. No error: the factor's row."
    )
    return Table.of(words["title"], rows, columns, note=note)


def _words(options: dict[str, Any] | Any) -> str:
    parts = [
        f"{name.replace('_', ' ')} {options[name]}" for name in _SHOWN if name in options and options[name] != "none"
    ]
    if "tensor_parallel" in options:
        parts.append(
            f"tensor {options['tensor_parallel']}, pipeline {options['pipeline_parallel']} x {options['virtual_stages']}"
        )
    return ", ".join(parts)
