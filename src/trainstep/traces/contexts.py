"""What the ranges open on a host thread say together, at any moment: `contexts(ranges, names_phases).at(time_ns)`.

Ranges nest, and the names that matter stand anywhere in the stack. Reading the whole stack for each event takes time that grows
with events times depth, so the stack is folded as it grows: a range's context is made from the context around it and the
range's name. One sweep over the starts and ends of a thread's ranges then gives the context of every moment.

[Note: ranges that cross] Rounded times make a range end after the range around it. It then leaves the middle of the stack, and
the contexts above it are made anew. Where more than _MOST_CROSSED stand above it (no profiler writes such a trace) it stays
until they have ended, so that the sweep's time grows with the number of ranges alone.
"""

import bisect
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trainstep.config.phases import Phase
from trainstep.traces.kineto import Range

PHASES = tuple(str(phase) for phase in Phase)
_STEP = re.compile(r"^(?:step |ProfilerStep#)(\d{1,18})$")
_LAYER = re.compile(r"^(?:layer |.*\b(?:layers?|blocks?|h)\.)(\d{1,18})$")
_IN_LAYER = re.compile(r"^.*\b(?:layers?|blocks?|h)\.(\d{1,18})\.(.+)$")
"""Modules of other people's models are named by their paths: transformer.h.3.mlp.fc is mlp.fc of layer 3."""
_ACCUMULATES = "AccumulateGrad"
_COMPILED = ("Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph")
_GRAPH = "## Call CompiledFxGraph"
_TORCH_OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")
_ENGINE = "autograd::engine"
_MOST_NAMES = 50
"""Names that a span is made of; the names of ranges further inside are left out."""
_MOST_CROSSED = 32


def step_number(name: str) -> int | None:
    """3 for `step 3`; None for what names no step."""
    found = _STEP.match(name)
    return int(found[1]) if found else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """What the annotations of a stack say: which step, phase and layer they name, and the spans inside the layer."""

    step: int | None = None
    phase: str = ""
    layer: int | None = None
    names: tuple[str, ...] = ()
    """Outermost first."""
    first_name: str = ""
    """The first of `names` before a path that went on from it took its place."""
    names_step_or_phase: bool = False
    decides_layer: bool = False
    """Whether `layer` holds whatever stands further out: a layer is named, or a phase begins."""
    starts_anew: bool = False
    """Whether the names of annotations further out do not count: a step, a phase or a layer begins."""

    def with_annotation(self, name: str, names_phases: bool) -> "Spans":
        """These, and one more annotation inside them. `names_phases`: whether any annotation of the trace names a phase."""
        if name.startswith(_GRAPH):
            return self
        if (step := step_number(name)) is not None:
            return dataclasses.replace(
                self, step=step, names=(), first_name="", names_step_or_phase=True, starts_anew=True
            )
        if name in PHASES:
            begun = dataclasses.replace(self, names=(), first_name="", names_step_or_phase=True, starts_anew=True)
            return dataclasses.replace(begun, phase=name, layer=None, decides_layer=True)
        if found := _LAYER.match(name):
            begun = dataclasses.replace(self, names=(), first_name="", starts_anew=True)
            return dataclasses.replace(begun, layer=int(found[1]), decides_layer=True)
        if found := _IN_LAYER.match(name):
            return dataclasses.replace(self._with_name(found[2]), layer=int(found[1]), decides_layer=True)
        if not name.startswith(_TORCH_OPTIMIZER):
            return self._with_name(name)
        if self.phase or names_phases:
            return self
        return dataclasses.replace(self, phase=str(Phase.OPTIMIZER))

    def inside(self, outer: "Spans") -> "Spans":
        """These, with those of another stack around them."""
        names, first_name = self.names, self.first_name
        if not self.starts_anew:
            kept = outer.names[:-1] if _goes_on(outer.names, first_name) else outer.names
            names, first_name = (*kept, *names)[:_MOST_NAMES], outer.first_name or first_name
        return Spans(
            step=outer.step if self.step is None else self.step,
            phase=self.phase or outer.phase,
            layer=self.layer if self.decides_layer else outer.layer,
            names=names,
            first_name=first_name,
            names_step_or_phase=self.names_step_or_phase or outer.names_step_or_phase,
            decides_layer=self.decides_layer or outer.decides_layer,
            starts_anew=self.starts_anew or outer.starts_anew,
        )

    def _with_name(self, name: str) -> "Spans":
        """One more name; a path that goes on from the last takes its place: mlp, then mlp.fc."""
        kept = self.names[:-1] if _goes_on(self.names, name) else self.names
        return dataclasses.replace(self, names=(*kept, name)[:_MOST_NAMES], first_name=self.first_name or name)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Context:
    """What a stack of open ranges says. Ranges that add nothing share the context around them."""

    spans: Spans = field(default_factory=Spans)
    backward: Range | None = None
    """The innermost op that autograd runs for one of the forward pass."""
    spans_in_backward: Spans = field(default_factory=Spans)
    """What annotations inside `backward` say."""
    compiled: bool = False
    accumulates: bool = False
    """Whether a gradient is accumulated."""
    in_engine: bool = False
    """Whether autograd runs something of backward."""
    numbered: bool = False
    """Whether autograd has numbered an op, as it does in forward."""

    def with_range(self, one: Range, names_phases: bool) -> "Context":
        """This context with one more range open inside it."""
        name = one.name
        changes: dict[str, Any] = {}
        if one.backward:
            changes = {"backward": one, "spans_in_backward": Spans(), "in_engine": True}
        elif not self.in_engine and name.startswith(_ENGINE):
            changes = {"in_engine": True}
        if one.annotation:
            changes["spans"] = self.spans.with_annotation(name, names_phases)
            if one.backward or self.backward is not None:
                inner = changes.get("spans_in_backward", self.spans_in_backward)
                changes["spans_in_backward"] = inner.with_annotation(name, names_phases)
        if not self.compiled and name.startswith(_COMPILED):
            changes["compiled"] = True
        if not self.accumulates and _ACCUMULATES in name:
            changes["accumulates"] = True
        if not self.numbered and one.sequence >= 0:
            changes["numbered"] = True
        return dataclasses.replace(self, **changes) if changes else self


