"""Programs of the emulated multiprocessor of gluon_machine.py: tiles in registers and in shared memory, and partitions of warps.

A partition is a thread, and one runs at a time: at every barrier a seeded draw chooses the next, so a run can be repeated. If no
partition can continue, that is a deadlock, and the error says what each waits for. Shared memory starts as NaN.
"""

import math
import random
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

DTYPES = {gl.bfloat16: torch.bfloat16, gl.float16: torch.float16, gl.float32: torch.float32, gl.int32: torch.int32}
GLUON_DTYPES = {torch_dtype: gluon_dtype for gluon_dtype, torch_dtype in DTYPES.items()}
WARPGROUP_THREADS = 128


class Wrong(AssertionError):
    """A rule of the machine that the kernel broke."""


# Values --------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Numbers:
    """A tensor with the attributes that a kernel may read, in registers or in shared memory."""

    data: Tensor

    @property
    def dtype(self) -> Any:
        return GLUON_DTYPES[self.data.dtype]

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)


@dataclass(frozen=True, eq=False)
class Tile(_Numbers):
    """A tensor in registers."""

    def to(self, dtype: Any) -> "Tile":
        return Tile(self.data.to(DTYPES[dtype]))


def plain(x: Any) -> Any:
    if isinstance(x, Started):
        raise Wrong("a wgmma's result is used before the wait for it")
    return x.data if isinstance(x, Tile) else x


def _tile_operator(name: str) -> Any:
    return lambda self, other: Tile(getattr(torch.Tensor, name)(self.data, plain(other)))


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "lt", "le", "gt", "ge", "eq", "and"):
    setattr(Tile, f"__{_name}__", _tile_operator(f"__{_name}__"))


@dataclass(frozen=True, eq=False)
class Shared(_Numbers):
    """A tile in shared memory."""

    layout: Any = None

    def index(self, i: int) -> "Shared":
        return Shared(self.data[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        return Shared(self.data.narrow(dim, int(start), int(length)))

    def permute(self, order: Sequence[int]) -> "Shared":
        return Shared(self.data.permute(*order))

    def reshape(self, shape: Sequence[int]) -> "Shared":
        return Shared(self.data.view(*[int(n) for n in shape]))

    def load(self, _layout: Any = None) -> Tile:
        return Tile(self.data.clone())

    def store(self, tile: Tile) -> None:
        if self.data.dtype != tile.data.dtype:
            raise Wrong(f"{tile.data.dtype} stored to shared memory of {self.data.dtype}")
        self.data.copy_(tile.data)
        here().unfenced.append(self.data)


@dataclass(frozen=True)
class Descriptor:
    """A tensor that TMA copies in boxes, with 0 beyond its end."""

    of: TensorDescriptor

    @property
    def dtype(self) -> Any:
        return GLUON_DTYPES[self.of.base.dtype]

    @property
    def layout(self) -> Any:
        return self.of.layout

    @property
    def block_type(self) -> Any:
        nbytes = math.prod(self.of.block_shape) * self.of.base.element_size()
        return types.SimpleNamespace(nbytes=nbytes, shape=list(self.of.block_shape))

    def box(self, where: Sequence[int], shared: Shared) -> tuple[Tensor, tuple[slice, ...]]:
        """The part of the tensor in the box, and its slices within the box."""
        if list(shared.data.shape) != list(self.of.block_shape):
            raise Wrong(f"a box of {self.of.block_shape} and shared memory of {list(shared.data.shape)}")
        whole = self.of.base.as_strided(tuple(self.of.shape), tuple(self.of.strides))
        inside, within = [], []
        for first, length, size in zip(map(int, where), self.of.block_shape, self.of.shape, strict=True):
            low, high = min(max(first, 0), size), min(max(first + length, 0), size)
            inside.append(slice(low, high))
            within.append(slice(low - first, high - first) if high > low else slice(0, 0))
        return whole[tuple(inside)], tuple(within)


@dataclass(eq=False)
class Started:
    """A wgmma that was started and may not be finished."""

    compute: Callable[[], Tensor]
    shape: torch.Size
    result: Tensor | None = None


# Scheduling ----------------------------------------------------------------------------------------------------------------------


@dataclass
class Partition:
    """The warps of one role."""

    program: "Program"
    number: int
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ready: Callable[[], bool] = lambda: True
    waits_for: str = ""
    wgmmas: list[Started] = field(default_factory=list)
    stores: list[Callable[[], None]] = field(default_factory=list)
    unfenced: list[Tensor] = field(default_factory=list)


@dataclass
class Meeting:
    """A named barrier: the partitions that have arrived, and how often all have."""

    here: set[int] = field(default_factory=set)
    number: int = 0


_local = threading.local()


def here() -> Partition:
    """The partition that runs."""
    return _local.partition  # type: ignore[no-any-return]


def begin(partition: Partition) -> None:
    """Let the partition run on this thread."""
    _local.partition = partition


class Program:
    """One program of the grid: its partitions, and its unfinished copies to shared memory."""

    def __init__(self, draw: random.Random, late: bool) -> None:
        self.draw, self.late = draw, late
        self.copies: list[Callable[[], None]] = []
        self.partitions: list[Partition] = []
        self.meetings: dict[int, Meeting] = {}
        self.error: BaseException | None = None
        self.done = threading.Semaphore(0)

    def next_partition(self) -> Partition:
        while True:
            able = [partition for partition in self.partitions if partition.ready()]
            if able:
                return self.draw.choice(able)
            if not self.copies:
                waits = [
                    f"partition {partition.number} waits for {partition.waits_for}" for partition in self.partitions
                ]
                raise Wrong("deadlock: " + ", ".join(waits))
            self.copies.pop(self.draw.randrange(len(self.copies)))()

    def pause(self, ready: Callable[[], bool], waits_for: str) -> None:
        """Let a drawn partition continue; return when the caller is `ready` and drawn."""
        me = here()
        me.ready, me.waits_for = ready, waits_for
        if self.partitions:
            chosen = self.next_partition()
            if chosen is not me:
                chosen.go.release()
                me.go.acquire()
                if self.error:
                    raise self.error
        elif not ready():
            raise Wrong(f"deadlock: waits for {waits_for}")
        me.ready = lambda: True

    def run_partitions(self, roles: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        self.partitions = [Partition(self, number) for number in range(len(roles))]
        threads = [
            threading.Thread(target=self._run, args=(partition, *role), daemon=True)
            for partition, role in zip(list(self.partitions), roles, strict=True)
        ]
        for thread in threads:
            thread.start()
        self.next_partition().go.release()
        for thread in threads:
            thread.join()
        if self.error:
            raise self.error
        if self.copies:
            raise Wrong("copies that nobody waited for")
        if any(meeting.here for meeting in self.meetings.values()):
            raise Wrong("a named barrier is left with arrivals that nobody met")

    @torch.no_grad()  # it holds for the current thread only
    def _run(self, me: Partition, role: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        begin(me)
        me.go.acquire()
        try:
            if not self.error:
                role(*arguments)
                if me.stores:
                    raise Wrong("a partition ends with stores that nobody waited for")
            self.partitions.remove(me)
            if self.partitions and not self.error:
                self.next_partition().go.release()
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread
            self.error = self.error or error
        if self.error:
            for other in list(self.partitions):
                other.go.release()
