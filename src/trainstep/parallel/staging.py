"""Buffers that gradients pass through on their way to their shards: borrowed for a message, given back, borrowed by the next.

Blocks of a Transformer have the same shapes, so two or three buffers serve all of them; allocating anew for each would cost the
host a view a parameter, and the memory of every message that is still on its way. When all gradients are there their memory is
freed: a step holds most where backward begins, and nothing is on its way then.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from trainstep.parallel.flat_buffer import FlatBuffer

_Kind = tuple[tuple[tuple[torch.Size, tuple[int, ...]], ...], torch.dtype, int]


class Shelf:
    """Flat buffers for tensors of the same shapes and strides."""

    def __init__(self, tensors: Sequence[Tensor], *, dtype: torch.dtype, device: torch.device, parts: int) -> None:
        self._tensors, self._dtype, self._device, self._parts = list(tensors), dtype, device, parts
        self._free: list[FlatBuffer] = []

    def borrow(self) -> FlatBuffer:
        """What its views hold is old, the filling between and behind them is zero."""
        if self._free:
            buffer = self._free.pop()
            buffer.take_memory()
            return buffer
        return FlatBuffer(self._tensors, dtype=self._dtype, device=self._device, parts=self._parts)

    def give_back(self, buffer: FlatBuffer) -> None:
        """The message that used it has been waited for."""
        self._free.append(buffer)

    @property
    def free(self) -> list[Tensor]:
        """Flat tensors that nobody uses now."""
        return [buffer.flat for buffer in self._free]

    def clear(self) -> None:
        """Free the memory of buffers that nobody uses."""
        for buffer in self._free:
            buffer.free_memory()


class StagingPool:
    """The shelves of a module's units: those of units alike are one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shelves: dict[_Kind, Shelf] = {}

    def shelf(self, tensors: Sequence[Tensor], *, dtype: torch.dtype, parts: int) -> Shelf:
        """The one for tensors like these."""
        kind = tuple((tensor.shape, tensor.stride()) for tensor in tensors), dtype, parts
        if kind not in self._shelves:
            self._shelves[kind] = Shelf(tensors, dtype=dtype, device=self._device, parts=parts)
        return self._shelves[kind]

    @property
    def free(self) -> list[Tensor]:
        """Flat tensors that nobody uses now."""
        return [flat for shelf in self._shelves.values() for flat in shelf.free]

    def clear(self) -> None:
        """Free the memory of buffers that nobody uses."""
        for shelf in self._shelves.values():
            shelf.clear()
