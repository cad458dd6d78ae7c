"""Who holds the memory of a training step: every allocation in one category, no 'other', at the moments that matter.

    window = step_window(timeline)                      # from the marks that the measured process left in its history
    ledger = Ledger(timeline, window, known)
    ledger.bytes_at(window.moments["after backward"])   # category -> bytes

[Note: how a category is known] Parameters, gradients, optimizer state, the batch and buffers by the addresses of their
tensors, which the measured process notes. What is born in forward and alive at its end is an activation, of the layer whose
span was open; what is born under the spans `head` and `loss` is logits and loss, and so is backward's tensor of the same size
while they live. Under autocast, as many of forward's survivors as the weights have 16-bit copies, by size, are those copies.
What outlives the step and no tensor is known for is a workspace: cuBLAS's above all; so is what a library takes to send a message.
Anything else comes and goes within the step: a temporary (gradients of activations among them).

Of several ranks: gradients are also the whole ones that autograd hands over and a strategy keeps a part of. Communication is what
it kept at any mark, and what is born while it gathers, fills a buffer to send, or synchronises.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from trainstep.config.phases import Phase
from trainstep.traces.memory_timeline import Allocation, Integers, MemoryTimeline
from trainstep.traces.snapshot import Span

MARK = "trainstep mark: "
"""Name of the empty ranges that a measured process opens at `built`, `begin`, the end of each phase, and `end`."""
RECOMPUTE = "recompute "
"""Name, with the block's number, of the range in which a block's forward runs again."""
MOMENTS = ("init", "after forward", "after backward", "after step", "peak")
AFTER = {
    Phase.FORWARD: "after forward",
    Phase.BACKWARD: "after backward",
    Phase.GRAD_SYNC: "after backward",
}
"""The moment at which a phase ends; where gradients are synchronised, backward is over when they are."""
CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer state",
    "communication",
    "activations",
    "autocast weight copies",
    "logits and loss",
    "temporaries",
    "workspaces",
    "batch and buffers",
)
SAVED_FOR_BACKWARD = ("activations", "autocast weight copies", "logits and loss")
"""Categories of what forward keeps for backward."""
ROUNDING = "rounding"
HELD = (*CATEGORIES, ROUNDING)
"""The lines that add up to what the allocator gave out."""
NO_LAYER = "outside layers"
_LOGITS_SPANS = ("head", "loss")
_BACKWARD_PHASES = (Phase.BACKWARD, Phase.GRAD_SYNC)
_COMMUNICATION_SPANS = ("unshard ", "send gradients ", "FSDP::")
"""Spans of parallel/ and of torch's FSDP2 in which buffers are made."""
_MESSAGE_SPANS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
"""Spans of parallel/collectives.py begin with one of them: inside, only the library that sends makes anything."""
_NO_LAYERS = (*Phase, *_COMMUNICATION_SPANS, *_MESSAGE_SPANS, "gloo:", "nccl:")
"""How spans begin that are around or between layers; the last two are those of torch's own threads."""
_LAYER = re.compile(r"(^|[ .])\d+$")
_LOGITS_SHARE = 0.2
"""Of the largest of forward's logits: what is smaller there is a scalar or a sum by row."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """Addresses of storages: gradients as backward (and synchronising them) ended, all else as the step ended. `cast_bytes`: of
    the copies of weights that autocast makes in one forward.

    Of several ranks, by the name of the mark at which they were noted: what the parallel strategy kept for `communication`,
    and each of autograd's `whole_gradients`.
    """

    parameters: frozenset[int] = frozenset()
    gradients: frozenset[int] = frozenset()
    optimizer_state: frozenset[int] = frozenset()
    inputs: frozenset[int] = frozenset()
    cast_bytes: Sequence[int] = ()
    communication: Mapping[str, Collection[int]] = field(default_factory=dict)
    whole_gradients: Mapping[str, Collection[int]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PhaseWindow:
    """A phase at work, from one position to another."""

    phase: str
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class StepWindow:
    """The recorded step: its first and last position, its phases, and moment -> position (`peak` included).

    `marks`: name of each -> position, the last one's of several micro-batches."""

    first: int
    last: int
    began_us: float
    phases: tuple[PhaseWindow, ...]
    moments: Mapping[str, int] = field(default_factory=dict)
    marks: Mapping[str, int] = field(default_factory=dict)

    def phase_at(self, position: int) -> str:
        """The phase in which an allocation born at this position was first used."""
        found = (one.phase for one in self.phases if one.first < position <= one.last)
        return next(found, "before the step" if position <= self.first else "between phases")


