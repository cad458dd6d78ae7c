"""Intervals of time: what they cover together, and the gaps they leave."""

import bisect
import itertools
from collections.abc import Iterable, Sequence


def union_ns(intervals_ns: Iterable[tuple[int, int]]) -> int:
    """Nanoseconds covered by at least one of these (start, end) intervals."""
    covered, reached = 0, None
    for start, end in sorted(intervals_ns):
        start = start if reached is None else max(start, reached)
        if end > start:
            covered += end - start
            reached = end
    return covered


def union_s(intervals_ns: Iterable[tuple[int, int]]) -> float:
    """Seconds covered by at least one of these intervals in nanoseconds."""
    return union_ns(intervals_ns) / 1e9


def gaps_before(intervals_ns: Sequence[tuple[int, int]], start_ns: int) -> list[int]:
    """For each interval, in order of start: nanoseconds from `start_ns` on that nothing covered, right before it."""
    reached, gaps = start_ns, []
    for start, end in intervals_ns:
        gaps.append(max(0, start - reached))
        reached = max(reached, end)
    return gaps


class Cover:
    """What some intervals cover together; `within_ns` says how much of another, in logarithmic time."""

    def __init__(self, intervals_ns: Iterable[tuple[int, int]]) -> None:
        self.merged: list[tuple[int, int]] = []
        for start, end in sorted(intervals_ns):
            if self.merged and start <= self.merged[-1][1]:
                self.merged[-1] = self.merged[-1][0], max(end, self.merged[-1][1])
            elif end > start:
                self.merged.append((start, end))
        self._starts = [start for start, _ in self.merged]
        self._before = [0, *itertools.accumulate(end - start for start, end in self.merged)]

    def within_ns(self, start_ns: int, end_ns: int) -> int:
        """Nanoseconds of [start, end) that are covered."""
        return self._until(end_ns) - self._until(start_ns)

    def _until(self, time_ns: int) -> int:
        index = bisect.bisect_right(self._starts, time_ns)
        if not index:
            return 0
        start, end = self.merged[index - 1]
        return self._before[index - 1] + min(time_ns, end) - start
