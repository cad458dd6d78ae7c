"""Many tensors in one flat one: what buckets, flat shards and FSDP's units are made of. costs/flat_layout.py says what lies where.

A view has its tensor's shape; where the tensor is dense but not contiguous (channels last, say), its strides too, so that
nothing that reads both runs into a slow path.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from trainstep.costs import flat_layout
from trainstep.costs.flat_layout import FlatLayout


def lay_out(tensors: Sequence[Tensor], *, parts: int = 1, extra: int = 0) -> FlatLayout:
    """The layout of costs/flat_layout.py for these tensors."""
    return flat_layout.lay_out([tensor.numel() for tensor in tensors], parts=parts, extra=extra)


class FlatBuffer:
    """One flat tensor, zeroed, and its views in the shapes of `tensors`."""

    def __init__(
        self, tensors: Sequence[Tensor], *, dtype: torch.dtype, device: torch.device, parts: int = 1, extra: int = 0
    ) -> None:
        self.layout = lay_out(tensors, parts=parts, extra=extra)
        self.flat = torch.zeros(self.layout.numel, dtype=dtype, device=device)
        self.views = [
            view_like(self.flat, start, tensor) for start, tensor in zip(self.layout.starts, tensors, strict=True)
        ]

    def shard(self, rank: int, world_size: int) -> Tensor:
        """That rank's part, in place."""
        first, end = self.layout.shard(rank, world_size)
        return self.flat[first:end]

    def free_memory(self) -> None:
        """Until `take_memory` neither it nor its views may be read."""
        self.flat.untyped_storage().resize_(0)

    def take_memory(self) -> None:
        """Zeroed, as at first, where it was freed; else nothing changes."""
        storage = self.flat.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.flat.nbytes)
            self.flat.zero_()


def view_like(flat: Tensor, start: int, tensor: Tensor) -> Tensor:
    """The elements of `flat` from `start` on in the shape of `tensor`, and in its strides where it is dense."""
    strides = tensor.stride() if _is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
    return flat.as_strided(tensor.shape, strides, flat.storage_offset() + start)


def made_dense(tensor: Tensor) -> Tensor:
    """The tensor, or where its elements do not fill its memory a copy whose do."""
    return tensor if _is_dense(tensor) else tensor.contiguous()


def in_memory_order(tensor: Tensor) -> Tensor:
    """A dense tensor's elements as they lie in memory, (n,), in place."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill its memory without gaps or overlap, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
