"""Computes the bytes held at every moment of a snapshot's history, and when each allocation came and went.

    timeline = MemoryTimeline(snapshot)
    timeline.requested_bytes.max()       # equals the allocator's own peak of requested bytes, to the byte

[Note: backward] The history does not contain what was held when it began. The end is known from the segments; undoing the events
from there gives the beginning. Counting forward from zero would give a wrong peak if the history began late.

[Note: rounding] The allocator gives more than was asked: multiples of 512 bytes, and the rest of a block where that is too
small to keep apart (512 bytes in the pool of small blocks, 1 MiB in the other). What each allocation got is replayed from
the addresses: an allocation always starts a free block, which ends at the next held address or with its segment.

Positions: 0 is before the first event, p after the first p events.
"""

import dataclasses
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainstep.traces.snapshot import Event, Frame, Snapshot

Integers = NDArray[np.int64]

_MACHINERY = ("_call_impl", "_wrapped_call_impl", "__torch_function__")
_STACK_DEPTH = 12
_ROUND_BYTES = 512
_LARGE_REMAINDER_BYTES = 2**20
_SMALL_SEGMENT_BYTES = 2**21
"""Segments of the small pool have this size, those of the large pool at least ten times as much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """One use of an address, held at positions `born` <= p < `died`."""

    address: int
    requested_bytes: int
    allocated_bytes: int
    born: int
    """0 if held when the history began."""
    died: int
    """One past the last position if held at the end."""
    time_us: float | None
    """When it was allocated; None if before the history."""
    stack: tuple[Frame, ...]

    def held_at(self, position: int) -> bool:
        return self.born <= position < self.died

    def stack_words(self) -> str:
        """Where it was allocated, innermost first, without torch's module machinery; or why that is unknown."""
        frames = [frame for frame in self.stack if frame.function not in _MACHINERY]
        if frames:
            return " < ".join(map(str, frames[:_STACK_DEPTH]))
        return "before the history began" if self.time_us is None else "no Python: backward's own thread"


