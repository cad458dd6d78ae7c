"""One unit's gradients on their way from whole ones to this rank's shard of their average.

    whole gradients -> a staging buffer -> reduce-scatter -> shard      each rank keeps 1/N of the unit's elements

The average is taken in `reduce_dtype` and kept in the parameters'.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from trainstep.costs.flat_layout import FlatLayout
from trainstep.parallel.collectives import DONE, Collectives, Pending
from trainstep.parallel.flat_buffer import FlatBuffer
from trainstep.parallel.staging import StagingPool
from trainstep.spans import span


class GradientShards:
    """`templates`: tensors of the gradients' shapes and strides; `layout`: where each lies in the flat one."""

    def __init__(
        self,
        name: str,
        templates: Sequence[Tensor],
        layout: FlatLayout,
        *,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype | None,
        collectives: Collectives,
        staging: StagingPool,
    ) -> None:
        self._name = name
        self._dtype = dtype
        self._reduce_dtype = reduce_dtype or dtype
        self._collectives = collectives
        world_size = collectives.ranks.world_size
        self._shelf = staging.shelf(templates, dtype=self._reduce_dtype, parts=world_size)
        self._shard_numel = layout.numel // world_size
        self._buffer: FlatBuffer | None = None
        self._reduced: Tensor | None = None
        self._into: Tensor | None = None
        self._pending: Pending = DONE

    @property
    def in_flight(self) -> list[Tensor]:
        """The buffer that is being reduced, and where its shard goes; nothing between messages."""
        return [] if self._buffer is None or self._reduced is None else [self._buffer.flat, self._reduced]

    def send(self, gradients: Sequence[Tensor | None], *, into: Tensor | None = None) -> None:
        """Copy gradients into a buffer, zeros for None, and start reducing. They may be freed at once.

        `into`: where the shard is to be, in the parameters' dtype; by default in new memory.
        """
        with span(f"send gradients {self._name}"):
            buffer = self._shelf.borrow()
            reduced = into
            if reduced is None or reduced.dtype != self._reduce_dtype:
                reduced = torch.empty(self._shard_numel, dtype=self._reduce_dtype, device=buffer.flat.device)
        self._into = into
        with torch.no_grad():
            _fill(buffer.views, gradients)
        self._pending = self._collectives.reduce_scatter(reduced, buffer.flat, reduction="average", label=self._name)
        self._buffer, self._reduced = buffer, reduced

    def receive(self) -> Tensor | None:
        """Wait; this rank's shard of the average, in the parameters' dtype. None if nothing was sent since the last time."""
        if self._buffer is None or self._reduced is None:
            return None
        self._pending.wait()
        self._shelf.give_back(self._buffer)
        shard = self._reduced.to(self._dtype) if self._into is None else self._into
        if shard is self._into and shard is not self._reduced:
            shard.copy_(self._reduced)
        self._buffer, self._reduced, self._pending = None, None, DONE
        return shard


def _fill(views: list[Tensor], gradients: Sequence[Tensor | None]) -> None:
    present = [gradient for gradient in gradients if gradient is not None]
    if len(present) < len(views):
        torch._foreach_zero_([view for view, gradient in zip(views, gradients, strict=True) if gradient is None])
        views = [view for view, gradient in zip(views, gradients, strict=True) if gradient is not None]
    if present:
        torch._foreach_copy_(views, present)
