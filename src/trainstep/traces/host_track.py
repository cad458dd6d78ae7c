"""What the host did while the device worked: launches and their lead, time blocked, allocation, a full queue, the stall.

Lead: from a launch on the host to the kernel's start on the device. A long lead means that the device is the limit; a lead
of microseconds that it waits for the host. Once the driver's queue is full (about a thousand launches ahead) a launch itself
blocks until the device catches up, which is what a timeline shows as a host that stands still.
"""

import bisect
import dataclasses
import itertools
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from trainstep.config.phases import Phase
from trainstep.traces.attribution import OUTSIDE
from trainstep.traces.kineto import Call
from trainstep.traces.tables import Columns, columns_of, phases_of
from trainstep.traces.work import TraceWork, Work

_LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cuGraphLaunch")
_BLOCKING = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
)
_ALLOCATIONS = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cuMemAlloc", "cuMemCreate", "cuMemMap")
_LONG_LAUNCH, _FAR_BEHIND_NS = 10, 1_000_000
"""A launch that waits for room in the queue takes over this many times the median, its kernel begins over this much later."""
BLOCKED, ALLOCATION, QUEUE_FULL, NO_STALL = "blocked", "allocation", "queue full", "none"


@dataclass(frozen=True, kw_only=True)
class Stall:
    """Host time from backward's return to the optimizer's first launch, a step, and what it went into. Seconds."""

    gap_s: float
    blocked_s: float
    allocation_s: float
    behind_s: float
    """How far the device was behind the host when the optimizer's first kernel was launched."""
    queue_full_s: float
    """Time the host was held up by a full queue before that, in the whole step."""

    @property
    def kind(self) -> str:
        """Why a timeline shows the host standing still between backward and optimizer, or NO_STALL."""
        if self.blocked_s > 0.5 * self.gap_s:
            return BLOCKED
        if self.allocation_s > 0.5 * self.gap_s:
            return ALLOCATION
        return QUEUE_FULL if self.queue_full_s > 0 else NO_STALL

    def columns(self) -> Columns:
        """As a table of one row."""
        return columns_of([{"kind": self.kind, **dataclasses.asdict(self)}])


def host_table(work: TraceWork) -> Columns:
    """A row a phase, per step: host time, launches, lead, blocked, allocation, full queue. Empty without a device."""
    if not work.on_device:
        return {}
    calls = _calls_by_phase(work)
    phases = [*phases_of(work.pieces), *(phase for phase in calls if phase not in phases_of(work.pieces))]
    full = set(_full_queue(work))
    return columns_of([_row(work, phase, calls.get(phase, []), full) for phase in phases])


def stall(work: TraceWork) -> Stall | None:
    """The stall between backward and optimizer, a step's mean; None where a step has not both."""
    attribution = work.attribution
    ends = sorted(
        one.end_ns
        for one in attribution.trace.ranges
        if one.annotation and one.thread == attribution.main and one.name == Phase.BACKWARD
    )
    blocked, allocated = (_HostTime(attribution.trace.calls, names) for names in (_BLOCKING, _ALLOCATIONS))
    firsts = _first_pieces(work, str(Phase.OPTIMIZER))
    queue_full_s = _seconds(_full_queue(work)) / len(work.steps)
    found = []
    for first in firsts:
        place = bisect.bisect_right(ends, first.call.start_ns) if first.call is not None else 0
        if not place or first.call is None:
            continue
        start_ns, end_ns = ends[place - 1], first.call.start_ns
        found.append(
            Stall(
                gap_s=(end_ns - start_ns) / 1e9,
                blocked_s=blocked.between_s(start_ns, end_ns),
                allocation_s=allocated.between_s(start_ns, end_ns),
                behind_s=max(0, first.start_ns - end_ns) / 1e9,
                queue_full_s=queue_full_s,
            )
        )
    if not found:
        return None
    names = ("gap_s", "blocked_s", "allocation_s", "behind_s", "queue_full_s")
    return Stall(**{name: statistics.fmean(getattr(one, name) for one in found) for name in names})


def launch_count(work: TraceWork) -> float:
    """Launches a step."""
    return len(_of(work.attribution.trace.calls, _LAUNCHES)) / len(work.steps)


def is_allocation(call: Call) -> bool:
    return call.name.startswith(_ALLOCATIONS)


