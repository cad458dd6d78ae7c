"""A snapshot that anyone recorded, as tables: what was held when most was, by where it was born, and the largest with stacks.

Nothing but stacks tells whose an allocation is there, so categories are where it was born: torch's optimizers, autograd's
threads (which run no Python), the other lines of Python.
"""

from collections import Counter
from collections.abc import Sequence

from trainstep.report.answers import Answer
from trainstep.report.forms import BYTES, COUNT, PERCENT, TEXT, byte_words, percent
from trainstep.report.rows import grouped
from trainstep.report.tables import Column, Table
from trainstep.traces.memory_timeline import Allocation, MemoryTimeline

_MOST_LISTED = 30
_OPTIMIZER = "torch/optim/"
_BACKWARD = "backward (no Python stack)"
_BEFORE = "before the history began"


def snapshot_tables(timeline: MemoryTimeline, *, min_share: float) -> list[Table]:
    """What was held when most was."""
    peak = timeline.peak()
    held = [one for one in timeline.allocations if one.held_at(peak)]
    return [_totals(timeline, peak), _by_origin(held), _largest(held, min_share)]


def snapshot_answer(timeline: MemoryTimeline) -> Answer:
    """What was allocated when most was, and where most of it was born."""
    peak = timeline.peak()
    held = [one for one in timeline.allocations if one.held_at(peak)]
    by_origin = grouped(held, origin)
    born = max(by_origin, key=lambda name: _bytes(by_origin[name]), default="")
    share = percent(_bytes(by_origin[born]) / (_bytes(held) or 1)) if by_origin else ""
    most = f", {share} % of it born in {born}" if by_origin else ""
    size = byte_words(int(timeline.allocated_bytes[peak]))
    what = "highest of what is left of the history" if timeline.snapshot.history_is_full else "peak"
    return Answer(
        workload="memory",
        verdict=f"{size} were allocated at the {what}{most}.",
        suggestion="`trainstep memory` of the step sorts it by parameters, optimizer state, activations, and says what to cut.",
    )


def snapshot_notes(timeline: MemoryTimeline) -> list[str]:
    """What a reader must know: whether the highest is a peak at all. [Note: the ring] in traces/snapshot.py"""
    events = len(timeline.snapshot.events)
    found = []
    highest = byte_words(int(timeline.requested_bytes.max()))
    if timeline.snapshot.history_is_full:
        found.append(
            f"The history holds {events:,} events, as a full ring does: its beginning is lost, and {highest} is the highest of "
            "what is left, not the peak; record with a larger max_entries."
        )
    elif timeline.held_before_bytes:
        found.append(
            f"The history began when {byte_words(timeline.held_before_bytes)} were held: an earlier peak would not be in it."
        )
    retries = sum(event.action == "oom" for event in timeline.snapshot.events)
    if retries:
        found.append(f"Memory ran out {retries} times in this history.")
    return [
        *found,
        "Requested: what tensors asked for. Allocated: with the allocator's rounding. Reserved: its segments.",
    ]


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
        {"born": born, "held": _bytes(group), "share": _bytes(group) / total, "allocations": len(group)}
        for born, group in groups
    ]
    columns = (
        Column("where it was born", TEXT, "born"),
        Column("held", BYTES),
        Column("share (%)", PERCENT, "share"),
        Column("allocations", COUNT),
    )
    return Table.of("Held when most was", lines, columns)


def _bytes(allocations: Sequence[Allocation]) -> int:
    return sum(one.requested_bytes for one in allocations)


def origin(one: Allocation) -> str:
    """Where an allocation was born, as far as its stack tells."""
    if one.time_us is None and not one.stack:
        return _BEFORE
    if not one.stack:
        return _BACKWARD
    if any(_OPTIMIZER in frame.file for frame in one.stack):
        return "optimizer"
    return "modules being built" if any(frame.function == "__init__" for frame in one.stack) else "other Python"


def _largest(held: Sequence[Allocation], min_share: float) -> Table:
    least = min_share * _bytes(held)
    alike = Counter((one.requested_bytes, one.stack_words()) for one in held if one.requested_bytes >= least)
    ranked = sorted(alike.items(), key=lambda item: -item[0][0] * item[1])[:_MOST_LISTED]
    lines = [{"each": size, "times": count, "born at": words} for (size, words), count in ranked]
    columns = (Column("each", BYTES), Column("times", COUNT), Column("born at"))
    note = f"Under {percent(min_share)} % of the peak each: not listed."
    return Table.of("Largest allocations held then", lines, columns, note=note)
