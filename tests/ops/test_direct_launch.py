"""Launches of a bound kernel: the state kept between calls, and the calls for which the kernel is bound again."""

import pytest
import torch

from fake_kernel import FakeKernel, stream_77
from trainstep.ops.direct_launch import BoundKernel

knobs = pytest.importorskip("triton").knobs

__all__ = ["stream_77"]
pytestmark = pytest.mark.usefixtures("stream_77")


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


def test_a_grid_may_have_two_dimensions():
    kernel = FakeKernel()
    BoundKernel(kernel, (7, 2), {"BLOCK": 64, "rows": 3}, num_warps=4, num_stages=3)(torch.empty(8))
    ((grid, _, options),) = kernel.bound
    assert grid == (7, 2, 1)
    assert options["num_stages"] == 3
