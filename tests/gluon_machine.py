"""What a multiprocessor of Hopper does for Gluon kernels, on a CPU: partitions that take turns, barriers, copies, wgmma.

A partition of warps is a thread, and one runs at a time: at every barrier a seeded draw says who goes on, so a run repeats. If
nobody can go on, that is a deadlock, and the error says who waits for what. Shared memory starts as NaN.

What runs by itself on the GPU may run early or late: `late=False` does copies and wgmma when they are started, `late=True`
copies when nobody can go on without them, wgmma and stores when they are waited for. A kernel that hands a buffer back too
early, or reads one too early, gives NaN or wrong numbers in one of the two. Checked besides: a barrier's arrivals and bytes;
fences between ordinary writes to shared memory and the units that read it by themselves; copies and stores that nobody waits
for. Layouts are not emulated: the compiler checks those. gluon_emulator.py runs kernels on this.
"""

import itertools
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
GLUON_DTYPES = {ours: theirs for theirs, ours in DTYPES.items()}
WARPGROUP_THREADS = 128


class Wrong(AssertionError):
    """A rule of the machine that the kernel broke."""


# Values --------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Tile:
    """A tensor in registers."""

    data: Tensor

    @property
    def dtype(self) -> Any:
        return GLUON_DTYPES[self.data.dtype]

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

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


@dataclass(frozen=True)
class Shared:
    """A tile in shared memory."""

    data: Tensor
    layout: Any = None

    @property
    def dtype(self) -> Any:
        return GLUON_DTYPES[self.data.dtype]

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

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
    """A tensor as TMA sees it: boxes of it, 0 beyond its end."""

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
        """What of the tensor lies in the box, and where in the box."""
        if list(shared.data.shape) != list(self.of.block_shape):
            raise Wrong(f"a box of {self.of.block_shape} and shared memory of {list(shared.data.shape)}")
        whole = self.of.base.as_strided(tuple(self.of.shape), tuple(self.of.strides))
        inside, within = [], []
        for first, length, size in zip(map(int, where), self.of.block_shape, self.of.shape, strict=True):
            low, high = min(max(first, 0), size), min(max(first + length, 0), size)
            inside.append(slice(low, high))
            within.append(slice(low - first, high - first) if high > low else slice(0, 0))
        return whole[tuple(inside)], tuple(within)


@dataclass
class Started:
    """A wgmma on its way."""

    compute: Callable[[], Tensor]
    result: Tensor | None = None


# Who runs ------------------------------------------------------------------------------------------------------------------------


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
    """A named barrier: which partitions have come, and how often all have."""

    here: set[int] = field(default_factory=set)
    number: int = 0


_local = threading.local()


def here() -> Partition:
    """The partition that runs."""
    return _local.partition  # type: ignore[no-any-return]


def begin(partition: Partition) -> None:
    """It runs on this thread."""
    _local.partition = partition


class Program:
    """One program of the grid: its partitions, and the copies on their way to shared memory."""

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
                waits = [f"partition {each.number} waits for {each.waits_for}" for each in self.partitions]
                raise Wrong("deadlock: " + ", ".join(waits))
            self.copies.pop(self.draw.randrange(len(self.copies)))()

    def pause(self, ready: Callable[[], bool], waits_for: str) -> None:
        """Somebody goes on; the caller when it is `ready` and drawn."""
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

    @torch.no_grad()  # which holds for the thread that says so
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


# What the machine does -----------------------------------------------------------------------------------------------------------


class Barrier:
    """An mbarrier: a phase completes when all arrivals have come and as many bytes as were announced."""

    def __init__(self) -> None:
        self.arrivals = 0  # 0: not initialised

    def init(self, count: int) -> None:
        self.arrivals = self.missing = int(count)
        self.missing_bytes = 0
        self.completed = 0

    def arrive(self, count: int, announced_bytes: int = 0) -> None:
        if not self.arrivals or self.missing < count:
            raise Wrong("more arrivals at a barrier than it waits for")
        self.missing -= count
        self.missing_bytes += announced_bytes
        self._complete()

    def receive(self, nbytes: int) -> None:
        self.missing_bytes -= nbytes
        self._complete()

    def _complete(self) -> None:
        if self.missing == 0 and self.missing_bytes == 0:
            self.missing = self.arrivals
            self.completed += 1
        elif self.missing == 0 and self.missing_bytes < 0:
            raise Wrong("more bytes arrive at a barrier than were announced")

    def has_passed(self, parity: int) -> bool:
        return (self.completed - 1) % 2 == parity


