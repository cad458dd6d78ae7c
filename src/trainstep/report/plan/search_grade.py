"""Table of what a search would have chosen in grids of measured steps."""

from collections.abc import Sequence
from typing import Any

from trainstep.plan.search.graded import GridCell, GridGrade, reasons_without_time
from trainstep.report.kit.forms import COUNT, MS, PERCENT, TEXT
from trainstep.report.kit.tables import Column, Table


def choices_table(grades: Sequence[GridGrade]) -> Table:
    """A row for each grid: the measured time of the search's choice, and that of the fastest cell."""
    rows = [
        {
            "work": _work_words(grade),
            "cells": len(grade.grid.cells),
            "choosable": sum(cell.time is not None for cell in grade.grid.cells),
            "choice": _words(grade, grade.chosen),
            "predicted": grade.chosen.time.step.time_s if grade.chosen.time is not None else None,
            "measured": grade.chosen.measured_s,
            "best": grade.best.measured_s,
            "loss": grade.loss,
            "place": f"{grade.place} of {len(grade.grid.cells)}",
            "fastest": "" if grade.chosen is grade.best else _words(grade, grade.best),
            "worst": max(cell.measured_s for cell in grade.grid.cells),
            "known": sum(cell.is_known for cell in grade.grid.cells),
        }
        for grade in grades
    ]
    columns = [
        Column("grid", TEXT, "work", names=True),
        Column("cells", COUNT),
        Column("with a prediction", COUNT, "choosable"),
        Column("choice", TEXT),
        Column("predicted (ms)", MS, "predicted"),
        Column("measured (ms)", MS, "measured"),
        Column("fastest (ms)", MS, "best"),
        Column("slowest (ms)", MS, "worst"),
        Column("behind the fastest", PERCENT, "loss"),
        Column("place", TEXT),
        Column("the fastest", TEXT, "fastest"),
        Column("in the calibration", COUNT, "known"),
    ]
    reasons: dict[str, int] = {}
    for grade in grades:
        for reason, count in reasons_without_time(grade.grid).items():
            reasons[reason] = reasons.get(reason, 0) + count
    note = "The choice is the fastest by prediction of the cells that surely fit. A cell of several records is their median."
    note += "".join(f" Cannot be chosen, {count}: {reason}." for reason, count in reasons.items())
    return Table.of(
        "What a search chooses among measured steps", rows, columns, note=note, raw=[plain(grade) for grade in grades]
    )


def plain(grade: GridGrade) -> dict[str, Any]:
    """A grade for programs."""
    gpu, model, context, ranks, batch, precision = grade.grid.work
    work = {
        "gpu": gpu,
        "model": model,
        "context": context,
        "ranks": ranks,
        "global_batch": batch,
        "precision": precision,
    }
    return {
        **work,
        "cells": len(grade.grid.cells),
        "varied": list(grade.grid.varied),
        "choice": dict(grade.chosen.options),
        "predicted_s": grade.chosen.time.step.time_s if grade.chosen.time is not None else None,
        "measured_s": grade.chosen.measured_s,
        "fastest_s": grade.best.measured_s,
        "fastest": dict(grade.best.options),
        "behind": grade.loss,
        "place": grade.place,
    }


def _work_words(grade: GridGrade) -> str:
    gpu, model, context, ranks, batch, precision = grade.grid.work
    return f"{ranks} {gpu.removeprefix('NVIDIA ')}, {model}, context {context}, {batch} sequences, {precision}"


def _words(grade: GridGrade, cell: GridCell) -> str:
    names = [name for name in grade.grid.varied if name in cell.options]
    return ", ".join(
        f"{name.replace('_', ' ')} {'default' if cell.options[name] is None else cell.options[name]}" for name in names
    )
