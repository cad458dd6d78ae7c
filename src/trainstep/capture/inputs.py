"""The inputs of a graph: tensors that stay where they are, into which each call's batch is copied.

What the step writes into its batch is copied back, and a tensor that is there twice is one tensor: so it is without a graph too.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from trainstep.capture.waits import NotCapturable

_CONSTANTS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)


def shape_of(batch: Any) -> Hashable:
    """What has to be equal for one graph to take two batches: structure, tensors' shapes, layouts and dtypes, which of them are the
    same tensor, every other value.

    NotCapturable for a batch that holds anything but dense tensors and plain values in dicts, lists and tuples.
    """
    leaves, structure = tree_flatten(batch)
    first = _firsts(leaves)
    return structure, tuple(map(_kind, leaves)), first


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device."""
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, batch)


def detached(outputs: Any) -> Any:
    """What a step returned without its history: that would hold on to activations for as long as there is a graph."""
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs)


def copies(outputs: Any) -> Any:
    """What a step returned, apart from the memory that a graph's next launch overwrites.

    ValueError for what is neither a tensor nor a plain value.
    """
    return tree_map(_copy, outputs)


class StaticInputs:
    """`batch`: what the step is captured with. `fill(other)`: copies another of the same shape into it."""

    def __init__(self, batch: Any, device: torch.device) -> None:
        leaves, structure = tree_flatten(batch)
        self._places = sorted(set(_firsts(leaves)) - {-1})
        """Where each tensor comes first among the leaves."""
        mine = {place: _copy_laid_out_alike(leaves[place], device) for place in self._places}
        self._mine = list(mine.values())
        self._written: list[int] = []
        self._versions = self._current_versions()
        same = zip(leaves, _firsts(leaves), strict=True)
        self.batch = tree_unflatten([mine.get(place, leaf) for leaf, place in same], structure)

    def fill(self, batch: Any) -> None:
        for mine, leaf in zip(self._mine, self._tensors(batch), strict=True):
            mine.copy_(leaf, non_blocking=True)

    def note_written(self) -> None:
        """Called after the capture: tensors that the step wrote into are written at every launch."""
        changes = zip(self._versions, self._current_versions(), strict=True)
        self._written = [index for index, (before, now) in enumerate(changes) if before != now]

    def write_back(self, batch: Any) -> None:
        """What the step wrote into its batch, where the batch was on the device."""
        if self._written:
            given = self._tensors(batch)
            for index in self._written:
                if given[index].device == self._mine[index].device:
                    given[index].copy_(self._mine[index])

    def _tensors(self, batch: Any) -> list[Tensor]:
        leaves = tree_flatten(batch)[0]
        return [leaves[place] for place in self._places]

    def _current_versions(self) -> list[int]:
        return [0 if mine.is_inference() else mine._version for mine in self._mine]


def _firsts(leaves: list[Any]) -> tuple[int, ...]:
    """For each leaf the place of the first that is the same tensor; -1 for what is no tensor."""
    seen: dict[int, int] = {}
    return tuple(
        seen.setdefault(id(leaf), place) if isinstance(leaf, Tensor) else -1 for place, leaf in enumerate(leaves)
    )


def _copy_laid_out_alike(tensor: Tensor, device: torch.device) -> Tensor:
    """Kernels go by strides, and round by them: a slice stays one, unless its elements share memory."""
    if tensor.device.type != device.type or _shares_memory_with_itself(tensor):
        return tensor.detach().to(device, copy=True)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)


def _shares_memory_with_itself(tensor: Tensor) -> bool:
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    if isinstance(leaf, _CONSTANTS):
        return leaf
    raise ValueError(f"function: returns a {type(leaf).__name__}; let it return tensors (`return output.loss`)")


def _kind(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        if leaf.requires_grad:
            raise NotCapturable(
                "batch: holds a tensor that requires grad, whose gradient a graph would keep; detach() it"
            )
        if leaf.layout != torch.strided or leaf.is_nested:
            raise NotCapturable(
                f"batch: holds a {'nested' if leaf.is_nested else 'sparse'} tensor; a graph takes dense ones"
            )
        return leaf.dtype, tuple(leaf.shape), None if leaf.is_contiguous() else leaf.stride()
    if isinstance(leaf, _CONSTANTS):
        return type(leaf), leaf
    raise NotCapturable(
        f"batch: holds a {type(leaf).__name__}; a captured step takes tensors and plain values in dicts, lists and tuples "
        "(of an object that is like a dict: dict(batch))"
    )
