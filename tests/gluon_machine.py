"""An emulated Hopper multiprocessor for Gluon kernels: barriers, copies, wgmma. gluon_program.py chooses the partition that runs.

Asynchronous work may run early or late: `late=False` runs copies and wgmma when they are started, `late=True` runs copies when
no partition can continue without them, wgmma and stores when they are waited for. A kernel that hands a buffer back too early, or
reads one too early, gives NaN or wrong numbers in one of the two. Also checked: arrivals and bytes of a barrier; fences between
ordinary writes to shared memory and the asynchronous units that read it; copies and stores that nothing waits for. Layouts are
not emulated: the compiler checks those. gluon_emulator.py runs kernels on this.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gluon_program import WARPGROUP_THREADS, Descriptor, Meeting, Shared, Started, Tile, Wrong, here


class Barrier:
    """An mbarrier: a phase completes when all arrivals and all announced bytes have come."""

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
    """Several barriers in shared memory."""

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
    """Arrive at a named barrier and continue; another partition may run first."""
    _come(name, threads)
    here().program.pause(lambda: True, "nothing")


def meet(name: int, threads: int) -> None:
    """Arrive at a named barrier and wait for the other partitions."""
    number = _come(name, threads)
    meeting = here().program.meetings[name]
    here().program.pause(lambda: meeting.number > number, f"named barrier {name}")


def _come(name: int, threads: int) -> int:
    """Arrive at a named barrier; the number of the meeting."""
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
    for written, operand in itertools.product(
        [tensor for partition in partitions for tensor in partition.unfenced], read
    ):
        if _first_byte(written) < _end_byte(operand) and _first_byte(operand) < _end_byte(written):
            raise Wrong("shared memory is read by wgmma or TMA without fence_async_shared behind the write")


def _first_byte(x: Tensor) -> int:
    return x.data_ptr()


def _end_byte(x: Tensor) -> int:
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    return x.data_ptr() + span * x.element_size()


def start_wgmma(a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Any:
    """Start a wgmma. It may add to one of the same shape that is not finished, since they run in order."""
    _refuse_unfenced(a, b)
    shape = acc.shape if isinstance(acc, Started) else acc.data.shape
    if a.data.dtype != b.data.dtype or list(shape) != [a.data.shape[0], b.data.shape[1]]:
        raise Wrong(f"wgmma of {a.data.dtype} {a.data.shape} and {b.data.dtype} {b.data.shape} for {shape}")
    if isinstance(acc, Started) and acc not in here().wgmmas:
        raise Wrong("an accumulator of a wgmma that was waited for, from before the wait")

    def compute() -> Tensor:
        product = a.data.float() @ b.data.float()
        before = acc.result if isinstance(acc, Started) else acc.data
        return product + before if use_acc else product

    started = Started(compute, shape)
    if not here().program.late:
        started.result = compute()
    here().wgmmas.append(started)
    return started if is_async else wait_wgmma(0, deps=(started,))


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
