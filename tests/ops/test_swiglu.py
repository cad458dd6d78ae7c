"""SwiGLU and its gradients are as accurate as the reference. test_fused_ops.py runs this file in Triton's interpreter."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from op_check import DEVICES, DTYPES, check, interpret, normal
from trainstep.ops import reference
from trainstep.ops import swiglu as module
from trainstep.ops.swiglu import SwiGLU, swiglu, swiglu_linear
from trainstep.training import transformer


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, module)


def expected(gate_up: Tensor) -> Tensor:
    return reference.swiglu(*gate_up.chunk(2, dim=-1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (96,), (17, 160), (2, 3, 96), (5, 2 * 2049), (0, 6)])
def test_the_activation_is_as_accurate_as_the_reference(shape: tuple[int, ...], dtype: torch.dtype, device: str):
    gate_up = normal(*shape, dtype=dtype, device=device)
    if gate_up.numel():
        check(swiglu, expected, [4 * gate_up])
    else:
        assert swiglu(gate_up).shape == (0, 3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(17, 160), (2, 3, 96), (96,)])
def test_with_the_matmul_behind_it(shape: tuple[int, ...], dtype: torch.dtype, device: str):
    gate_up = normal(*shape, dtype=dtype, device=device)
    weight = normal(24, shape[-1] // 2, seed=1, dtype=dtype, device=device)
    check(swiglu_linear, lambda gate_up, weight: expected(gate_up) @ weight.T, [gate_up, weight])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_and_up_may_be_two_tensors(dtype: torch.dtype, device: str):
    gate, up = (4 * normal(2, 9, 80, seed=seed, dtype=dtype, device=device) for seed in (0, 1))
    check(swiglu, reference.swiglu, [gate, up])
    check(lambda gate, up: swiglu(gate.mT, up.mT), lambda gate, up: reference.swiglu(gate.mT, up.mT), [gate, up])


def test_width_zero_gives_nothing():
    assert swiglu(torch.ones(3, 0)).shape == (3, 0)


def test_a_view_with_gaps_is_taken():
    check(lambda x: swiglu(x.mT), lambda x: expected(x.mT), [normal(3, 20, 7)])


def test_the_activation_is_not_kept_for_backward():
    kept: list[int] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    gate_up, weight = normal(10, 64).requires_grad_(), normal(8, 32).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        swiglu_linear(gate_up, weight)
    assert sorted(kept) == [8 * 32, 10 * 64]


def test_a_flop_counter_sees_the_three_matmuls():
    gate_up, weight = normal(10, 64).requires_grad_(), normal(8, 32).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        swiglu_linear(gate_up, weight).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 10 * 32 * 8


def test_autocast_applies():
    gate_up, weight = normal(10, 64), normal(8, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert swiglu_linear(gate_up, weight).dtype == torch.bfloat16


def test_the_module_loads_separate_gate_and_up():
    """The built-in model's MLP, whose checkpoints name gate and up by themselves."""
    theirs, ours = transformer.SwiGLU(24, 40), SwiGLU(24, 40)
    ours.load_state_dict(theirs.state_dict())
    x = normal(5, 24)
    torch.testing.assert_close(ours(x), theirs(x))
    again = SwiGLU(24, 40)
    again.load_state_dict(ours.state_dict())
    torch.testing.assert_close(again(x), theirs(x))


def test_the_module_has_a_device_and_a_dtype():
    for device in ("cpu", "meta"):
        weights = list(SwiGLU(24, 40, device=device, dtype=torch.bfloat16).parameters())
        assert [x.shape for x in weights] == [(80, 24), (24, 40)]
        assert {(x.device.type, x.dtype) for x in weights} == {(device, torch.bfloat16)}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: swiglu(torch.ones(2, 5)), r"gate_up: must be \(..., 2 F\), but has the shape \(2, 5\)"),
        (lambda: swiglu(torch.ones(())), r"gate_up: must be \(..., 2 F\)"),
        (lambda: swiglu(torch.ones(2, 5), torch.ones(2, 4)), r"up: must have gate's shape and dtype, \(2, 5\)"),
        (lambda: swiglu_linear(torch.ones(2, 6), torch.ones(4, 2)), r"weight: must be \(C, 3\)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(call: Any, words: str):
    with pytest.raises(ValueError, match=words):
        call()


def test_two_numbers_are_no_rows():
    gate, up = torch.tensor(1.5), torch.tensor(-2.0)
    assert torch.equal(swiglu(gate, up), reference.swiglu(gate, up))
