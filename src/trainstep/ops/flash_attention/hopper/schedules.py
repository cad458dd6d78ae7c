"""How the Hopper kernels cut and share out their work: schedules, TMA boxes, and the order of tiles.

A schedule is chosen by tile width; forward's also by the number of tiles, where there are several (`fastest`). Each was faster than
others on an H200 (docs/log.md) unless a comment says otherwise; a tuner passes its own.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trainstep.ops.direct_launch import FP_FUSION, described_starter, hooks_listen

SHARED_MEMORY_BYTES = 232_448
"""Shared memory of a program on Hopper at most."""
REGISTERS = 65_536
"""32-bit registers of a multiprocessor."""
WIDTHS = (64, 80, 96, 128)
"""Widths of tiles: a head of another width takes the next larger one, and TMA reads the columns beyond the head as 0."""
FIRST_COLUMNS = 64
"""Columns of the first part of a tile in two parts (columns.py)."""
LEAST_HEAD_DIM = 40
"""Narrower heads would waste nearly half of a tile or more."""
ROWS = 64
"""Queries (forward) or keys (backward) per warpgroup."""
BACKWARD_KEYS = 2 * ROWS
"""Keys per program of backward, which has two warpgroups."""
CACHE_BYTES = 32 * 2**20
"""Bytes that heads in work at the same time may read repeatedly: most of the L2 cache's 50 MB."""
_MANY = 64
"""Tiles per program of forward: with more, it does not matter which program ends last."""
_FEW = 8
"""Programs of backward per multiprocessor: with more, the last programs are short beside the whole. An estimate."""
_GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@dataclass(frozen=True, kw_only=True)
class ForwardSchedule:
    """A schedule of forward: a program keeps 64 queries per warpgroup and runs over the keys."""

    warpgroups: int
    """Number of consumers, 1 to 3."""
    block_k: int
    stages: int
    """Tiles of k in flight, and as many of v."""
    programs_per_multiprocessor: int = 1
    """Programs that run at the same time. No more are started in all, and each goes through several tiles."""
    tflops: float | None = None
    """Speed with a causal mask in bf16, on an H200, with every multiprocessor busy to the end: the choice among several schedules
    uses it. docs/log.md has the fit."""

    @property
    def block_q(self) -> int:
        return ROWS * self.warpgroups

    @property
    def registers(self) -> int:
        """Registers of a consumer's thread; a thread of the producer's four warps keeps 24."""
        return {1: 232, 2: 240, 3: 160}[self.warpgroups]

    @property
    def most_registers(self) -> int | None:
        """Registers with which a thread starts; None: triton's choice, which leaves none for other programs."""
        return None if self.programs_per_multiprocessor == 1 and self.warpgroups > 1 else 128

    def shared_bytes(self, width: int) -> int:
        """Shared memory of q and o, the rings of k and v, and barriers."""
        rows = 2 * ROWS * self.warpgroups + 2 * self.stages * self.block_k
        return 2 * width * rows + 16 * (self.warpgroups + 2 * self.stages)


