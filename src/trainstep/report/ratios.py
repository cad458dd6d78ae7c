"""One row's time over another's: a comparison with its interval, or why there is none."""

from dataclasses import dataclass
from typing import Any

from trainstep.records.compare import Comparison, compare_records
from trainstep.records.record import Failure
from trainstep.report.forms import failure_word
from trainstep.report.rows import Row


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A row against the one that it is held to."""

    base: Row
    row: Row
    found: Comparison | None = None
    trouble: str = ""
    """Why there is no ratio; empty where there is one."""

    @property
    def failure(self) -> Failure | None:
        """The row's, or else the other's."""
        return self.row.record.failure or self.base.record.failure

    @property
    def known(self) -> Comparison | None:
        """The comparison, where it came to a ratio with an interval."""
        found = self.found
        return None if found is None or None in (found.ratio, found.low, found.high) else found

    def numbers(self) -> dict[str, Any]:
        """What a program reads of it; the row's own key says which cell it is."""
        found = self.found
        return {
            "ratio": found and found.ratio,
            "ratio_low": found and found.low,
            "ratio_high": found and found.high,
            "verdict": found.verdict if found else "cannot tell",
            "reason": found.reason if found else self.trouble,
            "key": self.row.record.key,
        }


def ratio_of(base: Row, row: Row, quantity: str) -> Ratio:
    """In that quantity of time."""
    made = Ratio(base=base, row=row)
    if made.failure is not None:
        return Ratio(base=base, row=row, trouble=failure_word(made.failure))
    try:
        found = compare_records(base.record, row.record, quantity=quantity)
    except ValueError as error:  # other machines, or code
        return Ratio(base=base, row=row, trouble=str(error))
    return Ratio(base=base, row=row, found=found, trouble="" if found.ratio else found.reason)
