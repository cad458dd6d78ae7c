"""Bytes allocated at each moment are those that the allocator counted itself, also when the history began late."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from trainstep.traces.memory_timeline import MemoryTimeline
from trainstep.traces.snapshot import read_snapshot, snapshot_of

FIXTURES = Path(__file__).parent / "fixtures"
MIB = 2**20


@pytest.fixture(scope="module")
def timeline() -> MemoryTimeline:
    return MemoryTimeline(read_snapshot(FIXTURES / "snapshot_tiny.pickle.gz"))


@pytest.fixture(scope="module")
def stats() -> dict[str, int]:
    """The allocator's own counts in the recorded process."""
    counted: dict[str, int] = json.loads((FIXTURES / "snapshot_tiny.stats.json").read_text())
    return counted


def test_the_timeline_has_the_allocators_own_counts(timeline: MemoryTimeline, stats: dict[str, int]):
    assert timeline.requested_bytes.max() == stats["requested_bytes.all.peak"] == 78_868_556
    assert timeline.allocated_bytes.max() == stats["allocated_bytes.all.peak"] == 78_878_208
    assert timeline.requested_bytes[-1] == stats["requested_bytes.all.current"]
    assert timeline.allocated_bytes[-1] == stats["allocated_bytes.all.current"]
    assert len(timeline.allocations) == stats["allocation.all.allocated"]
    assert sum(allocation.died > timeline.end for allocation in timeline.allocations) == stats["allocation.all.current"]
    assert timeline.held_before_bytes == 0


@pytest.mark.parametrize("lost", [1, 300, 800, 1200, 1600])
def test_a_history_that_began_late_has_the_same_bytes(timeline: MemoryTimeline, lost: int):
    """Undoing events from the end gives the bytes allocated before the history; counting from zero would not."""
    snapshot = dataclasses.replace(timeline.snapshot, events=timeline.snapshot.events[lost:])
    late = MemoryTimeline(snapshot)
    assert (late.requested_bytes == timeline.requested_bytes[lost:]).all()
    assert late.held_before_bytes == timeline.requested_bytes[lost]
    assert late.allocated_bytes.max() == timeline.allocated_bytes[lost:].max()


def test_memory_never_freed_is_allocated_without_a_segment():
    event = {"action": "alloc", "addr": 512, "size": 4, "stream": 0, "time_us": 1, "frames": []}
    timeline = MemoryTimeline(snapshot_of({"segments": [], "device_traces": [[event]]}, where="here"))
    assert list(timeline.requested_bytes) == [0, 4]


def test_positions_are_those_of_events(timeline: MemoryTimeline):
    first = timeline.allocations[0]
    assert (first.born, first.requested_bytes) == (2, 131_072)  # the first event is its segment's
    assert first.held_at(first.born)
    assert not first.held_at(first.born - 1)
    assert timeline.position_at(timeline.time_us(500)) >= 500
    assert timeline.position_at(0) == 0
    assert timeline.peak() == int(timeline.requested_bytes.argmax())


@pytest.mark.parametrize("points", [10, 100, 500])
def test_thinning_keeps_the_peak_and_the_given_points(timeline: MemoryTimeline, points: int):
    positions = timeline.thinned(0, timeline.end, points=points, keep=[777])
    assert len(positions) <= points + 1
    assert {0, 777, timeline.end} <= set(positions)
    assert timeline.requested_bytes[positions].max() == timeline.requested_bytes.max()
    assert timeline.thinned(5, 9, points=10) == [5, 6, 7, 8, 9]


def history(
    *events: tuple[str, int, int], blocks: list[dict[str, Any]] | None = None, segment: int = 0
) -> MemoryTimeline:
    """The timeline of events (action, address, bytes); `blocks` are those of the only segment at the end."""
    trace_events = [
        {"action": action, "addr": address, "size": size, "time_us": time, "frames": []}
        for time, (action, address, size) in enumerate(events)
    ]
    segments = [{"address": 0, "total_size": segment, "segment_type": "large", "blocks": blocks}] if blocks else []
    return MemoryTimeline(snapshot_of({"segments": segments, "device_traces": [trace_events]}, where="here"))


def block(address: int, size: int, requested: int) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested, "state": "active_allocated", "frames": []}


@pytest.mark.parametrize(
    ("requested", "allocated"),
    [
        (19 * MIB + 1, 20 * MIB),  # the rest, under 1 MiB, is too small to keep apart
        (19 * MIB - 512, 19 * MIB - 512),  # the rest, over 1 MiB, is a block of its own
        (MIB + 1, MIB + 512),
    ],
)
def test_allocations_in_the_large_pool_are_rounded(requested: int, allocated: int):
    allocated_timeline = history(
        ("segment_alloc", 0, 20 * MIB),
        ("alloc", 0, requested),
        ("free_requested", 0, requested),
        ("free_completed", 0, requested),
    )
    assert allocated_timeline.allocated_bytes.max() == allocated
    assert allocated_timeline.allocated_bytes[-1] == 0


def test_allocations_in_the_small_pool_are_rounded_to_their_gap():
    small_pool = history(
        ("segment_alloc", 0, 2 * MIB),
        ("alloc", 0, 1),
        ("alloc", 512, 1024),
        ("free_completed", 0, 1),
        ("alloc", 0, 300),
        ("free_completed", 512, 1024),
        blocks=[block(0, 512, 300)],
        segment=2 * MIB,
    )
    assert list(small_pool.allocated_bytes) == [0, 0, 512, 1536, 1024, 1536, 512]


def test_allocations_before_the_history_are_found():
    """One block is allocated before and never freed, one is allocated before and freed, one is new."""
    blocks = [block(0, 512, 100), block(1024, 512, 300)]
    late_history = history(("free_completed", 512, 200), ("alloc", 1024, 300), blocks=blocks, segment=20 * MIB)
    assert list(late_history.requested_bytes) == [300, 100, 400]
    assert list(late_history.allocated_bytes) == [1024, 512, 1024]
    assert [(allocation.address, allocation.born, allocation.died) for allocation in late_history.allocations] == [
        (512, 0, 1),
        (0, 0, 3),
        (1024, 2, 3),
    ]
