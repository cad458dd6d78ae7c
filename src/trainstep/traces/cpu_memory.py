"""The CPU allocator's events, from a trace of torch's profiler, in the form of a CUDA memory snapshot: one reader serves both.

    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler: ...
    profiler.export_chrome_trace(path)
    memory = cpu_memory(json.loads(path.read_text()))
    snapshot = snapshot_of(memory.document, where="CPU")

The host's allocator neither rounds nor keeps a cache that torch knows of, so every held block is a segment of its own. A
stack is the operators and ranges open on the thread, innermost first; autograd runs on the caller's thread there.

[Note: frees that nobody saw] gloo copies what it reduces, and whichever thread is last lets the copy go: on one of gloo's own
the profiler does not look, and its count never gets smaller again. Such a block is taken to be free from the end of the
`grad_sync` that follows, by when all messages were waited for, or from when its address is given out again, if that is earlier.
Any other block is known to be free when its address is given out again.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MEMORY = "[memory]"
_RANGES = ("cpu_op", "user_annotation")
_SENT = "c10d::"
"""How names of torch.distributed's operators begin."""
_SYNCHRONISED = "grad_sync"


@dataclass(frozen=True, kw_only=True)
class CpuMemory:
    """`document`: as torch.cuda.memory._snapshot() would give it. The rest: the allocator's own count, for holding ours against."""

    document: dict[str, Any]
    times_us: tuple[float, ...]
    total_bytes: tuple[int, ...]

    def allocated_bytes(self, time_us: float) -> int:
        """What the allocator said it had given out at that time, over what it had when the trace began."""
        place = bisect_right(self.times_us, time_us)
        return self.total_bytes[place - 1] if place else 0


def cpu_memory(trace: Mapping[str, Any]) -> CpuMemory:
    """Of a chrome trace's events. ValueError where it has none of memory."""
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
    unseen = _unseen_frees(changes, stacks, ranges)
    held: dict[int, dict[str, Any]] = {}
    written = []
    frees = iter([*unseen, _Unseen(time_us=math.inf, address=0, bytes=0)])
    free = next(frees)
    for change, stack in zip(changes, stacks, strict=True):
        while free.time_us <= change["ts"]:
            held.pop(free.address, None)
            written += _freed(free.address, free.bytes, free.time_us)
            free = next(frees)
        size, address = int(change["args"]["Bytes"]), int(change["args"]["Addr"])
        common = {"addr": address, "size": abs(size), "stream": 0, "time_us": change["ts"]}
        if size >= 0:
            held[address] = {"size": size, "requested_size": size, "address": address, "frames": stack}
            written.append({"action": "alloc", "frames": stack, **common})
        else:
            held.pop(address, None)
            written += _freed(address, -size, change["ts"])
    while free.time_us < math.inf:
        held.pop(free.address, None)
        written += _freed(free.address, free.bytes, free.time_us)
        free = next(frees)
    document = {
        "segments": [_segment(block) for block in held.values()],
        "device_traces": [written],
        "external_annotations": _annotations(ranges),
    }
    before = int(changes[0]["args"]["Total Allocated"]) - int(changes[0]["args"]["Bytes"])
    counted = [(change["ts"], int(change["args"]["Total Allocated"]) - before) for change in changes]
    times_us, total_bytes = _corrected(counted, unseen)
    return CpuMemory(document=document, times_us=times_us, total_bytes=total_bytes)


@dataclass(frozen=True, kw_only=True)
class _Unseen:
    """A block that was freed where the profiler does not look."""

    time_us: float
    address: int
    bytes: int


def _unseen_frees(
    changes: Sequence[Mapping[str, Any]],
    stacks: Sequence[Sequence[Mapping[str, Any]]],
    ranges: Sequence[Mapping[str, Any]],
) -> list[_Unseen]:
    """In the order of time. [Note: frees that nobody saw]"""
    waited_us = sorted(one["ts"] + one["dur"] for one in ranges if one["name"] == _SYNCHRONISED)
    held: dict[int, tuple[int, float]] = {}
    found = []
    for change, stack in zip(changes, stacks, strict=True):
        size, address = int(change["args"]["Bytes"]), int(change["args"]["Addr"])
        before = held.pop(address, None)
        if size >= 0:
            is_sent = any(frame["name"].startswith(_SENT) for frame in stack)
            place = bisect_right(waited_us, change["ts"]) if is_sent else len(waited_us)
            held[address] = (size, waited_us[place] if place < len(waited_us) else math.inf)
            if before is not None:
                found.append(_Unseen(time_us=min(before[1], change["ts"]), address=address, bytes=before[0]))
    found += [
        _Unseen(time_us=waited, address=address, bytes=size)
        for address, (size, waited) in held.items()
        if waited < math.inf
    ]
    return sorted(found, key=lambda one: one.time_us)


def _freed(address: int, size: int, time_us: float) -> list[dict[str, Any]]:
    common = {"addr": address, "size": size, "stream": 0, "time_us": time_us, "frames": []}
    return [{"action": action, **common} for action in ("free_requested", "free_completed")]


def _corrected(
    counted: Sequence[tuple[float, int]], unseen: Sequence[_Unseen]
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Times, and the allocator's count at each, less what it does not know to be free."""
    moments = sorted(
        [*((time_us, 1, total) for time_us, total in counted), *((one.time_us, 0, one.bytes) for one in unseen)]
    )
    told = lost = 0
    times, totals = [], []
    for time_us, is_count, size in moments:
        told, lost = (size, lost) if is_count else (told, lost + size)
        times.append(time_us)
        totals.append(told - lost)
    return tuple(times), tuple(totals)


def _stacks(changes: Sequence[Mapping[str, Any]], ranges: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    """For each change, the ranges that were open on its thread."""
    open_: dict[Any, list[Mapping[str, Any]]] = {}
    found, place = [], 0
    for change in changes:
        while place < len(ranges) and ranges[place]["ts"] <= change["ts"]:
            thread = open_.setdefault(ranges[place].get("tid"), [])
            _close(thread, ranges[place]["ts"])
            thread.append(ranges[place])
            place += 1
        thread = open_.setdefault(change.get("tid"), [])
        _close(thread, change["ts"])
        found.append([{"name": one["name"], "filename": "", "line": 0} for one in reversed(thread)])
    return found


def _close(thread: list[Mapping[str, Any]], now_us: float) -> None:
    thread[:] = [one for one in thread if one["ts"] + one["dur"] >= now_us]


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
    """START and END of each range of the user's, as a snapshot has them."""
    marks = [
        {"stage": stage, "name": one["name"], "device": 0, "time_us": one["ts"] + late}
        for one in ranges
        if one["cat"] == "user_annotation"
        for stage, late in (("START", 0.0), ("END", one["dur"]))
    ]
    return sorted(marks, key=lambda mark: mark["time_us"])
