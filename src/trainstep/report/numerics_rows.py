"""What every table and chart of numerics needs: its rows, grouped by what they share, and how its numbers are written."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainstep.report.forms import ABSENT, percent
from trainstep.report.rows import Row, of_workload
from trainstep.report.tables import Entry

ERRORS = {
    "error_logits": "logits",
    "error_loss": "loss",
    "error_gradient_median": "gradients, median",
    "error_gradient_max": "gradients, worst",
}


def numerics_rows(rows: Sequence[Row]) -> list[Row]:
    return of_workload(rows, "numerics")


def groups_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows that differ in precision only, by what they share: `small 256`."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.label(without=("precision",)), []).append(row)
    return groups


def precision_of(row: Row) -> str:
    return str(row.record.config.get("precision"))


def fp32_of(group: Sequence[Row]) -> Row | None:
    """The row that the others' time and error are held to."""
    return next((row for row in group if precision_of(row) == "fp32"), None)


def table_of(row: Row, name: str) -> Mapping[str, Any]:
    """A table of the record, by column; empty where it has none."""
    return row.record.tables.get(name, {})


def error_entry(value: float | None) -> Entry:
    """`1.3e-07`, `0`, or nothing."""
    return Entry(text=ABSENT) if value is None else Entry(text=f"{value:.1e}" if value else "0", sort=value)


def share_words(share: float) -> str:
    """Percent, with digits left for what is rare."""
    if share == 0:
        return "0"
    return percent(share) if share >= 0.001 else f"{share * 100:.1e}"


def share_entry(share: float | None) -> Entry:
    return Entry(text=ABSENT) if share is None else Entry(text=share_words(share), sort=share)


def text_entry(value: Any) -> Entry:
    return Entry(text=str(value))
