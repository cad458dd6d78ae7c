"""The reference of attention agrees with torch's and with fp64 by hand, and in cases that torch's does not have."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from numerics import assert_as_accurate_as
from trainstep.ops import reference

FP64 = torch.float64


def qkv(queries: int, keys: int, heads: int = 4, key_heads: int = 4, head_dim: int = 16) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, heads, queries, head_dim), (2, key_heads, keys, head_dim), (2, key_heads, keys, head_dim)]
    return [torch.randn(shape, dtype=FP64, requires_grad=True) for shape in shapes]


def by_hand(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Attention in fp64, query by query and key by key."""
    q, k, v = q.double(), k.double(), v.double()
    rows = []
    for i in range(q.shape[2]):
        last = i + 1 if causal else k.shape[2]
        scores = [(q[:, :, i] * k[:, :, j]).sum(-1) / q.shape[-1] ** 0.5 for j in range(last)]
        weights = torch.stack(scores).exp()
        rows.append((weights.unsqueeze(-1) * v[:, :, :last].movedim(2, 0)).sum(0) / weights.sum(0).unsqueeze(-1))
    return torch.stack(rows, dim=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("positions", [1, 2, 17])
def test_attention_is_as_accurate_as_torchs(dtype: torch.dtype, causal: bool, positions: int):
    q, k, v = (x.to(dtype) for x in qkv(positions, positions, head_dim=6))
    result = reference.attention(q, k, v, causal=causal)
    expected = scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert_as_accurate_as(result, expected, by_hand(q, k, v, causal=causal))


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (5, 9), (9, 5), (1, 6)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_attention_agrees_with_torchs(queries: int, keys: int, causal: bool, key_heads: int):
    """The cases have unequal lengths, shared key heads and another scale."""
    q, k, v = qkv(queries, keys, key_heads=key_heads)
    result = reference.attention(q, k, v, causal=causal, scale=0.3)
    expected = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(result, expected)


def test_large_scores_still_sum_to_one():
    q, k, v = qkv(9, 9)
    out = reference.attention(100 * q, k, torch.full_like(v, 3.0), causal=True)
    torch.testing.assert_close(out, torch.full_like(out, 3.0))


def test_bottom_right_gives_the_last_rows_of_the_square():
    q, k, v = qkv(9, 9)
    square = reference.attention(q, k, v, causal=True)
    last = reference.attention(q[:, :, 4:], k, v, causal=True, causal_alignment="bottom_right")
    torch.testing.assert_close(last, square[:, :, 4:])


def test_queries_that_see_no_key_give_zero():
    q, k, v = qkv(6, 2)
    o = reference.attention(q, k, v, causal=True, causal_alignment="bottom_right")
    lse = reference.attention_lse(q, k, causal=True, causal_alignment="bottom_right")
    assert not o[:, :, :4].any()
    assert o[:, :, 4:].all()
    assert torch.equal(lse == float("-inf"), torch.arange(6).expand(2, 4, 6) < 4)
    gradients = torch.autograd.grad(o.sum(), [q, k, v])
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_lse_normalises_the_scores():
    q, k, _ = qkv(5, 8)
    lse = reference.attention_lse(q, k, causal=False, scale=1.0)
    torch.testing.assert_close((q @ k.mT - lse[..., None]).exp().sum(-1), torch.ones(2, 4, 5, dtype=FP64))
