"""Computes the bytes of AdamW's state, with masters or without, and of the temporary tensors of its update."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_MOMENTS = 2  # AdamW's, each of a parameter's size and of the dtype of what is updated
_STEP_BYTES = 4  # AdamW's step counter in fp32, one per tensor
_MASTER_BYTES = 4  # an fp32 copy of a parameter, which is updated in its place


class Updated(NamedTuple):
    """A tensor, or a piece of one, that a rank updates."""

    numel: int
    element_bytes: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.element_bytes


class StateBytes(NamedTuple):
    """Bytes of an optimizer's state."""

    whole: int
    """All of it, from the first step on."""
    from_start: int
    """The part that is there before the first step: masters."""
    in_update: int
    """Temporary tensors of the update."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW. `adamw`: RunConfig.adamw; its implementations need different temporary tensors. `masters`: it updates fp32 copies.

    `in_backward`: it updates what is complete while backward goes on (training/update_in_backward.py). `by_bucket`: it updates a
    bucket when its average arrives, before all gradients are synchronised.
    """

    adamw: str
    masters: bool = False
    in_backward: bool = False
    by_bucket: bool = False

    def state(self, updated: Sequence[Updated], steps: Sequence[Sequence[Updated]] = ()) -> StateBytes:
        """The bytes of its state for the pieces that a rank updates, at once or in several `steps`."""
        masters_bytes = sum(_MASTER_BYTES * piece.numel for piece in updated) if self.masters else 0
        moments_bytes = _MOMENTS * (masters_bytes if self.masters else sum(piece.nbytes for piece in updated))
        return StateBytes(
            whole=masters_bytes + moments_bytes + _STEP_BYTES * len(updated),
            from_start=masters_bytes,
            in_update=max((self._in_update(step) for step in steps or [updated]), default=0),
        )

    def _in_update(self, updated: Sequence[Updated]) -> int:
        """The temporary tensors of one step on a GPU."""
        sizes = [_MASTER_BYTES * piece.numel if self.masters else piece.nbytes for piece in updated]
        loop = max((last + 2 * size for last, size in zip([0, *sizes], sizes, strict=False)), default=0)
        temporary_bytes = {
            "fused": 0,
            "trainstep": 0,
            "foreach": sum(sizes),  # the root of every second moment
            "loop": loop,  # two tensors of a parameter's size, and the last parameter's root
        }[self.adamw]
        # Only ours takes gradients narrower than what it updates.
        return temporary_bytes + (sum(sizes) if self.masters and self.adamw != "trainstep" else 0)
