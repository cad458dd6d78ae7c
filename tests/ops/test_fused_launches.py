"""Fused ops bind a kernel once for its shapes, dtypes and settings, and then start it directly."""

from collections.abc import Callable, Iterator
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
    heads: int = 2, dtype: torch.dtype = BF16, inverse: bool = False, interleaved: bool = True, by_batch: bool = False,
    gap: int = 0, parts: int = 2,
) -> None:  # fmt: skip
    q, table = of(2, heads, 4, 16 + gap, dtype=dtype)[..., :16], of(*(2, 4, 8) if by_batch else (4, 8))
    rotary.launch_rotary([q] * parts, [q] * parts, table, table, interleaved=interleaved, inverse=inverse)


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


CASES: list[tuple[str, Launch, list[dict[str, Any]]]] = [
    ("rms_norm_kernel", norm, [{"rows": 5}, {"dtype": FP16}, {"eps": 1e-6}, {"add": True}]),
    ("rms_norm_backward_kernel", norm_backward, [{"rows": 5}, {"dtype": FP16}, {"add": True}]),
    ("rms_norm_weight_kernel", norm_backward, [{"rows": 5}, {"dtype": FP16}]),
    (
        "rotary_kernel",
        rotate,
        [
            {"heads": 3},
            {"dtype": FP16},
            {"inverse": True},
            {"interleaved": False},
            {"by_batch": True},
            {"gap": 16},
            {"parts": 3},
        ],
    ),
    ("swiglu_kernel", gate, [{"rows": 5}, {"dtype": FP16}, {"stride": 128}]),
    ("swiglu_backward_kernel", gate_backward, [{"rows": 5}, {"dtype": FP16}, {"write_y": True}]),
    (
        "cross_entropy_kernel",
        loss,
        [
            {"rows": 5},
            {"dtype": FP16},
            {"smoothing": 0.1},
            {"z_loss": 0.1},
            {"ignore_index": 0},
            {"has_lse": True},
            {"gradient": False},
        ],
    ),
    ("scale_kernel", scale, [{"elements": 128}, {"dtype": FP16}]),
]


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, FakeKernel]]:
    """All these kernels by name, on a pretended GPU; nothing bound before or meanwhile is known to other tests."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _device: 77, raising=False)
    modules = (cross_entropy, rms_norm, rotary, swiglu)
    cached = [x for module in modules for x in vars(module).values() if hasattr(x, "cache_clear")]
    kernels = {}
    for module in modules:
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            kernels[name] = FakeKernel(*getattr(module, name).arg_names)
            monkeypatch.setattr(module, name, kernels[name])
    for function in cached:
        function.cache_clear()
    yield kernels
    for function in cached:
        function.cache_clear()


@pytest.mark.parametrize(("name", "launch", "others"), CASES, ids=[case[0] for case in CASES])
def test_a_kernel_is_bound_once_for_what_it_depends_on(
    name: str, launch: Launch, others: list[dict[str, Any]], fakes: dict[str, FakeKernel]
):
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


def test_keys_are_rotated_where_there_are_no_queries(fakes: dict[str, FakeKernel]):
    q, k, table = of(2, 0, 4, 16), of(2, 1, 4, 16), of(4, 8)
    rotary.launch_rotary([q, k], [q, k], table, table, interleaved=True, inverse=False)
    assert len(fakes["rotary_kernel"].bound) == 1
    rotary.launch_rotary([k[:0], k[:0]], [k[:0], k[:0]], table, table, interleaved=True, inverse=False)
    assert len(fakes["rotary_kernel"].bound) == 1, "no position has nothing to rotate"
