"""The table has a legal row for everything that the function accepts, on every GPU; with 64 KiB of shared memory fp32 ends at
width 128."""

import pytest

from kernel_compiler import SHARED_MEMORY_BYTES
from trainstep.config.attention import KERNEL_TILE_FIELDS
from trainstep.ops.flash_attention.portable.tiles import (
    TABLE,
    TILE_FIELDS,
    Arithmetic,
    KernelPass,
    TileConfig,
    TileProblem,
    choose_row,
    is_legal,
    padded,
    shared_bytes,
    why_illegal,
)

GPUS = {f"sm_{capability}": limit for capability, limit in SHARED_MEMORY_BYTES.items()} | {
    "sm_75": 65_536,
    "gfx942": 65_536,
}


def on_an_h200(pass_: KernelPass, head_dim: int, arithmetic: Arithmetic) -> TileProblem:
    return TileProblem(pass_=pass_, head_dim=head_dim, arithmetic=arithmetic, shared_memory_bytes=232_448)


@pytest.mark.parametrize("architecture", GPUS)
@pytest.mark.parametrize("arithmetic", Arithmetic)
@pytest.mark.parametrize("pass_", KernelPass)
def test_every_head_width_has_a_row(architecture: str, arithmetic: Arithmetic, pass_: KernelPass):
    wide = [129, 256] if arithmetic is Arithmetic.HALF or GPUS[architecture] > 65_536 else []
    for head_dim in (8, 16, 64, 65, 80, 96, 128, *wide):
        row = choose_row(
            TileProblem(
                pass_=pass_,
                head_dim=head_dim,
                arithmetic=arithmetic,
                architecture=architecture,
                shared_memory_bytes=GPUS[architecture],
            )
        )
        assert head_dim <= row.most_head_dim
        assert row.architecture in (architecture, "any")


def test_each_row_names_its_record():
    assert all(row.record for row in TABLE)


def test_a_gpu_without_a_row_is_refused():
    small = TileProblem(pass_=KernelPass.FORWARD, head_dim=256, arithmetic=Arithmetic.IEEE, shared_memory_bytes=1024)
    with pytest.raises(ValueError, match="scaled_dot_product_attention"):
        choose_row(small)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"block_q": 48}, "power of two"),
        ({"block_k": 8}, "power of two"),
        ({"num_warps": 3}, "num_warps"),
        ({"num_stages": 0}, "must be at least 1"),
        ({"num_stages": 9}, "shared memory"),
        ({"block_q": 256}, "registers"),
    ],
)
def test_an_illegal_tile_has_a_reason(changes: dict[str, int], word: str):
    good = {"block_q": 128, "block_k": 128, "num_warps": 8, "num_stages": 2}
    problem = on_an_h200(KernelPass.FORWARD, 128, Arithmetic.HALF)
    assert is_legal(TileConfig(**good), problem)
    assert not is_legal(TileConfig(**good | changes), problem)
    assert word in (why_illegal(TileConfig(**good | changes), problem) or "")


def test_shared_memory_is_estimated_as_compiled():
    """The compiled sizes are those of triton 3.6.0 and 3.9.0 on sm_90, bf16, head width 128."""
    compiled = {
        KernelPass.FORWARD: ((128, 128, 8, 2), 163_840),
        KernelPass.KEY_GRADIENTS: ((64, 128, 8, 2), 131_584),
        KernelPass.QUERY_GRADIENTS: ((128, 64, 8, 2), 131_072),
    }
    for pass_, ((block_q, block_k, num_warps, num_stages), taken) in compiled.items():
        config = TileConfig(block_q=block_q, block_k=block_k, num_warps=num_warps, num_stages=num_stages)
        estimate = shared_bytes(config, on_an_h200(pass_, 128, Arithmetic.HALF))
        assert taken <= estimate <= taken + 4096


def test_widths_are_padded_to_powers_of_two():
    assert [padded(width) for width in (8, 16, 17, 80, 128, 200)] == [16, 16, 32, 128, 128, 256]


@pytest.mark.parametrize(
    ("pass_", "block_q", "block_k", "num_warps", "legal"),
    [
        (KernelPass.KEY_GRADIENTS, 16, 64, 8, False),  # faulted on an H200
        (KernelPass.KEY_GRADIENTS, 16, 64, 4, True),
        (KernelPass.KEY_GRADIENTS, 32, 64, 8, True),
        (KernelPass.KEY_GRADIENTS, 16, 128, 8, True),
        (KernelPass.FORWARD, 64, 16, 8, False),
        (KernelPass.FORWARD, 16, 64, 8, True),  # with 32 rows or fewer, warps split in another way
        (KernelPass.QUERY_GRADIENTS, 64, 32, 16, False),
        (KernelPass.QUERY_GRADIENTS, 64, 32, 8, True),
    ],
)
def test_tiles_with_parts_of_less_than_16_columns_are_illegal(
    pass_: KernelPass, block_q: int, block_k: int, num_warps: int, legal: bool
):
    config = TileConfig(block_q=block_q, block_k=block_k, num_warps=num_warps, num_stages=1)
    for arithmetic in Arithmetic:
        reason = why_illegal(config, on_an_h200(pass_, 64, arithmetic))
        assert (reason is None) == (legal or arithmetic is Arithmetic.IEEE), arithmetic
        assert reason is None or "parts of less than 16" in reason


def test_configs_name_the_fields_of_a_tile_as_kernels_do():
    assert TILE_FIELDS == KERNEL_TILE_FIELDS
