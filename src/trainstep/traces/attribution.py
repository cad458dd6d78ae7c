"""Whose work a kernel is: its step, phase, layer and span. `Attribution(trace).of(activity)`; nothing is left over.

A kernel leads by its correlation to the call that launched it. On the thread of that call stand the ops and spans open then:

direct    the spans themselves say it (forward, optimizer)
joined    autograd's thread has no spans of ours: the backward op's sequence number leads to the forward op that made it, and
          that op's spans name the work; the phase is what was open on the main thread meanwhile
fallback  neither: the spans open on the main thread at that time (gradient accumulation; events lost by the profiler)
"""

import bisect
import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainstep.config.phases import Phase
from trainstep.traces.kineto import Activity, Call, Range, Thread, Trace
from trainstep.traces.nesting import nestings

DIRECT, JOINED, FALLBACK = "direct", "joined", "fallback"
OUTSIDE = "outside phases"
"""The phase of work that no phase holds: the batch's upload, a library's own."""
_PHASES = tuple(str(phase) for phase in Phase)
_STEP = re.compile(r"^(?:step |ProfilerStep#)(\d+)$")
_LAYER = re.compile(r"^(?:layer |.*\b(?:layers?|blocks?|h)\.)(\d+)$")
_IN_LAYER = re.compile(r"^.*\b(?:layers?|blocks?|h)\.(\d+)\.(.+)$")
"""Modules of other people's models are named by their paths: transformer.h.3.mlp.fc is mlp.fc of layer 3."""
_ACCUMULATES = "AccumulateGrad"
_COMPILED = ("Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph")
_COMPILED_SPAN = "compiled"
"""The span of compiled code, inside which ours vanish: its layer says which block, none that it is the whole model."""
_GRAPH = "## Call CompiledFxGraph"
_TORCH_OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")


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
        self._names_phases = any(one.annotation and one.name in _PHASES for one in trace.ranges)
        self.named = self._names_phases or any(one.annotation and _STEP.match(one.name) for one in trace.ranges)
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
        nesting = self.nestings.get(thread)
        stack = list(nesting.around(time_ns)) if nesting else []
        backward = next((one for one in stack if one.backward), None)
        forward = self._forward_op(backward) if backward else None
        if backward is not None and forward is not None:
            return self._joined(stack, backward, forward, time_ns)
        if (
            any(one.annotation and (one.name in _PHASES or _STEP.match(one.name)) for one in stack)
            or thread == self.main
        ):
            return self._placed(stack, DIRECT, stack)
        place = self._placed([*stack, *self._on_main(time_ns)], FALLBACK, stack)
        accumulates = not place.span and any(_ACCUMULATES in one.name for one in stack)
        return dataclasses.replace(place, span="gradient accumulation") if accumulates else place

    def _assigned(self, activity: Activity) -> Assigned:
        call = self._calls.get(activity.correlation)
        if call is None:
            place = self._placed(self._on_main(activity.start_ns), FALLBACK, [])
        else:
            place = self.place(call.thread, call.start_ns)
        return Assigned(activity=activity, place=place, call=call)

    def _joined(self, stack: Sequence[Range], backward: Range, forward: Range, time_ns: int) -> Place:
        """The forward op's spans; where backward runs spans of its own (recomputation), those, in the same layer."""
        around = list(self.nestings[forward.thread].around(forward.start_ns))
        source = self._placed(around, JOINED, [forward, *around])
        inside = [one for one in stack if one.annotation and one.start_ns >= backward.start_ns]
        own = self._placed(inside, JOINED, [])
        step = self._placed([*stack, *self._on_main(time_ns)], JOINED, stack)
        return Place(
            step=step.step if step.step is not None else source.step,
            phase=step.phase if step.phase != OUTSIDE else str(Phase.BACKWARD),
            layer=own.layer if own.layer is not None else source.layer,
            span=own.span or source.span,
            compiled=source.compiled or _is_compiled(stack),
            how=JOINED,
        )

    def _placed(self, spans: Sequence[Range], how: str, stack: Sequence[Range]) -> Place:
        """From the spans around, innermost first, and the ops around where a trace of another's names no phases."""
        step: int | None = None
        layer: int | None = None
        phase, names = "", list[str]()
        for one in reversed(spans):
            if not one.annotation or one.name.startswith(_GRAPH):
                continue
            if found := _STEP.match(one.name):
                step, names = int(found[1]), []
            elif one.name in _PHASES:
                phase, layer, names = one.name, None, []
            elif found := _LAYER.match(one.name):
                layer, names = int(found[1]), []
            elif found := _IN_LAYER.match(one.name):
                layer, names = int(found[1]), _with_path(names, found[2])
            elif not one.name.startswith(_TORCH_OPTIMIZER):
                names = _with_path(names, one.name)
            elif not phase and not self._names_phases:
                phase = str(Phase.OPTIMIZER)
        if not phase and not self._names_phases:
            phase = _guessed_phase(stack)
        compiled = _is_compiled(stack)
        return Place(
            step=step,
            phase=phase or OUTSIDE,
            layer=layer,
            span=" / ".join(names) or (_COMPILED_SPAN if compiled else ""),
            compiled=compiled,
            how=how,
        )

    def _on_main(self, time_ns: int) -> list[Range]:
        nesting = self.nestings.get(self.main) if self.main else None
        return [one for one in nesting.around(time_ns) if one.annotation] if nesting else []

    def _forward_op(self, backward: Range) -> Range | None:
        """The last forward op before it that carries its number: earlier ones saw the number coming and made no node."""
        ops = self._forward_ops.get(backward.sequence, ())
        index = bisect.bisect_left([one.start_ns for one in ops], backward.start_ns) - 1
        return ops[index] if index >= 0 else None


def _with_path(names: list[str], path: str) -> list[str]:
    """The names with one more; a path that goes on from the last takes its place: mlp, then mlp.fc."""
    return [*names[:-1], path] if names and path.startswith(f"{names[-1]}.") else [*names, path]


def step_number(name: str) -> int | None:
    """3 for `step 3`; None for what names no step."""
    found = _STEP.match(name)
    return int(found[1]) if found else None


def _main_thread(trace: Trace) -> Thread | None:
    """The thread whose spans name phases or steps, else the one with the most ranges."""
    votes: dict[Thread, tuple[int, int]] = {}
    for one in trace.ranges:
        named, ranges = votes.get(one.thread, (0, 0))
        names = one.annotation and (one.name in _PHASES or _STEP.match(one.name) is not None)
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


def _is_compiled(stack: Iterable[Range]) -> bool:
    return any(one.name.startswith(_COMPILED) for one in stack)


def _guessed_phase(stack: Sequence[Range]) -> str:
    """For a trace whose spans name no phase: what autograd runs is backward, what it numbers is forward."""
    if any(one.backward or one.name.startswith("autograd::engine") for one in stack):
        return str(Phase.BACKWARD)
    return str(Phase.FORWARD) if any(one.sequence >= 0 for one in stack) else ""
