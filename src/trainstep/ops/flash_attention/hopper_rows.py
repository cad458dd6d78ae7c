"""Rows before and behind hopper_backward.py, in plain Triton.

`hopper_rows_kernel`: rowsum(do o), the log-sum-exp base 2, and zeros for dq's sum. `hopper_cast_kernel`: dq as the tensors are, out
of that sum. See [Note: one pass backward].
"""

import triton
import triton.language as tl

from trainstep.ops.flash_attention.backward import deltas_of_tile
from trainstep.ops.flash_attention.forward import LOG2_E
from trainstep.ops.flash_attention.hopper_parts import ROWS, SIZES


@triton.jit(do_not_specialize=SIZES)
def hopper_rows_kernel(
    o_ptr, do_ptr, lse_ptr, lse_log2_ptr, delta_ptr, dq_sum_ptr,
    stride_ob, stride_oh, stride_os, stride_gb, stride_gh, stride_gs, tiles, heads, queries, padded_queries,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Rows are padded to whole tiles: lse_log2 with +inf, delta with 0. dq_sum (B, H, padded S, FIRST + REST) is set to 0.

    BLOCK_D, FIRST and REST, if it is not 0, are powers of two.
    """
    batch_head, row, delta = deltas_of_tile(
        o_ptr, do_ptr, stride_ob, stride_oh, stride_os, stride_gb, stride_gh, stride_gs, tiles, heads, queries,
        HEAD_DIM, BLOCK_D, BLOCK_Q,
    )  # fmt: skip
    lse = tl.load(lse_ptr + batch_head * queries + row, mask=row < queries, other=float("-inf"))
    padded_row = batch_head * padded_queries + row
    tl.store(lse_log2_ptr + padded_row, tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E))
    tl.store(delta_ptr + padded_row, delta)
    first_q = tl.program_id(0) % tiles * BLOCK_Q
    dq_base = dq_sum_ptr + (batch_head * padded_queries + first_q) * (FIRST + REST)
    tl.store(dq_base + tl.arange(0, BLOCK_Q * FIRST), tl.zeros([BLOCK_Q * FIRST], tl.float32))
    if REST:
        rest_base = dq_base + BLOCK_Q * FIRST
        tl.store(rest_base + tl.arange(0, BLOCK_Q * REST), tl.zeros([BLOCK_Q * REST], tl.float32))


@triton.jit(do_not_specialize=SIZES)
def hopper_cast_kernel(
    dq_sum_ptr, dq_ptr, stride_dqb, stride_dqh, stride_dqs, pieces, heads, queries, scale,
    HEAD_DIM: tl.constexpr, PIECES_ACROSS: tl.constexpr, COLUMNS: tl.constexpr, LAST_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One piece of dq's sum, 64 queries x COLUMNS, out of the order of registers into rows, scaled.

    A head has `pieces`, PIECES_ACROSS side by side, one or two; the last is LAST_COLUMNS wide.
    """
    piece = tl.program_id(0).to(tl.int64)
    batch_head = piece // pieces
    first_q = piece % pieces // PIECES_ACROSS * ROWS
    first_column = piece % PIECES_ACROSS * COLUMNS
    if first_q < queries:
        WIDTH: tl.constexpr = (PIECES_ACROSS - 1) * COLUMNS + LAST_COLUMNS
        held = dq_sum_ptr + (piece // PIECES_ACROSS * WIDTH + first_column) * ROWS
        base = dq_ptr + batch_head // heads * stride_dqb + batch_head % heads * stride_dqh + first_q * stride_dqs
        left = queries - first_q
        if COLUMNS == LAST_COLUMNS:  # noqa: SIM114  (this one is known when compiling)
            _cast_piece(held, base, stride_dqs, left, first_column, scale, HEAD_DIM, COLUMNS)
        elif first_column == 0:
            _cast_piece(held, base, stride_dqs, left, first_column, scale, HEAD_DIM, COLUMNS)
        else:
            _cast_piece(held, base, stride_dqs, left, first_column, scale, HEAD_DIM, LAST_COLUMNS)


@triton.jit
def _cast_piece(held_ptr, dq_ptr, stride_dqs, rows, first_column, scale, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """What lies at held_ptr, to `rows` rows from dq_ptr on and columns from first_column on."""
    held = tl.reshape(tl.load(held_ptr + tl.arange(0, ROWS * COLUMNS)), [COLUMNS // 8, 4, 8, 4, 2, 2])
    dq = tl.reshape(tl.permute(held, [1, 4, 2, 0, 3, 5]), [ROWS, COLUMNS])
    row = tl.arange(0, ROWS)[:, None].to(tl.int64)
    column = first_column + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < HEAD_DIM)
    tl.store(dq_ptr + row * stride_dqs + column, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside)
