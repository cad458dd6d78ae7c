"""A snapshot that anyone recorded, as tables: what was held when most was, by where it was born, and the largest with stacks.

Nothing but stacks tells whose an allocation is there, so categories are where it was born: torch's optimizers, autograd's
threads (which run no Python), the other lines of Python.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from trainstep.report.forms import ABSENT, byte_words, percent
from trainstep.report.hand_built import Column
from trainstep.report.tables import Entry, Table
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
    end = timeline.end
    lines = {
        "requested": (int(timeline.requested_bytes[peak]), int(timeline.requested_bytes[end])),
        "rounding": tuple(int(timeline.allocated_bytes[at] - timeline.requested_bytes[at]) for at in (peak, end)),
        "allocated": (int(timeline.allocated_bytes[peak]), int(timeline.allocated_bytes[end])),
        "reserved": (None, reserved),
    }
    name = "at the highest" if snapshot.history_is_full else "at the peak"
    columns = (Column(title=""), Column(title=name, number=True), Column(title="at the end", number=True))
    entries = tuple((Entry(text=line), *(_bytes(size) for size in sizes)) for line, sizes in lines.items())
    raw: Sequence[Mapping[str, Any]] = (
        {
            "events_count": len(snapshot.events),
            "history_full": snapshot.history_is_full,
            "requested_peak_bytes": lines["requested"][0],
            "allocated_peak_bytes": lines["allocated"][0],
            "reserved_bytes": reserved,
        },
    )
    return Table(title="Snapshot", columns=columns, entries=entries, raw=tuple(raw))


def _by_origin(held: Sequence[Allocation]) -> Table:
    groups: dict[str, tuple[int, int]] = {}
    for one in held:
        size, count = groups.get(origin(one), (0, 0))
        groups[origin(one)] = (size + one.requested_bytes, count + 1)
    total = sum(size for size, _ in groups.values()) or 1
    ranked = sorted(groups.items(), key=lambda item: -item[1][0])
    columns = ("where it was born", "held", "share (%)", "allocations")
    return Table(
        title="Held when most was",
        columns=tuple(Column(title=title, number=place > 0) for place, title in enumerate(columns)),
        entries=tuple(
            (Entry(text=name), _bytes(size), Entry(text=percent(size / total), sort=size), Entry(text=f"{n:,}", sort=n))
            for name, (size, n) in ranked
        ),
    )


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
    total = sum(one.requested_bytes for one in held)
    groups: dict[tuple[int, str], int] = {}
    for one in held:
        if one.requested_bytes >= min_share * total:
            group = (one.requested_bytes, one.stack_words())
            groups[group] = groups.get(group, 0) + 1
    ranked = sorted(groups.items(), key=lambda item: -item[0][0] * item[1])[:_MOST_LISTED]
    return Table(
        title="Largest allocations held then",
        columns=(Column(title="each", number=True), Column(title="times", number=True), Column(title="born at")),
        entries=tuple(
            (Entry(text=byte_words(size), sort=size), Entry(text=f"{count:,}", sort=count), Entry(text=words))
            for (size, words), count in ranked
        ),
        note=f"Under {percent(min_share)} % of the peak each: not listed.",
    )


def _bytes(size: int | None) -> Entry:
    """With its unit."""
    return Entry(text=ABSENT) if size is None else Entry(text=byte_words(size), sort=size)
