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
