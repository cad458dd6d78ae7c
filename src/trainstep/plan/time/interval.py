"""A predicted time with its interval."""

from collections.abc import Iterable
from dataclasses import dataclass

ENDS = ("low_s", "time_s", "high_s")
"""The fields of an interval, in order."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A predicted time with the interval that should hold it."""

    time_s: float
    low_s: float
    high_s: float

    def __add__(self, other: "Interval") -> "Interval":
        return Interval(
            time_s=self.time_s + other.time_s, low_s=self.low_s + other.low_s, high_s=self.high_s + other.high_s
        )

    def __mul__(self, factor: float) -> "Interval":
        return Interval(time_s=factor * self.time_s, low_s=factor * self.low_s, high_s=factor * self.high_s)

    @property
    def half_width(self) -> float:
        """Half of the interval's length over its middle time."""
        return (self.high_s - self.low_s) / 2 / self.time_s


NOTHING = Interval(time_s=0.0, low_s=0.0, high_s=0.0)


def total_of(parts: Iterable[Interval]) -> Interval:
    """The sum, if all parts are at the same end together."""
    return sum(parts, start=NOTHING)
