"""Tells what the host did while the device worked, why it stood still, and which spans took longer in some step.

A launch's lead is the time from the launch on the host to the kernel's start on the device. A lead of milliseconds means that the
device is the limit, a lead of microseconds that the device waits for the host. Once the driver's queue is full (about a thousand
launches ahead) a launch itself blocks until the device catches up; a timeline shows this as a host that stands still.

A span's step is an outlier if its time (device time and the idle time before its kernels) exceeds the median of the steps by a
quarter and by 1 % of a step. Its cause is what else was different there: cudaMalloc, other kernels, or a host that came late. If
nothing was, the same kernels were all slower, which means the clock, or another user of the device.
"""

import bisect
import dataclasses
import itertools
import statistics
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from trainstep.config.run import Phase
from trainstep.traces.attribution import OUTSIDE, Place
from trainstep.traces.kineto import Call
from trainstep.traces.tables import Columns, columns_of, phases_of
from trainstep.traces.work import TraceWork, Work, by_step

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
"""A launch that waits for room in the queue takes over 10 times the median launch, and its kernel begins over 1 ms later."""
BLOCKED, ALLOCATION, QUEUE_FULL, NO_STALL = "blocked", "allocation", "queue full", "none"
_LEAST_EXCESS, _LEAST_STEP_SHARE = 0.25, 0.01
MALLOC, KERNELS, HOST, CLOCK = "cudaMalloc", "other kernels", "the host came late", "the same kernels, slower: clock"
_NO_DEVICE = "the same ops, slower"


@dataclass(frozen=True, kw_only=True)
class Stall:
    """Host time per step from the end of backward's span to the optimizer's first launch, and how it was spent."""

    gap_s: float
    blocked_s: float
    allocation_s: float
    behind_s: float
    """Lead of the optimizer's first kernel: how far the device was behind the host."""
    queue_full_s: float
    """Time in which a full queue blocked the host, in the whole step."""

    @property
    def kind(self) -> str:
        """Why the host stands still between backward and optimizer, or NO_STALL."""
        if self.blocked_s > 0.5 * self.gap_s:
            return BLOCKED
        if self.allocation_s > 0.5 * self.gap_s:
            return ALLOCATION
        return QUEUE_FULL if self.queue_full_s > 0 else NO_STALL

    def columns(self) -> Columns:
        """The stall as a table of one row."""
        return columns_of([{"kind": self.kind, **dataclasses.asdict(self)}])


def host_table(work: TraceWork) -> Columns:
    """One row per phase with means per step: host time, launches, lead, blocked, allocation, full queue. Empty without a device."""
    if not work.on_device:
        return {}
    calls = _calls_by_phase(work)
    phases = list(dict.fromkeys([*phases_of(work.pieces), *calls]))
    waiting = set(_waiting_launches(work))
    return columns_of([_phase_row(work, phase, calls.get(phase, []), waiting) for phase in phases])


def stall(work: TraceWork) -> Stall | None:
    """The stall between backward and optimizer, as the mean of the steps; None if no step has both."""
    attribution = work.attribution
    ends = sorted(
        span.end_ns
        for span in attribution.trace.ranges
        if span.annotation and span.thread == attribution.main and span.name == Phase.BACKWARD
    )
    blocked, allocated = (_CallTime(attribution.trace.calls, names) for names in (_BLOCKING, _ALLOCATIONS))
    queue_full_s = _seconds(_waiting_launches(work)) / len(work.steps)
    stalls = []
    for first in _first_pieces(work, str(Phase.OPTIMIZER)):
        place = bisect.bisect_right(ends, first.call.start_ns) if first.call is not None else 0
        if not place or first.call is None:
            continue
        start_ns, end_ns = ends[place - 1], first.call.start_ns
        stalls.append(
            Stall(
                gap_s=(end_ns - start_ns) / 1e9,
                blocked_s=blocked.between_s(start_ns, end_ns),
                allocation_s=allocated.between_s(start_ns, end_ns),
                behind_s=max(0, first.start_ns - end_ns) / 1e9,
                queue_full_s=queue_full_s,
            )
        )
    if not stalls:
        return None
    names = [field.name for field in dataclasses.fields(Stall)]
    return Stall(**{name: statistics.fmean(getattr(stall, name) for stall in stalls) for name in names})


def launch_count(work: TraceWork) -> float:
    """The number of launches per step."""
    return len(_calls_named(work.attribution.trace.calls, _LAUNCHES)) / len(work.steps)


