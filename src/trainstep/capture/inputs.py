"""The inputs of a graph: tensors that stay where they are, into which each call's batch is copied."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

_CONSTANTS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)


def shape_of(batch: Any) -> Hashable:
    """What has to be equal for one graph to take two batches: structure, tensors' shapes and dtypes, every other value.

    ValueError for a batch that holds anything but tensors and plain values in dicts, lists and tuples.
    """
    leaves, structure = tree_flatten(batch)
    return structure, tuple(map(_kind, leaves))


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device."""
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, batch)


def copies(outputs: Any) -> Any:
    """What a step returned, apart from the memory that a graph's next launch overwrites. ValueError as of a batch."""
    return tree_map(_copy, outputs)


class StaticInputs:
    """`batch`: what the step is captured with. `fill(other)`: copies another of the same shape into it."""

    def __init__(self, batch: Any, device: torch.device) -> None:
        leaves, structure = tree_flatten(batch)
        self._leaves = [leaf.to(device, copy=True) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.batch = tree_unflatten(self._leaves, structure)

    def fill(self, batch: Any) -> None:
        for mine, leaf in zip(self._leaves, tree_flatten(batch)[0], strict=True):
            if isinstance(mine, Tensor) and mine is not leaf:
                mine.copy_(leaf, non_blocking=True)


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    if isinstance(leaf, _CONSTANTS):
        return leaf
    raise ValueError(f"function: returns a {type(leaf).__name__}; let it return tensors (`return output.loss`)")


def _kind(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.dtype, tuple(leaf.shape)
    if isinstance(leaf, _CONSTANTS):
        return type(leaf), leaf
    raise ValueError(
        f"batch: holds a {type(leaf).__name__}; a captured step takes tensors and plain values in dicts, lists and tuples "
        "(of an object that is like a dict: dict(batch))"
    )
