"""The Hopper kernels' host side: says which tensors they take, and launches them.

The work that depends only on shapes is done once and kept. All other calls run on the kernels of split/ or portable/ (choice.py),
which follow the same rule of accuracy.
"""

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from trainstep.ops.direct_launch import PROBLEMS_KEPT, BoundKernel
from trainstep.ops.flash_attention.hopper.backward import hopper_gradients_kernel
from trainstep.ops.flash_attention.hopper.forward import hopper_forward_kernel
from trainstep.ops.flash_attention.hopper.parts import hopper_cast_kernel, hopper_rows_kernel
from trainstep.ops.flash_attention.hopper.schedules import (
    BACKWARD,
    BACKWARD_KEYS,
    FORWARD,
    LEAST_HEAD_DIM,
    ROWS,
    SHARED_MEMORY_BYTES,
    WIDTHS,
    BackwardSchedule,
    BoxedKernel,
    ForwardSchedule,
    ForwardWork,
    boxes,
    column_parts,
    fastest,
    heads_together,
    in_order,
    key_heads_together,
    piece_boxes,
    row_boxes,
    tile_width,
    work_order,
)
from trainstep.ops.flash_attention.portable.forward import LOG2_E
from trainstep.ops.flash_attention.problem import CallMeta, Problem, Stride, device_of, strides

ROWS_BLOCK_Q = 64
"""Queries per program of hopper_rows_kernel."""
MOST_PADDED_TO = 128
"""The largest number of queries in a step of backward."""


# Which tensors the kernels take ------------------------------------------------------------------------------------------------


