"""Counts the bytes that tensors hold now and held at most: on a GPU by the allocator, on a CPU by the storages of operators."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(Protocol):
    """Bytes beyond those that were there when counting began (on a GPU: all bytes)."""

    def now(self) -> int: ...

    def peak(self) -> int:
        """The most since `begin_peak`."""

    def begin_peak(self) -> None: ...


@contextmanager
def live_bytes(device: torch.device, resized: Sequence[Tensor] = ()) -> Iterator[LiveBytes]:
    """Count inside the block. Compiled code makes its tensors past the dispatcher: on a CPU run it uncompiled.

    `resized`: tensors that are there and whose storage is freed and allocated again, which no operator does.
    """
    if device.type == "cuda":
        yield _Allocator(device)
        return
    with _Storages(resized) as storages:
        yield storages


@contextmanager
def lone_pool(device: torch.device) -> Iterator[None]:
    """Take all memory for the current stream of a GPU from a pool of its own, as a capture does: gaps elsewhere are no use to it.

    By the current stream, and not by the thread, because backward allocates in autograd's threads. What is left of the pool goes
    back to the GPU with the next torch.cuda.empty_cache().
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    pool = torch.cuda.graph_pool_handle()
    torch._C._cuda_beginAllocateCurrentStreamToPool(index, pool)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)


class _Allocator:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def begin_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


class _Storages(TorchDispatchMode):
    """Sums up the storages that operators return, until they are freed."""

    def __init__(self, resized: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        """Id of a storage -> the storage and its bytes."""
        self._resized = [x.untyped_storage() for x in resized]
        self._before = self._resized_bytes()
        self._now = self._peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        results = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            if isinstance(leaf, Tensor):
                self._note(leaf, given)
        if self._resized:
            self._peak = max(self._peak, self.now())
        return results

    def _note(self, tensor: Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._alive or key in given:  # a view, of what was counted or was there before
            return
        nbytes = storage.nbytes()
        self._alive[key] = weakref.ref(storage, lambda _: self._forget(key)), nbytes
        self._now += nbytes
        self._peak = max(self._peak, self.now())

    def _forget(self, key: int) -> None:
        self._now -= self._alive.pop(key)[1]

    def _resized_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._resized)

    def now(self) -> int:
        return self._now + self._resized_bytes() - self._before

    def peak(self) -> int:
        return self._peak

    def begin_peak(self) -> None:
        self._peak = self.now()
