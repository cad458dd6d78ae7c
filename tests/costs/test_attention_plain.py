"""FLOPs and bytes of written-out attention, by hand and beside those of fused attention."""

import pytest

from trainstep.costs.attention import attention_flops, matmuls_bytes, matmuls_flops, softmax_bytes, softmax_flops


def test_flops_and_bytes_are_as_counted_by_hand():
    """One head, 4 positions, width 2: a matmul is 2 x 4 x 4 x 2 = 64 FLOPs and 16 + 2 x 8 = 32 elements."""
    assert matmuls_flops("forward", 1, 4, 2) == 2 * 64
    assert matmuls_flops("backward", 1, 4, 2) == 4 * 64
    assert matmuls_bytes("forward", 1, 4, 2, 4) == 2 * 32 * 4
    assert softmax_flops("forward", 3, 4) == 3 * 16 * 5
    assert softmax_flops("backward", 3, 4) == 3 * 16 * 4
    assert softmax_bytes("forward", 3, 4, 4) == 3 * 2 * 16 * 4
    assert softmax_bytes("backward", 3, 4, 2) == 3 * 3 * 16 * 2


@pytest.mark.parametrize("positions", [1, 128, 1024])
def test_forward_has_the_flops_of_attention_without_a_mask(positions: int):
    assert matmuls_flops("forward", 8, positions, 64) == attention_flops(8, positions, positions, 64, causal=False)