class Barriers:
    """Several in shared memory."""

    def __init__(self, number: int) -> None:
        self.all = [Barrier() for _ in range(number)]

    def index(self, i: int) -> Barrier:
        return self.all[int(i)]


def wait(barrier: Barrier, phase: int, pred: Any = True, deps: Any = ()) -> None:
    if pred:
        here().program.pause(lambda: barrier.has_passed(int(phase)), f"parity {int(phase)} of a barrier")


def arrive(barrier: Barrier, *, count: int = 1, pred: Any = True) -> None:
    if pred:
        barrier.arrive(count)
        here().program.pause(lambda: True, "")


def pass_by(name: int, threads: int) -> None:
    """Come to a named barrier and go on; another partition may run first."""
    _come(name, threads)
    here().program.pause(lambda: True, "nothing")


def meet(name: int, threads: int) -> None:
    """Come to a named barrier and wait for the others."""
    number = _come(name, threads)
    meeting = here().program.meetings[name]
    here().program.pause(lambda: meeting.number > number, f"named barrier {name}")


def _come(name: int, threads: int) -> int:
    """Which meeting there it is."""
    meeting = here().program.meetings.setdefault(name, Meeting())
    if here().number in meeting.here:
        raise Wrong(f"a partition comes to named barrier {name} twice before the others have come once")
    meeting.here.add(here().number)
    number = meeting.number
    if len(meeting.here) * WARPGROUP_THREADS == threads:
        meeting.here, meeting.number = set(), number + 1
    return number


def copy_in(descriptor: Descriptor, where: Sequence[int], barrier: Barrier, shared: Shared, pred: Any = True) -> None:
    shared.data.fill_(math.nan)

    def copy() -> None:
        source, within = descriptor.box(where, shared)
        shared.data.zero_()
        shared.data[within] = source
        barrier.receive(descriptor.block_type.nbytes)

    program = here().program
    program.copies.append(copy) if program.late else copy()


def store_shared(descriptor: Descriptor, where: Sequence[int], shared: Shared, *, add: bool) -> None:
    _refuse_unfenced(shared)

    def store() -> None:
        target, within = descriptor.box(where, shared)
        target.add_(shared.data[within]) if add else target.copy_(shared.data[within])

    here().stores.append(store) if here().program.late else store()


def store_wait(pendings: int) -> None:
    while len(here().stores) > pendings:
        here().stores.pop(0)()


def _refuse_unfenced(*operands: Any) -> None:
    read = [operand.data for operand in operands if isinstance(operand, Shared)]
    partitions = here().program.partitions or [here()]
    for written, operand in itertools.product([x for each in partitions for x in each.unfenced], read):
        if _first_byte(written) < _end_byte(operand) and _first_byte(operand) < _end_byte(written):
            raise Wrong("shared memory is read by wgmma or TMA without fence_async_shared behind the write")


def _first_byte(x: Tensor) -> int:
    return x.data_ptr()


def _end_byte(x: Tensor) -> int:
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    return x.data_ptr() + span * x.element_size()


def start_wgmma(a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Any:
    _refuse_unfenced(a, b)
    if a.data.dtype != b.data.dtype or list(acc_shape(acc)) != [a.data.shape[0], b.data.shape[1]]:
        raise Wrong(f"wgmma of {a.data.dtype} {a.data.shape} and {b.data.dtype} {b.data.shape} for {acc_shape(acc)}")

    def compute() -> Tensor:
        product = a.data.float() @ b.data.float()
        before = acc.result if isinstance(acc, Started) else acc.data
        return product + before if use_acc else product

    started = Started(compute)
    if not here().program.late:
        started.result = compute()
    here().wgmmas.append(started)
    return started if is_async else wait_wgmma(0, deps=(started,))


def acc_shape(acc: Any) -> torch.Size:
    if isinstance(acc, Started):
        raise Wrong("an accumulator that is on its way: wait for it first")
    return acc.data.shape  # type: ignore[no-any-return]


def wait_wgmma(num_outstanding: int = 0, deps: Sequence[Started] = ()) -> Any:
    running = here().wgmmas
    while len(running) > num_outstanding:
        started = running.pop(0)
        started.result = started.compute() if started.result is None else started.result
    if any(started in running for started in deps):
        raise Wrong("a wait for fewer wgmmas than its result needs")
    tiles = tuple(Tile(started.result) for started in deps)  # type: ignore[arg-type]
    return tiles[0] if len(tiles) == 1 else tiles


def fence() -> None:
    here().unfenced.clear()
