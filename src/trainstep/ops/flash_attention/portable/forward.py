"""The portable forward kernel: algorithm.forward, with one program per tile of queries.

A masked loop visits the key tiles that the causal diagonal cuts and a ragged last tile; a second loop without masks visits the
tiles that every query of the tile sees; tiles that are hidden whole are never visited. The masked loop comes first because ptxas
for Hopper serialises every wgmma of the kernel (C7515) where it comes second. Exponentials are base 2 with the scale folded in, so
that a score costs one multiply-add and one exp2. The log-sum-exp is stored in natural units.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainstep.ops.direct_launch import PROBLEMS_KEPT, BoundKernel
from trainstep.ops.flash_attention.portable.tile_access import SIZES, add_product, load_tile, program_tile, store_tile
from trainstep.ops.flash_attention.portable.tiles import KernelPass, TileConfig, choose_row, padded
from trainstep.ops.flash_attention.problem import CallMeta, Problem, strides, tile_problem

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _attend(
    acc, row_sum, row_max, q, k_base, v_base, stride_ks, stride_vs, first_q, begin, end, keys, offset, scale_log2,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to keys begin..end, for one query tile. row_max is in units of log2."""
    for first_k in tl.range(begin, end, BLOCK_K):
        k = load_tile(k_base, stride_ks, first_k, keys, BLOCK_K, HEAD_DIM, BLOCK_D, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASKED:
            k_index = first_k + tl.arange(0, BLOCK_K)[None, :]
            seen = k_index < keys
            if CAUSAL:
                seen = seen & (k_index <= first_q + tl.arange(0, BLOCK_Q)[:, None] + offset)
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        finite_max = new_max
        if MASKED:  # a row may have seen no key yet
            finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(scores * scale_log2 - finite_max[:, None])
        shrink = tl.exp2(row_max - finite_max)
        row_sum = row_sum * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = load_tile(v_base, stride_vs, first_k, keys, BLOCK_K, HEAD_DIM, BLOCK_D, MASKED)
        acc = add_product(acc, p.to(v.dtype), v, PRECISION)
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs, stride_ob, stride_oh, stride_os,
    tiles, batch_heads, heads_together, heads, heads_per_key_head, queries, keys, offset, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, RAGGED_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, batch_head = program_tile(tiles, batch_heads, heads_together)
    if CAUSAL:
        tile = tiles - 1 - tile  # the longest rows first
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    key_head = head // heads_per_key_head
    k_base = k_ptr + batch * stride_kb + key_head * stride_kh
    v_base = v_ptr + batch * stride_vb + key_head * stride_vh
    first_q = tile * BLOCK_Q
    q = load_tile(
        q_ptr + batch * stride_qb + head * stride_qh, stride_qs, first_q, queries, BLOCK_Q, HEAD_DIM, BLOCK_D, True
    )

    seen_by_any = keys
    seen_by_all = keys
    if CAUSAL:
        seen_by_any = tl.minimum(tl.maximum(tl.minimum(first_q + BLOCK_Q, queries) + offset, 0), keys)
        seen_by_all = tl.minimum(tl.maximum(first_q + 1 + offset, 0), keys)
    end_full = seen_by_all // BLOCK_K * BLOCK_K

    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    if CAUSAL or RAGGED_K:
        acc, row_sum, row_max = _attend(
            acc, row_sum, row_max, q, k_base, v_base, stride_ks, stride_vs, first_q, end_full, seen_by_any, keys, offset,
            scale_log2, BLOCK_Q, BLOCK_K, HEAD_DIM, BLOCK_D, True, CAUSAL, PRECISION,
        )  # fmt: skip
    acc, row_sum, row_max = _attend(
        acc, row_sum, row_max, q, k_base, v_base, stride_ks, stride_vs, first_q, 0, end_full, keys, offset, scale_log2,
        BLOCK_Q, BLOCK_K, HEAD_DIM, BLOCK_D, False, CAUSAL, PRECISION,
    )  # fmt: skip

    lse = tl.fma(row_max, LN_2, tl.log(row_sum))
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    q_index = first_q + tl.arange(0, BLOCK_Q)
    tl.store(lse_ptr + batch_head.to(tl.int64) * queries + q_index, lse, mask=q_index < queries)
    o_base = o_ptr + batch * stride_ob + head * stride_oh
    store_tile(o_base, stride_os, first_q, queries, acc, BLOCK_Q, HEAD_DIM, BLOCK_D)


def launch_forward(
    q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, problem: Problem, config: TileConfig | None = None
) -> tuple[Tensor, Tensor]:
    """o, in q's layout, and lse (B, H, S) in fp32. The last stride of each tensor is 1."""
    o = torch.empty_like(q_BHSD)
    batch, heads, queries, _ = q_BHSD.shape
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q_BHSD.device)
    bound = bind_forward(CallMeta.forward(q_BHSD, k_BGSD, v_BGSD), problem, config)
    bound(q_BHSD, k_BGSD, v_BGSD, o, lse)
    return o, lse


@functools.lru_cache(maxsize=PROBLEMS_KEPT)
def bind_forward(meta: CallMeta, problem: Problem, config: TileConfig | None) -> BoundKernel:
    """The kernel for a problem. A tuner times it directly."""
    batch, heads, queries, head_dim = meta.q_shape
    key_heads, keys = meta.k_shape[1], meta.k_shape[2]
    config = config or choose_row(tile_problem(KernelPass.FORWARD, head_dim, problem.arithmetic, meta.device)).config
    tiles = triton.cdiv(queries, config.block_q)
    arguments = strides(q=meta.q_stride, k=meta.k_stride, v=meta.v_stride, o=meta.like_q) | {
        "tiles": tiles,
        "batch_heads": batch * heads,
        "heads_together": config.heads_together,
        "heads": heads,
        "heads_per_key_head": heads // key_heads,
        "queries": queries,
        "keys": keys,
        "offset": problem.offset(queries, keys),
        "scale_log2": problem.scale * LOG2_E.value,
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded(head_dim),
        "BLOCK_Q": config.block_q,
        "BLOCK_K": config.block_k,
        "CAUSAL": problem.causal,
        "RAGGED_K": keys % config.block_k != 0,
        "PRECISION": problem.arithmetic.dot_precision,
    }
    return BoundKernel(
        forward_kernel, tiles * batch * heads, arguments, num_warps=config.num_warps, num_stages=config.num_stages
    )
