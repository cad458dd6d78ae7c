"""Ways of going parallel as rows: each with its name, and the yardstick that it is held against."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainstep.config.sync import OF_A_STRATEGY, USED_BY, needless
from trainstep.costs.strategies import YARDSTICK
from trainstep.records.record import Record
from trainstep.report.forms import ABSENT, TEXT
from trainstep.report.ratios import Ratio, median_of, ratio_of
from trainstep.report.rows import Row, flat_config, table_lines, words
from trainstep.report.tables import Column, Entry, point_columns, row_of

_NO_MATTER = {"check_agreement", "keep_trace"}


@dataclass(frozen=True, kw_only=True)
class Way:
    """A row, and the row of the same file in which ranks do not talk; None where there is none, it failed or is this one."""

    row: Row
    base: Row | None

    @property
    def record(self) -> Record:
        return self.row.record

    @property
    def sync(self) -> str:
        return str(self.record.config["sync"])

    @property
    def name(self) -> str:
        """`bucketed 25 MiB`: the way, and the options that are its own and vary in the report."""
        own = [name for name in USED_BY if name in self.row.point and name not in needless(self.record.config)]
        options = [_option(name, self.row.point[name]) for name in own]
        return " ".join([self.sync, *filter(None, options)])

    @property
    def place(self) -> str:
        """Everything but the way: `tiny 64`."""
        return self.row.label(without=OF_A_STRATEGY)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """A table of the record, line by line; none where the cell failed."""
        return table_lines(self.record.tables.get(name)) if self.record.failure is None else []

    def ratio(self, quantity: str) -> Ratio | None:
        """Its time against the yardstick's."""
        return None if self.base is None else ratio_of(self.base, self.row, quantity)

    def longer_s(self, quantity: str) -> float | None:
        """Median seconds over the yardstick's: communication that is not hidden, as the whole step feels it."""
        if self.base is None:
            return None
        own_s, base_s = (median_of(row.record, quantity) for row in (self.row, self.base))
        return None if own_s is None or base_s is None else own_s - base_s


def ways_of(rows: Sequence[Row]) -> list[Way]:
    """Each row with its yardstick: of the same file, machine and config, the ways' options aside."""
    bases = {_run_of(row): row for row in rows if row.record.config["sync"] == YARDSTICK and row.record.failure is None}
    bases_of = [(row, bases.get(_run_of(row))) for row in rows]
    return [Way(row=row, base=None if base is row else base) for row, base in bases_of]


def name_columns(rows: Iterable[Any]) -> list[Column]:
    """The columns that name a way; an option that a way does not have is absent, one that none has is no column."""
    mine = [row_of(row) for row in rows]
    sync = Column("sync", TEXT, lambda row: row_of(row).record.config["sync"], failed=None, names=True)
    columns = [] if any("sync" in row.point for row in mine) else [sync]
    for column in point_columns(mine):
        if column.title not in USED_BY:
            columns.append(column)
        elif any(column.title not in needless(row.record.config) for row in mine):
            columns.append(replace(column, get=_option_of(column.title)))
    return columns


def _option_of(name: str) -> Callable[[Any], Any]:
    return lambda row: (
        Entry(text=ABSENT) if name in needless(row_of(row).record.config) else row_of(row).point.get(name)
    )


def _run_of(row: Row) -> tuple[Any, ...]:
    config = flat_config(row.record)
    rest = [(name, words(value)) for name, value in config.items() if name not in OF_A_STRATEGY | _NO_MATTER]
    return (row.file, row.record.environment.hostname, *rest)


def _option(name: str, value: Any) -> str:
    """`25 MiB`, `first 1 MiB`, `reduce bf16`, `kept whole`."""
    if value is None or (name in ("reduce_dtype", "compute_dtype") and value == "own"):
        return ""
    if name == "bucket_mib":
        return f"{words(value)} MiB"
    if isinstance(value, bool):
        return "" if value else {"reshard_after_forward": "kept whole"}.get(name, "gradients stay bf16")
    return f"{name.removesuffix('_mib').removesuffix('_bucket').removesuffix('_dtype')} {words(value)}"