class MemoryTimeline:
    """The allocations, and `requested_bytes` and `allocated_bytes` at each position from 0 to the number of events."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._times_us = [event.time_us for event in snapshot.events]
        self.end = len(snapshot.events)
        self.allocations = tuple(_allocations(snapshot))
        self.requested_bytes = self.bytes_of(self.allocations)
        self.allocated_bytes = self.bytes_of(self.allocations, lambda allocation: allocation.allocated_bytes)

    def bytes_of(
        self,
        allocations: Iterable[Allocation],
        size: Callable[[Allocation], int] = lambda allocation: allocation.requested_bytes,
    ) -> Integers:
        """Bytes that these allocations hold at each position."""
        changes = np.zeros(self.end + 2, dtype=np.int64)
        for allocation in allocations:
            changes[allocation.born] += size(allocation)
            changes[allocation.died] -= size(allocation)
        return np.cumsum(changes)[:-1]

    def position_at(self, time_us: float) -> int:
        """The position after all events up to this time."""
        return bisect_right(self._times_us, time_us)

    def time_us(self, position: int) -> float:
        """The time of the event before the position."""
        return self._times_us[max(position - 1, 0)]

    def peak(self, first: int = 0, last: int | None = None) -> int:
        """The first position from `first` to `last`, both included, at which most bytes were held."""
        return first + int(np.argmax(self.requested_bytes[first : (self.end if last is None else last) + 1]))

    @property
    def held_before_bytes(self) -> int:
        """Bytes held when the history began."""
        return int(self.requested_bytes[0])

    def thinned(self, first: int, last: int, *, points: int, keep: Sequence[int] = ()) -> list[int]:
        """At most `points` positions from `first` to `last`: these, `keep`, and the lowest and highest of each stretch."""
        edges = sorted({first, last, *keep})
        if last - first + 1 <= points:
            return list(range(first, last + 1))
        chosen = set(edges)
        stretches = max(1, (points - len(edges)) // 2)
        for stretch in np.array_split(np.arange(first, last + 1), stretches):
            sizes = self.requested_bytes[stretch]
            chosen |= {int(stretch[sizes.argmin()]), int(stretch[sizes.argmax()])}
        return sorted(chosen)


def _allocations(snapshot: Snapshot) -> list[Allocation]:
    """Every allocation, in the order of birth, beginning with those from before the history. [Note: backward]"""
    end = len(snapshot.events) + 1
    space = _Space(snapshot)
    open_: dict[int, tuple[int, Event]] = {}
    allocations: list[Allocation] = []
    for index, event in enumerate(snapshot.events):
        if event.action == "alloc":
            open_[event.address] = (index, event)
            space.take(event.address, event.bytes)
        elif event.action == "free_completed":
            allocated_bytes = space.give(event.address)
            started = open_.pop(event.address, None)
            allocations.append(_allocation(started, event.address, event.bytes, allocated_bytes, died=index + 1))
        else:
            space.resize(event)
    never_freed = {address: event.bytes for address, (_, event) in open_.items()}
    for address, requested_bytes in (never_freed | _held_at_end(snapshot)).items():
        allocations.append(_allocation(open_.get(address), address, requested_bytes, space.give(address), died=end))
    # The snapshot's block may know the stack of an allocation from before the history.
    stacks = {block.address: block.stack for segment in snapshot.segments for block in segment.blocks}
    return sorted(
        (
            dataclasses.replace(allocation, stack=stacks.get(allocation.address, ()))
            if allocation.died == end and not allocation.stack
            else allocation
            for allocation in allocations
        ),
        key=lambda allocation: allocation.born,
    )


def _allocation(
    started: tuple[int, Event] | None, address: int, requested_bytes: int, allocated_bytes: int, *, died: int
) -> Allocation:
    index, event = started if started is not None else (-1, None)
    return Allocation(
        address=address,
        requested_bytes=requested_bytes,
        allocated_bytes=max(allocated_bytes, requested_bytes),
        born=index + 1,
        died=died,
        time_us=event.time_us if event else None,
        stack=event.stack if event else (),
    )


def _held_at_end(snapshot: Snapshot) -> dict[int, int]:
    """Address -> requested bytes."""
    return {
        block.address: block.requested_bytes
        for segment in snapshot.segments
        for block in segment.blocks
        if block.active
    }


def _held_at_start(snapshot: Snapshot) -> dict[int, int]:
    """Address -> requested bytes, by undoing the events from the end. [Note: backward]"""
    sizes = _held_at_end(snapshot)
    for event in reversed(snapshot.events):
        if event.action == "alloc":
            sizes.pop(event.address, None)
        elif event.action == "free_completed":
            sizes[event.address] = event.bytes
    return sizes


class _Space:
    """The held addresses, and how many bytes the allocator gave each. [Note: rounding]"""

    def __init__(self, snapshot: Snapshot) -> None:
        segments = {segment.address: segment for segment in snapshot.segments if segment.pool != "host"}
        self._expandable = any(segment.expandable for segment in segments.values())
        self._segments = {address: segment.bytes for address, segment in segments.items()}
        for event in reversed(snapshot.events):
            if event.action == "segment_alloc":
                self._segments.pop(event.address, None)
            elif event.action == "segment_free":
                self._segments[event.address] = event.bytes
        self._starts = sorted(self._segments)
        self._taken: dict[int, int] = {}
        self._addresses: list[int] = []
        known = {block.address: block for segment in segments.values() for block in segment.blocks if block.active}
        freed = {event.address for event in snapshot.events if event.action == "free_completed"}
        for address, requested_bytes in sorted(_held_at_start(snapshot).items()):
            self._hold(address, self._rounded(address, requested_bytes))
            if address in known and address not in freed:
                self._taken[address] = known[address].bytes

    def take(self, address: int, requested_bytes: int) -> None:
        """Give an allocation all of its free block, unless the rest is large enough to stay a block of its own."""
        size = self._rounded(address, requested_bytes)
        end = self._free_until(address)
        if end is not None:
            rest = end - address - size
            small = self._expandable or self._segment_bytes(address) == _SMALL_SEGMENT_BYTES
            kept_apart = rest >= _ROUND_BYTES if small else rest > _LARGE_REMAINDER_BYTES
            size = size if kept_apart or rest < 0 else end - address
        self._hold(address, size)

    def give(self, address: int) -> int:
        """Free an address and return the bytes it had."""
        place = bisect_left(self._addresses, address)
        if place < len(self._addresses) and self._addresses[place] == address:
            del self._addresses[place]
        return self._taken.pop(address, 0)

    def resize(self, event: Event) -> None:
        """Add or remove a segment."""
        if event.action == "segment_alloc" and event.address not in self._segments:
            self._segments[event.address] = event.bytes
            insort(self._starts, event.address)
        elif event.action == "segment_free" and self._segments.pop(event.address, None) is not None:
            self._starts.remove(event.address)

    def _hold(self, address: int, size: int) -> None:
        if address not in self._taken:
            insort(self._addresses, address)
        self._taken[address] = size

    def _rounded(self, address: int, requested_bytes: int) -> int:
        if self._segment_of(address) is None and not self._expandable:
            return requested_bytes  # the host's allocator reports no rounding
        return max(_ROUND_BYTES, -(-requested_bytes // _ROUND_BYTES) * _ROUND_BYTES)

    def _segment_of(self, address: int) -> int | None:
        place = bisect_right(self._starts, address) - 1
        if place < 0 or address >= self._starts[place] + self._segments[self._starts[place]]:
            return None
        return self._starts[place]

    def _segment_bytes(self, address: int) -> int:
        start = self._segment_of(address)
        return 0 if start is None else self._segments[start]

    def _free_until(self, address: int) -> int | None:
        """The end of the free block that begins here, or None outside any segment."""
        start = self._segment_of(address)
        if start is None:
            return None
        end = start + self._segments[start]
        place = bisect_right(self._addresses, address)
        return min(end, self._addresses[place]) if place < len(self._addresses) else end
