"""Flat tensors that hold many tensors, for buckets, flat shards and FSDP's units; staging and reducing of gradients.

costs/buckets.py lays out a flat tensor. A view in it has its tensor's shape and, where the tensor is dense but not contiguous
(channels last, say), also its strides, so that no operation on both takes a slow path.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from trainstep.costs import buckets as flat_layout
from trainstep.costs.buckets import FlatLayout
from trainstep.parallel.collectives import DONE, Pending, ShardGroups
from trainstep.parallel.copies.pieces import Pieces
from trainstep.spans import span


def lay_out(tensors: Sequence[Tensor], *, parts: int = 1, extra: int = 0) -> FlatLayout:
    """The layout of these tensors in a flat one, by costs/buckets.py."""
    return flat_layout.lay_out([tensor.numel() for tensor in tensors], parts=parts, extra=extra)


class FlatBuffer:
    """A flat tensor of zeros, and its views in the shapes of `tensors`."""

    def __init__(
        self, tensors: Sequence[Tensor], *, dtype: torch.dtype, device: torch.device, parts: int = 1, extra: int = 0
    ) -> None:
        self.layout = lay_out(tensors, parts=parts, extra=extra)
        self.flat = torch.zeros(self.layout.numel, dtype=dtype, device=device)
        self.views = [
            view_like(self.flat, start, tensor) for start, tensor in zip(self.layout.starts, tensors, strict=True)
        ]

    def shard(self, rank: int, world_size: int) -> Tensor:
        """The rank's part, as a view."""
        first, end = self.layout.shard(rank, world_size)
        return self.flat[first:end]

    def free_memory(self) -> None:
        """Free the memory: until `take_memory` neither the flat tensor nor its views may be read."""
        self.flat.untyped_storage().resize_(0)

    def take_memory(self) -> None:
        """Allocate the memory again if it was freed, filled with zeros."""
        storage = self.flat.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.flat.nbytes)
            self.flat.zero_()


def view_like(flat: Tensor, start: int, tensor: Tensor) -> Tensor:
    """The elements of `flat` from `start` on in the shape of `tensor`, and in its strides where it is dense."""
    strides = tensor.stride() if _is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
    return flat.as_strided(tensor.shape, strides, flat.storage_offset() + start)


def made_dense(tensor: Tensor) -> Tensor:
    """The tensor if it is dense, else a dense copy."""
    return tensor if _is_dense(tensor) else tensor.contiguous()


