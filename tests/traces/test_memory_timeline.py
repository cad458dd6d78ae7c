"""Bytes held at each moment: to the byte what the allocator counted itself, also when the history began late."""

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
def whole() -> MemoryTimeline:
    return MemoryTimeline(read_snapshot(FIXTURES / "snapshot_tiny.pickle.gz"))


@pytest.fixture(scope="module")
def stats() -> dict[str, int]:
    """What the allocator counted in that process."""
    counted: dict[str, int] = json.loads((FIXTURES / "snapshot_tiny.stats.json").read_text())
    return counted


def test_the_allocators_own_counts_to_the_byte(whole: MemoryTimeline, stats: dict[str, int]):
    assert whole.requested_bytes.max() == stats["requested_bytes.all.peak"] == 78_868_556
    assert whole.allocated_bytes.max() == stats["allocated_bytes.all.peak"] == 78_878_208
    assert whole.requested_bytes[-1] == stats["requested_bytes.all.current"]
    assert whole.allocated_bytes[-1] == stats["allocated_bytes.all.current"]
    assert len(whole.allocations) == stats["allocation.all.allocated"]
    assert sum(one.died > whole.end for one in whole.allocations) == stats["allocation.all.current"]
    assert whole.held_before_bytes == 0


@pytest.mark.parametrize("lost", [1, 300, 800, 1200, 1600])
def test_a_history_that_began_late(whole: MemoryTimeline, lost: int):
    """Undoing the events from the end finds what was held before; counting from zero would not."""
    snapshot = dataclasses.replace(whole.snapshot, events=whole.snapshot.events[lost:])
    late = MemoryTimeline(snapshot)
    assert (late.requested_bytes == whole.requested_bytes[lost:]).all()
    assert late.held_before_bytes == whole.requested_bytes[lost]
    assert late.allocated_bytes.max() == whole.allocated_bytes[lost:].max()


def test_what_was_never_freed_is_held_though_no_segment_says_so():
    event = {"action": "alloc", "addr": 512, "size": 4, "stream": 0, "time_us": 1, "frames": []}
    timeline = MemoryTimeline(snapshot_of({"segments": [], "device_traces": [[event]]}, where="here"))
    assert list(timeline.requested_bytes) == [0, 4]


def test_positions(whole: MemoryTimeline):
    first = whole.allocations[0]
    assert (first.born, first.requested_bytes) == (2, 131_072)  # the first event is its segment's
    assert first.held_at(first.born)
    assert not first.held_at(first.born - 1)
    assert whole.position_at(whole.time_us(500)) >= 500
    assert whole.position_at(0) == 0
    assert whole.peak() == int(whole.requested_bytes.argmax())


@pytest.mark.parametrize("points", [10, 100, 500])
def test_thinning_keeps_the_peak_and_what_is_asked(whole: MemoryTimeline, points: int):
    kept = whole.thinned(0, whole.end, points=points, keep=[777])
    assert len(kept) <= points + 1
    assert {0, 777, whole.end} <= set(kept)
    assert whole.requested_bytes[kept].max() == whole.requested_bytes.max()
    assert whole.thinned(5, 9, points=10) == [5, 6, 7, 8, 9]


def history(
    *events: tuple[str, int, int], blocks: list[dict[str, Any]] | None = None, segment: int = 0
) -> MemoryTimeline:
    """Of (action, address, bytes); `blocks`: what the one segment holds at the end."""
    plain = [
        {"action": action, "addr": address, "size": size, "time_us": time, "frames": []}
        for time, (action, address, size) in enumerate(events)
    ]
    segments = [{"address": 0, "total_size": segment, "segment_type": "large", "blocks": blocks}] if blocks else []
    return MemoryTimeline(snapshot_of({"segments": segments, "device_traces": [plain]}, where="here"))


def block(address: int, size: int, asked: int) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": asked, "state": "active_allocated", "frames": []}


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        (19 * MIB + 1, 20 * MIB),  # the rest, under 1 MiB, is too small to keep apart
        (19 * MIB - 512, 19 * MIB - 512),  # the rest, over 1 MiB, stays a block of its own
        (MIB + 1, MIB + 512),
    ],
)
def test_what_the_allocator_gives_in_the_large_pool(asked: int, got: int):
    found = history(
        ("segment_alloc", 0, 20 * MIB), ("alloc", 0, asked), ("free_requested", 0, asked), ("free_completed", 0, asked)
    )
    assert found.allocated_bytes.max() == got
    assert found.allocated_bytes[-1] == 0


def test_what_it_gives_in_the_small_pool_and_between_neighbours():
    found = history(
        ("segment_alloc", 0, 2 * MIB),
        ("alloc", 0, 1),
        ("alloc", 512, 1024),
        ("free_completed", 0, 1),
        ("alloc", 0, 300),
        ("free_completed", 512, 1024),
        blocks=[block(0, 512, 300)],
        segment=2 * MIB,
    )
    assert list(found.allocated_bytes) == [0, 0, 512, 1536, 1024, 1536, 512]


def test_held_before_the_history_and_at_its_end():
    """One block of each kind: before and kept, before and freed, new and kept."""
    blocks = [block(0, 512, 100), block(1024, 512, 300)]
    found = history(("free_completed", 512, 200), ("alloc", 1024, 300), blocks=blocks, segment=20 * MIB)
    assert list(found.requested_bytes) == [300, 100, 400]
    assert list(found.allocated_bytes) == [1024, 512, 1024]
    assert [(one.address, one.born, one.died) for one in found.allocations] == [(512, 0, 1), (0, 0, 3), (1024, 2, 3)]
