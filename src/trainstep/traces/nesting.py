"""Which ranges of a host thread were open at a moment: ops and annotations nest, so a parent each and a bisection say it."""

import bisect
from collections.abc import Iterator, Sequence

from trainstep.traces.kineto import Range, Thread


class Nesting:
    """The ranges of one thread. `around(time)` gives those open then, innermost first."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self.ranges = sorted(ranges, key=lambda one: (one.start_ns, -one.duration_ns, one.annotation is False))
        self._starts = [one.start_ns for one in self.ranges]
        self.parents = _parents(self.ranges)

    def around(self, time_ns: int) -> Iterator[Range]:
        index = bisect.bisect_right(self._starts, time_ns) - 1
        while index >= 0:
            found = self.ranges[index]
            if found.end_ns >= time_ns:
                yield found
            index = self.parents[index]

    def self_ns(self) -> list[int]:
        """For each range, in order: its duration without those right inside it."""
        own = [one.duration_ns for one in self.ranges]
        for index, parent in enumerate(self.parents):
            if parent >= 0:
                own[parent] -= self.ranges[index].duration_ns
        return own


def nestings(ranges: Sequence[Range]) -> dict[Thread, Nesting]:
    """One for each thread."""
    by_thread: dict[Thread, list[Range]] = {}
    for one in ranges:
        by_thread.setdefault(one.thread, []).append(one)
    return {thread: Nesting(mine) for thread, mine in by_thread.items()}


def _parents(ranges: Sequence[Range]) -> list[int]:
    """For each, in order of start, the number of the range right around it, or -1."""
    parents: list[int] = []
    open_now: list[int] = []
    for index, one in enumerate(ranges):
        while open_now and ranges[open_now[-1]].end_ns <= one.start_ns:
            open_now.pop()
        parents.append(open_now[-1] if open_now else -1)
        open_now.append(index)
    return parents
