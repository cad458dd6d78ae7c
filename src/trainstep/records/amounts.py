"""Says which amounts a measurement can have: `limits_of("s")`, for every unit that facts, samples and tables have.

No time, size, count or rate is negative, and no time is longer than a century. A file with such a number is damaged or was
edited, and its sums would overflow or say that a step takes -5 ms. Differences of two readings are declared as signed.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

LONGEST_S = 100 * 365.25 * 86_400
_LARGEST = 1e100
"""For all other units: far above every measurement, and far enough below the largest float for sums and squares."""
_NEVER_NEGATIVE = frozenset(("s", "bytes", "bytes/s", "count", "flops", "flop/s", "Hz", "W"))
_NUMBERS = frozenset((int, float))
_COUNTS = frozenset(("calls", "cores", "count", "gpu_count", "messages"))


class Limits(NamedTuple):
    """The least and the largest amount in a unit."""

    least: float
    largest: float

    def first_outside(self, values: Sequence[Any]) -> int | None:
        """Index of the first number beyond the limits, or of the first list that has one; None if there is none."""
        # Columns are long, so built-in functions check the whole column at the speed of C.
        if set(map(type, values)) <= _NUMBERS and (
            not values or self.least <= min(values) <= max(values) <= self.largest
        ):
            return None
        return next((index for index, value in enumerate(values) if not self.allow(value)), None)

    def allow(self, value: Any) -> bool:
        """Whether a number, or each number of a list, is within the limits. What is not a number is allowed."""
        if isinstance(value, list | tuple):
            return all(map(self.allow, value))
        return not isinstance(value, int | float) or self.least <= value <= self.largest

    def __str__(self) -> str:
        largest = f"{LONGEST_S:.0f}, a century" if self.largest == LONGEST_S else f"{self.largest:g}"
        return f"a number from {self.least:g} to {largest}"


@lru_cache  # records have many numbers of few units
def limits_of(unit: str, *, signed: bool = False) -> Limits:
    """The limits of amounts in a unit."""
    largest = LONGEST_S if unit == "s" else _LARGEST
    return Limits(0.0 if unit in _NEVER_NEGATIVE and not signed else -largest, largest)


@lru_cache
def unit_in_name(name: str) -> str:
    """The unit that stands in the name of a field or column (`time_s`, `peak_bytes`, `calls`); empty without one."""
    if name in _COUNTS:
        return "count"
    if name.endswith("_per_s"):
        return f"{name.removesuffix('_per_s')}/s"
    return "s" if name.endswith("_s") else "bytes" if name == "bytes" or name.endswith("_bytes") else ""
