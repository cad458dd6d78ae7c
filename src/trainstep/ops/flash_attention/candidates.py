"""Which tiles are worth timing for one kernel on one GPU, from a rule: `candidates(...)`, most promising first, all legal.

A tile has a side that stays with its program and a side that streams past it (tiles.staying_and_streaming). With 16-bit operands
one warp for 16 rows of what stays won wherever it was measured (H200): a warpgroup owns 64 rows. Twice as many where accumulators
need their registers. fp32 products take more registers and memory: smaller tiles, and fewer of them in flight. Of fp16 parts, two
to an operand, tiles of half the 16-bit ones' size take as much memory.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from trainstep.ops.flash_attention.tiles import Arithmetic, KernelPass, TileConfig, TileProblem, is_legal, padded

MOST = 30
_SHARED_CACHE_BYTES = 24 << 20
_POSITIONS_SHARED = 4096
"""heads_together is one number for all lengths: as many heads as share this much L2 by their keys and values at this length."""


def candidates(problem: TileProblem, *, heads: int) -> list[TileConfig]:
    """At most MOST legal tiles. `heads`: batch x heads; a single head leaves heads_together nothing to change."""
    head_bytes = 2 * _POSITIONS_SHARED * padded(problem.head_dim) * problem.arithmetic.element_bytes
    togethers = (1, max(2, _SHARED_CACHE_BYTES // head_bytes)) if heads > 1 else (1,)
    rule = {Arithmetic.HALF: _half_tiles, Arithmetic.FP16X3: _parts_tiles}.get(problem.arithmetic, _fp32_tiles)
    found = [tile for tile in rule(problem.pass_, problem.head_dim) if is_legal(tile, problem)]
    shapes = list(dict.fromkeys(found))[: MOST // len(togethers)]
    return [replace(tile, heads_together=number) for tile in shapes for number in togethers]


def _half_tiles(pass_: KernelPass, head_dim: int) -> Iterator[TileConfig]:
    streaming = (64, 32, 128) if padded(head_dim) <= 128 else (32, 64, 16)
    for stages, streams, stays in itertools.product((3, 2), streaming, (64, 128)):
        yield _tile(pass_, stays, streams, stays // 16, stages)
        if padded(head_dim) > 128:
            yield _tile(pass_, stays, streams, stays // 8, stages)
    for stages in (3, 2):  # narrow heads leave a warp registers for 32 rows
        yield _tile(pass_, 128, 64, 4, stages)
    yield _tile(pass_, 64, 32, 4, 4)
    if padded(head_dim) > 128:
        yield from _small_tiles(pass_)


def _fp32_tiles(pass_: KernelPass, head_dim: int) -> Iterator[TileConfig]:
    for (stays, warps), streams, stages in itertools.product(
        ((64, 8), (64, 4), (32, 4), (128, 8)), (32, 16, 64), (1, 2)
    ):
        yield _tile(pass_, stays, streams, warps, stages)
    for streams in (32, 64):
        yield _tile(pass_, 32, streams, 8, 1)
    if padded(head_dim) > 128:
        yield from _small_tiles(pass_)


def _parts_tiles(pass_: KernelPass, head_dim: int) -> Iterator[TileConfig]:
    streaming = (64, 32, 128) if padded(head_dim) <= 64 else (32, 64, 16)
    for stages, streams, stays in itertools.product((2, 1, 3), streaming, (64, 128)):
        yield _tile(pass_, stays, streams, stays // 16, stages)
    for stages, streams in itertools.product((1, 2), (32, 16)):
        yield _tile(pass_, 32, streams, 4, stages)
    if padded(head_dim) > 128:
        yield from _small_tiles(pass_)


def _small_tiles(pass_: KernelPass) -> Iterator[TileConfig]:
    """For wide heads on GPUs with little shared memory."""
    for stays, streams, stages in itertools.product((32, 16), (32, 16), (2, 1)):
        yield _tile(pass_, stays, streams, 4, stages)


def _tile(pass_: KernelPass, stays: int, streams: int, num_warps: int, num_stages: int) -> TileConfig:
    block_q, block_k = (streams, stays) if pass_ is KernelPass.KEY_GRADIENTS else (stays, streams)
    return TileConfig(block_q=block_q, block_k=block_k, num_warps=num_warps, num_stages=num_stages)