NOTHING_OPEN = Context()


class Contexts:
    """The context of each moment of one thread."""

    def __init__(self, ranges: Sequence[Range], names_phases: bool) -> None:
        """`ranges`: in the order in which they open, outer before inner, as traces/nesting.py sorts them."""
        self._ranges = ranges
        self._names_phases = names_phases
        self._times_ns: list[int] = []
        self._contexts: list[Context] = []
        self._sweep()

    def at(self, time_ns: int) -> Context:
        """The context at this time: of the ranges that began at or before it and did not end before it."""
        place = bisect.bisect_right(self._times_ns, time_ns) - 1
        return self._contexts[place] if place >= 0 else NOTHING_OPEN

    def _sweep(self) -> None:
        ranges = self._ranges
        ends = sorted(range(len(ranges)), key=lambda index: (ranges[index].end_ns, -index))
        stack: list[tuple[int, Context]] = []
        closed = [False] * len(ranges)
        next_end = 0
        for index, one in enumerate(ranges):
            while next_end < len(ends) and ranges[ends[next_end]].end_ns < one.start_ns:
                self._close(ends[next_end], stack, closed)
                next_end += 1
            while stack and ranges[stack[-1][0]].end_ns <= one.start_ns:
                closed[stack.pop()[0]] = True
            around = stack[-1][1] if stack else NOTHING_OPEN
            stack.append((index, around.with_range(one, self._names_phases)))
            self._mark(one.start_ns, stack)
        for end in ends[next_end:]:
            self._close(end, stack, closed)

    def _close(self, index: int, stack: list[tuple[int, Context]], closed: list[bool]) -> None:
        """Take a range out of the stack, from its top or from the middle. [Note: ranges that cross]"""
        if closed[index]:
            return
        closed[index] = True
        end_ns = self._ranges[index].end_ns
        if stack[-1][0] != index:
            place = bisect.bisect_left(stack, index, key=lambda opened: opened[0])
            if len(stack) - place > _MOST_CROSSED:
                return
            above = [number for number, _ in stack[place + 1 :] if not closed[number]]
            del stack[place:]
            for number in above:
                around = stack[-1][1] if stack else NOTHING_OPEN
                stack.append((number, around.with_range(self._ranges[number], self._names_phases)))
        else:
            stack.pop()
        while stack and closed[stack[-1][0]]:  # what stayed below because too much stood above it
            stack.pop()
        self._mark(end_ns + 1, stack)

    def _mark(self, time_ns: int, stack: Sequence[tuple[int, Context]]) -> None:
        """From this time on, until the next mark, the stack is this."""
        context = stack[-1][1] if stack else NOTHING_OPEN
        if self._times_ns and self._times_ns[-1] == time_ns:
            self._contexts[-1] = context
        elif not self._contexts or self._contexts[-1] is not context:
            self._times_ns.append(time_ns)
            self._contexts.append(context)


def _goes_on(names: tuple[str, ...], path: str) -> bool:
    """Whether a path goes on from the last of the names."""
    return bool(names) and path.startswith(f"{names[-1]}.")
