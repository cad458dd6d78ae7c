"""A message of several tensors, each sent from where it is.

message   [aaaa|bb  |ccccc  ]     each tensor starts at its own element; nothing is sent for the gaps between them
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainstep.costs.buckets import lay_out


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """`tensors`, one-dimensional and of one dtype, at the elements `starts` of a message of `numel` elements, in this order."""

    tensors: Sequence[Tensor]
    starts: Sequence[int]
    numel: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "Pieces":
        """The tensors one after the other, each at an aligned element."""
        layout = lay_out([tensor.numel() for tensor in tensors])
        return cls(tensors=tensors, starts=layout.starts, numel=layout.numel)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the message, gaps included."""
        return self.numel * self.dtype.itemsize

    def cut(self, first: int, end: int) -> list[tuple[int, Tensor]]:
        """What lies between two elements of the message: (place, counted from `first`; part of a tensor, as a view)."""
        parts = []
        for start, tensor in zip(self.starts, self.tensors, strict=True):
            begin, stop = max(first, start), min(end, start + tensor.numel())
            if begin < stop:
                parts.append((begin - first, tensor[begin - start : stop - start]))
        return parts
