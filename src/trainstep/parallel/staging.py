"""Buffers that gradients pass through on their way to their shards: borrowed for a message, given back, borrowed by the next.

Blocks of a Transformer have the same shapes, so two or three buffers serve all of them; allocating anew for each would cost the
host a view a parameter, and the memory of every message that is still on its way. When all gradients are there the buffers go:
a step holds most where backward begins, and nothing is on its way then.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from trainstep.parallel.flat_buffer import FlatBuffer

_Kind = tuple[tuple[tuple[torch.Size, tuple[int, ...]], ...], torch.dtype, int]


class StagingPool:
    """Flat buffers for tensors of the same shapes and strides."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[_Kind, list[FlatBuffer]] = {}

    def borrow(self, tensors: Sequence[Tensor], *, dtype: torch.dtype, parts: int) -> FlatBuffer:
        """A buffer for these; what its views hold is old, the filling between and behind them is zero."""
        kind = _kind(tensors, dtype, parts)
        waiting = self._free.get(kind)
        return waiting.pop() if waiting else FlatBuffer(tensors, dtype=dtype, device=self._device, parts=parts)

    def give_back(self, buffer: FlatBuffer, tensors: Sequence[Tensor], *, parts: int) -> None:
        """The message that used it has been waited for."""
        self._free.setdefault(_kind(tensors, buffer.flat.dtype, parts), []).append(buffer)

    def clear(self) -> None:
        """Free the buffers that nobody uses."""
        self._free.clear()

    @property
    def nbytes(self) -> int:
        """Of buffers that nobody uses."""
        return sum(buffer.flat.nbytes for buffers in self._free.values() for buffer in buffers)


def _kind(tensors: Sequence[Tensor], dtype: torch.dtype, parts: int) -> _Kind:
    return tuple((tensor.shape, tensor.stride()) for tensor in tensors), dtype, parts
