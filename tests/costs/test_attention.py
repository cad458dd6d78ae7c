"""Attention's FLOPs, counted by hand and as the area under the diagonal, and its bytes, counted by hand."""

import pytest

from trainstep.costs.attention import (
    AttentionSizes,
    attention_backward_flops,
    attention_bytes,
    attention_flops,
)


def test_flops_are_those_of_two_matmuls():
    scores, values = 2 * 7 * 16 * 11, 2 * 7 * 11 * 16
    assert attention_flops(5, 7, 11, 16, causal=False) == 5 * (scores + values)


def test_the_number_of_heads_does_not_change_flops():
    assert attention_flops(2 * 4, 6, 6, 2, causal=True) == attention_flops(2 * 1, 6, 6, 8, causal=True)


def test_a_causal_square_has_half_of_the_flops():
    assert attention_flops(3, 10, 10, 64, causal=False) == 3 * 4 * 10 * 10 * 64
    assert attention_flops(3, 10, 10, 64, causal=True) == 3 * 2 * 10 * 10 * 64
    assert attention_backward_flops(3, 10, 10, 64, causal=True) == 2.5 * attention_flops(3, 10, 10, 64, causal=True)


@pytest.mark.parametrize(
    ("queries", "keys", "bottom_right", "pairs"),
    [
        (2, 10, False, 2),  # the triangle 2 x 2 / 2
        (2, 10, True, 18),  # with the 8 keys before it
        (10, 2, False, 18),  # 8 queries below it see both keys
        (10, 2, True, 2),  # 8 queries above it see none
    ],
)
def test_flops_of_unequal_lengths_depend_on_the_alignment(queries: int, keys: int, bottom_right: bool, pairs: int):
    assert attention_flops(1, queries, keys, 64, causal=True, bottom_right=bottom_right) == 4 * 64 * pairs


SHAPE = AttentionSizes(batch=2, heads=6, key_heads=3, queries=5, keys=7, head_dim=4)
QUERIES, KEYS, MATRIX = 2 * 6 * 5 * 4, 2 * 3 * 7 * 4, 2 * 6 * 5 * 7
"""Elements of q, of k, and of the matrix of scores."""


def test_bytes_of_written_out_attention_have_the_matrix():
    forward = attention_bytes(SHAPE, element_bytes=4, written_out=True, backward=False)
    assert forward.inputs == 4 * (QUERIES + 2 * KEYS) == 2304
    assert forward.scores == forward.softmax == 4 * MATRIX == 1680
    assert (forward.lse, forward.output, forward.gradients) == (0, 4 * QUERIES, 0)
    assert forward.needed == 2304 + 2 * 1680 + 960
    with_backward = attention_bytes(SHAPE, element_bytes=4, written_out=True, backward=True)
    assert with_backward.gradients == 4 * (QUERIES + QUERIES + 2 * KEYS + MATRIX), (
        "of the output, q, k, v and the softmax"
    )


def test_bytes_of_fused_attention_have_the_log_sum_exp():
    with_backward = attention_bytes(SHAPE, element_bytes=2, written_out=False, backward=True)
    assert (with_backward.scores, with_backward.softmax) == (0, 0)
    assert with_backward.lse == 4 * 2 * 6 * 5, "in fp32, whatever the dtype"
    assert with_backward.gradients == 2 * (2 * QUERIES + 2 * KEYS)
    assert with_backward.needed == 2 * (QUERIES + 2 * KEYS) + 240 + 2 * QUERIES + 2 * (2 * QUERIES + 2 * KEYS)


def test_a_long_context_needs_128_gib_for_the_matrix():
    """16 heads of 65,536 positions in bf16 need 128 GiB for a matrix, or 4 MiB for the log-sum-exp."""
    shape = AttentionSizes(batch=1, heads=16, key_heads=16, queries=65536, keys=65536, head_dim=64)
    assert attention_bytes(shape, element_bytes=2, written_out=True, backward=False).scores == 128 * 2**30
    assert attention_bytes(shape, element_bytes=2, written_out=False, backward=False).lse == 4 * 2**20
