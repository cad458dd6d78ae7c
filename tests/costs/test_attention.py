"""Attention's FLOPs, counted by hand and as the area under the diagonal."""

import pytest

from trainstep.costs.attention import attention_backward_flops, attention_flops


def test_two_matmuls():
    scores, values = 2 * 7 * 16 * 11, 2 * 7 * 11 * 16
    assert attention_flops(5, 7, 11, 16, causal=False) == 5 * (scores + values)


def test_heads_do_not_change_them():
    assert attention_flops(2 * 4, 6, 6, 2, causal=True) == attention_flops(2 * 1, 6, 6, 8, causal=True)


def test_square():
    assert attention_flops(3, 10, 10, 64, causal=False) == 3 * 4 * 10 * 10 * 64
    assert attention_flops(3, 10, 10, 64, causal=True) == 3 * 2 * 10 * 10 * 64
    assert attention_backward_flops(3, 10, 10, 64, causal=True) == 2.5 * attention_flops(3, 10, 10, 64, causal=True)


@pytest.mark.parametrize(
    ("queries", "keys", "bottom_right", "pairs"),
    [
        (2, 10, False, 2),  # the triangle 2 x 2 / 2
        (2, 10, True, 18),  # and the 8 keys before it
        (10, 2, False, 18),  # 8 queries below it see both keys
        (10, 2, True, 2),  # 8 queries above it see none
    ],
)
def test_cross_length(queries: int, keys: int, bottom_right: bool, pairs: int):
    assert attention_flops(1, queries, keys, 64, causal=True, bottom_right=bottom_right) == 4 * 64 * pairs
