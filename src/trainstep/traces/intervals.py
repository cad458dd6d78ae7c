"""Intervals of time: what they cover together, and the gaps they leave."""

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
