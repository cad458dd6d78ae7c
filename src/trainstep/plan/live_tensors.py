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
        self.phase = "init"
        self.peaks: dict[str, Moment] = {}
        self._requested = dict.fromkeys(CATEGORIES, 0)
        self._activations: dict[str, int] = {}

    def new(self, nbytes: int, category: str, op: str = "") -> Tensor:
        """Allocate a tensor."""
        block = self.allocator.take(nbytes)
        self._requested[category] += nbytes
        if category == ACTIVATION:
            self._activations[op] = self._activations.get(op, 0) + nbytes
        peak = self.peaks.get(self.phase)
        if peak is None or self.allocator.allocated_bytes > peak.allocated_bytes:
            self.peaks[self.phase] = self.moment(self.phase)
        return Tensor(block, category, nbytes, op)

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Free tensors."""
        for tensor in tensors:
            self.allocator.give_back(tensor.block)
            self._requested[tensor.category] -= tensor.nbytes
            if tensor.category == ACTIVATION:
                self._activations[tensor.op] -= tensor.nbytes

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
