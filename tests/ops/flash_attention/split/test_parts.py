"""Parts of fp32 tensors, which kernels read through descriptors that are made once for a shape."""

import weakref

import pytest
import torch

from fake_kernel import FakeKernel, stream_77
from trainstep.ops.flash_attention.problem import CallMeta

split_parts = pytest.importorskip("trainstep.ops.flash_attention.split.parts")

__all__ = ["stream_77"]
pytestmark = pytest.mark.usefixtures("stream_77")


def test_parts_are_read_through_descriptors():
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
    shape, stride = torch.Size((1, 1, 2**29, 64)), (0, 0, 64, 1)
    with pytest.raises(ValueError, match="take tf32x3"):
        split_parts.Prologue(CallMeta(shape, shape, torch.float32, torch.device("cpu"), *[stride] * 3), (2**29, 2**29))
