"""A trace as pieces of work: each with its place, class, time, and the idle time of the device right before it.

`read_work(trace)` is where every table begins. On a device the pieces are kernels and copies; in a trace without a device
they are ops with their own (self) time, and what lies between ops is a piece too, so that a step adds up either way.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainstep.config.phases import Phase
from trainstep.traces.attribution import OUTSIDE, Assigned, Attribution, Place
from trainstep.traces.contexts import step_number
from trainstep.traces.intervals import gaps_before, union_ns
from trainstep.traces.kernel_classes import OVERHEAD, class_of_op, kernel_class
from trainstep.traces.kernel_names import short_name
from trainstep.traces.kineto import Activity, Call, Range, Trace
from trainstep.traces.repetition import with_steps

OP = "op"
BETWEEN = "(between ops)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One kernel, copy or op. `gap_ns`: how long the device had nothing to do before it. `call`: what launched it."""

    name: str
    kind: str
    place: Place
    start_ns: int
    duration_ns: int
    gap_ns: int = 0
    call: Call | None = None


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step. `window_ns`: its span on the host; `busy_ns`: with at least one piece at work; `after_ns`: idle at its end."""

    number: int
    start_ns: int
    window_ns: int
    busy_ns: int
    after_ns: int


@dataclass(frozen=True, kw_only=True)
class TraceWork:
    """All pieces of a trace, its steps, and how pieces found their place."""

    attribution: Attribution
    on_device: bool
    pieces: tuple[Work, ...]
    steps: tuple[Step, ...]
    total_ns: int
    """Sum of all pieces: all of the trace's device time."""
    by_fallback_ns: int
    split: str
    """How a trace that marks no steps was split into them; empty where it marks them."""

    @property
    def assigned_share(self) -> float:
        """Of the trace's own device time (of a CPU's ops: of all their time), what pieces put into a phase of the tables."""
        events_ns = (
            sum(one.duration_ns for one in self.attribution.trace.activities) if self.on_device else self.total_ns
        )
        placed_ns = sum(one.duration_ns for one in self.pieces if one.place.phase in (*map(str, Phase), OUTSIDE))
        return placed_ns / events_ns if events_ns else 1.0

    @property
    def fallback_share(self) -> float:
        return self.by_fallback_ns / self.total_ns if self.total_ns else 0.0


def read_work(trace: Trace) -> TraceWork:
    """Pieces and steps of a trace. One that marks no steps is split by what repeats (repetition.py), or is one step."""
    trace, split = with_steps(trace)
    attribution = Attribution(trace)
    on_device = bool(trace.activities)
    assigned = attribution.assign() if on_device else _own_times(attribution)
    if not assigned:
        raise ValueError("the trace holds no kernel, and no op in any of its steps: record it around whole steps")
    windows = _windows(trace, attribution)
    if all(start == end for start, end in windows.values()):
        raise ValueError("the steps of the trace take no time: record it around whole steps")
    pieces = _pieces(assigned, windows, on_device)
    total_ns = sum(one.activity.duration_ns for one in assigned)
    if sum(one.duration_ns for one in pieces) != total_ns:
        raise RuntimeError("time of the trace was lost between its events and its pieces of work")
    mine = _grouped(pieces, list(windows))
    return TraceWork(
        attribution=attribution,
        on_device=on_device,
        pieces=tuple(pieces),
        steps=tuple(_step(number, window, mine[number], on_device) for number, window in windows.items()),
        total_ns=total_ns,
        by_fallback_ns=sum(one.activity.duration_ns for one in assigned if one.place.how == "fallback"),
        split=split,
    )


def _own_times(attribution: Attribution) -> list[Assigned]:
    """Each op's and annotation's duration without what runs inside it, in steps and phases only."""
    found = []
    for nesting in attribution.nestings.values():
        for one, own_ns in zip(nesting.ranges, nesting.self_ns(), strict=True):
            place = attribution.place(one.thread, one.start_ns)
            if own_ns <= 0 or (attribution.named and place.step is None and place.phase == OUTSIDE):
                continue
            activity = Activity(
                kind=OP,
                name=BETWEEN if one.annotation else one.name,
                device=-1,
                stream=-1,
                start_ns=one.start_ns,
                duration_ns=own_ns,
                correlation=-1,
            )
            found.append(Assigned(activity=activity, place=place, call=None))
    return sorted(found, key=lambda one: one.activity.start_ns)


def _windows(trace: Trace, attribution: Attribution) -> dict[int, tuple[int, int]]:
    """Step -> its start and end on the main thread."""
    named = {
        number: (one.start_ns, one.end_ns)
        for one in trace.ranges
        if one.annotation and one.thread == attribution.main and (number := step_number(one.name)) is not None
    }
    if named:
        return named
    events: list[Activity | Call | Range] = [*trace.activities, *trace.calls, *trace.ranges]
    return {0: (min(one.start_ns for one in events), max(one.end_ns for one in events))}


def _pieces(assigned: Sequence[Assigned], windows: dict[int, tuple[int, int]], on_device: bool) -> list[Work]:
    intervals = [(one.activity.start_ns, one.activity.end_ns) for one in assigned]
    gaps = gaps_before(intervals, intervals[0][0]) if on_device and intervals else [0] * len(intervals)
    begun: set[int] = set()
    known: dict[tuple[str, str], tuple[str, str]] = {}
    pieces = []
    for one, gap_ns in zip(assigned, gaps, strict=True):
        number = one.place.step if one.place.step is not None else 0
        if number in windows and number not in begun and on_device:  # what lies before the step is no idle time of it
            begun.add(number)
            since_start = one.activity.start_ns - windows[number][0]
            gap_ns = max(0, min(gap_ns, since_start) if len(begun) > 1 else since_start)
        identity = (one.activity.kind, one.activity.name)
        name, kind = known.get(identity) or known.setdefault(identity, _name_and_class(one.activity))
        pieces.append(
            Work(
                name=name,
                kind=kind,
                place=one.place,
                start_ns=one.activity.start_ns,
                duration_ns=one.activity.duration_ns,
                gap_ns=gap_ns,
                call=one.call,
            )
        )
    return pieces


def _name_and_class(activity: Activity) -> tuple[str, str]:
    if activity.kind != OP:
        return short_name(activity.name), kernel_class(activity)
    return activity.name, OVERHEAD if activity.name == BETWEEN else class_of_op(activity.name)


def _step(number: int, window: tuple[int, int], mine: Sequence[Work], on_device: bool) -> Step:
    spans = [(one.start_ns, one.start_ns + one.duration_ns) for one in mine]
    end_ns = max((end for _, end in spans), default=window[0])
    return Step(
        number=number,
        start_ns=window[0],
        window_ns=window[1] - window[0],
        busy_ns=union_ns(spans) if on_device else sum(one.duration_ns for one in mine),
        after_ns=max(0, window[1] - end_ns) if on_device else 0,
    )


def by_step(work: TraceWork) -> dict[int, list[Work]]:
    """Step -> its pieces; those of no step are the first's."""
    return _grouped(work.pieces, [step.number for step in work.steps])


def _grouped(pieces: Sequence[Work], numbers: Sequence[int]) -> dict[int, list[Work]]:
    found: dict[int, list[Work]] = {number: [] for number in numbers}
    first = min(numbers)
    for one in pieces:
        found.setdefault(first if one.place.step is None else one.place.step, []).append(one)
    return found
