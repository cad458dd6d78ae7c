"""Memory events of a CPU become a snapshot like CUDA's, which agrees with the allocator's own count."""

from typing import Any

import pytest

from trainstep.traces.cpu_memory import cpu_memory
from trainstep.traces.memory_timeline import MemoryTimeline
from trainstep.traces.snapshot import snapshot_of


def change(time_us: float, address: int, size: int, total: int, device: int = 0) -> dict[str, Any]:
    arguments = {"Bytes": size, "Addr": address, "Total Allocated": total, "Device Type": device}
    return {"ph": "i", "name": "[memory]", "ts": time_us, "tid": 7, "args": arguments}


def span(name: str, start_us: float, long_us: float, category: str = "cpu_op", thread: int = 7) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": start_us, "dur": long_us, "tid": thread}


TRACE = {
    "traceEvents": [
        {"ph": "M", "name": "process_name"},
        change(1, 64, 100, 100),
        span("forward", 2, 8, "user_annotation"),
        span("aten::mm", 3, 2),
        span("elsewhere", 3, 2, thread=8),
        change(4, 640, 50, 150),
        change(4.5, 999, 5, 5, device=1),
        change(9, 64, -100, 50),
        change(12, 64, 7, 57),
    ]
}


def test_events_become_a_snapshot():
    memory = cpu_memory(TRACE)
    timeline = MemoryTimeline(snapshot_of(memory.document, where="here"))
    assert list(timeline.requested_bytes) == [0, 100, 150, 150, 50, 57]  # a release is requested, then completed
    assert list(timeline.allocated_bytes) == list(timeline.requested_bytes)
    assert [memory.allocated_bytes(time) for time in (0.5, 1, 8, 9, 99)] == [0, 100, 150, 50, 57]


def test_stacks_are_the_ranges_open_on_the_thread():
    timeline = MemoryTimeline(snapshot_of(cpu_memory(TRACE).document, where="here"))
    assert [allocation.stack_words() for allocation in timeline.allocations] == [
        "no Python: backward's own thread",
        "aten::mm < forward",
        "no Python: backward's own thread",
    ]
    assert [(recorded.name, recorded.start_us, recorded.end_us) for recorded in timeline.snapshot.spans] == [
        ("forward", 2, 10)
    ]


def test_a_trace_without_memory_is_refused():
    with pytest.raises(ValueError, match="profile_memory=True"):
        cpu_memory({"traceEvents": [span("aten::mm", 1, 2)]})


def test_frees_on_gloos_threads_are_found():
    """gloo frees its copy without an event: it is free once gradients are synchronised, or when its address is allocated again."""
    events = [
        change(1, 64, 100, 100),
        span("c10d::_reduce_scatter_base_", 2, 2),
        change(3, 640, 50, 150),  # a copy whose release has no event
        span("grad_sync", 5, 2, "user_annotation"),
        change(8, 320, 7, 157),  # the allocator's count does not have it either
        span("c10d::_reduce_scatter_base_", 9, 1.5),
        change(10, 640, 50, 207),  # another, at the same address
        change(11, 640, 30, 237),  # allocated again before gradients are synchronised
        span("grad_sync", 12, 2, "user_annotation"),
        change(15, 64, -100, 137),
    ]
    memory = cpu_memory({"traceEvents": events})
    timeline = MemoryTimeline(snapshot_of(memory.document, where="here"))
    allocations = [(found.address, found.requested_bytes, found.born == 0) for found in timeline.allocations]
    assert allocations == [(64, 100, False), (640, 50, False), (320, 7, False), (640, 50, False), (640, 30, False)]
    at = [timeline.requested_bytes[timeline.position_at(time)] for time in (3, 6.9, 7, 8, 10, 11, 15)]
    assert at == [150, 150, 100, 107, 157, 137, 37]
    assert [memory.allocated_bytes(time) for time in (3, 6.9, 7, 8, 10, 11, 15)] == at


def test_memory_allocated_outside_a_message_stays_allocated():
    events = [change(1, 64, 100, 100), span("grad_sync", 2, 2, "user_annotation"), change(5, 320, 1, 101)]
    assert cpu_memory({"traceEvents": events}).allocated_bytes(9) == 101
