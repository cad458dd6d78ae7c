"""Finds which step, phase, layer and span a kernel belongs to: `Attribution(trace).assign()` places all device work.

A kernel's correlation number leads to the call that launched it; the call's time and thread lead to the ops and spans open then:

direct    the open spans name the place (forward, optimizer)
joined    autograd's thread has no spans of ours: the backward op's sequence number leads to the forward op that made it, and
          that op's spans name the place; the phase is what was open on the main thread meanwhile
fallback  else, the spans open on the main thread at that time name it (gradient accumulation; events lost by the profiler)
replayed  a graph's kernels come from a single launch, so no span names their place; the order of an eager step gives it

[Note: replays] A graph has the same kernels in the same order as the step from which it was captured, except that kernels that fill
bytes replace memsets; both get the same name here. So the n-th kernel of a name in a replay gets the place of the n-th kernel of
that name in a profile of the eager step. If the replay and the eager step have a name unequally often (a library may choose another
kernel while a graph is captured), the kernel gets the place of the kernel before it. On a CPU a tape of operators replaces the
graph; it has copies that the eager step lacks, so fewer operators are placed by order.
"""

import bisect
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainstep.config.run import Phase
from trainstep.traces.contexts import NOTHING_OPEN, PHASES, Context, Contexts, Spans, step_number
from trainstep.traces.kernel_classes import FILLS_BYTES
from trainstep.traces.kineto import MEMSET, Activity, Call, Range, Thread, Trace
from trainstep.traces.nesting import nestings

DIRECT, JOINED, FALLBACK, REPLAYED = "direct", "joined", "fallback", "replayed"
OUTSIDE = "outside phases"
"""The phase of work outside all phases: the batch's upload, a library's own work."""
_GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
BETWEEN = "(between ops)"
"""The name of the time between ops, in a trace without a device."""
_Name = tuple[str, str]
"""An activity's kind and name."""
_COMPILED_SPAN = "compiled"
"""The span of compiled code, inside which our spans vanish. Its layer is the compiled block; None means the whole model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where work belongs. `span`: the spans inside the layer, outermost first, such as `attention scores`; empty without any."""

    step: int | None
    phase: str
    layer: int | None
    span: str
    compiled: bool = False
    how: str = DIRECT


@dataclass(frozen=True, kw_only=True, slots=True)
class Assigned:
    """An activity (on a CPU, an op's own time), its place, and the call that launched it if the trace has it."""

    activity: Activity
    place: Place
    call: Call | None


class Attribution:
    """Finds the place of anything that a host thread did, and of the device work that it launched."""

    def __init__(self, trace: Trace, *, guess_phases: bool = True) -> None:
        """`guess_phases`: if no span names phases, derive the phase from the open ops."""
        self.trace = trace
        self._guess_phases = guess_phases
        self.nestings = nestings(trace.ranges)
        self.main = _main_thread(trace)
        # Calls that launch nothing share no correlation number with an activity.
        self._calls = {call.correlation: call for call in trace.calls if call.correlation >= 0}
        self._forward_ops = _forward_ops(trace.ranges)
        self._names_phases = any(span.annotation and span.name in PHASES for span in trace.ranges)
        self._contexts = {
            thread: Contexts(nesting.ranges, self._names_phases) for thread, nesting in self.nestings.items()
        }
        self._places: dict[tuple[bool, Context, Context], Place] = {}
        """Whether on the main thread, the context, and the main thread's context at that time -> their place."""
        self.named = self._names_phases or any(
            span.annotation and step_number(span.name) is not None for span in trace.ranges
        )
        """Whether the trace's spans name phases or steps at all."""

    def assign(self) -> list[Assigned]:
        """Every device activity with its place. RuntimeError if device time is lost, which would be a bug here."""
        assigned = [self._assigned(activity) for activity in self.trace.activities]
        total_ns = sum(activity.duration_ns for activity in self.trace.activities)
        assigned_ns = sum(piece.activity.duration_ns for piece in assigned if piece.place.phase)
        if len(assigned) != len(self.trace.activities) or assigned_ns != total_ns:
            raise RuntimeError(f"{assigned_ns} of {total_ns} ns of device time were assigned to a phase")
        return assigned

    def place_at(self, thread: Thread, time_ns: int) -> Place:
        """The place of what this thread did at this time."""
        key = thread == self.main, self._context(thread, time_ns), self._context_on_main(time_ns)
        place = self._places.get(key)
        if place is None:  # all ops of one range share a place
            place = self._places[key] = self._place(*key)
        return place

    def _place(self, is_main: bool, context: Context, on_main: Context) -> Place:
        forward = self._forward_op(context.backward) if context.backward is not None else None
        if forward is not None:
            return self._place_of_backward(context, forward, on_main)
        if context.spans.names_step_or_phase or is_main:
            return self._place_from_spans(context.spans, DIRECT, context)
        place = self._place_from_spans(context.spans.inside(on_main.spans), FALLBACK, context)
        accumulates = not place.span and context.accumulates
        return dataclasses.replace(place, span="gradient accumulation") if accumulates else place

    def _assigned(self, activity: Activity) -> Assigned:
        call = self._calls.get(activity.correlation)
        if call is None:
            spans = self._context_on_main(activity.start_ns).spans
            place = self._place_from_spans(spans, FALLBACK, NOTHING_OPEN)
        else:
            place = self.place_at(call.thread, call.start_ns)
        return Assigned(activity=activity, place=place, call=call)

    def _place_of_backward(self, context: Context, forward: Range, on_main: Context) -> Place:
        """The place that the forward op's spans name, or the spans that backward itself opened, as recomputation does."""
        around = self._context(forward.thread, forward.start_ns)
        source = self._place_from_spans(around.spans, JOINED, around)
        in_backward = self._place_from_spans(context.spans_in_backward, JOINED, NOTHING_OPEN)
        meanwhile = self._place_from_spans(context.spans.inside(on_main.spans), JOINED, context)
        return Place(
            step=meanwhile.step if meanwhile.step is not None else source.step,
            phase=meanwhile.phase if meanwhile.phase != OUTSIDE else str(Phase.BACKWARD),
            layer=in_backward.layer if in_backward.layer is not None else source.layer,
            span=in_backward.span or source.span,
            compiled=source.compiled or context.compiled,
            how=JOINED,
        )

    def _place_from_spans(self, spans: Spans, how: str, context: Context) -> Place:
        """The place that the open spans name. In a trace whose spans name no phases, the open ops tell the phase."""
        phase = spans.phase
        if not phase and self._guess_phases and not self._names_phases:
            phase = _guessed_phase(context)
        return Place(
            step=spans.step,
            phase=phase or OUTSIDE,
            layer=spans.layer,
            span=" / ".join(spans.names) or (_COMPILED_SPAN if context.compiled else ""),
            compiled=context.compiled,
            how=how,
        )

    def _context(self, thread: Thread, time_ns: int) -> Context:
        contexts = self._contexts.get(thread)
        return contexts.at(time_ns) if contexts else NOTHING_OPEN

    def _context_on_main(self, time_ns: int) -> Context:
        return self._context(self.main, time_ns) if self.main else NOTHING_OPEN

    def _forward_op(self, backward: Range) -> Range | None:
        """The forward op that made this backward op."""
        # It is the last op with this number before the backward op: earlier ops got the same number but made no node.
        ops = self._forward_ops.get(backward.sequence, ())
        index = bisect.bisect_left(ops, backward.start_ns, key=lambda op: op.start_ns) - 1
        return ops[index] if index >= 0 else None


