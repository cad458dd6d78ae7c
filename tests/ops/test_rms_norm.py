"""RMSNorm and its gradients are as accurate as the reference. test_fused_ops.py runs this file in Triton's interpreter."""

import pytest
import torch
from torch import Tensor, nn

from op_check import DEVICES, DTYPES, check, interpret, normal
from trainstep.ops import reference
from trainstep.ops import rms_norm as module
from trainstep.ops.rms_norm import RMSNorm, rms_norm

EPS = 1e-5
SHAPES = [(65, 1), (1, 17), (17, 80), (3, 5, 96), (1000, 64), (0, 8), (2, 4096), (3, 5000), (600, 1600)]


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, module)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return reference.rms_norm(x, weight, EPS)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return norm(x + residual, weight), x + residual


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_is_as_accurate_as_the_reference(shape: tuple[int, ...], dtype: torch.dtype, device: str):
    x, weight = normal(*shape, dtype=dtype, device=device), normal(shape[-1], seed=1, dtype=dtype, device=device)
    if x.numel():
        check(lambda x, weight: rms_norm(x, weight, EPS), norm, [x, weight])
    else:
        assert rms_norm(x, weight, EPS).shape == shape


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("x_dtype", "residual_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
@pytest.mark.parametrize("shape", [(17, 80), (2, 3, 1000)])
def test_the_residual_is_added_first_and_returned(
    shape: tuple[int, ...], x_dtype: torch.dtype, residual_dtype: torch.dtype, device: str
):
    x, residual = (
        normal(*shape, dtype=x_dtype, device=device),
        normal(*shape, seed=2, dtype=residual_dtype, device=device),
    )
    weight = normal(shape[-1], seed=1, device=device)
    check(lambda x, residual, weight: rms_norm(x, weight, EPS, residual=residual), add_norm, [x, residual, weight])


@pytest.mark.parametrize("device", DEVICES)
def test_views_with_gaps_are_taken(device: str):
    x, weight = normal(6, 40, 50, device=device), normal(40, seed=1, device=device)
    check(lambda x, weight: rms_norm(x.mT[:, ::2], weight, EPS), lambda x, w: norm(x.mT[:, ::2], w), [x, weight])


@pytest.mark.parametrize("device", DEVICES)
def test_the_result_may_be_rounded_for_the_next_matmul(device: str):
    x, weight = normal(17, 80, device=device), normal(80, seed=1, device=device)
    result = rms_norm(x, weight, EPS, dtype=torch.float16)  # the interpreter cuts bf16 off instead of rounding it
    assert result.dtype == torch.float16
    torch.testing.assert_close(result, rms_norm(x, weight, EPS).half(), rtol=0, atol=0)


def test_widths_without_elements():
    assert rms_norm(torch.ones(3, 0), torch.ones(0)).shape == (3, 0)
    with pytest.raises(ValueError, match="x: must be"):
        rms_norm(torch.ones(()), torch.ones(()))


def test_the_gradient_of_an_unused_sum_is_zero():
    x, residual = (normal(5, 8, seed=seed).requires_grad_() for seed in (0, 1))
    y, _ = rms_norm(x, torch.ones(8), EPS, residual=residual)
    y.sum().backward()
    total = (x + residual).detach().requires_grad_()
    norm(total, torch.ones(8)).sum().backward()
    torch.testing.assert_close(x.grad, total.grad)
    torch.testing.assert_close(residual.grad, total.grad)


def test_the_module_is_torchs():
    ours, torchs = RMSNorm(24, 1e-6), nn.RMSNorm(24, 1e-6)
    torchs.weight.data = normal(24)
    ours.load_state_dict(torchs.state_dict())
    x = normal(7, 24, seed=1)
    torch.testing.assert_close(ours(x), torchs(x))
    y, total = ours(x, 2 * x)
    torch.testing.assert_close(total, 3 * x)
    torch.testing.assert_close(y, torchs(3 * x))


def test_the_module_has_a_device_and_a_dtype():
    norm = RMSNorm(24, device="meta", dtype=torch.bfloat16)
    assert (norm.weight.device.type, norm.weight.dtype) == ("meta", torch.bfloat16)


@pytest.mark.parametrize(
    ("weight", "residual", "words"),
    [
        ((), None, "weight: must have the shape (8,)"),
        ((7,), None, "weight: must have the shape (8,)"),
        ((8,), (5, 9), "residual: must have x's shape (5, 8)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(weight: tuple[int, ...], residual: tuple[int, ...] | None, words: str):
    with pytest.raises(ValueError, match=words.replace("(", r"\(").replace(")", r"\)")):
        rms_norm(torch.ones(5, 8), torch.ones(weight), residual=None if residual is None else torch.ones(residual))


def test_results_lie_as_compilers_expect():
    """A dimension of size 1 may have any stride; results have those of new tensors, as their fakes have."""
    x = normal(2, 1, 8).as_strided((2, 1, 8), (8, 7, 1))
    assert x.is_contiguous()
    y, total = rms_norm(x, normal(8), residual=x)
    assert y.stride() == total.stride() == (8, 8, 1)
