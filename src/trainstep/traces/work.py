"""Turns a trace into pieces of work: each with its place, class, time, and the device's idle time directly before it.

Every table begins with `read_work(trace)`. On a device the pieces are kernels and copies. In a trace without a device they are ops
with their own (self) time, and the time between ops is a piece too, so that a step adds up either way.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from trainstep.config.run import Phase
from trainstep.config.script import Part
from trainstep.traces.attribution import (
    BETWEEN,
    FALLBACK,
    OUTSIDE,
    REPLAYED,
    Assigned,
    Attribution,
    Place,
    placed_by_order,
)
from trainstep.traces.contexts import step_number
from trainstep.traces.kernel_classes import (
    COMMUNICATION,
    COPIES,
    OVERHEAD,
    class_of_op,
    is_library_message,
    kernel_class,
    short_name,
)
from trainstep.traces.kineto import Activity, Call, Range, Thread, Timed, Trace, collector_paused
from trainstep.traces.nesting import gaps_before, union_ns
from trainstep.traces.repetition import with_steps

OP = "op"
_MESSAGE = re.compile(r"(?:all_reduce|reduce_scatter|all_gather|broadcast)(?: |$)")
"""Spans of parallel/collectives.py."""
_LOADER = "enumerate(DataLoader)"
"""Prefix of torch's own ranges around a DataLoader's next batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work(Timed):
    """One kernel, copy or op. `gap_ns`: how long the device was idle before it. `call`: the call that launched it.

    `is_message`: a library's kernel that is a whole message.
    """

    kind: str
    place: Place
    gap_ns: int = 0
    call: Call | None = None
    is_message: bool = False


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step. `window_ns`: its span on the host; `busy_ns`: time with a piece at work; `after_ns`: idle time at its end."""

    number: int
    start_ns: int
    window_ns: int
    busy_ns: int
    after_ns: int


@dataclass(frozen=True, kw_only=True)
class TraceWork:
    """All pieces of a trace, its steps, and how the pieces were placed."""

    attribution: Attribution
    on_device: bool
    pieces: tuple[Work, ...]
    steps: tuple[Step, ...]
    total_ns: int
    """The sum of all pieces, which is all of the trace's device time."""
    by_fallback_ns: int
    replayed_ns: int
    """Time of graph replays whose places come from an eager step of the same work."""
    split: str
    """How a trace that marks no steps was split into steps; empty if it marks them."""

    @property
    def assigned_share(self) -> float:
        """The share of the trace's device time (without a device, of its ops' time) that pieces put into a phase of the tables."""
        activities = self.attribution.trace.activities
        events_ns = sum(activity.duration_ns for activity in activities) if self.on_device else self.total_ns
        placed_ns = sum(piece.duration_ns for piece in self.pieces if piece.place.phase in (*map(str, Phase), OUTSIDE))
        return placed_ns / events_ns if events_ns else 1.0

    @property
    def fallback_share(self) -> float:
        return self.by_fallback_ns / self.total_ns if self.total_ns else 0.0


@collector_paused()
def read_work(trace: Trace, eager: Trace | None = None) -> TraceWork:
    """The pieces and steps of a trace. A trace without marked steps is split by its repetitions (repetition.py), or is one step.

    `eager`: one step of the same work without a graph, from which replayed work in `trace` gets its places.
    """
    trace, split = with_steps(trace)
    # A graph's step has ops only for the copies of its batch and its outputs, which belong to no phase.
    attribution = Attribution(trace, guess_phases=eager is None)
    on_device = bool(trace.activities)
    assigned = _assigned(attribution)
    if eager is not None:
        alike = (
            bool(eager.activities) == on_device
        )  # if not, the profiler lost the device's part of one of the two traces
        assigned = placed_by_order(assigned, _assigned(Attribution(eager)) if alike else [])
    if not assigned:
        raise ValueError("the trace holds no kernel, and no op in any of its steps: record it around whole steps")
    windows = _windows(trace, attribution)
    if all(start == end for start, end in windows.values()):
        raise ValueError("the steps of the trace take no time: record it around whole steps")
    pieces = _pieces(attribution, assigned, windows, on_device)
    total_ns = sum(event.activity.duration_ns for event in assigned)
    if sum(piece.duration_ns for piece in pieces) != total_ns:
        raise RuntimeError("time of the trace was lost between its events and its pieces of work")
    pieces_of = _grouped(pieces, list(windows))
    return TraceWork(
        attribution=attribution,
        on_device=on_device,
        pieces=tuple(pieces),
        steps=tuple(_step(number, window, pieces_of[number], on_device) for number, window in windows.items()),
        total_ns=total_ns,
        by_fallback_ns=_placed_ns(assigned, FALLBACK),
        replayed_ns=_placed_ns(assigned, REPLAYED),
        split=split,
    )


def _placed_ns(assigned: Sequence[Assigned], how: str) -> int:
    return sum(event.activity.duration_ns for event in assigned if event.place.how == how)


def _assigned(attribution: Attribution) -> list[Assigned]:
    """The device's work with its places, or without a device the ops' own times."""
    return attribution.assign() if attribution.trace.activities else _own_times(attribution)


