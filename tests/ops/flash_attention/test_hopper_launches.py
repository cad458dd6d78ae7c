"""What the Hopper kernels are launched with, and when they are not: no kernel runs here."""

from typing import Any

import pytest
import torch
from torch import Tensor

hopper = pytest.importorskip("trainstep.ops.flash_attention.hopper")

from trainstep.ops.flash_attention.launch import Device, Problem  # noqa: E402  after what may be missing
from trainstep.ops.flash_attention.tiles import Arithmetic  # noqa: E402

PROBLEM = Problem(0.125, True, False, Arithmetic.HALF)


class Launched:
    """In place of every kernel."""

    order = None

    def __init__(self) -> None:
        self.bound: list[tuple[Any, ...]] = []
        self.tensors: dict[str, tuple[Tensor, ...]] = {}

    def bind(self, *what: Any) -> "Launched":
        self.bound.append(what)
        return self

    def __getattr__(self, kernel: str) -> Any:
        return lambda *tensors: self.tensors.update({kernel: tensors})


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """On a GPU that takes the kernels."""
    hopper._bound_forward.cache_clear()
    hopper._bound_backward.cache_clear()
    launched = Launched()
    monkeypatch.setattr(hopper, "device_of", lambda _device: Device("sm_90", 232_448))
    monkeypatch.setattr(hopper, "bind_hopper_forward", launched.bind)
    monkeypatch.setattr(hopper, "bind_hopper_backward", launched.bind)
    yield launched
    hopper._bound_forward.cache_clear()
    hopper._bound_backward.cache_clear()


def laid_out(offset: int = 0) -> Tensor:
    """(2, 3, 16, 64) laid out (B, S, H, D), `offset` elements from an aligned address."""
    return torch.randn(2 * 16 * 3 * 64 + offset).to(torch.bfloat16)[offset:].view(2, 16, 3, 64).transpose(1, 2)


def inputs() -> list[Tensor]:
    """q, k, v, o, lse."""
    return [*(laid_out() for _ in range(4)), torch.randn(2, 3, 16)]


def test_forward(launched: Launched):
    q, k, v, *_ = inputs()
    for _ in range(2):
        o, lse = hopper.launch_hopper_forward(q, k, v, PROBLEM)
        assert [x is y for x, y in zip(launched.tensors["attend"], (q, k, v, o, lse, None), strict=True)] == [True] * 6
    ((*_, o_stride, dtype, device, problem, schedule),) = launched.bound
    assert (o_stride, dtype, device, problem, schedule) == (o.stride(), q.dtype, q.device, PROBLEM, None)
    assert o.stride() == q.stride()
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)


def test_backward(launched: Launched):
    q, k, v, o, lse = inputs()
    do = torch.randn(q.shape).to(q.dtype)
    dq, dk, dv = hopper.launch_hopper_backward(do, q, k, v, o, lse, PROBLEM)
    *_, do_stride, dq_stride, dk_stride, dv_stride, _, _, _, _ = launched.bound[0]
    assert (do_stride, dq_stride, dk_stride, dv_stride) == (do.stride(), dq.stride(), dk.stride(), dv.stride())
    assert dq.stride() == q.stride()
    assert launched.tensors["gradients"][3] is do
    assert launched.tensors["gradients"][6] is dk
    assert launched.tensors["gradients"][7] is dv
    assert launched.tensors["cast"][1] is dq


@pytest.mark.parametrize("do", [laid_out(offset=1), torch.randn(2, 3, 16, 68).to(torch.bfloat16)[..., :64]])
def test_a_gradient_that_tma_cannot_read_is_copied(launched: Launched, do: Tensor):
    q, k, v, o, lse = inputs()
    hopper.launch_hopper_backward(do, q, k, v, o, lse, PROBLEM)
    copied = launched.tensors["gradients"][3]
    assert launched.tensors["rows"][1] is copied
    assert torch.equal(copied, do)
    assert copied.data_ptr() % 16 == 0
    assert launched.bound[-1][6] == copied.stride()


@pytest.mark.parametrize("which", range(3))
def test_unaligned_tensors_are_left_to_other_kernels(launched: Launched, which: int):
    tensors = inputs()
    assert hopper.launch_hopper_forward(*tensors[:3], PROBLEM) is not None
    tensors[which] = laid_out(offset=1)
    assert hopper.launch_hopper_forward(*tensors[:3], PROBLEM) is None
    assert hopper.launch_hopper_backward(laid_out(), *tensors, PROBLEM) is None
    assert "address" in (hopper.why_not(*tensors[:3]) or "")


def test_other_dtypes_are_left_to_other_kernels(launched: Launched):
    q, k, v, o, lse = [x.float() for x in inputs()]
    assert hopper.launch_hopper_forward(q, k, v, PROBLEM) is None
    assert hopper.launch_hopper_backward(o, q, k, v, o, lse, PROBLEM) is None
    assert not launched.bound
