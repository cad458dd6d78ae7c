"""Bytes that the tensors of a step hold in this process, counted storage by storage, for comparison with memory formulas.

Activations are not seen: autograd saves them outside of Python's sight.
"""

import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainstep.costs.rank_groups import Level
from trainstep.parallel.collectives import Collectives

_EQUAL_READINGS = 5


def storage_bytes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of each storage that these tensors lie in."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


class Holdings:
    """Bytes held in addition to those at construction; the parameters of `but` count as additional."""

    def __init__(self, but: nn.Module) -> None:
        gc.collect()
        own = storage_bytes(but.parameters())
        self._before = {place for place in storage_bytes(_all_tensors()) if place not in own}

    def total_bytes(self) -> int:
        """The bytes held now."""
        return sum(nbytes for place, nbytes in storage_bytes(_all_tensors()).items() if place not in self._before)

    def settled_bytes(self) -> int:
        """The bytes held once they no longer change: gloo's threads release the tensor of a message shortly after its arrival."""
        readings = [self.total_bytes()]
        while len(readings) < _EQUAL_READINGS or len(set(readings[-_EQUAL_READINGS:])) > 1:
            time.sleep(0.001)
            readings.append(self.total_bytes())
        return readings[-1]


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(storage_bytes(value for value in values if isinstance(value, Tensor)).values())


@contextmanager
def sampled_at_messages(holdings: Holdings) -> Iterator[list[tuple[str, int]]]:
    """A list that gets (label, settled bytes) when each message starts; of a message in stages, when its first stage does."""
    samples: list[tuple[str, int]] = []
    real = Collectives._counted

    def counted(self: Collectives, operation: str, tensor: Tensor, label: str) -> Any:
        is_later_stage = self._level is Level.ACROSS_GROUPS or (
            operation == "all_gather" and label.startswith("bucket")
        )
        if not is_later_stage:
            samples.append((label, holdings.settled_bytes()))
        return real(self, operation, tensor, label)

    Collectives._counted = counted  # type: ignore[method-assign]
    try:
        yield samples
    finally:
        Collectives._counted = real  # type: ignore[method-assign]


class MostHeld(TorchDispatchMode):
    """The most bytes held after any op inside."""

    def __init__(self, holdings: Holdings) -> None:
        super().__init__()
        self._holdings = holdings
        self.most_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        self.most_bytes = max(self.most_bytes, self._holdings.total_bytes())
        return result


def _all_tensors() -> Iterator[Tensor]:
    """All tensors that Python's garbage collector knows, and their gradients."""
    for candidate in gc.get_objects():
        # torch.compile's fake tensors have no memory
        if issubclass(type(candidate), Tensor) and not issubclass(type(candidate), FakeTensor):
            yield candidate
            if candidate.is_leaf and candidate.grad is not None:
                yield candidate.grad