@dataclass(frozen=True, kw_only=True)
class BackwardSchedule:
    """A schedule of backward: a program keeps 128 keys, 64 for each of two warpgroups, and runs over the queries."""

    block_q: int
    """64, or 128 for tiles 64 wide; wider tiles have no room for 128 (see split_rows)."""
    stages: int
    """Tiles of q in flight, and as many of do."""

    @property
    def split_rows(self) -> bool:
        """Whether the two warpgroups divide dq by rows or by columns: a wgmma has 64 rows."""
        return self.block_q == 2 * ROWS

    def dq_columns(self, width: int) -> tuple[int, ...]:
        """The columns of the pieces of dq's sum side by side, 64 queries each: one piece if rows are divided, else one a warpgroup.

        The second part of a tile in two parts is the second warpgroup's: it has fewer columns, but the two share matrix units.
        ValueError where both rows and columns would be divided.
        """
        parts = column_parts(width)
        if not self.split_rows:
            return parts if len(parts) == 2 else (width // 2, width // 2)
        if len(parts) == 2:
            raise ValueError(
                f"block_q: {self.block_q} splits dq's rows, and tiles {width} wide split its columns; take 64"
            )
        return parts


FORWARD = {
    64: (
        # Triton 3.6 spills a few addresses in the loop under a causal mask; this schedule is the fastest all the same
        ForwardSchedule(warpgroups=3, block_k=128, stages=3, tflops=525),
        ForwardSchedule(warpgroups=1, block_k=128, stages=2, programs_per_multiprocessor=2, tflops=484),
    ),
    # No other schedule was timed. With three warpgroups and 128 keys registers spill, and ptxas makes every wgmma wait
    80: (ForwardSchedule(warpgroups=2, block_k=128, stages=2),),
    96: (ForwardSchedule(warpgroups=2, block_k=128, stages=2),),
    128: (ForwardSchedule(warpgroups=2, block_k=128, stages=2),),
}
"""By tile width. docs/log.md has the schedules that were slower."""
BACKWARD = {
    64: BackwardSchedule(block_q=128, stages=2),
    80: BackwardSchedule(block_q=64, stages=2),
    96: BackwardSchedule(block_q=64, stages=2),
    128: BackwardSchedule(block_q=64, stages=2),
}
"""By tile width."""


def tile_width(head_dim: int) -> int:
    """The narrowest tile that holds the head."""
    return next(width for width in WIDTHS if head_dim <= width)


def column_parts(width: int) -> tuple[int, ...]:
    """The widths, powers of two, of the parts of a tile's columns."""
    return (width,) if width in (FIRST_COLUMNS, 2 * FIRST_COLUMNS) else (FIRST_COLUMNS, width - FIRST_COLUMNS)


# TMA boxes, and kernels that read and write tensors through them.


class Boxes(NamedTuple):
    """The contents of a TMA descriptor but for the tensor: shape and strides in elements, the box of a copy, its layout in shared
    memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    layout: Any

    def of(self, tensor: Tensor) -> TensorDescriptor:
        return TensorDescriptor(tensor, self.shape, self.strides, self.box, self.layout)


Forms = tuple[Boxes | None, ...]
"""A kernel's descriptors of one tensor; None for a part that tiles of this width do not have."""


def boxes(shape: Sequence[int], stride: Sequence[int], rows: int, width: int, dtype: torch.dtype) -> Forms:
    """Boxes of `rows` positions of one head of a (batch, head, position, column) tensor, in one part or two (columns.py)."""
    # The stride of a dimension of size 1 may be any number, which TMA might refuse.
    steps = tuple(step if size > 1 else shape[-1] for size, step in zip(shape[:-1], stride[:-1], strict=True))

    def part(columns: int) -> Boxes:
        box = [1, 1, rows, columns]
        layout = gl.NVMMASharedLayout.get_default_for(box, _GLUON_DTYPES[dtype])
        return Boxes(tuple(shape), (*steps, 1), tuple(box), layout)

    first, *rest = map(part, column_parts(width))
    return first, rest[0] if rest else None


def row_boxes(length: int, box: int) -> Forms:
    """Boxes of `box` fp32 numbers in a row of `length`."""
    return (Boxes((length,), (1,), (box,), gl.NVMMASharedLayout.get_default_for([box], gl.float32)),)


def piece_boxes(size: int, columns: Sequence[int]) -> Forms:
    """Boxes of dq's sum, `size` numbers in fp32, in pieces of ROWS queries x `columns` [Note: one pass backward]; None for a second
    box like the first. A box has rows of 256 numbers, TMA's maximum."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    first, last = (
        Boxes((size // 256, 256), (256, 1), (ROWS * n // 256, 256), layout) for n in (columns[0], columns[-1])
    )
    return first, None if last == first else last


class BoxedKernel:
    """A kernel whose arguments are TMA descriptors, then tensors, then values that depend only on shapes."""

    def __init__(
        self,
        kernel: Any,
        programs: int,
        boxes: Sequence[Forms],
        arguments: dict[str, Any],
        most_registers: int | None = None,
    ) -> None:
        names = kernel.arg_names
        self.kernel, self.programs = kernel, programs
        self.boxes = tuple(boxes)
        self._arguments = tuple(arguments[name] for name in names[len(names) - len(arguments) :])
        self.options: dict[str, Any] = {"num_warps": 4, **FP_FUSION}
        if most_registers is not None:
            self.options["maxnreg"] = most_registers
        self._start: Callable[..., None] | None = None
        self._has_run = False

    def arguments(self, *tensors: Tensor) -> list[Any]:
        """All arguments of the kernel."""
        descriptors = chain.from_iterable(self._descriptors(tensors))
        return [*descriptors, *tensors[len(self.boxes) :], *self._arguments]

    def _descriptors(self, tensors: Sequence[Tensor]) -> list[list[TensorDescriptor | None]]:
        """The descriptors of each tensor that has any."""
        return [
            [form and form.of(tensor) for form in forms] for forms, tensor in zip(self.boxes, tensors, strict=False)
        ]

    def __call__(self, *tensors: Tensor) -> None:
        if self._start is not None and not hooks_listen():
            self._start(*tensors)
            return
        arguments, grid = self.arguments(*tensors), (self.programs, 1, 1)
        compiled = self.kernel[grid](*arguments, **self.options)
        if not self._has_run:
            descriptors = self._descriptors(tensors)
            self._start = described_starter(compiled, grid, tensors[0].device, descriptors, self._arguments)
            self._has_run = True


# Sharing out the tiles: which program of the forward kernel does which tiles in which order, and which schedule ends
# first.
#
# A tile's cost is the number of blocks of keys that it visits, and one more for its other work. Under a causal mask
# costs differ by up to the number of blocks, and with few tiles it matters more how many multiprocessors a schedule
# keeps busy than how fast it is on each: 192 queries per tile are fastest where there are many tiles, 64 where there
# are few.


@dataclass(frozen=True, kw_only=True)
class ForwardWork:
    """All tiles of a call. `together`: number of heads whose tiles are interleaved; `offset`: query i sees keys 0..i + offset."""

    heads: int
    together: int
    queries: int
    keys: int
    causal: bool
    offset: int

    def tiles(self, schedule: ForwardSchedule) -> int:
        """The number of a head's tiles."""
        return -(-self.queries // schedule.block_q)

    def costs_of_head(self, schedule: ForwardSchedule) -> tuple[int, ...]:
        """The costs of a head's tiles, longest first."""
        costs = []
        for tile in reversed(range(self.tiles(schedule))):
            seen = min(max((tile + 1) * schedule.block_q + self.offset, 0), self.keys) if self.causal else self.keys
            costs.append(1 + max(1, -(-seen // schedule.block_k)))
        return tuple(costs)


def in_order(costs_of_head: Sequence[int], heads: int, together: int) -> list[int]:
    """The costs of all heads' tiles in the kernel's order: over `together` heads at a time (parts.tile_and_head)."""
    groups = [min(together, heads - first) for first in range(0, heads, together)]
    return [cost for group in groups for cost in costs_of_head for _ in range(group)]


def heads_together(heads_per_key_head: int, keys: int, head_dim: int, batch_heads: int) -> int:
    """The number of query heads whose keys and values fit into the cache together, at least those of one key head."""
    key_heads = max(1, CACHE_BYTES // (4 * keys * head_dim))
    return min(batch_heads, key_heads * heads_per_key_head)


def key_heads_together(programs: int, multiprocessors: int, queries: int, head_dim: int, batch_key_heads: int) -> int:
    """The number of key heads that backward interleaves, so that q, do and dq of `queries` rows per key head fit into the cache."""
    # All of them where there are few programs: else a long program that starts last ends alone (simulated, 8 query heads
    # per key head, 256 programs: 1.5 times the mean).
    if programs <= _FEW * multiprocessors:
        return batch_key_heads
    return heads_together(1, 2 * queries, head_dim, batch_key_heads)  # dq, in fp32, takes as much as q and do


def fastest(schedules: Sequence[ForwardSchedule], work: ForwardWork, multiprocessors: int) -> ForwardSchedule:
    """The schedule whose last program ends first, if a multiprocessor has the speed `tflops` and its programs share it evenly."""

    def time(schedule: ForwardSchedule) -> float:
        programs = multiprocessors * schedule.programs_per_multiprocessor
        costs = in_order(work.costs_of_head(schedule), work.heads, work.together)
        blocks = _longest(costs, programs) * schedule.programs_per_multiprocessor
        assert schedule.tflops is not None, "each of several schedules needs its tflops"
        return blocks * schedule.block_q * schedule.block_k / schedule.tflops

    return min(schedules, key=time) if len(schedules) > 1 else schedules[0]


def _longest(costs: Sequence[int], programs: int) -> float:
    """The cost of the busiest program's work."""
    if len(costs) > _MANY * programs:
        return sum(costs) / programs
    return max(sum(costs[piece] for piece in share) for share in _shared_out(costs, programs))


def work_order(costs: Sequence[int], programs: int) -> list[int]:
    """The table of work: `programs` + 1 numbers that say where each program's pieces begin, then the pieces of all programs."""
    shares = _shared_out(costs, programs)
    begins = accumulate(map(len, shares), initial=0)
    return [*begins, *chain.from_iterable(shares)]


def _shared_out(costs: Sequence[int], programs: int) -> list[list[int]]:
    """Each program's pieces of work: in order, each piece goes to the program with the least work so far."""
    # Assigning them in rotation instead leaves one program with up to 1.6 times the mean (causal mask, tiles of 1 to 32
    # blocks, heads in groups).
    loads = [(0, program) for program in range(programs)]
    shares: list[list[int]] = [[] for _ in range(programs)]
    for piece, cost in enumerate(costs):
        load, program = loads[0]
        shares[program].append(piece)
        heapq.heapreplace(loads, (load + cost, program))
    return shares
