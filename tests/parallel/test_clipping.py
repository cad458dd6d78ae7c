"""Clipping of gradients, as torch does it in one process, and over parts on several ranks."""

import math

import pytest
import torch

from ranks import run_ranks
from trainstep.parallel.clipping import clip_gradients_
from trainstep.parallel.collectives import Collectives
from trainstep.parallel.ranks import Ranks


def gradients(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=numbers).to(dtype) for size in (3, 7, 1)]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.1, 100.0])
def test_clipping_is_torchs(norm_type: float, max_norm: float):
    clipped = gradients()
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in clipped]
    for parameter, gradient in zip(parameters, clipped, strict=True):
        parameter.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    assert torch.allclose(clip_gradients_([*clipped, None], max_norm, norm_type), norm, rtol=1e-6)
    for parameter, gradient in zip(parameters, clipped, strict=True):
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, gradient, rtol=1e-6)


def test_norms_of_16_bit_gradients_are_taken_in_fp32():
    large = [torch.full((10_000,), 300.0, dtype=torch.float16)]
    assert float(clip_gradients_(large, 1.0)) == pytest.approx(30_000, rel=1e-4)


def test_the_norm_of_complex_and_fp64_gradients_is_right():
    norm = clip_gradients_([torch.tensor([3 + 4j]), torch.tensor([12.0], dtype=torch.float64)], 1.0)
    assert float(norm) == pytest.approx(13)


def clip_parts_with_nan(ranks: Ranks, norm_type: float) -> list[float]:
    parts = [torch.tensor([math.nan if ranks.rank == 1 else 1.0])]
    return [float(clip_gradients_(parts, 1.0, norm_type, across=Collectives(ranks))), *parts[0].tolist()]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_nan_on_one_rank_is_nan_on_all(norm_type: float):
    assert all(math.isnan(value) for values in run_ranks(3, clip_parts_with_nan, norm_type) for value in values)


def clip_parts(ranks: Ranks, norm_type: float) -> tuple[float, list[list[float]]]:
    all_gradients = gradients()
    parts = (
        [all_gradients[0]] if ranks.rank == 0 else [all_gradients[1], None, all_gradients[2]] if ranks.rank == 1 else []
    )
    norm = clip_gradients_(parts, 0.5, norm_type, across=Collectives(ranks))
    return float(norm), [gradient.tolist() for gradient in parts if gradient is not None]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_parts_of_several_ranks_have_the_norm_of_the_whole(norm_type: float):
    all_gradients = gradients()
    norm = float(clip_gradients_(all_gradients, 0.5, norm_type))
    (first, a), (second, b), (third, nothing) = run_ranks(3, clip_parts, norm_type)
    assert first == second == third == pytest.approx(norm, rel=1e-6)
    assert nothing == []
    for part, expected in zip([*a, *b], all_gradients, strict=True):
        assert part == pytest.approx(expected.tolist(), rel=1e-5)


def test_no_gradients_have_norm_zero():
    assert float(clip_gradients_([None], 1.0)) == 0


def test_a_norm_below_one_is_refused():
    with pytest.raises(ValueError, match="norm_type: must be at least 1"):
        clip_gradients_(gradients(), 1.0, 0.5)