def step_window(timeline: MemoryTimeline) -> StepWindow:
    """The last step that its process marked. ValueError where there are no marks."""
    spans = timeline.snapshot.spans
    marks = {one.name.removeprefix(MARK): one.start_us for one in spans if one.name.startswith(MARK)}
    if "begin" not in marks or "end" not in marks:
        raise ValueError(
            "the history has no marks of a step: its beginning is lost, or it was not recorded by trainstep"
        )
    first, last = timeline.position_at(marks["begin"]), timeline.position_at(marks["end"])
    phases = tuple(
        PhaseWindow(phase=one.name, first=timeline.position_at(one.start_us), last=timeline.position_at(one.end_us))
        for one in spans
        if one.name in tuple(Phase) and marks["begin"] <= one.start_us <= marks["end"]
    )
    moments = {"init": timeline.position_at(marks["built"])} if "built" in marks else {}
    for phase, moment in AFTER.items():
        if marks.get(phase, 0.0) >= marks["begin"]:
            moments[moment] = timeline.position_at(marks[phase])
    moments |= {"after step": last, "peak": timeline.peak(first, last)}
    positions = {name: timeline.position_at(time_us) for name, time_us in marks.items()}
    return StepWindow(first=first, last=last, began_us=marks["begin"], phases=phases, moments=moments, marks=positions)


