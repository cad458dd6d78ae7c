"""Tables of a foreign allocator snapshot: memory at its peak by origin, and the largest allocations.

A snapshot has no categories, only stacks, so allocations are sorted by their origin: torch's optimizers, autograd's threads (which
run no Python), modules being built, other Python.
"""

from collections import Counter
from collections.abc import Sequence

from trainstep.grouping import grouped
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.forms import BYTES, COUNT, PERCENT, TEXT, byte_words, percent
from trainstep.report.kit.tables import Column, Table
from trainstep.traces.memory_timeline import Allocation, MemoryTimeline

_MOST_LISTED = 30
_OPTIMIZER = "torch/optim/"
_BACKWARD = "backward (no Python stack)"
_BEFORE = "before the history began"


def snapshot_tables(timeline: MemoryTimeline, *, min_share: float) -> list[Table]:
    """The totals, the memory by origin and the largest allocations at the fullest moment; no peak if the ring was full."""
    peak = timeline.peak()
    allocations = _held_at(timeline, peak)
    return [_totals(timeline, peak), _by_origin(allocations), _largest(allocations, min_share)]


def snapshot_answer(timeline: MemoryTimeline) -> Answer:
    """The bytes allocated at the peak, and the origin of most of them."""
    peak = timeline.peak()
    allocations = _held_at(timeline, peak)
    by_origin = grouped(allocations, origin)
    largest = max(by_origin, key=lambda name: _bytes(by_origin[name]), default="")
    share = percent(_bytes(by_origin[largest]) / (_bytes(allocations) or 1)) if by_origin else ""
    most = f", {share} % of it in {largest}" if by_origin else ""
    size = byte_words(int(timeline.allocated_bytes[peak]))
    what = "highest point of the remaining history" if timeline.snapshot.history_is_full else "peak"
    return Answer(
        workload="memory",
        verdict=f"{size} were allocated at the {what}{most}.",
        suggestion="`trainstep memory` of the step sorts it by parameters, optimizer state, activations, and says what to cut.",
    )


def snapshot_notes(timeline: MemoryTimeline) -> list[str]:
    """Limits of the history (see [Note: the ring] in traces/snapshot.py), and the meaning of the lines."""
    notes = []
    if timeline.snapshot.history_is_full:
        highest = byte_words(int(timeline.requested_bytes.max()))
        notes.append(
            f"The history has {len(timeline.snapshot.events):,} events, which is a full ring: its beginning is lost, and "
            f"{highest} "
            "is the highest point of the rest, not the peak; record with a larger max_entries."
        )
    elif timeline.held_before_bytes:
        notes.append(
            f"{byte_words(timeline.held_before_bytes)} were held before the history began, so it cannot show an earlier peak."
        )
    retries = sum(event.action == "oom" for event in timeline.snapshot.events)
    if retries:
        notes.append(f"Memory ran out {retries} times in this history.")
    return [
        *notes,
        "Requested: bytes that tensors asked for. Allocated: with the allocator's rounding. Reserved: the allocator's "
        "segments.",
    ]


def _held_at(timeline: MemoryTimeline, moment: int) -> list[Allocation]:
    return [allocation for allocation in timeline.allocations if allocation.held_at(moment)]


def _totals(timeline: MemoryTimeline, peak: int) -> Table:
    snapshot = timeline.snapshot
    reserved = sum(segment.bytes for segment in snapshot.segments)
    name = "at the highest" if snapshot.history_is_full else "at the peak"
    requested, allocated = (
        [int(sizes[at]) for at in (peak, timeline.end)]
        for sizes in (timeline.requested_bytes, timeline.allocated_bytes)
    )
    lines = [
        {"line": "requested", name: requested[0], "at the end": requested[1]},
        {"line": "rounding", name: allocated[0] - requested[0], "at the end": allocated[1] - requested[1]},
        {"line": "allocated", name: allocated[0], "at the end": allocated[1]},
        {"line": "reserved", "at the end": reserved},
    ]
    raw = {
        "events_count": len(snapshot.events),
        "history_full": snapshot.history_is_full,
        "requested_peak_bytes": requested[0],
        "allocated_peak_bytes": allocated[0],
        "reserved_bytes": reserved,
    }
    columns = (Column("", TEXT, "line"), Column(name, BYTES), Column("at the end", BYTES))
    return Table.of("Snapshot", lines, columns, raw=[raw])


def _by_origin(held: Sequence[Allocation]) -> Table:
    total = _bytes(held) or 1
    groups = sorted(grouped(held, origin).items(), key=lambda item: -_bytes(item[1]))
    lines = [
        {"origin": name, "held": _bytes(group), "share": _bytes(group) / total, "allocations": len(group)}
        for name, group in groups
    ]
    columns = (
        Column("origin"),
        Column("held", BYTES),
        Column("share (%)", PERCENT, "share"),
        Column("allocations", COUNT),
    )
    return Table.of("Held at the highest moment, by origin", lines, columns)


def _bytes(allocations: Sequence[Allocation]) -> int:
    return sum(allocation.requested_bytes for allocation in allocations)


def origin(allocation: Allocation) -> str:
    """The part of the program that made an allocation, as far as its stack tells."""
    if allocation.time_us is None and not allocation.stack:
        return _BEFORE
    if not allocation.stack:
        return _BACKWARD
    if any(_OPTIMIZER in frame.file for frame in allocation.stack):
        return "optimizer"
    return "modules being built" if any(frame.function == "__init__" for frame in allocation.stack) else "other Python"


def _largest(held: Sequence[Allocation], min_share: float) -> Table:
    least = min_share * _bytes(held)
    alike = Counter(
        (allocation.requested_bytes, allocation.stack_words())
        for allocation in held
        if allocation.requested_bytes >= least
    )
    ranked = sorted(alike.items(), key=lambda item: -item[0][0] * item[1])[:_MOST_LISTED]
    lines = [{"each": size, "times": count, "allocated at": words} for (size, words), count in ranked]
    columns = (Column("each", BYTES), Column("times", COUNT), Column("allocated at"))
    note = f"Allocations under {percent(min_share)} % of the peak are not listed."
    return Table.of("Largest allocations at the highest moment", lines, columns, note=note)
