"""Launches of a bound kernel: the state kept between calls, and the calls for which the kernel is bound again."""

import weakref
from typing import Any

import pytest
import torch

from trainstep.ops.flash_attention.launch import BoundKernel, CallMeta, Problem, device_of, strides
from trainstep.ops.flash_attention.portable.tiles import Arithmetic

knobs = pytest.importorskip("triton").knobs


class FakeKernel:
    """A kernel that keeps calls through Triton's launch, calls of the compiled kernel with hooks, and direct starts."""

    arg_names = ("x_ptr", "rows", "BLOCK")
    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.bound, self.hooked, self.started = [], [], []
        self.run = FakeLauncher()
        self.run.launch = lambda *arguments: self.started.append(arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> "FakeKernel":
            (self.bound if options else self.hooked).append((grid, arguments, options))
            return self

        return launch


class FakeLauncher:
    """A launcher that passes its arguments on, as Triton's does."""

    launch: Any

    def __call__(self, *everything: Any) -> None:
        self.launch(*everything)


@pytest.fixture(autouse=True)
def stream_77(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _device: 77, raising=False)


def test_later_calls_start_the_compiled_kernel():
    kernel = FakeKernel()
    bound = BoundKernel(kernel, 7, {"BLOCK": 64, "rows": 3}, num_warps=4)
    x = torch.empty(8)
    bound(x)
    bound(x)
    bound(x)
    ((grid, arguments, options),) = kernel.bound
    assert grid == (7, 1, 1)
    assert arguments == (x, 3, 64)
    assert options["num_warps"] == 4
    assert kernel.started == [(7, 1, 1, 77, "function", "metadata", None, None, None, x.data_ptr(), 3, 64)] * 2
    assert not kernel.hooked


def test_an_unknown_launcher_is_not_bypassed():
    kernel = FakeKernel()
    kernel.run = object()
    bound = BoundKernel(kernel, 7, {"BLOCK": 64, "rows": 3}, num_warps=4)
    x = torch.empty(8)
    bound(x)
    bound(x)
    assert kernel.hooked == [((7, 1, 1), (x.data_ptr(), 3, 64), {})]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_called(hook: str):
    kernel = FakeKernel()
    bound = BoundKernel(kernel, 7, {"BLOCK": 64, "rows": 3}, num_warps=4)
    x = torch.empty(8)
    bound(x)
    listening = getattr(knobs.runtime, hook)
    listening.add(print)
    try:
        bound(x)
    finally:
        listening.remove(print)
    assert kernel.hooked == [((7, 1, 1), (x.data_ptr(), 3, 64), {})]
    assert not kernel.started


def test_unaligned_tensors_are_bound_each_time():
    kernel = FakeKernel()
    bound = BoundKernel(kernel, 7, {"BLOCK": 64, "rows": 3}, num_warps=4)
    for x in (torch.empty(8)[1:], torch.empty(8), torch.empty(8)[1:]):
        bound(x)
    assert len(kernel.bound) == 3
    assert not kernel.started


def test_parts_are_read_through_descriptors():
    split_parts = pytest.importorskip("trainstep.ops.flash_attention.split.parts")
    kernel = FakeKernel()
    shape = (2, 2, 5, 64, 16)
    bound = split_parts.PartsKernel((shape,), (32,), kernel, 7, {"BLOCK": 64, "rows": 3}, num_warps=4)
    first, second = torch.empty(2, *shape, dtype=torch.float16)
    x = torch.empty(8)
    bound(first, x)
    bound(second, x)
    ((_, (descriptor, *arguments), _),) = kernel.bound
    assert arguments == [x, 3, 64]
    assert (descriptor.shape, descriptor.strides, descriptor.block_shape) == ([2 * 2 * 5 * 64, 16], [16, 1], [32, 16])
    assert descriptor.base is first
    ((*_, started_descriptor, address, rows, block),) = kernel.started
    assert started_descriptor.base is second
    assert vars(started_descriptor) == {**vars(descriptor), "base": second}
    assert (address, rows, block) == (x.data_ptr(), 3, 64)
    del descriptor, started_descriptor, arguments
    kernel.bound.clear()
    kernel.started.clear()
    alive = weakref.ref(first)
    del first
    assert alive() is None


def test_more_rows_of_parts_than_32_bits_can_count_are_refused():
    prologue = pytest.importorskip("trainstep.ops.flash_attention.split.parts")
    shape, stride = torch.Size((1, 1, 2**29, 64)), (0, 0, 64, 1)
    with pytest.raises(ValueError, match="take tf32x3"):
        prologue.Prologue(CallMeta(shape, shape, torch.float32, torch.device("cpu"), *[stride] * 3), (2**29, 2**29))


def test_the_offset_depends_on_the_alignment():
    assert Problem(1.0, True, False, Arithmetic.HALF).offset(3, 8) == 0
    assert Problem(1.0, True, True, Arithmetic.HALF).offset(3, 8) == 5


def test_a_cpu_is_any_architecture():
    assert device_of(torch.device("cpu")).architecture == "any"
    assert strides(dk=(9, 8, 7, 1)) == {"stride_dkb": 9, "stride_dkh": 8, "stride_dks": 7}
