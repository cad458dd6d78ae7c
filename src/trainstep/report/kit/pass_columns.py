"""Columns of the workloads that time one pass by itself: time, rate, errors, memory, what ran, and doubts."""

from collections.abc import Iterable
from dataclasses import replace

from trainstep.report.kit.forms import ABSENT, COLUMN_SIZE, ERROR, MS_STD, TEXT, shortened
from trainstep.report.kit.peers import HOST, TIME, failure_cell
from trainstep.report.kit.ranking import mean_column, median_and_range
from trainstep.report.kit.rows import Row, doubts, host_limit, words
from trainstep.report.kit.tables import Column
from trainstep.traces.verdict import LAUNCH_BOUND

_MOST_OF_A_NAME = 60
_HOST = "Host: time until the call returns."
_WORDS = replace(TEXT, text=lambda value: shortened(words(value), _MOST_OF_A_NAME))
_YES_NO = replace(TEXT, text=lambda value: words(bool(value)))
"""Records store a boolean, or 1 or 0."""
TIME_COLUMN = Column(
    "time (ms)",
    MS_STD,
    median_and_range(TIME),
    help="Median ± half the interquartile range of a call.",
    failed=failure_cell,
)


def cell_columns(rates: Iterable[Column], errors: Iterable[Column], more_errors: Iterable[str]) -> tuple[Column, ...]:
    """The columns of a table of cells. `more_errors`: names of results whose error has a column of its own with --all."""
    columns = (
        *rates,
        *errors,
        *(Column(f"error of {name}", ERROR, f"error_{name}", more=True) for name in more_errors),
        Column("NaN", _YES_NO, "has_nan", more=True, note="NaN: NaN or infinity."),
        Column("deterministic", _YES_NO, "deterministic", more=True),
        Column("which ran", _WORDS, "which_ran", more=True),
        Column("host (ms)", MS_STD, median_and_range(HOST), more=True, note=_HOST),
        Column("launch-bound", _YES_NO, lambda row: host_limit(row.record) == LAUNCH_BOUND, more=True),
        Column("peak ({unit})", COLUMN_SIZE, "peak_bytes"),
        Column("held ({unit})", COLUMN_SIZE, "held_bytes", more=True),
        mean_column(TIME, "time"),
    )
    # A failed row shows its failure only in the column of the time, and the reason in the last.
    time = replace(TIME_COLUMN, help="")
    return (time, *(replace(column, help="", optional=True, failed=lambda _: ABSENT) for column in columns))


def pass_doubts(row: Row) -> str:
    """Reasons to doubt the result, checks that failed, and reasons to doubt the time."""
    failed = row.record.fact("afterwards_failed")
    reasons = ["NaN or infinity"] if row.record.fact("has_nan") else []
    reasons += [f"not measured: {words(failed)}"] if failed else []
    return "; ".join([*reasons, *doubts(row.record)])
