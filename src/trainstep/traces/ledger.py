"""Assigns the memory of a training step to its holders: every allocation has one category, after each phase and at the peak.

    window = step_window(timeline)                      # from the marks that the measured process left in its history
    ledger = Ledger(timeline, window, known)
    ledger.bytes_at(window.moments["after backward"])   # category -> bytes

[Note: how a category is known] The category of an allocation is the first that fits:

    parameters, gradients, optimizer state, batch and buffers   by the addresses of their tensors, which the measured process notes
    workspaces                what a library allocates while it sends a message
    communication             what the parallel strategy kept at any mark, and what is born while it gathers, fills a buffer to
                              send, or synchronises
    autocast weight copies    as many of forward's survivors as the weights have 16-bit copies, matched by size
    logits and loss           what is born under the spans `head` and `loss`, and backward's tensors of the same size beside it
    activations               what is born in forward and alive at its end; its layer is the block's span that was open
    workspaces                what outlives the step and belongs to no known tensor, above all cuBLAS's
    temporaries               all else: it comes and goes within the step (gradients of activations among them)

With several ranks, the category gradients includes the whole gradients from autograd of which a strategy keeps only a part.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from trainstep.config.run import Phase
from trainstep.traces.memory_timeline import Allocation, Integers, MemoryTimeline
from trainstep.traces.snapshot import Span

MARK = "trainstep mark: "
"""Prefix of the empty ranges that a measured process opens at `built`, `begin`, the end of each phase, and `end`."""
RECOMPUTE = "recompute "
"""Prefix, before the block's number, of the range in which a block's forward is recomputed."""
MOMENTS = ("init", "after forward", "after backward", "after step", "peak")
AFTER = {Phase.FORWARD: "after forward", Phase.BACKWARD: "after backward", Phase.GRAD_SYNC: "after backward"}
"""Phase -> the moment at which it ends. If gradients are synchronised, backward is over when they are."""
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
"""The categories that forward keeps for backward."""
ROUNDING = "rounding"
HELD = (*CATEGORIES, ROUNDING)
"""The lines whose sum is what the allocator gave out."""
NO_LAYER = "outside layers"
_LOGITS_SPANS = ("head", "loss")
_BACKWARD_PHASES = (Phase.BACKWARD, Phase.GRAD_SYNC)
_COMMUNICATION_SPANS = ("unshard ", "send gradients ", "FSDP::")
"""Spans of parallel/ and of torch's FSDP2 in which buffers are made."""
_MESSAGE_SPANS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
"""First words of the spans of parallel/collectives.py, inside which only the library that sends allocates."""
_NO_LAYERS = (*Phase, *_COMMUNICATION_SPANS, *_MESSAGE_SPANS, "gloo:", "nccl:")
"""First words of spans around or between layers; the last two are those of torch's own threads."""
_LAYER = re.compile(r"(^|[ .])\d+$")
_LOGITS_SHARE = 0.2
"""A tensor smaller than this share of the largest logits of forward is a scalar or a sum by row."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """Addresses of storages that the measured process noted.

    Gradients were noted at the end of backward (after their synchronisation), all else at the end of the step. `cast_bytes`: sizes
    of the weight copies that autocast makes in one forward. With several ranks, `communication` (storages that the parallel
    strategy kept) and `whole_gradients` (from autograd) are by the name of the mark at which they were noted.
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
    """A phase of the step, from one position to another."""

    phase: str
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class StepWindow:
    """The recorded step: its first and last position, its phases, and moment -> position (`peak` included).

    `marks`: name -> position; with several micro-batches, the last micro-batch's.
    """

    first: int
    last: int
    began_us: float
    phases: tuple[PhaseWindow, ...]
    moments: Mapping[str, int] = field(default_factory=dict)
    marks: Mapping[str, int] = field(default_factory=dict)

    def phase_at(self, position: int) -> str:
        """The phase in which an allocation born at this position was first used."""
        names = (phase.phase for phase in self.phases if phase.first < position <= phase.last)
        return next(names, "before the step" if position <= self.first else "between phases")


