"""How the Hopper kernels cut their work: rows of data, and what a row needs of the machine.

A schedule is chosen by tile width, forward's among several by the tiles there are (hopper_work.fastest). Each won against others on
an H200 (docs/log.md) but where it says so; a tuner passes others.
"""

from dataclasses import dataclass

SHARED_MEMORY_BYTES = 232_448
"""A program's most on Hopper."""
REGISTERS = 65_536
"""32-bit registers of a multiprocessor."""
WIDTHS = (64, 80, 96, 128)
"""Of tiles: a head of another width takes the next, and TMA reads what lies beyond it as 0."""
FIRST_COLUMNS = 64
"""The first part of a tile in two (hopper_columns)."""
LEAST_HEAD_DIM = 40
"""Narrower heads waste half of a tile and more."""
ROWS = 64
"""Of queries (forward) or keys (backward) a warpgroup keeps."""
BACKWARD_KEYS = 2 * ROWS
"""A program of backward: two warpgroups'."""


@dataclass(frozen=True, kw_only=True)
class ForwardSchedule:
    """A program keeps 64 queries a warpgroup and runs over the keys."""

    warpgroups: int
    """Consumers, 1 to 3."""
    block_k: int
    stages: int
    """Tiles of k, and as many of v, in flight."""
    programs_per_multiprocessor: int = 1
    """At a time; no more programs are started in all, and each goes through several tiles."""
    tflops: float | None = None
    """Of a causal mask in bf16, on an H200, with every multiprocessor busy to the end: what a choice of several weighs. docs/log.md
    has the fit."""

    @property
    def block_q(self) -> int:
        return ROWS * self.warpgroups

    @property
    def registers(self) -> int:
        """Of a consumer's thread: the producer's four warps keep 24."""
        return {1: 232, 2: 240, 3: 160}[self.warpgroups]

    @property
    def most_registers(self) -> int | None:
        """What a thread starts with, where triton's own choice (all of the multiprocessor's) leaves no room for other programs."""
        return None if self.programs_per_multiprocessor == 1 and self.warpgroups > 1 else 128

    def shared_bytes(self, width: int) -> int:
        """q and o, the rings of k and v, barriers."""
        rows = 2 * ROWS * self.warpgroups + 2 * self.stages * self.block_k
        return 2 * width * rows + 16 * (self.warpgroups + 2 * self.stages)


@dataclass(frozen=True, kw_only=True)
class BackwardSchedule:
    """A program keeps 128 keys, 64 a warpgroup of two, and runs over the queries."""

    block_q: int
    """64, or 128 for tiles 64 wide: those of other widths have no room for so many (see split_rows)."""
    stages: int
    """Tiles of q, and as many of do, in flight."""

    @property
    def split_rows(self) -> bool:
        """Whether the two warpgroups share out dq's rows or its columns: a wgmma has 64 rows."""
        return self.block_q == 2 * ROWS

    def dq_columns(self, width: int) -> tuple[int, ...]:
        """Of the pieces of dq's sum side by side, 64 queries each: one that both warpgroups have to themselves, or one a warpgroup.

        The second part of a tile in two is the second warpgroup's: fewer columns than the first's, but they share matrix units.
        ValueError where both rows and columns would be shared out.
        """
        parts = column_parts(width)
        if not self.split_rows:
            return parts if len(parts) == 2 else (width // 2, width // 2)
        if len(parts) == 2:
            raise ValueError(f"block_q: {self.block_q} splits dq's rows, and tiles {width} wide its columns; take 64")
        return parts


FORWARD = {
    64: (
        # Triton 3.6 spills a few addresses in its loop under a causal mask; it wins even so
        ForwardSchedule(warpgroups=3, block_k=128, stages=3, tflops=525),
        ForwardSchedule(warpgroups=1, block_k=128, stages=2, programs_per_multiprocessor=2, tflops=484),
    ),
    # No other was timed. With three warpgroups and 128 keys registers spill, and ptxas makes every wgmma wait
    80: (ForwardSchedule(warpgroups=2, block_k=128, stages=2),),
    96: (ForwardSchedule(warpgroups=2, block_k=128, stages=2),),
    128: (ForwardSchedule(warpgroups=2, block_k=128, stages=2),),
}
"""By tile width. Of those tried and left out: docs/log.md."""

BACKWARD = {
    64: BackwardSchedule(block_q=128, stages=2),
    80: BackwardSchedule(block_q=64, stages=2),
    96: BackwardSchedule(block_q=64, stages=2),
    128: BackwardSchedule(block_q=64, stages=2),
}
"""By tile width."""


def tile_width(head_dim: int) -> int:
    """The narrowest that holds the head."""
    return next(width for width in WIDTHS if head_dim <= width)


def column_parts(width: int) -> tuple[int, ...]:
    """Powers of two that a tile's columns are cut into."""
    return (width,) if width in (FIRST_COLUMNS, 2 * FIRST_COLUMNS) else (FIRST_COLUMNS, width - FIRST_COLUMNS)
