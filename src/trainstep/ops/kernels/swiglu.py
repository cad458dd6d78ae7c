"""Kernels of SwiGLU's element-wise part. Gate and up may lie side by side in one tensor, as one matmul makes them."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainstep.ops.direct_launch import PROBLEMS_KEPT, TRITON_STAGES, BoundKernel
from trainstep.ops.operators import on_device

_BLOCK = 2048
"""Elements of one row of gate, and of up, that a program takes: 8 each for 256 threads in forward, 16 for 128 in backward."""
_FORWARD_WARPS, _BACKWARD_WARPS = 8, 4


@triton.jit
def swiglu_kernel(gate_ptr, up_ptr, y_ptr, width, row_stride, blocks, BLOCK: tl.constexpr):
    """y = gate sigmoid(gate) up, in fp32, rounded once. `row_stride`: of gate and of up; `blocks`: of a row.

    Neighbouring programs take neighbouring blocks of a row, so that memory is read in order: 103 % of a copy's rate on an H200, and
    98 % where neighbouring programs took different rows (results/h200/swiglu_variants.ndjson).
    """
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(gate_ptr + row * row_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * row_stride + column, mask=mask, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, y_ptr, width, row_stride, BLOCK: tl.constexpr, WRITE_Y: tl.constexpr
):  # fmt: skip
    """With s = sigmoid(gate): dgate = dy up s (1 + gate (1 - s)), dup = dy gate s; and y with WRITE_Y.

    `row_stride`: of gate, up and their gradients.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    place = row * row_stride + column
    gate = tl.load(gate_ptr + place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + place, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    silu = gate * s
    dgate = dy * up * s * (1 + gate * (1 - s))
    tl.store(dgate_ptr + place, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    tl.store(dup_ptr + place, (dy * silu).to(dup_ptr.dtype.element_ty), mask=mask)
    if WRITE_Y:
        tl.store(y_ptr + row * width + column, (silu * up).to(y_ptr.dtype.element_ty), mask=mask)


def launch_swiglu(gate: Tensor, up: Tensor, row_stride: int) -> Tensor:
    """y (..., F), without gaps, of gate and up (..., F) in one dtype, whose rows are `row_stride` elements apart."""
    y = gate.new_empty(gate.shape)
    if y.numel():
        kernel = _bound_forward(y.numel(), y.shape[-1], row_stride, y.dtype, y.device)
        with on_device(y.device):
            kernel(gate, up, y)
    return y


@functools.lru_cache(PROBLEMS_KEPT)
def _bound_forward(
    elements: int, width: int, row_stride: int, _dtype: torch.dtype, _device: torch.device
) -> BoundKernel:
    blocks = triton.cdiv(width, _BLOCK)
    arguments = {"width": width, "row_stride": row_stride, "blocks": blocks, "BLOCK": _BLOCK}
    programs = elements // width * blocks
    return BoundKernel(swiglu_kernel, programs, arguments, num_warps=_FORWARD_WARPS, num_stages=TRITON_STAGES)


def launch_swiglu_backward(
    dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, y: Tensor | None, row_stride: int
) -> None:
    """Write the gradients of gate and up, and into y, if it is given, the result of forward. dy and y have no gaps.

    gate, up, dgate and dup have one dtype, dy and y another or the same.
    """
    if dy.numel():
        dtypes = (dy.dtype, gate.dtype)
        kernel = _bound_backward(dy.numel(), dy.shape[-1], row_stride, y is not None, dtypes, dy.device)
        with on_device(dy.device):
            kernel(dy, gate, up, dgate, dup, dy if y is None else y)


@functools.lru_cache(PROBLEMS_KEPT)
def _bound_backward(
    elements: int, width: int, row_stride: int, write_y: bool, _dtypes: tuple[torch.dtype, ...], _device: torch.device
) -> BoundKernel:
    arguments = {"width": width, "row_stride": row_stride, "BLOCK": _BLOCK, "WRITE_Y": write_y}
    grid = (elements // width, triton.cdiv(width, _BLOCK))
    return BoundKernel(swiglu_backward_kernel, grid, arguments, num_warps=_BACKWARD_WARPS, num_stages=TRITON_STAGES)