def step_window(timeline: MemoryTimeline) -> StepWindow:
    """The last step that its process marked. ValueError if there are no marks."""
    spans = timeline.snapshot.spans
    marks = {span.name.removeprefix(MARK): span.start_us for span in spans if span.name.startswith(MARK)}
    if "begin" not in marks or "end" not in marks:
        raise ValueError(
            "the history has no marks of a step: its beginning is lost, or it was not recorded by trainstep"
        )
    first, last = timeline.position_at(marks["begin"]), timeline.position_at(marks["end"])
    phases = tuple(
        PhaseWindow(phase=span.name, first=timeline.position_at(span.start_us), last=timeline.position_at(span.end_us))
        for span in spans
        if span.name in tuple(Phase) and marks["begin"] <= span.start_us <= marks["end"]
    )
    moments = {"init": timeline.position_at(marks["built"])} if "built" in marks else {}
    for phase, moment in AFTER.items():
        if marks.get(phase, 0.0) >= marks["begin"]:
            moments[moment] = timeline.position_at(marks[phase])
    moments |= {"after step": last, "peak": timeline.peak(first, last)}
    positions = {name: timeline.position_at(time_us) for name, time_us in marks.items()}
    return StepWindow(first=first, last=last, began_us=marks["begin"], phases=phases, moments=moments, marks=positions)


