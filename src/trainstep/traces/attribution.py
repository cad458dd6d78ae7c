"""Whose work a kernel is: its step, phase, layer and span. `Attribution(trace).of(activity)`; nothing is left over.

A kernel leads by its correlation to the call that launched it. On the thread of that call stand the ops and spans open then:

direct    the spans themselves say it (forward, optimizer)
joined    autograd's thread has no spans of ours: the backward op's sequence number leads to the forward op that made it, and
          that op's spans name the work; the phase is what was open on the main thread meanwhile
fallback  neither: the spans open on the main thread at that time (gradient accumulation; events lost by the profiler)
"""

import bisect
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from trainstep.config.phases import Phase
from trainstep.traces.contexts import NOTHING_OPEN, PHASES, Context, Contexts, Spans, step_number
from trainstep.traces.kineto import Activity, Call, Range, Thread, Trace
from trainstep.traces.nesting import nestings

DIRECT, JOINED, FALLBACK = "direct", "joined", "fallback"
OUTSIDE = "outside phases"
"""The phase of work that no phase holds: the batch's upload, a library's own."""
_COMPILED_SPAN = "compiled"
"""The span of compiled code, inside which ours vanish: its layer says which block, none that it is the whole model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where work belongs. `span`: the spans inside the layer, outermost first, `attention scores`; empty: the layer's own."""

    step: int | None
    phase: str
    layer: int | None
    span: str
    compiled: bool = False
    how: str = DIRECT


@dataclass(frozen=True, kw_only=True, slots=True)
class Assigned:
    """An activity (or, on a CPU, an op's own time), its place, and the call that launched it where the trace has it."""

    activity: Activity
    place: Place
    call: Call | None


class Attribution:
    """Finds the place of anything a host thread did, and so of what it launched."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.nestings = nestings(trace.ranges)
        self.main = _main_thread(trace)
        self._calls = _launches(trace)
        self._forward_ops = _forward_ops(trace.ranges)
        self._names_phases = any(one.annotation and one.name in PHASES for one in trace.ranges)
        self._contexts = {
            thread: Contexts(nesting.ranges, self._names_phases) for thread, nesting in self.nestings.items()
        }
        self._direct: dict[Context, Place] = {}
        self.named = self._names_phases or any(
            one.annotation and step_number(one.name) is not None for one in trace.ranges
        )
        """Whether the trace's spans name phases or steps at all."""

    def assign(self) -> list[Assigned]:
        """Every device activity with its place. RuntimeError if time is lost on the way, which would be a fault of ours."""
        found = [self._assigned(activity) for activity in self.trace.activities]
        total = sum(activity.duration_ns for activity in self.trace.activities)
        assigned = sum(one.activity.duration_ns for one in found if one.place.phase)
        if len(found) != len(self.trace.activities) or assigned != total:
            raise RuntimeError(f"{assigned} of {total} ns of device time were assigned to a phase")
        return found

    def place(self, thread: Thread, time_ns: int) -> Place:
        """Whose work that thread did at that time."""
        context = self._context(thread, time_ns)
        forward = self._forward_op(context.backward) if context.backward is not None else None
        if forward is not None:
            return self._joined(context, forward, time_ns)
        if context.spans.names_step_or_phase or thread == self.main:
            if context not in self._direct:
                self._direct[context] = self._placed(context.spans, DIRECT, context)
            return self._direct[context]
        place = self._placed(context.spans.inside(self._spans_on_main(time_ns)), FALLBACK, context)
        accumulates = not place.span and context.accumulates
        return dataclasses.replace(place, span="gradient accumulation") if accumulates else place

    def _assigned(self, activity: Activity) -> Assigned:
        call = self._calls.get(activity.correlation)
        if call is None:
            place = self._placed(self._spans_on_main(activity.start_ns), FALLBACK, NOTHING_OPEN)
        else:
            place = self.place(call.thread, call.start_ns)
        return Assigned(activity=activity, place=place, call=call)

    def _joined(self, context: Context, forward: Range, time_ns: int) -> Place:
        """The forward op's spans; where backward runs spans of its own (recomputation), those, in the same layer."""
        around = self._context(forward.thread, forward.start_ns)
        source = self._placed(around.spans, JOINED, around)
        own = self._placed(context.spans_in_backward, JOINED, NOTHING_OPEN)
        step = self._placed(context.spans.inside(self._spans_on_main(time_ns)), JOINED, context)
        return Place(
            step=step.step if step.step is not None else source.step,
            phase=step.phase if step.phase != OUTSIDE else str(Phase.BACKWARD),
            layer=own.layer if own.layer is not None else source.layer,
            span=own.span or source.span,
            compiled=source.compiled or context.compiled,
            how=JOINED,
        )

    def _placed(self, spans: Spans, how: str, context: Context) -> Place:
        """From the spans around, and from the ops around where a trace of another's names no phases."""
        phase = spans.phase
        if not phase and not self._names_phases:
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

    def _spans_on_main(self, time_ns: int) -> Spans:
        return self._context(self.main, time_ns).spans if self.main else NOTHING_OPEN.spans

    def _forward_op(self, backward: Range) -> Range | None:
        """The last forward op before it that carries its number: earlier ones saw the number coming and made no node."""
        ops = self._forward_ops.get(backward.sequence, ())
        index = bisect.bisect_left(ops, backward.start_ns, key=lambda one: one.start_ns) - 1
        return ops[index] if index >= 0 else None


def _main_thread(trace: Trace) -> Thread | None:
    """The thread whose spans name phases or steps, else the one with the most ranges."""
    votes: dict[Thread, tuple[int, int]] = {}
    for one in trace.ranges:
        named, ranges = votes.get(one.thread, (0, 0))
        names = one.annotation and (one.name in PHASES or step_number(one.name) is not None)
        votes[one.thread] = (named + names, ranges + 1)
    return max(votes, key=lambda thread: votes[thread]) if votes else None


def _launches(trace: Trace) -> dict[int, Call]:
    """Correlation -> the call. Calls that launch nothing share no number with an activity."""
    return {call.correlation: call for call in trace.calls if call.correlation >= 0}


def _forward_ops(ranges: Iterable[Range]) -> dict[int, list[Range]]:
    found: dict[int, list[Range]] = {}
    for one in ranges:
        if one.sequence >= 0 and not one.forward_thread and not one.annotation:
            found.setdefault(one.sequence, []).append(one)
    return found


def _guessed_phase(context: Context) -> str:
    """For a trace whose spans name no phase: what autograd runs is backward, what it numbers is forward."""
    if context.in_engine:
        return str(Phase.BACKWARD)
    return str(Phase.FORWARD) if context.numbered else ""
