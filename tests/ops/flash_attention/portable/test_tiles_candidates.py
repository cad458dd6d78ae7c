"""Candidates of the rule are legal, unique and not too many, and contain every tile that was the fastest on an H200."""

import pytest

from kernel_compiler import SHARED_MEMORY_BYTES
from trainstep.ops.flash_attention.portable.tiles import (
    MOST,
    Arithmetic,
    KernelPass,
    TileConfig,
    TileProblem,
    candidates,
    is_legal,
)

H200 = SHARED_MEMORY_BYTES[90]
WINNERS = {
    (KernelPass.FORWARD, 64): [(128, 64, 8, 3), (64, 64, 4, 3)],
    (KernelPass.FORWARD, 128): [(64, 64, 4, 3)],
    (KernelPass.KEY_GRADIENTS, 64): [(128, 64, 4, 2)],
    (KernelPass.KEY_GRADIENTS, 128): [(64, 128, 8, 3), (32, 64, 4, 3)],
    (KernelPass.QUERY_GRADIENTS, 64): [(64, 64, 4, 3)],
    (KernelPass.QUERY_GRADIENTS, 128): [(128, 64, 8, 3)],
}


def half_on_an_h200(pass_: KernelPass, head_dim: int) -> TileProblem:
    return TileProblem(pass_=pass_, head_dim=head_dim, arithmetic=Arithmetic.HALF, shared_memory_bytes=H200)


@pytest.mark.parametrize("limit", [65_536, *SHARED_MEMORY_BYTES.values()])
@pytest.mark.parametrize("arithmetic", Arithmetic)
@pytest.mark.parametrize("pass_", KernelPass)
def test_candidates_are_legal_unique_and_not_too_many(pass_: KernelPass, arithmetic: Arithmetic, limit: int):
    for head_dim in (8, 32, 64, 80, 128, 256):
        problem = TileProblem(pass_=pass_, head_dim=head_dim, arithmetic=arithmetic, shared_memory_bytes=limit)
        tiles = candidates(problem, heads=64)
        assert len(tiles) <= MOST
        assert len(set(tiles)) == len(tiles)
        assert all(is_legal(tile, problem) for tile in tiles)
        assert tiles or limit == 65_536


@pytest.mark.parametrize(("pass_", "head_dim"), WINNERS)
def test_the_fastest_tiles_are_among_the_candidates(pass_: KernelPass, head_dim: int):
    tiles = candidates(half_on_an_h200(pass_, head_dim), heads=64)
    for block_q, block_k, num_warps, num_stages in WINNERS[pass_, head_dim]:
        tile = TileConfig(block_q=block_q, block_k=block_k, num_warps=num_warps, num_stages=num_stages)
        assert tile in tiles


def test_heads_share_24_mib_of_cache():
    problem = half_on_an_h200(KernelPass.FORWARD, 64)
    sixteen = candidates(problem, heads=16)
    assert {tile.heads_together for tile in sixteen} == {1, 24}
    assert 24 * 2 * 4096 * 64 * 2 == 24 * 2**20, "keys and values of 4096 positions"
    single = candidates(problem, heads=1)
    assert {tile.heads_together for tile in single} == {1}
