"""Turns the CPU allocator's events, from a trace of torch's profiler, into the form of a CUDA memory snapshot.

    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler: ...
    profiler.export_chrome_trace(path)
    memory = cpu_memory(json.loads(path.read_text()))
    snapshot = snapshot_of(memory.document, where="CPU")

One reader then serves both. The host's allocator neither rounds nor keeps a cache that torch knows of, so every held block is a
segment of its own. A stack consists of the operators and ranges open on the thread, innermost first; on a CPU, autograd runs on the
caller's thread.

[Note: unseen frees] gloo copies the tensors that it reduces, and the last thread that uses a copy frees it. The profiler does not
see frees on gloo's own threads, so its count of bytes stays too high. Such a block counts as free from the end of the next
`grad_sync`, when all messages have ended, or from the next use of its address, if that is earlier. Any other block whose free was
not seen counts as free from the next use of its address.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MEMORY = "[memory]"
_RANGES = ("cpu_op", "user_annotation")
_COLLECTIVE_PREFIX = "c10d::"  # torch.distributed's operators
_GRAD_SYNC = "grad_sync"


@dataclass(frozen=True, kw_only=True)
class CpuMemory:
    """`document` has the form of torch.cuda.memory._snapshot().

    `total_bytes` is the allocator's own count after each event, less the blocks whose frees it did not see; the bytes of the
    document are checked against it.
    """

    document: dict[str, Any]
    times_us: tuple[float, ...]
    total_bytes: tuple[int, ...]

    def allocated_bytes(self, time_us: float) -> int:
        """The allocator's count of bytes given out at this time, less its count when the trace began."""
        place = bisect_right(self.times_us, time_us)
        return self.total_bytes[place - 1] if place else 0


def cpu_memory(trace: Mapping[str, Any]) -> CpuMemory:
    """Convert a Chrome trace. ValueError if it has no events of memory."""
    events = [event for event in trace["traceEvents"] if isinstance(event.get("ts"), int | float)]
    changes = sorted(
        (event for event in events if event.get("name") == _MEMORY and event["args"].get("Device Type") == 0),
        key=lambda event: (event["ts"], event["args"].get("Ev Idx", 0)),
    )
    if not changes:
        raise ValueError("the trace holds no events of memory: profile with profile_memory=True")
    ranges = sorted(
        (event for event in events if event.get("cat") in _RANGES and "dur" in event),
        key=lambda event: (event["ts"], -event["dur"]),
    )
    stacks = _stacks(changes, ranges)
    moments: list[tuple[float, int, int, Mapping[str, Any] | _UnseenFree]] = [
        *((change["ts"], 1, place, change) for place, change in enumerate(changes)),
        *((free.time_us, 0, place, free) for place, free in enumerate(_unseen_frees(changes, stacks, ranges))),
    ]
    blocks: dict[int, dict[str, Any]] = {}
    history: list[dict[str, Any]] = []
    times_us, totals = [], []
    before_bytes = int(changes[0]["args"]["Total Allocated"]) - int(changes[0]["args"]["Bytes"])
    count_bytes = unseen_bytes = 0
    for time_us, _, place, event in sorted(moments, key=lambda moment: moment[:3]):
        if isinstance(event, _UnseenFree):
            address, size, is_free = event.address, event.bytes, True
            unseen_bytes += size
        else:
            address, size = int(event["args"]["Addr"]), int(event["args"]["Bytes"])
            is_free = size < 0
            count_bytes = int(event["args"]["Total Allocated"]) - before_bytes
        common = {"addr": address, "size": abs(size), "stream": 0, "time_us": time_us}
        if is_free:
            blocks.pop(address, None)
            history += [{"action": action, "frames": [], **common} for action in ("free_requested", "free_completed")]
        else:
            stack = stacks[place]
            blocks[address] = {"size": size, "requested_size": size, "address": address, "frames": stack}
            history.append({"action": "alloc", "frames": stack, **common})
        times_us.append(time_us)
        totals.append(count_bytes - unseen_bytes)
    document = {
        "segments": [_segment(block) for block in blocks.values()],
        "device_traces": [history],
        "external_annotations": _annotations(ranges),
    }
    return CpuMemory(document=document, times_us=tuple(times_us), total_bytes=tuple(totals))


@dataclass(frozen=True, kw_only=True)
class _UnseenFree:
    """The free of a block on a thread that the profiler does not record."""

    time_us: float
    address: int
    bytes: int


def _unseen_frees(
    changes: Sequence[Mapping[str, Any]],
    stacks: Sequence[Sequence[Mapping[str, Any]]],
    ranges: Sequence[Mapping[str, Any]],
) -> list[_UnseenFree]:
    """The unseen frees, in the order of time. [Note: unseen frees]"""
    sync_ends_us = sorted(event["ts"] + event["dur"] for event in ranges if event["name"] == _GRAD_SYNC)
    open_blocks: dict[int, tuple[int, float]] = {}  # address -> bytes, and when it is free at the latest
    frees = []
    for change, stack in zip(changes, stacks, strict=True):
        size, address = int(change["args"]["Bytes"]), int(change["args"]["Addr"])
        before = open_blocks.pop(address, None)
        if size >= 0:
            is_sent = any(frame["name"].startswith(_COLLECTIVE_PREFIX) for frame in stack)
            place = bisect_right(sync_ends_us, change["ts"]) if is_sent else len(sync_ends_us)
            open_blocks[address] = (size, sync_ends_us[place] if place < len(sync_ends_us) else math.inf)
            if before is not None:
                frees.append(_UnseenFree(time_us=min(before[1], change["ts"]), address=address, bytes=before[0]))
    frees += [
        _UnseenFree(time_us=free_us, address=address, bytes=size)
        for address, (size, free_us) in open_blocks.items()
        if free_us < math.inf
    ]
    return sorted(frees, key=lambda free: free.time_us)


def _stacks(changes: Sequence[Mapping[str, Any]], ranges: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    """For each change, the ranges open on its thread, innermost first."""
    open_by_thread: dict[Any, list[Mapping[str, Any]]] = {}
    stacks, place = [], 0
    for change in changes:
        while place < len(ranges) and ranges[place]["ts"] <= change["ts"]:
            thread = open_by_thread.setdefault(ranges[place].get("tid"), [])
            _close(thread, ranges[place]["ts"])
            thread.append(ranges[place])
            place += 1
        thread = open_by_thread.setdefault(change.get("tid"), [])
        _close(thread, change["ts"])
        stacks.append([{"name": opened["name"], "filename": "", "line": 0} for opened in reversed(thread)])
    return stacks


def _close(thread: list[Mapping[str, Any]], now_us: float) -> None:
    thread[:] = [opened for opened in thread if opened["ts"] + opened["dur"] >= now_us]


def _segment(block: Mapping[str, Any]) -> dict[str, Any]:
    size = block["size"]
    return {
        "device": 0,
        "address": block["address"],
        "total_size": size,
        "allocated_size": size,
        "active_size": size,
        "requested_size": size,
        "stream": 0,
        "segment_type": "host",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": block["frames"],
        "blocks": [{**block, "state": "active_allocated"}],
    }


def _annotations(ranges: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The START and END marks of each annotation, as a snapshot has them."""
    marks = [
        {"stage": stage, "name": event["name"], "device": 0, "time_us": event["ts"] + after_us}
        for event in ranges
        if event["cat"] == "user_annotation"
        for stage, after_us in (("START", 0.0), ("END", event["dur"]))
    ]
    return sorted(marks, key=lambda mark: mark["time_us"])
