"""A CPU's events become a snapshot like CUDA's, with the allocator's own count to hold it against."""

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
    assert list(timeline.requested_bytes) == [0, 100, 150, 150, 50, 57]  # a release is asked for, then done
    assert list(timeline.allocated_bytes) == list(timeline.requested_bytes)
    assert [memory.allocated_bytes(time) for time in (0.5, 1, 8, 9, 99)] == [0, 100, 150, 50, 57]


def test_stacks_are_what_was_open_on_the_thread():
    timeline = MemoryTimeline(snapshot_of(cpu_memory(TRACE).document, where="here"))
    assert [one.stack_words() for one in timeline.allocations] == [
        "no Python: backward's own thread",
        "aten::mm < forward",
        "no Python: backward's own thread",
    ]
    assert [(one.name, one.start_us, one.end_us) for one in timeline.snapshot.spans] == [("forward", 2, 10)]


def test_a_trace_without_memory_is_refused():
    with pytest.raises(ValueError, match="profile_memory=True"):
        cpu_memory({"traceEvents": [span("aten::mm", 1, 2)]})


def test_frees_on_gloos_threads_are_found():
    """Its copy is let go unseen: free once gradients are synchronised, or when the address is given out again."""
    events = [
        change(1, 64, 100, 100),
        span("c10d::_reduce_scatter_base_", 2, 2),
        change(3, 640, 50, 150),  # a copy whose free nobody tells
        span("grad_sync", 5, 2, "user_annotation"),
        change(8, 320, 7, 157),  # the allocator's count does not know either
        span("c10d::_reduce_scatter_base_", 9, 1.5),
        change(10, 640, 50, 207),  # another, at the same address
        change(11, 640, 30, 237),  # given out again before gradients are synchronised
        span("grad_sync", 12, 2, "user_annotation"),
        change(15, 64, -100, 137),
    ]
    memory = cpu_memory({"traceEvents": events})
    timeline = MemoryTimeline(snapshot_of(memory.document, where="here"))
    told = [(one.address, one.requested_bytes, one.born == 0) for one in timeline.allocations]
    assert told == [(64, 100, False), (640, 50, False), (320, 7, False), (640, 50, False), (640, 30, False)]
    at = [timeline.requested_bytes[timeline.position_at(time)] for time in (3, 6.9, 7, 8, 10, 11, 15)]
    assert at == [150, 150, 100, 107, 157, 137, 37]
    assert [memory.allocated_bytes(time) for time in (3, 6.9, 7, 8, 10, 11, 15)] == at


def test_what_is_held_without_a_message_stays_held():
    events = [change(1, 64, 100, 100), span("grad_sync", 2, 2, "user_annotation"), change(5, 320, 1, 101)]
    assert cpu_memory({"traceEvents": events}).allocated_bytes(9) == 101