def outliers_table(work: TraceWork) -> Columns:
    """One row per outlier, the largest excess first: phase, span, layer, step, times, cause. Empty for fewer than three steps."""
    if len(work.steps) < 3:
        return {}
    allocations = _allocations(work)
    by_span: dict[tuple[str, str, int | None], dict[int, _SpanTime]] = {}
    for number, pieces in by_step(work).items():
        groups: dict[tuple[str, str, int | None], list[Work]] = {}
        for piece in pieces:
            groups.setdefault(_key(piece.place), []).append(piece)
        for key, group in groups.items():
            by_span.setdefault(key, {})[number] = _SpanTime(
                time_ns=sum(piece.duration_ns for piece in group),
                gap_ns=sum(piece.gap_ns for piece in group),
                names=frozenset(Counter(piece.name for piece in group).items()),
                allocations=allocations[(number, *key)],
            )
    least_ns = _LEAST_STEP_SHARE * statistics.median(step.window_ns for step in work.steps)
    rows: list[dict[str, Any]] = []
    for (phase, span, layer), times in by_span.items():
        median_ns = statistics.median([time.total_ns for time in times.values()])
        all_times = _SpanTimes(list(times.values()))
        for number, time in times.items():
            excess_ns = time.total_ns - median_ns
            if excess_ns > max(_LEAST_EXCESS * median_ns, least_ns) and len(times) > 1:
                rows.append(
                    {
                        "phase": phase,
                        "span": span,
                        "layer": "" if layer is None else str(layer),
                        "step": number,
                        "time_s": time.total_ns / 1e9,
                        "median_s": median_ns / 1e9,
                        "cause": _cause(time, all_times, excess_ns, work.on_device),
                    }
                )
    return columns_of(sorted(rows, key=lambda row: row["median_s"] - row["time_s"]))


def _phase_row(work: TraceWork, phase: str, calls: Sequence[Call], waiting: Collection[Call]) -> dict[str, Any]:
    """A row of `host_table`. `waiting`: the launches that waited for room in the queue."""
    steps = len(work.steps)
    pieces = [piece for piece in work.pieces if piece.place.phase == phase]
    leads = [piece.start_ns - piece.call.start_ns for piece in pieces if piece.call is not None]
    launches, blocked = _calls_named(calls, _LAUNCHES), _calls_named(calls, _BLOCKING)
    allocations = _calls_named(calls, _ALLOCATIONS)
    waiting_here = [piece.call for piece in pieces if piece.call is not None and piece.call in waiting]
    return {
        "phase": phase,
        "host_s": _host_s(work, phase) / steps,
        "device_s": sum(piece.duration_ns for piece in pieces) / 1e9 / steps,
        "idle_s": sum(piece.gap_ns for piece in pieces) / 1e9 / steps,
        "launches": len(launches) / steps,
        "launch_s": _seconds(launches) / steps,
        "lead_s": statistics.median(leads) / 1e9 if leads else 0.0,
        "blocked_s": _seconds(blocked) / steps,
        "allocations": len(allocations) / steps,
        "allocation_s": _seconds(allocations) / steps,
        "queue_full": len(waiting_here) / steps,
        "queue_full_s": _seconds(waiting_here) / steps,
    }


def _calls_by_phase(work: TraceWork) -> dict[str, list[Call]]:
    """Phase -> calls. A launch has its kernel's phase, another call the phase at work on its thread."""
    phase_of = {piece.call.correlation: piece.place.phase for piece in work.pieces if piece.call is not None}
    calls: dict[str, list[Call]] = {}
    start_ns = min(step.start_ns for step in work.steps)
    for call in work.attribution.trace.calls:
        if call.start_ns < start_ns:
            continue
        phase = phase_of.get(call.correlation)
        if phase is None and call.name.startswith((*_LAUNCHES, *_BLOCKING, *_ALLOCATIONS)):
            place = work.attribution.place_at(call.thread, call.start_ns)
            if place.step is None and work.attribution.named:
                continue  # a call of the profiler's, or the user's between steps
            phase = place.phase
        calls.setdefault(phase or OUTSIDE, []).append(call)
    return calls


def _host_s(work: TraceWork, phase: str) -> float:
    """Seconds inside the phase's spans on the main thread. `OUTSIDE` has what the spans leave of the steps."""
    attribution = work.attribution
    spans = [span for span in attribution.trace.ranges if span.annotation and span.thread == attribution.main]
    if phase != OUTSIDE:
        return sum(span.duration_ns for span in spans if span.name == phase) / 1e9
    inside_ns = sum(span.duration_ns for span in spans if span.name in tuple(map(str, Phase)))
    return max(0, sum(step.window_ns for step in work.steps) - inside_ns) / 1e9