def _row(work: TraceWork, phase: str, calls: Sequence[Call], waiting: Collection[Call]) -> dict[str, Any]:
    steps = len(work.steps)
    mine = [one for one in work.pieces if one.place.phase == phase]
    leads = [one.start_ns - one.call.start_ns for one in mine if one.call is not None]
    launches, blocked = _of(calls, _LAUNCHES), _of(calls, _BLOCKING)
    allocations = _of(calls, _ALLOCATIONS)
    full = [one.call for one in mine if one.call is not None and one.call in waiting]
    return {
        "phase": phase,
        "host_s": _host_s(work, phase) / steps,
        "device_s": sum(one.duration_ns for one in mine) / 1e9 / steps,
        "idle_s": sum(one.gap_ns for one in mine) / 1e9 / steps,
        "launches": len(launches) / steps,
        "launch_s": _seconds(launches) / steps,
        "lead_s": statistics.median(leads) / 1e9 if leads else 0.0,
        "blocked_s": _seconds(blocked) / steps,
        "allocations": len(allocations) / steps,
        "allocation_s": _seconds(allocations) / steps,
        "queue_full": len(full) / steps,
        "queue_full_s": _seconds(full) / steps,
    }


def _calls_by_phase(work: TraceWork) -> dict[str, list[Call]]:
    """A launch's phase is its kernel's; of the other calls the phase at work on their thread."""
    phase_of = {one.call.correlation: one.place.phase for one in work.pieces if one.call is not None}
    found: dict[str, list[Call]] = {}
    start_ns = min(step.start_ns for step in work.steps)
    for call in work.attribution.trace.calls:
        if call.start_ns < start_ns:
            continue
        phase = phase_of.get(call.correlation)
        if phase is None and call.name.startswith((*_LAUNCHES, *_BLOCKING, *_ALLOCATIONS)):
            place = work.attribution.place(call.thread, call.start_ns)
            if place.step is None and work.attribution.named:
                continue  # the profiler's own, or its user's between steps
            phase = place.phase
        found.setdefault(phase or OUTSIDE, []).append(call)
    return found


def _host_s(work: TraceWork, phase: str) -> float:
    """Time inside the phase's spans on the main thread; of what is outside them, what is left of the steps."""
    attribution = work.attribution
    named = [one for one in attribution.trace.ranges if one.annotation and one.thread == attribution.main]
    if phase != OUTSIDE:
        return sum(one.duration_ns for one in named if one.name == phase) / 1e9
    inside = sum(one.duration_ns for one in named if one.name in tuple(map(str, Phase)))
    return max(0, sum(step.window_ns for step in work.steps) - inside) / 1e9


def _first_pieces(work: TraceWork, phase: str) -> list[Work]:
    """The first piece of that phase in each step."""
    firsts: dict[int | None, Work] = {}
    for one in work.pieces:
        if one.place.phase == phase:
            firsts.setdefault(one.place.step, one)
    return list(firsts.values())


def _full_queue(work: TraceWork) -> list[Call]:
    """Launches that waited for room in the queue."""
    times = [one.duration_ns for one in _of(work.attribution.trace.calls, _LAUNCHES)]
    long_ns = _LONG_LAUNCH * statistics.median(times) if times else 0.0
    return [
        one.call
        for one in work.pieces
        if one.call is not None
        and one.call.name.startswith(_LAUNCHES)
        and one.call.duration_ns > long_ns
        and one.start_ns - one.call.start_ns > _FAR_BEHIND_NS
    ]


class _HostTime:
    """Time that the host spent in calls of some names, between any two moments, in logarithmic time."""

    def __init__(self, calls: Sequence[Call], names: tuple[str, ...]) -> None:
        """`calls`: in order of start."""
        named = _of(calls, names)
        self._starts_ns = [one.start_ns for one in named]
        self._before_ns = [0, *itertools.accumulate(one.duration_ns for one in named)]

    def between_s(self, start_ns: int, end_ns: int) -> float:
        """Seconds in calls that began from `start_ns` to before `end_ns`."""
        first, last = (bisect.bisect_left(self._starts_ns, time_ns) for time_ns in (start_ns, end_ns))
        return (self._before_ns[last] - self._before_ns[first]) / 1e9


def _of(calls: Sequence[Call], names: tuple[str, ...]) -> list[Call]:
    return [one for one in calls if one.name.startswith(names)]


def _seconds(calls: Sequence[Call]) -> float:
    return sum(one.duration_ns for one in calls) / 1e9