def why_not(q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> str | None:
    """Why the Hopper kernels do not take these tensors, in a few words; None if they do. k and v must have the same shape."""
    reason = _why_not_at_any_address(CallMeta.forward(q_BHSD, k_BGSD, v_BGSD))
    if reason is None and not _aligned(q_BHSD, k_BGSD, v_BGSD):
        return "a tensor's address is not a multiple of 16 bytes"
    return reason


def _aligned(q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> bool:
    return not (q_BHSD.data_ptr() | k_BGSD.data_ptr() | v_BGSD.data_ptr()) % 16


def _why_not_at_any_address(meta: CallMeta) -> str | None:
    """The reasons that do not depend on the tensors' addresses."""
    architecture, shared_memory_bytes = device_of(meta.device)
    if architecture != "sm_90" or shared_memory_bytes < SHARED_MEMORY_BYTES:
        return f"the device is {architecture}, not sm_90"
    if meta.q_shape[2] < ROWS:
        return f"there are fewer than {ROWS} queries, and most of each tile would be empty"
    shapes = (meta.q_shape, meta.k_shape, meta.k_shape)
    return why_not_shape(meta.dtype, shapes, (meta.q_stride, meta.k_stride, meta.v_stride))


def why_not_shape(dtype: torch.dtype, shapes: tuple[torch.Size, ...], each_stride: tuple[Stride, ...]) -> str | None:
    """The reasons that do not depend on the device. `shapes` and `each_stride`: those of q, k, v."""
    head_dim = shapes[0][-1]
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype} is not a 16-bit dtype"
    if head_dim % 8 or not LEAST_HEAD_DIM <= head_dim <= WIDTHS[-1]:
        return f"heads are {head_dim} wide, not a multiple of 8 from {LEAST_HEAD_DIM} to {WIDTHS[-1]}"
    for shape, stride in zip(shapes, each_stride, strict=True):
        step_bytes = [step * dtype.itemsize for size, step in zip(shape, stride, strict=True) if size > 1]
        if any(step % 16 for step in step_bytes[:-1]):
            return "a stride is not a multiple of 16 bytes"
        if any(step <= 0 or step >= 2**40 for step in step_bytes):
            return "a tensor is expanded, or has a stride of 2^40 bytes or more"
    batch, heads, queries, _ = shapes[0]
    if batch * heads * (queries + MOST_PADDED_TO) >= 2**31:
        return "there are 2^31 rows or more"
    return None


# Launches --------------------------------------------------------------------------------------------------------------------


def padded_rows(queries: int, schedule: BackwardSchedule) -> int:
    """Rows per head of log-sum-exp, delta and dq's sum: padded to whole steps."""
    return -(-queries // schedule.block_q) * schedule.block_q


def launch_hopper_forward(
    q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, problem: Problem, schedule: ForwardSchedule | None = None
) -> tuple[Tensor, Tensor] | None:
    """o, in q's layout, and lse (B, H, S) in fp32; None for tensors that the kernel does not take (why_not)."""
    bound = _bound_forward(CallMeta.forward(q_BHSD, k_BGSD, v_BGSD), problem, schedule)
    if bound is None or not _aligned(q_BHSD, k_BGSD, v_BGSD):
        return None
    batch, heads, queries, _ = q_BHSD.shape
    o, lse = torch.empty_like(q_BHSD), q_BHSD.new_empty(batch, heads, queries, dtype=torch.float32)
    bound.attend(q_BHSD, k_BGSD, v_BGSD, o, lse, bound.order)
    return o, lse


@functools.lru_cache(maxsize=PROBLEMS_KEPT)
def _bound_forward(meta: CallMeta, problem: Problem, schedule: ForwardSchedule | None) -> "ForwardKernel | None":
    """The kernel, or None if it does not take these: one look-up per call."""
    return None if _why_not_at_any_address(meta) else bind_hopper_forward(meta, problem, schedule)


class ForwardKernel(NamedTuple):
    """The kernel and the last of its tensors, which says which program does which tiles."""

    attend: BoxedKernel
    order: Tensor


def bind_hopper_forward(meta: CallMeta, problem: Problem, schedule: ForwardSchedule | None) -> ForwardKernel:
    """The kernel for a problem."""
    batch, heads, queries, head_dim = meta.q_shape
    key_heads, keys = meta.k_shape[1], meta.k_shape[2]
    width = tile_width(head_dim)
    work = ForwardWork(
        heads=batch * heads,
        together=heads_together(heads // key_heads, keys, head_dim, batch * heads),
        queries=queries,
        keys=keys,
        causal=problem.causal,
        offset=problem.offset(queries, keys),
    )
    schedule = schedule or fastest(FORWARD[width], work, multiprocessors(meta.device))
    pieces = work.tiles(schedule) * work.heads
    concurrent_programs = multiprocessors(meta.device) * schedule.programs_per_multiprocessor
    table = concurrent_programs < pieces
    arguments = {
        "tiles": work.tiles(schedule),
        "batch_heads": work.heads,
        "heads_together": work.together,
        "heads": heads,
        "heads_per_key_head": heads // key_heads,
        "queries": queries,
        "keys": keys,
        "offset": work.offset,
        "scale_log2": problem.scale * LOG2_E.value,
        "BLOCK_K": schedule.block_k,
        "WARPGROUPS": schedule.warpgroups,
        "STAGES": schedule.stages,
        "CAUSAL": problem.causal,
        "RAGGED_K": keys % schedule.block_k != 0,
        "TABLE": table,
        "REGISTERS": schedule.registers,
    }
    forms = (
        boxes(meta.q_shape, meta.q_stride, ROWS, width, meta.dtype),
        boxes(meta.k_shape, meta.k_stride, schedule.block_k, width, meta.dtype),
        boxes(meta.k_shape, meta.v_stride, schedule.block_k, width, meta.dtype),
        boxes(meta.q_shape, meta.like_q, ROWS, width, meta.dtype),
    )
    programs = concurrent_programs if table else pieces
    kernel = BoxedKernel(hopper_forward_kernel, programs, forms, arguments, schedule.most_registers)
    costs = work.costs_of_head(schedule) if table else ()
    return ForwardKernel(kernel, order_table(meta.device, costs, work.heads, work.together, programs))


@functools.cache
def order_table(
    device: torch.device, costs_of_head: tuple[int, ...], heads: int, together: int, programs: int
) -> Tensor:
    """work_order on the device, 4 bytes a tile; a placeholder where there are no costs.

    RuntimeError while a CUDA graph is captured, since a copy from the host would break the capture.
    """
    # Kept for good, since a CUDA graph may have its address: 8,192 heads of 8,192 queries take 1.3 MiB. Lengths with the
    # same number of blocks share a table.
    if device.type == "cuda" and torch.cuda.graphs.is_current_stream_capturing():
        raise RuntimeError(
            "flash_attention: these lengths are new in a CUDA graph: call it once with them before the graph is captured"
        )
    order = work_order(in_order(costs_of_head, heads, together), programs) if costs_of_head else [0]
    return torch.tensor(order, dtype=torch.int32, device=device)


def launch_hopper_backward(
    do_BHSD: Tensor, q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, o_BHSD: Tensor, lse_BHS: Tensor,
    problem: Problem, schedule: BackwardSchedule | None = None,
) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
    """dq, dk, dv, in the layouts of q, k, v; None for tensors that the kernels do not take (why_not).

    dq is not deterministic: its bits may differ from run to run.
    """
    bound, do_fits = _bound_backward(CallMeta.backward(do_BHSD, q_BHSD, k_BGSD, v_BGSD, o_BHSD), problem, schedule)
    if bound is None or not _aligned(q_BHSD, k_BGSD, v_BGSD):
        return None
    if not do_fits or do_BHSD.data_ptr() % 16:
        do_BHSD = do_BHSD.clone(memory_format=torch.contiguous_format)
        return launch_hopper_backward(do_BHSD, q_BHSD, k_BGSD, v_BGSD, o_BHSD, lse_BHS, problem, schedule)
    dq, dk, dv = torch.empty_like(q_BHSD), torch.empty_like(k_BGSD), torch.empty_like(v_BGSD)
    lse_log2, delta, dq_sum = backward_buffers(q_BHSD, bound.padded_queries)
    bound.rows(o_BHSD, do_BHSD, lse_BHS, lse_log2, delta, dq_sum)
    bound.gradients(q_BHSD, k_BGSD, v_BGSD, do_BHSD, lse_log2, delta, dk, dv, dq_sum)
    bound.cast(dq_sum, dq)
    return dq, dk, dv


@functools.lru_cache(maxsize=PROBLEMS_KEPT)
def _bound_backward(
    meta: CallMeta, problem: Problem, schedule: BackwardSchedule | None
) -> tuple["BackwardKernels | None", bool]:
    """The kernels, or None if they do not take these, and whether do can be read without a copy."""
    if _why_not_at_any_address(meta):
        return None, False
    do_fits = why_not_shape(meta.dtype, (meta.q_shape,), (meta.do_stride,)) is None
    return bind_hopper_backward(meta, problem, schedule), do_fits


def backward_buffers(q_BHSD: Tensor, padded_queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Buffers in fp32 for log-sum-exp base 2, delta and dq's sum: padded rows, for dq's sum as wide as tiles.

    [Note: one pass backward]
    """
    batch, heads, _, head_dim = q_BHSD.shape
    rows = batch * heads * padded_queries
    sizes = [rows, rows, rows * tile_width(head_dim)]
    lse_log2, delta, dq_sum = q_BHSD.new_empty(sum(sizes), dtype=torch.float32).split_with_sizes(sizes)
    return lse_log2, delta, dq_sum


class BackwardKernels(NamedTuple):
    """The kernels of backward, in the order in which they run."""

    rows: BoundKernel
    gradients: BoxedKernel
    cast: BoundKernel
    padded_queries: int


def bind_hopper_backward(meta: CallMeta, problem: Problem, schedule: BackwardSchedule | None) -> BackwardKernels:
    """The kernels for a problem."""
    batch, heads, queries, head_dim = meta.q_shape
    key_heads, keys = meta.k_shape[1], meta.k_shape[2]
    width = tile_width(head_dim)
    schedule = schedule or BACKWARD[width]
    group = heads // key_heads
    tiles = triton.cdiv(keys, BACKWARD_KEYS)
    padded_queries = padded_rows(queries, schedule)
    arguments = {
        "tiles": tiles,
        "batch_key_heads": batch * key_heads,
        "heads_together": key_heads_together(
            tiles * batch * key_heads, multiprocessors(meta.device), queries * group, head_dim, batch * key_heads
        ),
        "key_heads": key_heads,
        "heads_per_key_head": group,
        "queries": queries,
        "padded_queries": padded_queries,
        "keys": keys,
        "offset": problem.offset(queries, keys),
        "scale": problem.scale,
        "scale_log2": problem.scale * LOG2_E.value,
        "BLOCK_Q": schedule.block_q,
        "STAGES": schedule.stages,
        "SPLIT_ROWS": schedule.split_rows,
        "CAUSAL": problem.causal,
        "RAGGED_K": keys % BACKWARD_KEYS != 0,
    }
    row_form = row_boxes(batch * heads * padded_queries, schedule.block_q)
    dq_columns = schedule.dq_columns(width)
    pieces = padded_queries // ROWS * len(dq_columns)
    forms = (
        boxes(meta.q_shape, meta.q_stride, schedule.block_q, width, meta.dtype),
        boxes(meta.k_shape, meta.k_stride, BACKWARD_KEYS, width, meta.dtype),
        boxes(meta.k_shape, meta.v_stride, BACKWARD_KEYS, width, meta.dtype),
        boxes(meta.q_shape, meta.do_stride, schedule.block_q, width, meta.dtype),
        row_form,
        row_form,
        boxes(meta.k_shape, meta.like_k, ROWS, width, meta.dtype),
        boxes(meta.k_shape, meta.like_v, ROWS, width, meta.dtype),
        piece_boxes(batch * heads * padded_queries * width, dq_columns),
    )
    row_tiles = padded_queries // ROWS_BLOCK_Q
    first, *rest = column_parts(width)
    row_arguments = strides(o=meta.o_stride, g=meta.do_stride) | {
        "tiles": row_tiles,
        "heads": heads,
        "queries": queries,
        "padded_queries": padded_queries,
        "HEAD_DIM": head_dim,
        "BLOCK_D": triton.next_power_of_2(width),
        "FIRST": first,
        "REST": sum(rest),
        "BLOCK_Q": ROWS_BLOCK_Q,
    }
    cast_arguments = strides(dq=meta.like_q) | {
        "pieces": pieces,
        "heads": heads,
        "queries": queries,
        "scale": problem.scale,
        "HEAD_DIM": head_dim,
        "PIECES_ACROSS": len(dq_columns),
        "COLUMNS": dq_columns[0],
        "LAST_COLUMNS": dq_columns[-1],
    }
    return BackwardKernels(
        rows=BoundKernel(hopper_rows_kernel, row_tiles * batch * heads, row_arguments, num_warps=4),
        gradients=BoxedKernel(hopper_gradients_kernel, tiles * batch * key_heads, forms, arguments),
        cast=BoundKernel(hopper_cast_kernel, pieces * batch * heads, cast_arguments, num_warps=4),
        padded_queries=padded_queries,
    )


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors: the programs that run at the same time."""
    if device.type != "cuda":
        return 3  # few, so that tests on a CPU cover several tiles per program
    return torch.cuda.get_device_properties(device).multi_processor_count
