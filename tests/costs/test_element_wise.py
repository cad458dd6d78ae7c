"""Least bytes are those of the tensors that the ops read and write, and FLOPs those that torch counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trainstep.costs.element_wise import (
    cross_entropy_bytes,
    linear_cross_entropy_flops,
    rms_norm_bytes,
    rotary_bytes,
    swiglu_bytes,
)
from trainstep.ops import reference


def tensors_bytes(*tensors: torch.Tensor) -> int:
    return sum(x.nbytes for x in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_tensors(dtype: torch.dtype):
    size = dtype.itemsize
    x = torch.empty(6, 40, dtype=dtype)
    y = residual = total = dy = dtotal = dx = torch.empty_like(x)
    assert rms_norm_bytes(6, 40, size) == tensors_bytes(x, y)
    assert rms_norm_bytes(6, 40, size, residual=True) == tensors_bytes(x, residual, total, y)
    assert rms_norm_bytes(6, 40, size, backward=True) == tensors_bytes(dy, total, dx)
    assert rms_norm_bytes(6, 40, size, residual=True, backward=True) == tensors_bytes(dy, dtotal, total, dx)
    gate_up = torch.empty(6, 80, dtype=dtype)
    assert swiglu_bytes(6, 40, size) == tensors_bytes(gate_up, y)
    assert swiglu_bytes(6, 40, size, backward=True) == tensors_bytes(dy, gate_up, gate_up)
    assert swiglu_bytes(6, 40, size, backward=True, again=True) == tensors_bytes(dy, gate_up, gate_up, y)
    qkv = torch.empty(6, (5 + 2 * 2) * 8, dtype=dtype)
    assert rotary_bytes(6, 5, 2, 8, size) == 2 * tensors_bytes(qkv)
    assert cross_entropy_bytes(6, 40, size) == 3 * tensors_bytes(x)
    assert cross_entropy_bytes(6, 40, size, gradient=False) == tensors_bytes(x)


def test_flops_of_the_head_are_its_matmuls():
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        loss = reference.linear_cross_entropy(hidden, weight, torch.arange(6))
        assert counter.get_total_flops() == linear_cross_entropy_flops(6, 8, 40, backward=False)
        loss.backward()
    assert counter.get_total_flops() == linear_cross_entropy_flops(6, 8, 40)
