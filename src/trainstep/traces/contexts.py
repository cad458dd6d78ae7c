"""Tells what the open ranges of a host thread mean at any moment: `Contexts(ranges, names_phases).at(time_ns)`.

Ranges nest, and the names that matter stand anywhere in the stack. Reading the whole stack for each event takes time that grows
with events times depth, so the stack is folded as it grows: a range's context is made from the context around it and the
range's name. One sweep over the starts and ends of a thread's ranges then gives the context of every moment.

[Note: ranges that cross] Rounded times make a range end after the range around it. It is then removed from the middle of the stack,
and the contexts above it are made anew. Where more than _MOST_CROSSED ranges stand above it (no profiler writes such a trace) it
stays until they have ended, so that the sweep's time grows only with the number of ranges.
"""

import bisect
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trainstep.config.run import Phase
from trainstep.traces.kineto import Range

PHASES = tuple(str(phase) for phase in Phase)
_STEP = re.compile(r"^(?:step |ProfilerStep#)(\d{1,18})$")
_LAYER = re.compile(r"^(?:layer |.*\b(?:layers?|blocks?|h)\.)(\d{1,18})$")
_IN_LAYER = re.compile(r"^.*\b(?:layers?|blocks?|h)\.(\d{1,18})\.(.+)$")
"""Modules of users' models are named by their paths: transformer.h.3.mlp.fc is mlp.fc of layer 3."""
_ACCUMULATES = "AccumulateGrad"
_COMPILED = ("Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph")
_GRAPH = "## Call CompiledFxGraph"
_TORCH_OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")
_ENGINE = "autograd::engine"
_MOST_NAMES = 50
"""The most names in `Spans.names`; names of ranges further inside are left out."""
_MOST_CROSSED = 32


def step_number(name: str) -> int | None:
    """3 for `step 3` or `ProfilerStep#3`; None for any other name."""
    match = _STEP.match(name)
    return int(match[1]) if match else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """The step, phase and layer that the annotations of a stack name, and the names of the spans inside the layer."""

    step: int | None = None
    phase: str = ""
    layer: int | None = None
    names: tuple[str, ...] = ()
    """Outermost first."""
    first_name: str = ""
    """The first of `names` as it was before a longer path replaced it."""
    names_step_or_phase: bool = False
    decides_layer: bool = False
    """Whether `layer` is final, whatever spans are further out: the stack names a layer, or a phase begins in it."""
    starts_anew: bool = False
    """Whether names further out do not count, because a step, a phase or a layer begins."""

    def with_annotation(self, name: str, names_phases: bool) -> "Spans":
        """These spans with one more annotation inside. `names_phases`: whether any annotation of the trace names a phase."""
        if name.startswith(_GRAPH):
            return self
        step, layer = step_number(name), _LAYER.match(name)
        if step is not None or name in PHASES or layer:
            begun = dataclasses.replace(self, names=(), first_name="", starts_anew=True)
            if step is not None:
                return dataclasses.replace(begun, step=step, names_step_or_phase=True)
            if layer:
                return dataclasses.replace(begun, layer=int(layer[1]), decides_layer=True)
            return dataclasses.replace(begun, phase=name, layer=None, names_step_or_phase=True, decides_layer=True)
        if path := _IN_LAYER.match(name):
            return dataclasses.replace(self._with_name(path[2]), layer=int(path[1]), decides_layer=True)
        if not name.startswith(_TORCH_OPTIMIZER):
            return self._with_name(name)
        if self.phase or names_phases:
            return self
        return dataclasses.replace(self, phase=str(Phase.OPTIMIZER))

    def inside(self, outer: "Spans") -> "Spans":
        """These spans with those of another stack around them."""
        names, first_name = self.names, self.first_name
        if not self.starts_anew:
            kept = outer.names[:-1] if _continues(outer.names, first_name) else outer.names
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
        """These spans with one more name. A path that continues the last name replaces it: mlp.fc replaces mlp."""
        kept = self.names[:-1] if _continues(self.names, name) else self.names
        return dataclasses.replace(self, names=(*kept, name)[:_MOST_NAMES], first_name=self.first_name or name)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Context:
    """What a stack of open ranges means. A range that adds nothing shares the context around it."""

    spans: Spans = field(default_factory=Spans)
    backward: Range | None = None
    """The innermost op that autograd runs for an op of the forward pass."""
    spans_in_backward: Spans = field(default_factory=Spans)
    """The annotations inside `backward`."""
    compiled: bool = False
    accumulates: bool = False
    """Whether a gradient is accumulated."""
    in_engine: bool = False
    """Whether autograd's engine is running."""
    numbered: bool = False
    """Whether autograd has numbered an op, as it does in forward."""

    def with_range(self, opened: Range, names_phases: bool) -> "Context":
        """This context with one more range open inside it."""
        name = opened.name
        changes: dict[str, Any] = {}
        if opened.backward:
            changes = {"backward": opened, "spans_in_backward": Spans(), "in_engine": True}
        elif not self.in_engine and name.startswith(_ENGINE):
            changes = {"in_engine": True}
        if opened.annotation:
            changes["spans"] = self.spans.with_annotation(name, names_phases)
            if opened.backward or self.backward is not None:
                inner = changes.get("spans_in_backward", self.spans_in_backward)
                changes["spans_in_backward"] = inner.with_annotation(name, names_phases)
        if not self.compiled and name.startswith(_COMPILED):
            changes["compiled"] = True
        if not self.accumulates and _ACCUMULATES in name:
            changes["accumulates"] = True
        if not self.numbered and opened.sequence >= 0:
            changes["numbered"] = True
        return dataclasses.replace(self, **changes) if changes else self


