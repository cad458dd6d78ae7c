"""Fused ops bind a kernel once for its shapes, dtypes and settings, and then start it directly."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fake_kernel import FakeKernel

pytest.importorskip("triton")
from trainstep.ops.kernels import cross_entropy, rms_norm, rotary, swiglu

BF16, FP16 = torch.bfloat16, torch.float16
Launch = Callable[..., Any]


def of(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def norm(rows: int = 4, dtype: torch.dtype = BF16, eps: float = 1e-5, add: bool = False) -> None:
    x = of(rows, 64, dtype=dtype)
    rms_norm.launch_rms_norm(x, of(rows, 64) if add else None, of(64), eps, dtype)


def norm_backward(rows: int = 4, dtype: torch.dtype = BF16, add: bool = False) -> None:
    x = of(rows, 64, dtype=dtype)
    rms_norm.launch_rms_norm_backward(x, of(rows, 64) if add else None, x, of(64), of(rows, dtype=torch.float32))


def rotate(
    heads: int = 2, dtype: torch.dtype = BF16, inverse: bool = False, interleaved: bool = True, by_batch: bool = False
) -> None:
    q, table = of(2, heads, 4, 16, dtype=dtype), of(*(2, 4, 8) if by_batch else (4, 8))
    rotary.launch_rotary([q, q], [q, q], table, table, interleaved=interleaved, inverse=inverse)


def gate(rows: int = 4, dtype: torch.dtype = BF16, stride: int = 64) -> None:
    swiglu.launch_swiglu(of(rows, 64, dtype=dtype), of(rows, 64, dtype=dtype), stride)


def gate_backward(rows: int = 4, dtype: torch.dtype = BF16, write_y: bool = False) -> None:
    x = of(rows, 64, dtype=dtype)
    swiglu.launch_swiglu_backward(x, x, x, x, x, x if write_y else None, 64)


def loss(rows: int = 4, dtype: torch.dtype = BF16, **settings: Any) -> None:
    plain = {"ignore_index": -100, "smoothing": 0.0, "z_loss": 0.0, "has_lse": False, "gradient": True}
    z, fp32 = of(rows, 64, dtype=dtype), of(rows, dtype=torch.float32)
    cross_entropy.launch_cross_entropy(z, of(rows, dtype=torch.int64), fp32, fp32, fp32, **plain | settings)


def scale(elements: int = 64, dtype: torch.dtype = BF16) -> None:
    cross_entropy.launch_scale(of(elements, dtype=dtype), of(1, dtype=torch.float32))


CASES: list[tuple[ModuleType, str, Launch, list[dict[str, Any]]]] = [
    (rms_norm, "rms_norm_kernel", norm, [{"rows": 5}, {"dtype": FP16}, {"eps": 1e-6}, {"add": True}]),
    (rms_norm, "rms_norm_backward_kernel", norm_backward, [{"rows": 5}, {"dtype": FP16}, {"add": True}]),
    (rms_norm, "rms_norm_weight_kernel", norm_backward, [{"rows": 5}, {"dtype": FP16}]),
    (
        rotary,
        "rotary_kernel",
        rotate,
        [{"heads": 3}, {"dtype": FP16}, {"inverse": True}, {"interleaved": False}, {"by_batch": True}],
    ),
    (swiglu, "swiglu_kernel", gate, [{"rows": 5}, {"dtype": FP16}, {"stride": 128}]),
    (swiglu, "swiglu_backward_kernel", gate_backward, [{"rows": 5}, {"dtype": FP16}, {"write_y": True}]),
    (
        cross_entropy,
        "cross_entropy_kernel",
        loss,
        [{"rows": 5}, {"dtype": FP16}, {"smoothing": 0.1}, {"z_loss": 0.1}, {"ignore_index": 0}, {"has_lse": True}],
    ),
    (cross_entropy, "scale_kernel", scale, [{"elements": 128}, {"dtype": FP16}]),
]


@pytest.fixture(autouse=True)
def on_a_pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _device: 77, raising=False)


@pytest.mark.parametrize(("module", "name", "launch", "others"), CASES, ids=[case[1] for case in CASES])
def test_a_kernel_is_bound_once_for_what_it_depends_on(
    module: ModuleType, name: str, launch: Launch, others: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    fakes = {x: FakeKernel(*getattr(module, x).arg_names) for x in vars(module) if x.endswith("_kernel")}
    for x, fake in fakes.items():
        monkeypatch.setattr(module, x, fake)
    cached = [x for x in vars(module).values() if hasattr(x, "cache_clear")]
    for function in cached:
        function.cache_clear()
    kernel = fakes[name]
    launch()
    launch()
    ((grid, arguments, options),) = kernel.bound
    assert options["num_stages"] == 3
    assert len(arguments) == len(kernel.arg_names), "every argument of the kernel is given, in its order"
    tensors = sum(isinstance(x, Tensor) for x in arguments)
    assert all(x.endswith("_ptr") == (i < tensors) for i, x in enumerate(kernel.arg_names))
    started = kernel.started[0]
    assert started[:3] == grid
    addresses, constants = (
        started[9 : 9 + tensors],
        started[9 + tensors :],
    )  # behind the stream, the function and what hooks get
    assert all(isinstance(x, int) for x in addresses)
    assert constants == arguments[tensors:]
    for count, other in enumerate(others, start=2):
        launch(**other)
        assert len(kernel.bound) == count, other
    launch()
    assert len(kernel.started) == 2, "and the first is still known"
    for function in cached:
        function.cache_clear()