def _main_thread(trace: Trace) -> Thread | None:
    """The thread with the most spans that name phases or steps; if there are none, with the most ranges."""
    votes: dict[Thread, tuple[int, int]] = {}
    for span in trace.ranges:
        named, ranges = votes.get(span.thread, (0, 0))
        names = span.annotation and (span.name in PHASES or step_number(span.name) is not None)
        votes[span.thread] = (named + names, ranges + 1)
    return max(votes, key=lambda thread: votes[thread]) if votes else None


def _forward_ops(ranges: Iterable[Range]) -> dict[int, list[Range]]:
    """Sequence number -> forward ops with it, in order of start."""
    ops: dict[int, list[Range]] = {}
    for op in ranges:
        if op.sequence >= 0 and not op.forward_thread and not op.annotation:
            ops.setdefault(op.sequence, []).append(op)
    return ops


def _guessed_phase(context: Context) -> str:
    """The phase by autograd's marks: what its engine runs is backward, what it numbers is forward."""
    if context.in_engine:
        return str(Phase.BACKWARD)
    return str(Phase.FORWARD) if context.numbered else ""


def placed_by_order(assigned: Sequence[Assigned], eager: Sequence[Assigned]) -> list[Assigned]:
    """`assigned`, with the places of replayed work taken from one eager step; other work keeps its place. [Note: replays]

    Both are in order of start. Eager work is ignored if a span in the replayed steps names its phase, as for an optimizer outside
    the graph. Work without a counterpart gets the place of the work before it in its step, or else that of the eager step's first
    work; it counts as placed by fallback.
    """
    named = {event.place.phase for event in assigned if not _is_replayed(event)} - {OUTSIDE}
    first_step = min((event.place.step for event in eager if event.place.step is not None), default=None)
    eager = [
        event for event in _in_launch_order(eager) if event.place.phase not in named and event.place.step == first_step
    ]
    places: defaultdict[_Name, list[Place]] = defaultdict(list)
    for event in eager:
        places[_name_of(event)].append(event.place)
    counts = Counter((event.place.step, _name_of(event)) for event in assigned if _is_replayed(event))
    seen: Counter[tuple[int | None, _Name]] = Counter()
    before: dict[int | None, Place] = {}
    placed = []
    for event in assigned:
        if not _is_replayed(event):
            placed.append(event)
            continue
        step, name = event.place.step, _name_of(event)
        eager_places = places.get(name, [])
        if name[1] != BETWEEN and len(eager_places) == counts[step, name]:
            place = dataclasses.replace(eager_places[seen[step, name]], step=step, how=REPLAYED)
            seen[step, name] += 1
        else:  # if the counts differ, matching by position would shift every later kernel
            neighbour = before.get(step) or (eager[0].place if eager else event.place)
            place = dataclasses.replace(neighbour, step=step, how=FALLBACK)
        before[step] = place
        placed.append(dataclasses.replace(event, place=place))
    return placed


def _name_of(event: Assigned) -> _Name:
    activity = event.activity
    if activity.kind == MEMSET or FILLS_BYTES in activity.name:
        return MEMSET, ""
    return activity.kind, activity.name


def _is_replayed(event: Assigned) -> bool:
    """Whether a graph launch (on a CPU, a tape) did this work: it is in a step, and no span of the step names its phase."""
    if event.place.step is None or event.place.phase != OUTSIDE:
        return False
    return event.activity.device < 0 or launched_by_graph(event.call)


def launched_by_graph(call: Call | None) -> bool:
    """Whether this call launched a whole graph."""
    return call is not None and call.name.startswith(_GRAPH_LAUNCHES)


def _in_launch_order(events: Sequence[Assigned]) -> list[Assigned]:
    """Streams run beside each other, so kernels may start in another order than they were launched in."""
    return sorted(events, key=lambda event: (event.call or event.activity).start_ns)
