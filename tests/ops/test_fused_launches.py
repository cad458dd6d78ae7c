"""Fused ops bind a kernel once for its shapes, dtypes and settings, and then start it directly."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fake_kernel import FakeKernel, stream_77

pytest.importorskip("triton")
from trainstep.ops.kernels import cross_entropy, rms_norm, rotary, swiglu

BF16, FP16 = torch.bfloat16, torch.float16
__all__ = ["stream_77"]
Launch = Callable[..., Any]


def of(*shape: int, dtype: torch.dtype = BF16, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def norm(
    rows: int = 4, width: int = 64, eps: float = 1e-5, x: torch.dtype = BF16, added: torch.dtype | None = None,
    weight: torch.dtype = BF16, y: torch.dtype = BF16, device: str = "cpu",
) -> None:  # fmt: skip
    residual = None if added is None else of(rows, width, dtype=added, device=device)
    scale = of(width, dtype=weight, device=device)
    rms_norm.launch_rms_norm(of(rows, width, dtype=x, device=device), residual, scale, eps, y)


def norm_backward(
    rows: int = 4, width: int = 64, dy: torch.dtype = BF16, added: torch.dtype | None = None, h: torch.dtype = BF16,
    weight: torch.dtype = BF16, device: str = "cpu",
) -> None:  # fmt: skip
    dsum = None if added is None else of(rows, width, dtype=added, device=device)
    of_dy, of_h = (of(rows, width, dtype=dtype, device=device) for dtype in (dy, h))
    inverse_rms = of(rows, dtype=torch.float32, device=device)
    rms_norm.launch_rms_norm_backward(of_dy, dsum, of_h, of(width, dtype=weight, device=device), inverse_rms)


def rotate(
    heads: int = 2, q: torch.dtype = BF16, k: torch.dtype = BF16, v: torch.dtype | None = None, table: torch.dtype = BF16,
    inverse: bool = False, interleaved: bool = True, by_batch: bool = False, gap: int = 0, device: str = "cpu",
) -> None:  # fmt: skip
    dtypes = [dtype for dtype in (q, k, v) if dtype is not None]
    tensors = [of(2, heads, 4, 16 + gap, dtype=dtype, device=device)[..., :16] for dtype in dtypes]
    angles = of(*(2, 4, 8) if by_batch else (4, 8), dtype=table, device=device)
    rotary.launch_rotary(tensors, tensors, angles, angles, interleaved=interleaved, inverse=inverse)


def gate(rows: int = 4, width: int = 64, stride: int = 64, dtype: torch.dtype = BF16, device: str = "cpu") -> None:
    x = of(rows, width, dtype=dtype, device=device)
    swiglu.launch_swiglu(x, x, stride)


def gate_backward(
    rows: int = 4, width: int = 64, stride: int = 64, dy: torch.dtype = BF16, x: torch.dtype = BF16, write_y: bool = False,
    device: str = "cpu",
) -> None:  # fmt: skip
    of_dy, of_x = (of(rows, width, dtype=dtype, device=device) for dtype in (dy, x))
    swiglu.launch_swiglu_backward(of_dy, of_x, of_x, of_x, of_x, of_dy if write_y else None, stride)


def loss(
    rows: int = 4, vocabulary: int = 64, gap: int = 0, dtype: torch.dtype = BF16, device: str = "cpu", **settings: Any
) -> None:
    plain = {"ignore_index": -100, "smoothing": 0.0, "z_loss": 0.0, "has_lse": False, "gradient": True}
    z = of(rows, vocabulary + gap, dtype=dtype, device=device)[:, :vocabulary]
    targets, fp32 = (of(rows, dtype=dtype, device=device) for dtype in (torch.int64, torch.float32))
    cross_entropy.launch_cross_entropy(z, targets, fp32, fp32, fp32, **plain | settings)


def scale(elements: int = 64, dtype: torch.dtype = BF16, device: str = "cpu") -> None:
    cross_entropy.launch_scale(of(elements, dtype=dtype, device=device), of(1, dtype=torch.float32, device=device))


META = {"device": "meta"}
"""Stands for another GPU."""
CASES: list[tuple[str, int, Launch, list[dict[str, Any]]]] = [
    (
        "rms_norm_kernel", 8, norm,
        [
            {"rows": 5}, {"width": 128}, {"eps": 1e-6}, {"x": FP16}, {"weight": FP16}, {"y": FP16}, {"added": BF16},
            {"added": FP16}, META,
        ],
    ),
    (
        "rms_norm_backward_kernel", 8, norm_backward,
        [
            {"rows": 5}, {"width": 128}, {"dy": FP16}, {"h": FP16}, {"weight": FP16}, {"added": BF16}, {"added": FP16},
            {"added": BF16, "dy": FP16}, META,
        ],
    ),
    ("rms_norm_weight_kernel", 4, norm_backward, [{"width": 128}, {"weight": FP16}, META]),
    (
        "rotary_kernel", 4, rotate,
        [
            {"heads": 3}, {"q": FP16}, {"k": FP16}, {"v": BF16}, {"v": FP16}, {"table": FP16}, {"inverse": True},
            {"interleaved": False}, {"by_batch": True}, {"gap": 16}, META,
        ],
    ),
    ("swiglu_kernel", 8, gate, [{"rows": 5}, {"width": 128}, {"stride": 128}, {"dtype": FP16}, META]),
    (
        "swiglu_backward_kernel", 4, gate_backward,
        [{"rows": 5}, {"width": 128}, {"stride": 128}, {"dy": FP16}, {"x": FP16}, {"write_y": True}, META],
    ),
    (
        "cross_entropy_kernel", 1, loss,
        [
            {"rows": 5}, {"vocabulary": 128}, {"gap": 64}, {"dtype": FP16}, {"ignore_index": 0}, {"smoothing": 0.1},
            {"z_loss": 0.1}, {"has_lse": True}, {"gradient": False}, META,
        ],
    ),
    ("scale_kernel", 8, scale, [{"elements": 128}, {"dtype": FP16}, META]),
]  # fmt: skip
"""Kernel, its warps, a launch of it, and what else must be bound anew."""


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, stream_77: None) -> Iterator[dict[str, FakeKernel]]:
    """All these kernels by name, on a pretended GPU; what tests before and after this one have bound is apart."""
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


@pytest.mark.parametrize(("name", "warps", "launch", "others"), CASES, ids=[case[0] for case in CASES])
def test_a_kernel_is_bound_once_for_what_it_depends_on(
    name: str, warps: int, launch: Launch, others: list[dict[str, Any]], fakes: dict[str, FakeKernel]
):
    kernel = fakes[name]
    launch()
    launch()
    ((grid, arguments, options),) = kernel.bound
    assert (options["num_stages"], options["num_warps"]) == (3, warps)
    assert len(arguments) == len(kernel.arg_names), "every argument of the kernel is given, in its order"
    tensors = sum(isinstance(x, Tensor) for x in arguments)
    assert all(x.endswith("_ptr") == (i < tensors) for i, x in enumerate(kernel.arg_names))
    started = kernel.started[0]
    assert started[:3] == grid
    given = started[9:]  # behind the grid, the stream, the function and what hooks get
    assert all(isinstance(x, int) for x in given[:tensors]), "addresses"
    assert given[tensors:] == arguments[tensors:]
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