class Ledger:
    """`category_of[i]` and `layer_of[i]` belong to `timeline.allocations[i]`."""

    def __init__(self, timeline: MemoryTimeline, window: StepWindow, known: Known) -> None:
        self.timeline = timeline
        self.window = window
        self._known = known
        begin_us, end_us = timeline.time_us(window.first), timeline.time_us(window.last)
        self._spans = [
            one
            for one in timeline.snapshot.spans
            if not one.name.startswith(MARK) and one.end_us >= begin_us and one.start_us <= end_us
        ]
        self.layer_of = [self._layer(one) for one in timeline.allocations]
        self._whole_gradients = self._noted(known.whole_gradients)
        self._communication = self._noted(known.communication)
        self._cast = self._autocast_copies()
        self._logits = self._forward_logits()
        large = [timeline.allocations[index] for index in self._logits]
        largest = max((one.requested_bytes for one in large), default=0)
        self._large_logits = [one for one in large if one.requested_bytes >= _LOGITS_SHARE * largest]
        self._large_sizes = {one.requested_bytes for one in self._large_logits}
        self.category_of = [self._category(index, one) for index, one in enumerate(timeline.allocations)]

    def bytes_at(self, position: int) -> dict[str, int]:
        """Category -> requested bytes held."""
        held = dict.fromkeys(CATEGORIES, 0)
        for one, category in zip(self.timeline.allocations, self.category_of, strict=True):
            if one.held_at(position):
                held[category] += one.requested_bytes
        return held

    def rounding_at(self, position: int) -> int:
        """Bytes that the allocator gave over those asked for."""
        return int(self.timeline.allocated_bytes[position] - self.timeline.requested_bytes[position])

    def series(self) -> dict[str, Integers]:
        """Category -> requested bytes at every position."""
        return {
            category: self.timeline.bytes_of(
                one for one, its in zip(self.timeline.allocations, self.category_of, strict=True) if its == category
            )
            for category in CATEGORIES
        }

    def activations_at(self, position: int) -> dict[str, int]:
        """Layer -> bytes of activations held, in the order of their birth."""
        held: dict[str, int] = {}
        for one, category, layer in zip(self.timeline.allocations, self.category_of, self.layer_of, strict=True):
            if category == "activations" and one.held_at(position):
                held[layer] = held.get(layer, 0) + one.requested_bytes
        return held

    def _category(self, index: int, one: Allocation) -> str:
        known, end = self._known, self.window.moments["after step"]
        by_address = {
            "parameters": known.parameters,
            "optimizer state": known.optimizer_state,
            "batch and buffers": known.inputs,
        }
        for category, addresses in by_address.items():
            if one.address in addresses and one.held_at(end):
                return category
        backward_end = self.window.moments.get("after backward")
        if backward_end is not None and one.address in known.gradients and one.held_at(backward_end):
            return "gradients"
        if index in self._whole_gradients:
            return "gradients"
        if self._is_made_to_send(one):
            return "workspaces"
        if index in self._communication or self._is_born_communicating(one):
            return "communication"
        if index in self._cast:
            return "autocast weight copies"
        if index in self._logits or self._is_logits_gradient(one):
            return "logits and loss"
        if self._outlives_forward(one) or self._outlives_recompute(one):
            return "activations"
        return "workspaces" if one.held_at(end) else "temporaries"

    def _noted(self, noted: Mapping[str, Collection[int]]) -> set[int]:
        """Allocations that had one of these addresses at its mark."""
        at: dict[int, list[int]] = {}
        for index, one in enumerate(self.timeline.allocations):
            at.setdefault(one.address, []).append(index)
        return {
            index
            for mark, addresses in noted.items()
            if mark in self.window.marks
            for address in addresses
            for index in at.get(address, ())
            if self.timeline.allocations[index].held_at(self.window.marks[mark])
        }

    def _is_made_to_send(self, one: Allocation) -> bool:
        return any(span.name.split(" ", 1)[0] in _MESSAGE_SPANS for span in self._open_spans(one))

    def _is_born_communicating(self, one: Allocation) -> bool:
        """Made to gather or to send, or once backward is over and gradients are synchronised."""
        phase = self._phase_of(one)
        in_sync = phase is not None and phase.phase == Phase.GRAD_SYNC
        return in_sync or any(span.name.startswith(_COMMUNICATION_SPANS) for span in self._open_spans(one))

    def _phase_of(self, one: Allocation) -> PhaseWindow | None:
        return next((phase for phase in self.window.phases if phase.first < one.born <= phase.last), None)

    def _outlives_forward(self, one: Allocation) -> bool:
        """Born in forward and let go in a later phase of the step."""
        phase = self._phase_of(one)
        in_forward = phase is not None and phase.phase == Phase.FORWARD
        return in_forward and phase is not None and one.held_at(phase.last) and not one.held_at(self.window.last)

    def _outlives_recompute(self, one: Allocation) -> bool:
        """Born where backward runs a block's forward again, and alive when that is done."""
        span = next((span for span in self._open_spans(one) if span.name.startswith(RECOMPUTE)), None)
        phase = self._phase_of(one)
        if span is None or phase is None or phase.phase not in _BACKWARD_PHASES:
            return False
        return one.held_at(self.timeline.position_at(span.end_us))

    def _autocast_copies(self) -> set[int]:
        """For each forward, its survivors that match the sizes of the weights' copies, one for one."""
        found: set[int] = set()
        for phase in self.window.phases:
            if phase.phase != Phase.FORWARD or not self._known.cast_bytes:
                continue
            expected = Counter(self._known.cast_bytes)
            born = [
                (index, one)
                for index, one in enumerate(self.timeline.allocations)
                if phase.first < one.born <= phase.last
            ]
            last_birth = max((one.born for _, one in born), default=0)
            for index, one in born:
                if one.held_at(last_birth) and not one.held_at(self.window.last) and expected[one.requested_bytes] > 0:
                    expected[one.requested_bytes] -= 1
                    found.add(index)
        return found

    def _forward_logits(self) -> set[int]:
        found = set()
        for index, one in enumerate(self.timeline.allocations):
            phase = self._phase_of(one)
            if phase is None or phase.phase != Phase.FORWARD or index in self._cast:
                continue
            if any(span.name in _LOGITS_SPANS for span in self._open_spans(one)):
                found.add(index)
        return found

    def _is_logits_gradient(self, one: Allocation) -> bool:
        phase = self._phase_of(one)
        if phase is None or phase.phase not in _BACKWARD_PHASES:
            return False
        return one.requested_bytes in self._large_sizes and any(
            each.held_at(one.born - 1) for each in self._large_logits
        )

    def _open_spans(self, one: Allocation) -> list[Span]:
        """Spans of the step open at an allocation's birth, outermost first."""
        if one.time_us is None or not self.window.first < one.born <= self.window.last:
            return []
        return [span for span in self._spans if span.start_us <= one.time_us <= span.end_us]

    def _layer(self, one: Allocation) -> str:
        """The span of a repeated block (`layer 3`, `model.layers.3`), else the outermost within the phase."""
        names = [span.name for span in self._open_spans(one) if not span.name.startswith(_NO_LAYERS)]
        numbered = next((name for name in names if _LAYER.search(name)), None)
        if numbered is not None:
            return numbered.replace(RECOMPUTE, "layer ") if numbered.startswith(RECOMPUTE) else numbered
        return names[0] if names else NO_LAYER
