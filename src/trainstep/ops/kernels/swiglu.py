"""Kernels of SwiGLU's element-wise part, on gate and up side by side in one tensor, as one matmul makes them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainstep.ops.operators import on_device

_BLOCK = 2048
"""Elements of one row of gate, and of up, that a program takes: 16 each for 128 threads."""
_WARPS = 4


@triton.jit
def swiglu_kernel(gate_up_ptr, y_ptr, width, BLOCK: tl.constexpr):
    """y = gate sigmoid(gate) up, in fp32, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(gate_up_ptr + 2 * row * width + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (2 * row + 1) * width + column, mask=mask, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward_kernel(dy_ptr, gate_up_ptr, dgate_up_ptr, y_ptr, width, BLOCK: tl.constexpr):
    """With s = sigmoid(gate): dgate = dy up s (1 + gate (1 - s)), dup = dy gate s; and y, for the next weight's gradient."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate_place, up_place = 2 * row * width + column, (2 * row + 1) * width + column
    gate = tl.load(gate_up_ptr + gate_place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + up_place, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    silu = gate * s
    tl.store(
        dgate_up_ptr + gate_place, (dy * up * s * (1 + gate * (1 - s))).to(dgate_up_ptr.dtype.element_ty), mask=mask
    )
    tl.store(dgate_up_ptr + up_place, (dy * silu).to(dgate_up_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + row * width + column, (silu * up).to(y_ptr.dtype.element_ty), mask=mask)


def launch_swiglu(gate_up: Tensor) -> Tensor:
    """y (rows, F) of gate and up (rows, 2 F) without gaps."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(rows, width)
    if y.numel():
        with on_device(y.device):
            swiglu_kernel[(rows, triton.cdiv(width, _BLOCK))](gate_up, y, width, BLOCK=_BLOCK, num_warps=_WARPS)
    return y


def launch_swiglu_backward(dy: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of gate and up, (rows, 2 F), and y, (rows, F), without gaps."""
    rows, width = dy.shape
    dgate_up, y = torch.empty_like(gate_up), gate_up.new_empty(rows, width)
    if y.numel():
        with on_device(y.device):
            swiglu_backward_kernel[(rows, triton.cdiv(width, _BLOCK))](
                dy, gate_up, dgate_up, y, width, BLOCK=_BLOCK, num_warps=_WARPS
            )
    return dgate_up, y
