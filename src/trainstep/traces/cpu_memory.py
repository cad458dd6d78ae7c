"""The CPU allocator's events, from a trace of torch's profiler, in the form of a CUDA memory snapshot: one reader serves both.

    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler: ...
    profiler.export_chrome_trace(path)
    memory = cpu_memory(json.loads(path.read_text()))
    snapshot = snapshot_of(memory.document, where="CPU")

The host's allocator neither rounds nor keeps a cache that torch knows of, so every held block is a segment of its own. A
stack is the operators and ranges open on the thread, innermost first; autograd runs on the caller's thread there.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MEMORY = "[memory]"
_RANGES = ("cpu_op", "user_annotation")


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
    held: dict[int, dict[str, Any]] = {}
    written = []
    for change, stack in zip(changes, stacks, strict=True):
        size, address = int(change["args"]["Bytes"]), int(change["args"]["Addr"])
        common = {"addr": address, "size": abs(size), "stream": 0, "time_us": change["ts"]}
        if size >= 0:
            held[address] = {"size": size, "requested_size": size, "address": address, "frames": stack}
            written.append({"action": "alloc", "frames": stack, **common})
        else:
            held.pop(address, None)
            written += [{"action": action, "frames": [], **common} for action in ("free_requested", "free_completed")]
    document = {
        "segments": [_segment(block) for block in held.values()],
        "device_traces": [written],
        "external_annotations": _annotations(ranges),
    }
    counted = [int(change["args"]["Total Allocated"]) for change in changes]
    before = counted[0] - int(changes[0]["args"]["Bytes"])
    return CpuMemory(
        document=document,
        times_us=tuple(change["ts"] for change in changes),
        total_bytes=tuple(count - before for count in counted),
    )


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
