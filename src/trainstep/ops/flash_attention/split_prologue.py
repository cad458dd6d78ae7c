"""What runs before the kernels of fp32_precision="fp16x3": the parts of q, k, v and do, by two launches for all of them.

`split_peaks_kernel` finds the scales, `split_parts_kernel` makes the parts and backward's delta (split_parts.py has the note). A
program takes one tile of one tensor: q's come first, then k's, v's and do's.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainstep.ops.flash_attention.launch import BoundKernel, CallMeta, strides
from trainstep.ops.flash_attention.split_parts import (
    DO_PEAK,
    K_PEAK,
    LEAST_INFINITY,
    PART_EXPONENT,
    Q_PEAK,
    SPLIT_SIZES,
    V_PEAK,
    Peak,
    bits_of,
    exponent_of,
    split,
    times_power_of_two,
)
from trainstep.ops.flash_attention.tile_access import load_tile
from trainstep.ops.flash_attention.tiles import padded

MOST_ROWS, MOST_ELEMENTS = 64, 4096
"""Of a program."""


@triton.jit
def _load(
    x_ptr, stride_b, stride_h, stride_s, program, tiles, heads, rows,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The tile of x that belongs to this program, counted from the first of x's."""
    batch_head = program // tiles
    base = x_ptr + (batch_head // heads).to(tl.int64) * stride_b + (batch_head % heads).to(tl.int64) * stride_h
    return load_tile(base, stride_s, program % tiles * BLOCK, rows, BLOCK, HEAD_DIM, BLOCK_D, True)


@triton.jit
def _add_to_peak(x, peak_ptr):
    """Maxima of integers do not depend on their order: every run gives the same."""
    bits = bits_of(x)
    tl.atomic_max(peak_ptr, tl.max(tl.max(tl.where(bits < LEAST_INFINITY, bits, 0), 1), 0))


@triton.jit
def _scaled(x, peak_ptr):
    return times_power_of_two(x, PART_EXPONENT - exponent_of(tl.load(peak_ptr)))


@triton.jit
def _store_parts(parts_ptr, x, program, tiles, all_heads, padded_rows, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr):
    first = program % tiles * BLOCK
    inside = first + tl.arange(0, BLOCK)[:, None] < padded_rows
    out = parts_ptr + ((program // tiles).to(tl.int64) * padded_rows + first) * BLOCK_D
    out += tl.arange(0, BLOCK)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    x1, x2 = split(x)
    tl.store(out, x1, mask=inside)
    tl.store(out + all_heads.to(tl.int64) * padded_rows * BLOCK_D, x2, mask=inside)


@triton.jit(do_not_specialize=SPLIT_SIZES)
def split_peaks_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, peaks_ptr, stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs, stride_gb, stride_gh, stride_gs,
    query_tiles, key_tiles, batch_heads, batch_key_heads, heads, key_heads, heads_per_key_head, queries, keys,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """peaks[tensor, group] = bits of max |x| over the finite. They start at 0."""
    program = tl.program_id(0)
    of_q, of_k = query_tiles * batch_heads, key_tiles * batch_key_heads
    if program < of_q:
        x = _load(
            q_ptr, stride_qb, stride_qh, stride_qs, program, query_tiles, heads, queries, HEAD_DIM, BLOCK_D, BLOCK
        )
        _add_to_peak(x, peaks_ptr + Q_PEAK * batch_key_heads + program // query_tiles // heads_per_key_head)
    elif program < of_q + of_k:
        own = program - of_q
        x = _load(k_ptr, stride_kb, stride_kh, stride_ks, own, key_tiles, key_heads, keys, HEAD_DIM, BLOCK_D, BLOCK)
        _add_to_peak(x, peaks_ptr + K_PEAK * batch_key_heads + own // key_tiles)
    elif program < of_q + 2 * of_k:
        own = program - of_q - of_k
        x = _load(v_ptr, stride_vb, stride_vh, stride_vs, own, key_tiles, key_heads, keys, HEAD_DIM, BLOCK_D, BLOCK)
        _add_to_peak(x, peaks_ptr + V_PEAK * batch_key_heads + own // key_tiles)
    elif BACKWARD:
        own = program - of_q - 2 * of_k
        x = _load(do_ptr, stride_gb, stride_gh, stride_gs, own, query_tiles, heads, queries, HEAD_DIM, BLOCK_D, BLOCK)
        _add_to_peak(x, peaks_ptr + DO_PEAK * batch_key_heads + own // query_tiles // heads_per_key_head)


@triton.jit(do_not_specialize=SPLIT_SIZES)
def split_parts_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, o_ptr, peaks_ptr, query_parts_ptr, key_parts_ptr, delta_ptr,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_gb, stride_gh, stride_gs, stride_ob, stride_oh, stride_os,
    query_tiles, key_tiles, batch_heads, batch_key_heads, heads, key_heads, heads_per_key_head, queries, keys,
    padded_queries, padded_keys,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Parts; in the backward pass delta = rowsum(do o) too, in the units of scaled do and v, where nothing overflows."""
    program = tl.program_id(0)
    of_q, of_k = query_tiles * batch_heads, key_tiles * batch_key_heads
    if program < of_q:
        x = _load(
            q_ptr, stride_qb, stride_qh, stride_qs, program, query_tiles, heads, queries, HEAD_DIM, BLOCK_D, BLOCK
        )
        x = _scaled(x, peaks_ptr + Q_PEAK * batch_key_heads + program // query_tiles // heads_per_key_head)
        _store_parts(query_parts_ptr, x, program, query_tiles, batch_heads, padded_queries, BLOCK_D, BLOCK)
    elif program < of_q + of_k:
        own = program - of_q
        x = _load(k_ptr, stride_kb, stride_kh, stride_ks, own, key_tiles, key_heads, keys, HEAD_DIM, BLOCK_D, BLOCK)
        x = _scaled(x, peaks_ptr + K_PEAK * batch_key_heads + own // key_tiles)
        _store_parts(key_parts_ptr, x, own, key_tiles, batch_key_heads, padded_keys, BLOCK_D, BLOCK)
    elif program < of_q + 2 * of_k:
        own = program - of_q - of_k
        x = _load(v_ptr, stride_vb, stride_vh, stride_vs, own, key_tiles, key_heads, keys, HEAD_DIM, BLOCK_D, BLOCK)
        x = _scaled(x, peaks_ptr + V_PEAK * batch_key_heads + own // key_tiles)
        v_parts_ptr = key_parts_ptr + 2 * batch_key_heads.to(tl.int64) * padded_keys * BLOCK_D
        _store_parts(v_parts_ptr, x, own, key_tiles, batch_key_heads, padded_keys, BLOCK_D, BLOCK)
    elif BACKWARD:
        own = program - of_q - 2 * of_k
        batch_head = own // query_tiles
        group = batch_head // heads_per_key_head
        x = _load(do_ptr, stride_gb, stride_gh, stride_gs, own, query_tiles, heads, queries, HEAD_DIM, BLOCK_D, BLOCK)
        x = _scaled(x, peaks_ptr + DO_PEAK * batch_key_heads + group)
        do_parts_ptr = query_parts_ptr + 2 * batch_heads.to(tl.int64) * padded_queries * BLOCK_D
        _store_parts(do_parts_ptr, x, own, query_tiles, batch_heads, padded_queries, BLOCK_D, BLOCK)
        o = _load(o_ptr, stride_ob, stride_oh, stride_os, own, query_tiles, heads, queries, HEAD_DIM, BLOCK_D, BLOCK)
        delta = tl.sum(x * _scaled(o, peaks_ptr + V_PEAK * batch_key_heads + group), 1)  # |o| <= max |v|
        row = own % query_tiles * BLOCK + tl.arange(0, BLOCK)
        tl.store(delta_ptr + batch_head.to(tl.int64) * queries + row, delta, mask=row < queries)


class Parts(NamedTuple):
    """What the kernels read in place of tensors. Backward's have a delta (B, H, S)."""

    queries: Tensor
    """Of q, in the backward pass of do too: split_parts.py says how they lie."""
    keys: Tensor
    """Of k and v."""
    peaks: Tensor
    """(5, groups) int32; the kernel of query gradients fills the last row."""
    delta: Tensor


class Prologue:
    """Makes the parts of a call's tensors; `padded_rows`: of q and do, and of k and v. The last stride of each is 1."""

    def __init__(self, meta: CallMeta, padded_rows: tuple[int, int]) -> None:
        batch, heads, queries, head_dim = meta.q_shape
        key_heads, keys = meta.k_shape[1], meta.k_shape[2]
        self.backward = bool(meta.do_stride)
        self.query_shape = (1 + self.backward, 2, batch * heads, padded_rows[0], padded(head_dim))
        self.key_shape = (2, 2, batch * key_heads, padded_rows[1], padded(head_dim))
        for shape, whose in ((self.query_shape, meta.q_shape), (self.key_shape, meta.k_shape)):
            if math.prod(shape[:-1]) >= 2**31:
                raise ValueError(
                    f"fp32_precision: fp16x3 counts rows of its parts in 32 bits, and {tuple(whose)} has more: take tf32x3"
                )
        self._peaks_shape = (len(Peak), batch * key_heads)
        self._delta_shape = meta.q_shape[:3] if self.backward else (0,)
        block = min(MOST_ROWS, MOST_ELEMENTS // padded(head_dim))
        query_tiles, key_tiles = (triton.cdiv(rows, block) for rows in padded_rows)
        do, o = (meta.do_stride, meta.o_stride) if self.backward else (meta.q_stride, meta.q_stride)
        arguments: dict[str, Any] = strides(q=meta.q_stride, k=meta.k_stride, v=meta.v_stride, g=do) | {
            "query_tiles": query_tiles,
            "key_tiles": key_tiles,
            "batch_heads": batch * heads,
            "batch_key_heads": batch * key_heads,
            "heads": heads,
            "key_heads": key_heads,
            "heads_per_key_head": heads // key_heads,
            "queries": queries,
            "keys": keys,
            "HEAD_DIM": head_dim,
            "BLOCK_D": padded(head_dim),
            "BLOCK": block,
            "BACKWARD": self.backward,
        }
        programs = query_tiles * batch * heads * (1 + self.backward) + 2 * key_tiles * batch * key_heads
        self._find_peaks = BoundKernel(split_peaks_kernel, programs, arguments, num_warps=4)
        arguments |= strides(o=o) | {"padded_queries": padded_rows[0], "padded_keys": padded_rows[1]}
        self._split = BoundKernel(split_parts_kernel, programs, arguments, num_warps=4)

    def __call__(self, q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, *do_and_o: Tensor) -> Parts:
        """Forward passes q where backward has do and o; it is not read again."""
        do, o = do_and_o if self.backward else (q_BHSD, q_BHSD)
        device = q_BHSD.device
        parts = Parts(
            torch.empty(self.query_shape, dtype=torch.float16, device=device),
            torch.empty(self.key_shape, dtype=torch.float16, device=device),
            torch.zeros(self._peaks_shape, dtype=torch.int32, device=device),
            torch.empty(self._delta_shape, dtype=torch.float32, device=device),
        )
        self._find_peaks(q_BHSD, k_BGSD, v_BGSD, do, parts.peaks)
        self._split(q_BHSD, k_BGSD, v_BGSD, do, o, parts.peaks, parts.queries, parts.keys, parts.delta)
        return parts