def _first_pieces(work: TraceWork, phase: str) -> list[Work]:
    """The first piece of this phase in each step."""
    firsts: dict[int | None, Work] = {}
    for piece in work.pieces:
        if piece.place.phase == phase:
            firsts.setdefault(piece.place.step, piece)
    return list(firsts.values())


def _waiting_launches(work: TraceWork) -> list[Call]:
    """Launches that waited for room in the queue."""
    times = [launch.duration_ns for launch in _calls_named(work.attribution.trace.calls, _LAUNCHES)]
    long_ns = _LONG_LAUNCH * statistics.median(times) if times else 0.0
    return [
        piece.call
        for piece in work.pieces
        if piece.call is not None
        and piece.call.name.startswith(_LAUNCHES)
        and piece.call.duration_ns > long_ns
        and piece.start_ns - piece.call.start_ns > _FAR_BEHIND_NS
    ]


class _CallTime:
    """Tells, in logarithmic time, how long the host spent in calls of some names between any two moments."""

    def __init__(self, calls: Sequence[Call], names: tuple[str, ...]) -> None:
        """`calls` are in order of start."""
        matching = _calls_named(calls, names)
        self._starts_ns = [call.start_ns for call in matching]
        self._before_ns = [0, *itertools.accumulate(call.duration_ns for call in matching)]

    def between_s(self, start_ns: int, end_ns: int) -> float:
        """Seconds in calls that began in [start_ns, end_ns)."""
        first, last = (bisect.bisect_left(self._starts_ns, time_ns) for time_ns in (start_ns, end_ns))
        return (self._before_ns[last] - self._before_ns[first]) / 1e9


def _calls_named(calls: Sequence[Call], names: tuple[str, ...]) -> list[Call]:
    return [call for call in calls if call.name.startswith(names)]


def _seconds(calls: Sequence[Call]) -> float:
    return sum(call.duration_ns for call in calls) / 1e9


@dataclass(frozen=True, kw_only=True)
class _SpanTime:
    """One span in one step."""

    time_ns: int
    gap_ns: int
    names: frozenset[tuple[str, int]]
    """Each piece's name with the number of pieces that have it."""
    allocations: int

    @property
    def total_ns(self) -> int:
        return self.time_ns + self.gap_ns


class _SpanTimes:
    """One span in all of its steps; compares each step with the others in logarithmic time."""

    def __init__(self, times: Sequence[_SpanTime]) -> None:
        self._allocations = sorted(time.allocations for time in times)
        self._gaps_ns = sorted(time.gap_ns for time in times)
        self._names = Counter(time.names for time in times)

    def median_allocations_without(self, time: _SpanTime) -> float:
        return _median_without(self._allocations, time.allocations)

    def median_gap_ns_without(self, time: _SpanTime) -> float:
        return _median_without(self._gaps_ns, time.gap_ns)

    def is_alone_with_names_of(self, time: _SpanTime) -> bool:
        return self._names[time.names] == 1


def _median_without(ordered: Sequence[int], value: int) -> float:
    """The median of `ordered` without one occurrence of `value`."""
    left_out = bisect.bisect_left(ordered, value)

    def rest(index: int) -> int:
        return ordered[index + (index >= left_out)]

    count = len(ordered) - 1
    return (rest((count - 1) // 2) + rest(count // 2)) / 2


def _cause(time: _SpanTime, times: _SpanTimes, excess_ns: float, on_device: bool) -> str:
    if time.allocations > times.median_allocations_without(time):
        return MALLOC
    if times.is_alone_with_names_of(time):
        return KERNELS
    late_ns = time.gap_ns - times.median_gap_ns_without(time)
    if late_ns > 0.5 * excess_ns:
        return HOST
    return CLOCK if on_device else _NO_DEVICE


def _allocations(work: TraceWork) -> Counter[tuple[int, str, str, int | None]]:
    counts: Counter[tuple[int, str, str, int | None]] = Counter()
    for call in _calls_named(work.attribution.trace.calls, _ALLOCATIONS):
        place = work.attribution.place_at(call.thread, call.start_ns)
        if place.step is not None:
            counts[(place.step, *_key(place))] += 1
    return counts


def _key(place: Place) -> tuple[str, str, int | None]:
    return place.phase, place.span, place.layer
