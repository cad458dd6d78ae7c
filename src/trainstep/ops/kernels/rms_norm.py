"""Kernels of RMSNorm, with the addition of a residual where there is one.

Forward: a program normalises a tile of whole rows. Backward: a program goes through many tiles, with the next ones on their way
while it works on one, and sums the gradient of the weight over its rows in registers. The sums of all programs, a row of a table
each, are then added in a fixed order by a kernel of our own: torch's sum over a few hundred rows takes 7 µs, and rounding it
another kernel.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainstep.ops.direct_launch import PROBLEMS_KEPT, TRITON_STAGES, BoundKernel
from trainstep.ops.operators import on_device

WIDEST = 16_384
"""The widest row that a program holds in registers, with 32 warps."""
_TILE = 4096
"""Elements of a tile, if rows are not longer: 16 each for 256 threads."""
_PROGRAMS_PER_SM = 4
_STAGES = 3
"""Tiles of backward that are on their way or worked on, of 16-bit rows of at most `_widest_pipelined`. On an H200 8192 x 4096 takes
54.9 µs of the GPU, and 57.0 with the next tile read into registers, both with sums in tiles of 32 columns
(results/h200/rms_norm_variants.csv)."""
_SUMMED_ROWS, _SUMMED_COLUMNS = 128, 16
"""The tile in which the sums of programs are added: 2.6 µs for 4,096 columns on an H200, 3.2 with 32 columns."""


@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, sum_ptr, y_ptr, inverse_rms_ptr, rows, width, eps,
    ADD: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """y = h inverse_rms weight, h = x + residual as stored in `sum`, or x without ADD. Everything between is in fp32."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    mask = (row < rows) & (column < width)
    place = row.to(tl.int64) * width + column
    h = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        added = h + tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
        rounded = added.to(sum_ptr.dtype.element_ty)  # what backward reads is what is normalised
        tl.store(sum_ptr + place, rounded, mask=mask)
        h = rounded.to(tl.float32)
    # Correctly rounded: backward subtracts nearly equal numbers where a row is short.
    inverse_rms = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(h * h, axis=1, keep_dims=True) / width + eps))
    tl.store(inverse_rms_ptr + row, inverse_rms, mask=row < rows)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(y_ptr + place, (h * inverse_rms * weight).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm_backward_kernel(
    dy_ptr, dsum_ptr, h_ptr, weight_ptr, inverse_rms_ptr, dh_ptr, dweight_ptr, rows, width,
    ADD: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """With n = h inverse_rms: dh = inverse_rms (weight dy - n mean(weight dy n)), plus `dsum` with ADD; dweight = sum of dy n."""
    program = tl.program_id(0)
    column = tl.arange(0, WIDTH)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    dweight = tl.zeros([ROWS, WIDTH], tl.float32)
    step = tl.num_programs(0) * ROWS
    row = program * ROWS + tl.arange(0, ROWS)[:, None]
    next_inverse_rms = tl.load(inverse_rms_ptr + row, mask=row < rows, other=0.0)
    for first in tl.range(program * ROWS, rows, step, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & (column < width)
        place = row.to(tl.int64) * width + column
        inverse_rms = next_inverse_rms
        next_inverse_rms = tl.load(inverse_rms_ptr + row + step, mask=row + step < rows, other=0.0)
        h = tl.load(h_ptr + place, mask=mask, other=0.0)
        dy = tl.load(dy_ptr + place, mask=mask, other=0.0).to(tl.float32)
        n = h.to(tl.float32) * inverse_rms
        dn = dy * weight
        dh = inverse_rms * (dn - n * (tl.sum(dn * n, axis=1, keep_dims=True) / width))
        if ADD:
            dh += tl.load(dsum_ptr + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(dh_ptr + place, dh.to(dh_ptr.dtype.element_ty), mask=mask)
        dweight += dy * n
    place = program.to(tl.int64) * width + column
    tl.store(dweight_ptr + place, tl.sum(dweight, axis=0, keep_dims=True), mask=column < width)


@triton.jit
def rms_norm_weight_kernel(
    table_ptr, dweight_ptr, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """dweight = sum of the table's rows, from the first to the last whatever runs beside."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        total += tl.load(table_ptr + row * width + column, mask=(row < rows) & (column < width), other=0.0)
    dweight = tl.sum(total, axis=0, keep_dims=True)
    tl.store(dweight_ptr + column, dweight.to(dweight_ptr.dtype.element_ty), mask=column < width)


def launch_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """y in `dtype`, h (x itself without a residual) and 1 / rms (rows,) in fp32, of (..., C) tensors without gaps."""
    width, device = x.shape[-1], x.device
    rows = x.numel() // width
    add = residual is not None
    h = x if residual is None else x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    residual = x if residual is None else residual
    y, inverse_rms = x.new_empty(x.shape, dtype=dtype), x.new_empty(rows, dtype=torch.float32)
    kernel = _bound_forward(rows, width, eps, add, (x.dtype, residual.dtype, weight.dtype, dtype), device)
    with on_device(device):
        kernel(x, residual, weight, h, y, inverse_rms)
    return y, h, inverse_rms


@functools.lru_cache(PROBLEMS_KEPT)
def _bound_forward(
    rows: int, width: int, eps: float, add: bool, _dtypes: tuple[torch.dtype, ...], _device: torch.device
) -> BoundKernel:
    tile_rows, columns, warps = _tile(width)
    arguments = {"rows": rows, "width": width, "eps": eps, "ADD": add, "ROWS": tile_rows, "WIDTH": columns}
    programs = max(1, triton.cdiv(rows, tile_rows))
    return BoundKernel(rms_norm_kernel, programs, arguments, num_warps=warps, num_stages=TRITON_STAGES)


def launch_rms_norm_backward(
    dy: Tensor, dsum: Tensor | None, h: Tensor, weight: Tensor, inverse_rms: Tensor
) -> tuple[Tensor, Tensor]:
    """dh in h's dtype and dweight in the weight's, of (..., C) tensors without gaps."""
    width, device = h.shape[-1], h.device
    add = dsum is not None
    dsum = dy if dsum is None else dsum
    dtypes = (dy.dtype, dsum.dtype, h.dtype, weight.dtype)
    programs, rows_kernel, weight_kernel = _bound_backward(h.numel() // width, width, add, dtypes, device)
    dh, dweight = h.new_empty(h.shape), weight.new_empty(width)
    sums = h.new_empty(programs, width, dtype=torch.float32)
    with on_device(device):
        rows_kernel(dy, dsum, h, weight, inverse_rms, dh, sums)
        weight_kernel(sums, dweight)
    return dh, dweight


@functools.lru_cache(PROBLEMS_KEPT)
def _bound_backward(
    rows: int, width: int, add: bool, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> tuple[int, BoundKernel, BoundKernel]:
    """Rows of the table of sums, the kernel that writes it, and the kernel that adds them."""
    dy_dtype, _, h_dtype, _ = dtypes
    tile = backward_tile(width, rows, device, is_16_bit=h_dtype.itemsize == dy_dtype.itemsize == 2)
    arguments = {
        "rows": rows,
        "width": width,
        "ADD": add,
        "STAGES": tile.stages,
        "ROWS": tile.rows,
        "WIDTH": tile.columns,
    }
    sum_arguments = {"rows": tile.programs, "width": width, "ROWS": _SUMMED_ROWS, "COLUMNS": _SUMMED_COLUMNS}
    blocks = triton.cdiv(width, _SUMMED_COLUMNS)
    return (
        tile.programs,
        BoundKernel(rms_norm_backward_kernel, tile.programs, arguments, num_warps=tile.warps, num_stages=TRITON_STAGES),
        BoundKernel(rms_norm_weight_kernel, blocks, sum_arguments, num_warps=4, num_stages=TRITON_STAGES),
    )


class BackwardTile(NamedTuple):
    """Rows and columns of a tile of backward, and how the tiles are worked through."""

    rows: int
    columns: int
    warps: int
    programs: int
    stages: int


def backward_tile(width: int, rows: int, device: torch.device, *, is_16_bit: bool) -> BackwardTile:
    """The tile for a tensor of so many rows. `is_16_bit`: all of h and dy is. With one stage nothing is read ahead."""
    tile_rows, columns, warps = _tile(width)
    processors, programs_per_sm = _processors(device), _PROGRAMS_PER_SM
    is_pipelined = is_16_bit and width <= _widest_pipelined(device)
    if is_pipelined:
        programs_per_sm, warps = 2 if columns <= _TILE else 1, 8
        while tile_rows > 1 and triton.cdiv(rows, tile_rows) < processors:  # few rows: all multiprocessors work
            tile_rows //= 2
    programs = max(1, min(triton.cdiv(rows, tile_rows), processors * programs_per_sm))
    return BackwardTile(tile_rows, columns, warps, programs, _STAGES if is_pipelined else 1)


def _tile(width: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, and warps: short rows share a tile, and a longer row has more threads."""
    columns = triton.next_power_of_2(width)
    return max(1, _TILE // columns), columns, min(32, max(8, columns // 512))


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def _widest_pipelined(device: torch.device) -> int:
    """The widest 16-bit row of which shared memory holds all stages of three tensors.

    Three stages of three rows of 8,192 take 144 KiB. A program may have 227 KiB on Hopper's GPUs and on Blackwell's large ones, and
    99 on the smallest.
    """
    is_large = device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)
    return 8192 if is_large else 4096
