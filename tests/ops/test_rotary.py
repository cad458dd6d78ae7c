"""Rotary embedding and its gradients are as accurate as the reference. test_fused_ops.py runs this file in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from op_check import DEVICES, DTYPES, INTERPRETED, check, interpret, normal
from trainstep.ops import reference
from trainstep.ops import rotary as module
from trainstep.ops.rotary import rotary, rotary_split

CASES = [  # batch, heads, key heads, positions, width
    (1, 1, 1, 1, 8),
    (2, 3, 3, 17, 80),
    (1, 4, 2, 33, 96),
    (1, 5, 1, 7, 64),
    (2, 40, 8, 3, 128),
]


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, module)


def tables(positions: int, width: int, device: str) -> tuple[Tensor, Tensor]:
    return reference.rotary_tables(positions, width, 10_000.0, torch.device(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_a_split_projection_is_as_accurate_as_the_reference(
    case: tuple[int, ...], dtype: torch.dtype, interleaved: bool, device: str
):
    batch, heads, key_heads, positions, width = case
    cos, sin = tables(positions, width, device)

    def expected(qkv: Tensor) -> tuple[Tensor, ...]:
        by_head = qkv.unflatten(-1, (-1, width)).transpose(1, 2)
        q, k, v = by_head.split((heads, key_heads, key_heads), dim=1)
        return *(reference.rotary(x, cos, sin, interleaved=interleaved) for x in (q, k)), v

    def ours(qkv: Tensor) -> tuple[Tensor, ...]:
        return rotary_split(qkv, cos, sin, heads=heads, key_heads=key_heads, interleaved=interleaved)

    qkv = normal(batch, positions, (heads + 2 * key_heads) * width, dtype=dtype, device=device)
    check(ours, expected, [qkv])
    q, k, v = ours(qkv)
    if device == "cuda" or INTERPRETED:
        assert q.transpose(1, 2).is_contiguous(), "the layout that projections make"
    assert (q.shape[1], k.shape[1], v.shape[1]) == (heads, key_heads, key_heads)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interleaved", [True, False])
def test_separate_projections_in_any_layout(interleaved: bool, device: str):
    cos, sin = tables(9, 48, device)
    q, k = normal(2, 9, 6, 48, device=device), normal(2, 2, 48, 9, seed=1, device=device)

    def run(rotate: object) -> object:
        return lambda q, k: rotate(q.transpose(1, 2), k.transpose(2, 3))  # type: ignore[operator]

    def expected(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(reference.rotary(x, cos, sin, interleaved=interleaved) for x in (q, k))  # type: ignore[return-value]

    check(run(lambda q, k: rotary(q, k, cos, sin, interleaved=interleaved)), run(expected), [q, k])  # type: ignore[arg-type]


@pytest.mark.parametrize("device", DEVICES)
def test_batch_elements_may_have_their_own_positions(device: str):
    cos, sin = tables(30, 16, device)
    places = torch.stack([torch.arange(5), torch.arange(20, 25)]).to(device)
    q, k = normal(2, 3, 5, 16, device=device), normal(2, 3, 5, 16, seed=1, device=device)

    def expected(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return tuple(reference.rotary(x, cos[places].unsqueeze(1), sin[places].unsqueeze(1)) for x in (q, k))

    check(lambda q, k: rotary(q, k, cos[places], sin[places]), expected, [q, k])
    first, _ = rotary(q, k, cos[places], sin[places])
    torch.testing.assert_close(first[:1], rotary(q[:1], k[:1], cos[:5], sin[:5])[0], rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_cos_and_sin_have_no_gradient(device: str):
    cos, sin = (table.requires_grad_() for table in tables(5, 16, device))
    q, k = normal(2, 3, 5, 16, device=device).requires_grad_(), normal(2, 3, 5, 16, seed=1, device=device)
    sum(x.sum() for x in rotary(q, k, cos, sin)).backward()
    assert q.grad is not None
    assert cos.grad is sin.grad is None


def test_the_product_of_q_and_k_depends_on_their_distance_alone():
    cos, sin = tables(40, 32, "cpu")
    q, k = (normal(1, 1, 1, 32, seed=seed).expand(1, 1, 40, 32) for seed in (0, 1))
    q, k = rotary(q, k, cos, sin, interleaved=False)
    products = (q @ k.mT)[0, 0]
    torch.testing.assert_close(products.diagonal(3), products[0, 3].expand(37), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: rotary_split(torch.ones(1, 4, 50), *tables(4, 16, "cpu"), heads=3), "qkv: must be"),
        (
            lambda: rotary_split(torch.ones(1, 4, 48), *tables(4, 16, "cpu"), heads=0),
            "heads, key_heads: must be at least 1",
        ),
        (lambda: rotary(torch.ones(1, 2, 4, 16), torch.ones(1, 2, 5, 16), *tables(4, 16, "cpu")), "q, k: must be"),
        (lambda: rotary(torch.ones(1, 2, 4, 15), torch.ones(1, 2, 4, 15), *tables(4, 16, "cpu")), "even D"),
        (lambda: rotary(torch.ones(1, 2, 4, 16), torch.ones(1, 2, 4, 16), *tables(5, 16, "cpu")), "cos: must have"),
        (
            lambda: rotary(torch.ones(1, 2, 4, 16), torch.ones(1, 2, 4, 16), *tables(4, 16, "meta")),
            "cos: must be on cpu with q and k, but is on meta",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_named(call: object, words: str):
    with pytest.raises(ValueError, match=words):
        call()  # type: ignore[operator]
