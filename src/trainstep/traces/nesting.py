"""Finds which ranges of a host thread were open at a moment, and what intervals of time cover together.

Ops and annotations nest, so a parent for each range and one bisection find all open ranges.
"""

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence

from trainstep.traces.kineto import Range, Thread


class Nesting:
    """The ranges of one thread, in order of start, with the index of each range's parent (-1: none)."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self.ranges = sorted(ranges, key=lambda opened: (opened.start_ns, -opened.duration_ns, not opened.annotation))
        self._starts = [opened.start_ns for opened in self.ranges]
        self.parents = _parents(self.ranges)

    def around(self, time_ns: int) -> Iterator[Range]:
        """The ranges open at this time, innermost first."""
        index = bisect.bisect_right(self._starts, time_ns) - 1
        while index >= 0:
            candidate = self.ranges[index]
            if candidate.end_ns >= time_ns:
                yield candidate
            index = self.parents[index]

    def self_ns(self) -> list[int]:
        """For each range, in order, its duration without its children's."""
        self_times_ns = [opened.duration_ns for opened in self.ranges]
        for index, parent in enumerate(self.parents):
            if parent >= 0:
                self_times_ns[parent] -= self.ranges[index].duration_ns
        return self_times_ns


def nestings(ranges: Sequence[Range]) -> dict[Thread, Nesting]:
    """The nesting of each thread."""
    by_thread: dict[Thread, list[Range]] = {}
    for opened in ranges:
        by_thread.setdefault(opened.thread, []).append(opened)
    return {thread: Nesting(thread_ranges) for thread, thread_ranges in by_thread.items()}


def union_ns(intervals_ns: Iterable[tuple[int, int]]) -> int:
    """Nanoseconds covered by at least one of these (start, end) intervals."""
    return sum(end - start for start, end in Cover(intervals_ns).merged)


def union_s(intervals_ns: Iterable[tuple[int, int]]) -> float:
    """Seconds covered by at least one of these intervals in nanoseconds."""
    return union_ns(intervals_ns) / 1e9


def gaps_before(intervals_ns: Sequence[tuple[int, int]], start_ns: int) -> list[int]:
    """For each interval, in order of start, the uncovered nanoseconds directly before it, from `start_ns` on."""
    reached, gaps = start_ns, []
    for start, end in intervals_ns:
        gaps.append(max(0, start - reached))
        reached = max(reached, end)
    return gaps


class Cover:
    """What some intervals cover together; `within_ns` tells, in logarithmic time, how much of another interval they cover."""

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


def _parents(ranges: Sequence[Range]) -> list[int]:
    """For each range, in order of start, the index of the range directly around it, or -1."""
    parents: list[int] = []
    open_now: list[int] = []
    for index, opened in enumerate(ranges):
        while open_now and ranges[open_now[-1]].end_ns <= opened.start_ns:
            open_now.pop()
        parents.append(open_now[-1] if open_now else -1)
        open_now.append(index)
    return parents