NOTHING_OPEN = Context()


class Contexts:
    """The contexts of one thread, by time."""

    def __init__(self, ranges: Sequence[Range], names_phases: bool) -> None:
        """`ranges` are in the order in which they open, outer before inner, as traces/nesting.py sorts them."""
        self._ranges = ranges
        self._names_phases = names_phases
        self._times_ns: list[int] = []
        self._contexts: list[Context] = []
        self._sweep()

    def at(self, time_ns: int) -> Context:
        """The context of the ranges that began at or before this time and did not end before it."""
        place = bisect.bisect_right(self._times_ns, time_ns) - 1
        return self._contexts[place] if place >= 0 else NOTHING_OPEN

    def _sweep(self) -> None:
        ranges = self._ranges
        ends = sorted(range(len(ranges)), key=lambda index: (ranges[index].end_ns, -index))
        stack: list[tuple[int, Context]] = []
        closed = [False] * len(ranges)
        next_end = 0
        for index, opened in enumerate(ranges):
            while next_end < len(ends) and ranges[ends[next_end]].end_ns < opened.start_ns:
                self._close(ends[next_end], stack, closed)
                next_end += 1
            while stack and ranges[stack[-1][0]].end_ns <= opened.start_ns:
                closed[stack.pop()[0]] = True
            around = stack[-1][1] if stack else NOTHING_OPEN
            stack.append((index, around.with_range(opened, self._names_phases)))
            self._mark(opened.start_ns, stack)
        for end in ends[next_end:]:
            self._close(end, stack, closed)

    def _close(self, index: int, stack: list[tuple[int, Context]], closed: list[bool]) -> None:
        """Remove a range from the stack's top, or from its middle. [Note: ranges that cross]"""
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
        while stack and closed[stack[-1][0]]:  # ranges that stayed because too many stood above them
            stack.pop()
        self._mark(end_ns + 1, stack)

    def _mark(self, time_ns: int, stack: Sequence[tuple[int, Context]]) -> None:
        """Note that the stack is open from `time_ns` until the next mark."""
        context = stack[-1][1] if stack else NOTHING_OPEN
        if self._times_ns and self._times_ns[-1] == time_ns:
            self._contexts[-1] = context
        elif not self._contexts or self._contexts[-1] is not context:
            self._times_ns.append(time_ns)
            self._contexts.append(context)


def _continues(names: tuple[str, ...], path: str) -> bool:
    """Whether a path continues the last of the names."""
    return bool(names) and path.startswith(f"{names[-1]}.")
