"""Launching: what is kept between calls, and when the kernel has to be bound anew."""

from typing import Any

import torch

from trainstep.ops.flash_attention.launch import BoundKernel, Problem, device_of, strides
from trainstep.ops.flash_attention.tiles import Arithmetic


class FakeKernel:
    """Counts calls through Triton's own launch, and those that start the compiled kernel."""

    arg_names = ("x_ptr", "rows", "BLOCK")

    def __init__(self) -> None:
        self.bound, self.started = [], []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> "FakeKernel":
            (self.bound if options else self.started).append((grid, arguments, options))
            return self

        return launch


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
    assert [arguments for _, arguments, _ in kernel.started] == [(x, 3, 64)] * 2


def test_unaligned_tensors_are_bound_each_time():
    kernel = FakeKernel()
    bound = BoundKernel(kernel, 7, {"BLOCK": 64, "rows": 3}, num_warps=4)
    for x in (torch.empty(8)[1:], torch.empty(8), torch.empty(8)[1:]):
        bound(x)
    assert len(kernel.bound) == 3
    assert not kernel.started


def test_offset():
    assert Problem(1.0, True, False, Arithmetic.HALF).offset(3, 8) == 0
    assert Problem(1.0, True, True, Arithmetic.HALF).offset(3, 8) == 5


def test_without_a_gpu():
    assert device_of(torch.device("cpu")).architecture == "any"
    assert strides(dk=(9, 8, 7, 1)) == {"stride_dkb": 9, "stride_dkh": 8, "stride_dks": 7}