class Ledger:
    """The allocations by category and layer: `category_of[i]` and `layer_of[i]` belong to `timeline.allocations[i]`."""

    def __init__(self, timeline: MemoryTimeline, window: StepWindow, known: Known) -> None:
        self.timeline = timeline
        self.window = window
        self._known = known
        begin_us, end_us = timeline.time_us(window.first), timeline.time_us(window.last)
        self._spans = [
            span
            for span in timeline.snapshot.spans
            if not span.name.startswith(MARK) and span.end_us >= begin_us and span.start_us <= end_us
        ]
        self.layer_of = [self._layer(allocation) for allocation in timeline.allocations]
        self._whole_gradients = self._noted(known.whole_gradients)
        self._communication = self._noted(known.communication)
        self._cast = self._autocast_copies()
        self._logits = {
            index
            for index, allocation in enumerate(timeline.allocations)
            if index not in self._cast
            and self._born_in(allocation, Phase.FORWARD)
            and any(span.name in _LOGITS_SPANS for span in self._open_spans(allocation))
        }
        logits = [timeline.allocations[index] for index in self._logits]
        least_bytes = _LOGITS_SHARE * max((allocation.requested_bytes for allocation in logits), default=0)
        self._large_logits = [allocation for allocation in logits if allocation.requested_bytes >= least_bytes]
        self._large_sizes = {allocation.requested_bytes for allocation in self._large_logits}
        self.category_of = [self._category(index, allocation) for index, allocation in enumerate(timeline.allocations)]

    def bytes_at(self, position: int) -> dict[str, int]:
        """Category -> requested bytes held."""
        sizes = dict.fromkeys(CATEGORIES, 0)
        for allocation, category in zip(self.timeline.allocations, self.category_of, strict=True):
            if allocation.held_at(position):
                sizes[category] += allocation.requested_bytes
        return sizes

    def rounding_at(self, position: int) -> int:
        """Bytes that the allocator gave beyond those requested."""
        return int(self.timeline.allocated_bytes[position] - self.timeline.requested_bytes[position])

    def series(self) -> dict[str, Integers]:
        """Category -> requested bytes at every position."""
        return {
            category: self.timeline.bytes_of(
                self.timeline.allocations[index] for index, name in enumerate(self.category_of) if name == category
            )
            for category in CATEGORIES
        }

    def activations_at(self, position: int) -> dict[str, int]:
        """Layer -> bytes of activations held, layers in the order of their first allocation."""
        sizes: dict[str, int] = {}
        for allocation, category, layer in zip(self.timeline.allocations, self.category_of, self.layer_of, strict=True):
            if category == "activations" and allocation.held_at(position):
                sizes[layer] = sizes.get(layer, 0) + allocation.requested_bytes
        return sizes

    def _category(self, index: int, allocation: Allocation) -> str:
        known, end = self._known, self.window.moments["after step"]
        by_address = {
            "parameters": known.parameters,
            "optimizer state": known.optimizer_state,
            "batch and buffers": known.inputs,
        }
        for category, addresses in by_address.items():
            if allocation.address in addresses and allocation.held_at(end):
                return category
        backward_end = self.window.moments.get("after backward")
        if backward_end is not None and allocation.address in known.gradients and allocation.held_at(backward_end):
            return "gradients"
        if index in self._whole_gradients:
            return "gradients"
        if any(span.name.split(" ", 1)[0] in _MESSAGE_SPANS for span in self._open_spans(allocation)):
            return "workspaces"
        if index in self._communication or self._is_born_communicating(allocation):
            return "communication"
        if index in self._cast:
            return "autocast weight copies"
        if index in self._logits or self._is_logits_gradient(allocation):
            return "logits and loss"
        if self._outlives_forward(allocation) or self._outlives_recompute(allocation):
            return "activations"
        return "workspaces" if allocation.held_at(end) else "temporaries"

    def _noted(self, noted: Mapping[str, Collection[int]]) -> set[int]:
        """Indices of the allocations that were held at one of the noted addresses at the mark of the note."""
        by_address: dict[int, list[int]] = {}
        for index, allocation in enumerate(self.timeline.allocations):
            by_address.setdefault(allocation.address, []).append(index)
        return {
            index
            for mark, addresses in noted.items()
            if mark in self.window.marks
            for address in addresses
            for index in by_address.get(address, ())
            if self.timeline.allocations[index].held_at(self.window.marks[mark])
        }

    def _is_born_communicating(self, allocation: Allocation) -> bool:
        """Whether it is born while the strategy gathers, fills a buffer to send, or synchronises gradients after backward."""
        if self._born_in(allocation, Phase.GRAD_SYNC):
            return True
        return any(span.name.startswith(_COMMUNICATION_SPANS) for span in self._open_spans(allocation))

    def _born_in(self, allocation: Allocation, *phases: Phase) -> PhaseWindow | None:
        """The window in which the allocation is born, if it is of one of these phases."""
        window = next((phase for phase in self.window.phases if phase.first < allocation.born <= phase.last), None)
        return window if window is not None and window.phase in phases else None

    def _outlives_forward(self, allocation: Allocation) -> bool:
        """Whether the allocation is born in forward and freed in a later phase of the step."""
        forward = self._born_in(allocation, Phase.FORWARD)
        return forward is not None and allocation.held_at(forward.last) and not allocation.held_at(self.window.last)

    def _outlives_recompute(self, allocation: Allocation) -> bool:
        """Whether the allocation is born while backward recomputes a block's forward, and alive when the recomputation ends."""
        span = next((span for span in self._open_spans(allocation) if span.name.startswith(RECOMPUTE)), None)
        if span is None or not self._born_in(allocation, *_BACKWARD_PHASES):
            return False
        return allocation.held_at(self.timeline.position_at(span.end_us))

    def _autocast_copies(self) -> set[int]:
        """Indices of the allocations that are autocast's weight copies: survivors of a forward with the sizes of the copies."""
        copies: set[int] = set()
        for phase in self.window.phases:
            if phase.phase != Phase.FORWARD or not self._known.cast_bytes:
                continue
            expected = Counter(self._known.cast_bytes)
            born = [
                (index, allocation)
                for index, allocation in enumerate(self.timeline.allocations)
                if phase.first < allocation.born <= phase.last
            ]
            last_birth = max((allocation.born for _, allocation in born), default=0)
            for index, allocation in born:
                if (
                    allocation.held_at(last_birth)
                    and not allocation.held_at(self.window.last)
                    and expected[allocation.requested_bytes] > 0
                ):
                    expected[allocation.requested_bytes] -= 1
                    copies.add(index)
        return copies

    def _is_logits_gradient(self, allocation: Allocation) -> bool:
        if allocation.requested_bytes not in self._large_sizes or not self._born_in(allocation, *_BACKWARD_PHASES):
            return False
        return any(logits.held_at(allocation.born - 1) for logits in self._large_logits)

    def _open_spans(self, allocation: Allocation) -> list[Span]:
        """The step's spans open at an allocation's birth, outermost first."""
        if allocation.time_us is None or not self.window.first < allocation.born <= self.window.last:
            return []
        return [span for span in self._spans if span.start_us <= allocation.time_us <= span.end_us]

    def _layer(self, allocation: Allocation) -> str:
        """The name of a repeated block's span (`layer 3`, `model.layers.3`), else of the outermost span in the phase."""
        names = [span.name for span in self._open_spans(allocation) if not span.name.startswith(_NO_LAYERS)]
        numbered = next((name for name in names if _LAYER.search(name)), None)
        if numbered is not None:
            return numbered.replace(RECOMPUTE, "layer ") if numbered.startswith(RECOMPUTE) else numbered
        return names[0] if names else NO_LAYER
