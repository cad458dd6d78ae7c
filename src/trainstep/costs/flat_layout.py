"""Where tensors lie in a flat one: offsets, filling, and which part is whose.

    tensors      a        b    c            each at the next multiple of ALIGNMENT elements
    flat        [aaaaaaaa bbbb ccccccc 0 0]
    shards      [ rank 0  | rank 1  | rank 2 ]   equal parts, the end filled up so that they are

Buckets, flat shards and FSDP's units are laid out so (parallel/flat_buffer.py); what they send and hold follows from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 8
"""Elements that each tensor's start is a multiple of: 16 bytes of 16-bit elements, what vectorised loads and stores need. The same
whatever the dtype, so that a buffer in bf16 has the layout of one in fp32."""


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """Where each tensor starts in the flat one, in elements. `numel`: all of it, the filling included."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    numel: int

    def shard(self, rank: int, world_size: int) -> tuple[int, int]:
        """First and end element of that rank's part."""
        part = self.numel // world_size
        return rank * part, (rank + 1) * part

    def piece(self, index: int, rank: int, world_size: int) -> tuple[int, int]:
        """First and end element, counted within tensor `index`, of what that rank's part holds of it; equal if nothing."""
        first, end = self.shard(rank, world_size)
        start, size = self.starts[index], self.sizes[index]
        return min(max(first - start, 0), size), min(max(end - start, 0), size)


def lay_out(numels: Sequence[int], *, parts: int = 1, extra: int = 0) -> FlatLayout:
    """A layout for tensors of these numbers of elements, each start aligned, that divides into `parts` equal and aligned ones.

    `extra`: further elements kept behind the tensors; their place is `numel - extra` onward only where `parts` is 1.
    """
    starts, end = [], 0
    for numel in numels:
        starts.append(end)
        end += _up_to(ALIGNMENT, numel)
    return FlatLayout(
        starts=tuple(starts),
        sizes=tuple(numels),
        numel=_up_to(ALIGNMENT * parts, end + extra) if parts > 1 else end + extra,
    )


def _up_to(step: int, numel: int) -> int:
    return -(-numel // step) * step
