"""RMSNorm, RoPE and SwiGLU agree with torch's ops, fp64 and their algebra; attention is in test_reference_attention.py."""

import math

import pytest
import torch
from torch import Tensor

from numerics import assert_as_accurate_as
from trainstep.ops import reference

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 100.0])
def test_rms_norm_is_as_accurate_as_torchs(dtype: torch.dtype, scale: float):
    x, weight = (normal(4, 7, 33, seed=1) * scale).to(dtype), (1 + normal(33, seed=2)).to(dtype)
    truth = torch.nn.functional.rms_norm(x.double(), (33,), weight.double(), 1e-5)
    expected = torch.nn.functional.rms_norm(x, (33,), weight, 1e-5)
    result = reference.rms_norm(x, weight, 1e-5)
    assert result.dtype == dtype
    assert_as_accurate_as(result, expected, truth)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norms_gradients_are_as_accurate_as_torchs(dtype: torch.dtype):
    def gradients(norm: object, wide: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.to(dtype).to(wide).requires_grad_() for t in (normal(5, 33, seed=1), 1 + normal(33, seed=2))]
        cotangent = normal(5, 33, dtype=dtype, seed=3).to(wide)
        return torch.autograd.grad(norm(*leaves), leaves, cotangent)  # type: ignore[operator]

    def torchs(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (33,), weight, 1e-5)

    results = gradients(lambda x, weight: reference.rms_norm(x, weight, 1e-5), dtype)
    for name, result, expected, truth in zip(
        ("x", "weight"), results, gradients(torchs, dtype), gradients(torchs, torch.float64), strict=True
    ):
        assert_as_accurate_as(result, expected, truth, name)


def test_rms_norm_computes_in_fp32():
    """The squares of these values overflow or vanish in fp16; a norm computed in fp32 is right."""
    ones = torch.ones(8, dtype=torch.float16)
    assert torch.equal(reference.rms_norm(ones * 1000, ones, 1e-5), ones)
    small = reference.rms_norm(ones * 1e-4, ones, 0.0)
    assert (small - 1).abs().max() < 2e-3


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
def test_every_reference_keeps_the_dtype(dtype: torch.dtype):
    x = normal(1, 2, 4, 6, dtype=dtype)
    cos, sin = reference.rotary_tables(4, 6, 10_000.0, CPU)
    assert reference.rotary(x, cos, sin).dtype == dtype
    assert reference.rms_norm(x, x[0, 0, 0], 1e-5).dtype == dtype
    assert reference.swiglu(x, x).dtype == dtype
    assert reference.attention(x, x, x, causal=True).dtype == dtype


def test_fp64_is_not_narrowed():
    """The reference that kernels are compared with must itself be computed in fp64."""
    x, weight = normal(3, 16, dtype=torch.float64), normal(16, dtype=torch.float64, seed=1)
    truth = torch.nn.functional.rms_norm(x, (16,), weight, 1e-5)
    assert (reference.rms_norm(x, weight, 1e-5) - truth).abs().max() < 1e-13
    cos, sin = (table.double() for table in reference.rotary_tables(3, 16, 10_000.0, CPU))
    back = reference.rotary(reference.rotary(x, cos, sin), cos, -sin)
    assert (back - x * (cos**2 + sin**2).repeat_interleave(2, dim=-1)).abs().max() < 1e-13


def test_rotary_tables_are_the_cosines_and_sines():
    cos, sin = reference.rotary_tables(131_072, 8, 10_000.0, CPU)
    assert (cos.shape, cos.dtype) == ((131_072, 4), torch.float32)
    for position in (0, 1, 17, 131_071):
        for pair in range(4):
            angle = position * 10_000.0 ** (-2 * pair / 8)
            assert cos[position, pair].item() == pytest.approx(math.cos(angle), abs=1e-7)
            assert sin[position, pair].item() == pytest.approx(math.sin(angle), abs=1e-7)


def test_rotary_rotates_adjacent_pairs():
    """The expected rotation by complex numbers: x_2i + j x_2i+1 times e^(j angle)."""
    x = normal(2, 3, 17, 8)
    cos, sin = reference.rotary_tables(17, 8, 10_000.0, CPU)
    pairs = torch.view_as_complex(x.double().reshape(2, 3, 17, 4, 2).contiguous())
    angles = torch.arange(17.0, dtype=torch.float64)[:, None] * 10_000.0 ** (-torch.arange(0, 8, 2).double() / 8)
    rotated = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    assert (reference.rotary(x, cos, sin).double() - rotated).abs().max() < 1e-6
    assert torch.equal(reference.rotary(x, cos, sin)[:, :, 0], x[:, :, 0])


def test_rotary_keeps_norms():
    x = normal(1, 2, 40, 16)
    rotated = reference.rotary(x, *reference.rotary_tables(40, 16, 10_000.0, CPU))
    norms = [t.unflatten(-1, (-1, 2)).norm(dim=-1) for t in (rotated, x)]
    torch.testing.assert_close(*norms)
    assert not torch.allclose(rotated, x)


@pytest.mark.parametrize("shift", [1, 5, 30])
def test_rotary_scores_depend_only_on_distance(shift: int):
    q, k = normal(1, 1, 1, 16).expand(1, 1, 40, 16), normal(1, 1, 1, 16, seed=1).expand(1, 1, 40, 16)
    tables = reference.rotary_tables(40, 16, 10_000.0, CPU)
    scores = (reference.rotary(q, *tables) @ reference.rotary(k, *tables).mT)[0, 0]
    torch.testing.assert_close(scores[shift:, shift:], scores[:-shift, :-shift], atol=1e-4, rtol=0)
    assert scores[0].std() > 0.1


def test_swiglu_is_its_formula():
    gate, up = normal(3, 5), normal(3, 5, seed=1)
    torch.testing.assert_close(reference.swiglu(gate, up), up * gate / (1 + (-gate).exp()))
