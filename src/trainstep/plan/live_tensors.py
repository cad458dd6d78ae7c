"""The tensors that are alive while a step is replayed, by category, and the fullest moment of each phase."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from trainstep.plan.allocator import Allocator, Block

PARAMETERS, GRADIENTS, STATE = "parameters", "gradients", "optimizer state"
ACTIVATION, COPY, LOGITS = "activations", "autocast weight copies", "logits and loss"
TEMPORARY, COMMUNICATION, WORKSPACE = "temporaries", "communication", "workspaces"
BATCH, ROUNDING = "batch and buffers", "rounding"
CATEGORIES = (
    *(PARAMETERS, GRADIENTS, STATE, ACTIVATION, COPY, LOGITS, TEMPORARY, COMMUNICATION, WORKSPACE, BATCH, ROUNDING),
)
"""Everything that the allocator gives out is in one of these; `rounding` is what it gives out beyond what was asked for."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What is held at a moment. `categories` add up to `allocated_bytes`; `activations_by_op` to their activations."""

    name: str
    categories: dict[str, int]
    activations_by_op: dict[str, int]
    allocated_bytes: int
    reserved_bytes: int


class Tensor(NamedTuple):
    """One tensor that is alive. `op`: the op that keeps it, for activations."""

    block: Block
    category: str
    nbytes: int
    op: str


class LiveTensors:
    """Makes and frees tensors. `phase` names the peaks: `peaks[phase]` is the fullest moment of a phase."""

    def __init__(self) -> None:
        self.allocator = Allocator()
        self.peaks: dict[str, Moment] = {}
        self._phase = "init"
        self._most_bytes = 0
        """The most allocated bytes of this phase so far."""
        self._is_fullest = False
        """Whether this is the fullest moment of the phase so far, and `peaks` does not have it yet."""
        self._requested = dict.fromkeys(CATEGORIES, 0)
        self._activations: dict[str, int] = {}

    @property
    def phase(self) -> str:
        return self._phase

    @phase.setter
    def phase(self, name: str) -> None:
        self.note_peak()
        self._phase = name
        self._most_bytes = self.peaks[name].allocated_bytes if name in self.peaks else 0

    def forget_peaks(self) -> None:
        """Begin the peaks anew."""
        self.peaks.clear()
        self._most_bytes, self._is_fullest = 0, False

    def new(self, nbytes: int, category: str, op: str = "") -> Tensor:
        """Allocate a tensor."""
        block = self.allocator.take(nbytes)
        self._requested[category] += nbytes
        if category == ACTIVATION:
            self._activations[op] = self._activations.get(op, 0) + nbytes
        if self.allocator.allocated_bytes > self._most_bytes:
            self._most_bytes, self._is_fullest = self.allocator.allocated_bytes, True
        return Tensor(block, category, nbytes, op)

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Free tensors."""
        self.note_peak()
        for tensor in tensors:
            self.allocator.give_back(tensor.block)
            self._requested[tensor.category] -= tensor.nbytes
            if tensor.category == ACTIVATION:
                self._activations[tensor.op] -= tensor.nbytes

    def note_peak(self) -> None:
        """Fill `peaks` up to now: a moment is described only when it is over, because most are soon exceeded."""
        if self._is_fullest:
            self.peaks[self._phase] = self.moment(self._phase)
            self._is_fullest = False

    def moment(self, name: str) -> Moment:
        """What is held now."""
        rounding = self.allocator.allocated_bytes - sum(self._requested.values())
        return Moment(
            name=name,
            categories={**self._requested, ROUNDING: rounding},
            activations_by_op={op: nbytes for op, nbytes in self._activations.items() if nbytes},
            allocated_bytes=self.allocator.allocated_bytes,
            reserved_bytes=self.allocator.reserved_bytes,
        )