def in_memory_order(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in the order of memory, (n,), as a view."""
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


# Staging buffers, which gradients pass through on the way to their shards: a message borrows a buffer and returns it.
#
# Blocks of a Transformer have the same shapes, so two or three buffers serve all of them. To allocate a buffer for each
# message would cost the host one view per parameter, and the memory of all messages that have not been waited for.

_Kind = tuple[tuple[tuple[torch.Size, tuple[int, ...]], ...], torch.dtype, int]
"""Shapes and strides, dtype, number of parts."""


class Shelf:
    """Flat buffers for tensors of the same shapes and strides."""

    def __init__(self, tensors: Sequence[Tensor], *, dtype: torch.dtype, device: torch.device, parts: int) -> None:
        self._tensors, self._dtype, self._device, self._parts = list(tensors), dtype, device, parts
        self._free: list[FlatBuffer] = []

    def borrow(self) -> FlatBuffer:
        """A buffer that no message uses: its views hold old values, and the padding between and behind them is zero."""
        if self._free:
            buffer = self._free.pop()
            buffer.take_memory()
            return buffer
        return FlatBuffer(self._tensors, dtype=self._dtype, device=self._device, parts=self._parts)

    def give_back(self, buffer: FlatBuffer) -> None:
        """Return a buffer after its message has been waited for."""
        self._free.append(buffer)

    @property
    def free(self) -> list[Tensor]:
        """Flat tensors of the buffers that no message uses."""
        return [buffer.flat for buffer in self._free]

    def clear(self) -> None:
        """Free the memory of the buffers that no message uses.

        Called when all gradients are ready: a step holds most memory where backward begins, and no message needs a buffer then.
        """
        for buffer in self._free:
            buffer.free_memory()


class StagingPool:
    """The shelves of a module's units; units with the same shapes share a shelf."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shelves: dict[_Kind, Shelf] = {}

    def shelf(self, tensors: Sequence[Tensor], *, dtype: torch.dtype, parts: int) -> Shelf:
        """The shelf for tensors of these shapes and strides."""
        kind = tuple((tensor.shape, tensor.stride()) for tensor in tensors), dtype, parts
        if kind not in self._shelves:
            self._shelves[kind] = Shelf(tensors, dtype=dtype, device=self._device, parts=parts)
        return self._shelves[kind]

    @property
    def free(self) -> list[Tensor]:
        """Flat tensors of the buffers that no message uses."""
        return [flat for shelf in self._shelves.values() for flat in shelf.free]

    def clear(self) -> None:
        """Free the memory of the buffers that no message uses."""
        for shelf in self._shelves.values():
            shelf.clear()


class GradientShards:
    """Reduces one unit's whole gradients to this rank's shard of their average.

        whole gradients -> a staging buffer -> reduce-scatter -> shard      each of a group's N ranks keeps 1/N of the unit

    A transport that takes pieces (copies/pieces.py) reads gradients where they are, without a staging buffer, if all are there in
    the dtype and the layout that is sent.

    The average is taken in `reduce_dtype` and kept in `dtype`, that of the parameters. `templates`: tensors with the gradients'
    shapes and strides; `layout`: where each lies in the flat tensor.
    """

    def __init__(
        self,
        name: str,
        templates: Sequence[Tensor],
        layout: FlatLayout,
        *,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype | None,
        groups: ShardGroups,
        staging: StagingPool,
    ) -> None:
        self._name = name
        self._dtype = dtype
        self._reduce_dtype = reduce_dtype or dtype
        self._groups = groups
        parts = groups.shards.ranks.world_size
        self._templates = templates
        self._layout = layout
        self._shelf = staging.shelf(templates, dtype=self._reduce_dtype, parts=parts)
        self._shard_numel = layout.numel // parts
        self._buffer: FlatBuffer | None = None
        self._sent: Sequence[Tensor] = ()
        """What is being reduced: the buffer, or the gradients themselves."""
        self._reduced: Tensor | None = None
        self._into: Tensor | None = None
        self._pending: Pending = DONE

    @property
    def in_flight(self) -> list[Tensor]:
        """What is being reduced (the buffer, or gradients), and the tensor for the shard; empty between messages."""
        return [] if self._reduced is None else [*self._sent, self._reduced]

    def send(self, gradients: Sequence[Tensor | None], *, into: Tensor | None = None) -> None:
        """Start reducing gradients, zeros for None. The caller may drop them at once.

        `into`: the tensor for the shard, in the parameters' dtype; by default a new one.
        """
        pieces = self._in_place(gradients)
        with span(f"send gradients {self._name}"):
            buffer = self._shelf.borrow() if pieces is None else None
            reduced = into
            if reduced is None or reduced.dtype != self._reduce_dtype:
                device = self._groups.everyone.ranks.device
                reduced = torch.empty(self._shard_numel, dtype=self._reduce_dtype, device=device)
        self._into = into
        if pieces is not None:
            self._pending = self._groups.reduce_scatter_pieces(reduced, pieces, label=self._name)
            self._sent = pieces.tensors
        elif buffer is not None:
            with torch.no_grad():
                _fill(buffer.views, gradients)
            self._pending = self._groups.reduce_scatter(reduced, buffer.flat, label=self._name)
            self._sent = [buffer.flat]
        self._buffer, self._reduced = buffer, reduced

    def _in_place(self, gradients: Sequence[Tensor | None]) -> Pieces | None:
        """The gradients as a message that is sent from where they are; None if they must be copied first."""
        fitting = [
            in_memory_order(gradient)
            for gradient, template in zip(gradients, self._templates, strict=True)
            if gradient is not None and gradient.dtype == self._reduce_dtype and gradient.stride() == template.stride()
        ]
        if len(fitting) < len(gradients):
            return None
        pieces = Pieces(tensors=fitting, starts=self._layout.starts, numel=self._layout.numel)
        return pieces if self._groups.takes_pieces(pieces) else None

    def receive(self) -> Tensor | None:
        """Wait for this rank's shard of the average, in the parameters' dtype. None if nothing was sent since the last call."""
        if self._reduced is None:
            return None
        self._pending.wait()
        if self._buffer is not None:
            self._shelf.give_back(self._buffer)
        shard = self._reduced.to(self._dtype) if self._into is None else self._into
        if shard is self._into and shard is not self._reduced:
            shard.copy_(self._reduced)
        self._buffer, self._reduced, self._sent, self._pending = None, None, (), DONE
        return shard


def _fill(views: list[Tensor], gradients: Sequence[Tensor | None]) -> None:
    present = [gradient for gradient in gradients if gradient is not None]
    if len(present) < len(views):
        torch._foreach_zero_([view for view, gradient in zip(views, gradients, strict=True) if gradient is None])
        views = [view for view, gradient in zip(views, gradients, strict=True) if gradient is not None]
    if present:
        torch._foreach_copy_(views, present)
