"""Arguments of the Hopper kernels' launches, and calls that are left to other kernels; no kernel runs here."""

from typing import Any

import pytest
import torch
from torch import Tensor

hopper = pytest.importorskip("trainstep.ops.flash_attention.hopper.host")

from trainstep.ops.flash_attention.portable.tiles import Arithmetic  # noqa: E402
from trainstep.ops.flash_attention.problem import CallMeta, Device, Problem  # noqa: E402  after what may be missing

PROBLEM = Problem(0.125, True, False, Arithmetic.HALF)


class Launched:
    """A stand-in for every kernel, which keeps the tensors of its launches."""

    order = None
    padded_queries = 128

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
    """Pretend a GPU that supports the kernels."""
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
    """A tensor of shape (2, 3, 64, 64) laid out (B, S, H, D), `offset` elements from an aligned address."""
    return torch.randn(2 * 64 * 3 * 64 + offset).to(torch.bfloat16)[offset:].view(2, 64, 3, 64).transpose(1, 2)


def inputs() -> list[Tensor]:
    """Tensors q, k, v, o, lse."""
    return [*(laid_out() for _ in range(4)), torch.randn(2, 3, 64)]


def test_forward_is_bound_once_and_gets_its_tensors(launched: Launched):
    q, k, v, *_ = inputs()
    for _ in range(2):
        o, lse = hopper.launch_hopper_forward(q, k, v, PROBLEM)
        assert [x is y for x, y in zip(launched.tensors["attend"], (q, k, v, o, lse, None), strict=True)] == [True] * 6
    ((meta, problem, schedule),) = launched.bound
    assert (meta.dtype, meta.device, problem, schedule) == (q.dtype, q.device, PROBLEM, None)
    assert meta.like_q == o.stride() == q.stride()
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)


def test_backward_gets_its_tensors_and_strides(launched: Launched):
    q, k, v, o, lse = inputs()
    do = torch.randn(q.shape).to(q.dtype)
    dq, dk, dv = hopper.launch_hopper_backward(do, q, k, v, o, lse, PROBLEM)
    meta, _, _ = launched.bound[0]
    assert (meta.do_stride, meta.o_stride) == (do.stride(), o.stride())
    assert (meta.like_q, meta.like_k, meta.like_v) == (dq.stride(), dk.stride(), dv.stride())
    assert dq.stride() == q.stride() != do.stride()
    assert launched.tensors["gradients"][3] is do
    assert launched.tensors["gradients"][6] is dk
    assert launched.tensors["gradients"][7] is dv
    assert launched.tensors["cast"][1] is dq


@pytest.mark.parametrize("do", [laid_out(offset=1), torch.randn(2, 3, 64, 68).to(torch.bfloat16)[..., :64]])
def test_a_gradient_that_tma_cannot_read_is_copied(launched: Launched, do: Tensor):
    q, k, v, o, lse = inputs()
    hopper.launch_hopper_backward(do, q, k, v, o, lse, PROBLEM)
    copied = launched.tensors["gradients"][3]
    assert launched.tensors["rows"][1] is copied
    assert torch.equal(copied, do)
    assert copied.data_ptr() % 16 == 0
    assert launched.bound[-1][0].do_stride == copied.stride()


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


def test_few_queries_are_left_to_other_kernels(launched: Launched):
    """Most of a tile of 128 queries would be padding."""
    q, k, v = (torch.randn(2, 3, 64, 64).to(torch.bfloat16) for _ in range(3))
    assert hopper.launch_hopper_forward(q, k, v, PROBLEM) is not None
    assert "fewer than 64 queries" in hopper.why_not(q[:, :, :40], k, v)


def test_lengths_of_as_many_blocks_share_their_table():
    hopper.order_table.cache_clear()
    tables = [
        hopper.bind_hopper_forward(
            CallMeta.forward(*[torch.empty(2, 4, queries, 64).to(torch.bfloat16)] * 3), PROBLEM, None
        ).order
        for queries in (1000, 1010, 2000)
    ]
    assert tables[0] is tables[1]
    assert tables[0] is not tables[2]


def test_new_lengths_in_a_graph_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda.graphs, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="call it once with them before"):
        hopper.order_table(torch.device("cuda"), (2, 1), 3, 3, 132)