def _own_times(attribution: Attribution) -> list[Assigned]:
    """Own time of each op and annotation, without ranges inside it; only inside steps and phases if the trace names any."""
    events = []
    for nesting in attribution.nestings.values():
        for opened, self_ns in zip(nesting.ranges, nesting.self_ns(), strict=True):
            place = attribution.place_at(opened.thread, opened.start_ns)
            if self_ns <= 0 or (attribution.named and place.step is None and place.phase == OUTSIDE):
                continue
            activity = Activity(
                kind=OP,
                name=BETWEEN if opened.annotation else opened.name,
                device=-1,
                stream=-1,
                start_ns=opened.start_ns,
                duration_ns=self_ns,
                correlation=-1,
            )
            events.append(Assigned(activity=activity, place=place, call=None))
    return sorted(events, key=lambda event: event.activity.start_ns)


def _windows(trace: Trace, attribution: Attribution) -> dict[int, tuple[int, int]]:
    """Step -> its start and end on the main thread."""
    named = {
        number: (span.start_ns, span.end_ns)
        for span in trace.ranges
        if span.annotation and span.thread == attribution.main and (number := step_number(span.name)) is not None
    }
    if named:
        return named
    events: list[Timed] = [*trace.activities, *trace.calls, *trace.ranges]
    return {0: (min(event.start_ns for event in events), max(event.end_ns for event in events))}


def is_message(span: Range) -> bool:
    """Whether the span is that of a message."""
    return span.annotation and _MESSAGE.match(span.name) is not None


def is_wait_for_data(span: Range) -> bool:
    """Whether a DataLoader makes or waits for its next batch in this span: torch's own range, or that of `trainstep run`."""
    return span.annotation and (span.name.startswith(_LOADER) or span.name == Part.DATA)


def message_span(attribution: Attribution, thread: Thread, time_ns: int) -> Range | None:
    """The innermost message span open at this time, if any."""
    around = attribution.nestings[thread].around(time_ns) if thread in attribution.nestings else ()
    return next((span for span in around if is_message(span)), None)


def _span_of(attribution: Attribution, event: Assigned) -> Range | None:
    """The span of the message that issued this work, if a message did."""
    return None if event.call is None else message_span(attribution, event.call.thread, event.call.start_ns)


def _by_copies(attribution: Attribution, event: Assigned, of_libraries: Collection[tuple[Thread, int]]) -> bool:
    """Whether a message by copies issued this work. `of_libraries`: spans whose whole message is a library's kernel."""
    span = _span_of(attribution, event)
    return span is not None and (span.thread, span.start_ns) not in of_libraries


def _pieces(
    attribution: Attribution, assigned: Sequence[Assigned], windows: dict[int, tuple[int, int]], on_device: bool
) -> list[Work]:
    intervals = [(event.activity.start_ns, event.activity.end_ns) for event in assigned]
    gaps = gaps_before(intervals, intervals[0][0]) if on_device and intervals else [0] * len(intervals)
    begun: set[int] = set()
    of_libraries = {
        (span.thread, span.start_ns)
        for event in assigned
        if is_library_message(event.activity) and (span := _span_of(attribution, event)) is not None
    }
    known: dict[tuple[str, str], tuple[str, str, bool]] = {}
    pieces = []
    for event, gap_ns in zip(assigned, gaps, strict=True):
        number = event.place.step if event.place.step is not None else 0
        if number in windows and number not in begun and on_device:  # idle time before the step does not belong to it
            begun.add(number)
            since_start = event.activity.start_ns - windows[number][0]
            gap_ns = max(0, min(gap_ns, since_start) if len(begun) > 1 else since_start)
        identity = (event.activity.kind, event.activity.name)
        name, kind, is_whole = known.get(identity) or known.setdefault(identity, _name_and_class(event.activity))
        if kind == COPIES and _by_copies(attribution, event, of_libraries):
            kind = COMMUNICATION
        pieces.append(
            Work(
                name=name,
                kind=kind,
                place=event.place,
                start_ns=event.activity.start_ns,
                duration_ns=event.activity.duration_ns,
                gap_ns=gap_ns,
                call=event.call,
                is_message=is_whole,
            )
        )
    return pieces


def _name_and_class(activity: Activity) -> tuple[str, str, bool]:
    """The activity's name and class, and whether it is a library's message."""
    if activity.kind != OP:
        return short_name(activity.name), kernel_class(activity), is_library_message(activity)
    return activity.name, OVERHEAD if activity.name == BETWEEN else class_of_op(activity.name), False


def _step(number: int, window: tuple[int, int], pieces: Sequence[Work], on_device: bool) -> Step:
    spans = [(piece.start_ns, piece.end_ns) for piece in pieces]
    end_ns = max((end for _, end in spans), default=window[0])
    return Step(
        number=number,
        start_ns=window[0],
        window_ns=window[1] - window[0],
        busy_ns=union_ns(spans) if on_device else sum(piece.duration_ns for piece in pieces),
        after_ns=max(0, window[1] - end_ns) if on_device else 0,
    )


def by_step(work: TraceWork) -> dict[int, list[Work]]:
    """Step -> its pieces; pieces outside all steps count for the first step."""
    return _grouped(work.pieces, [step.number for step in work.steps])


def _grouped(pieces: Sequence[Work], numbers: Sequence[int]) -> dict[int, list[Work]]:
    groups: dict[int, list[Work]] = {number: [] for number in numbers}
    first = min(numbers)
    for piece in pieces:
        groups.setdefault(first if piece.place.step is None else piece.place.step, []).append(piece)
    return groups
