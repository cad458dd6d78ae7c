"""The portable backward kernels: algorithm.backward in two deterministic passes.

No two programs add to one place, so every bit repeats. `delta_kernel` computes rowsum(do o). `key_gradients_kernel` has one
program per tile of keys, which runs over the query tiles and over the query heads that share a key head, and gives dk and dv.
`query_gradients_kernel` has one program per tile of queries, which runs over the key tiles and gives dq. Both compute the scores
again, the first transposed: 7 matmuls, where one pass with atomics has 5. Masked tiles go first.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainstep.ops.direct_launch import PROBLEMS_KEPT, BoundKernel
from trainstep.ops.flash_attention.portable.forward import LOG2_E
from trainstep.ops.flash_attention.portable.tile_access import (
    ROWS_PER_SUM,
    SIZES,
    add_product,
    load_row,
    load_tile,
    program_tile,
    store_tile,
)
from trainstep.ops.flash_attention.portable.tiles import KernelPass, TileConfig, choose_row, padded
from trainstep.ops.flash_attention.problem import CallMeta, Problem, strides, tile_problem

DELTA_BLOCK_Q = 64


@triton.jit
def deltas_of_tile(
    o_ptr, do_ptr, stride_ob, stride_oh, stride_os, stride_gb, stride_gh, stride_gs, tiles, heads, queries,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """(batch and head, indices of queries, their rowsum(do o)) of this program; the sum is 0 beyond the last query."""
    batch_head = tl.program_id(0) // tiles
    first_q = tl.program_id(0) % tiles * BLOCK_Q
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    o_base = o_ptr + batch * stride_ob + head * stride_oh
    do_base = do_ptr + batch * stride_gb + head * stride_gh
    o = load_tile(o_base, stride_os, first_q, queries, BLOCK_Q, HEAD_DIM, BLOCK_D, True).to(tl.float32)
    do = load_tile(do_base, stride_gs, first_q, queries, BLOCK_Q, HEAD_DIM, BLOCK_D, True).to(tl.float32)
    return batch_head.to(tl.int64), first_q + tl.arange(0, BLOCK_Q), tl.sum(o * do, 1)


@triton.jit(do_not_specialize=SIZES)
def delta_kernel(
    o_ptr, do_ptr, delta_ptr, stride_ob, stride_oh, stride_os, stride_gb, stride_gh, stride_gs, tiles, heads, queries,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Store rowsum(do o). stride_g*: strides of the output's gradient, here and below."""
    batch_head, q_index, delta = deltas_of_tile(
        o_ptr, do_ptr, stride_ob, stride_oh, stride_os, stride_gb, stride_gh, stride_gs, tiles, heads, queries,
        HEAD_DIM, BLOCK_D, BLOCK_Q,
    )  # fmt: skip
    tl.store(delta_ptr + batch_head * queries + q_index, delta, mask=q_index < queries)


@triton.jit
def _recompute_p(scores, lse, scale, scale_log2, IN_FP32: tl.constexpr):
    """exp(scale scores - lse), where lse broadcasts to scores.

    lse in units of log2 would be rounded once more. Only products in IEEE fp32 are exact enough for that to matter, so only there p
    takes one more multiplication. lse's own rounding, eps |lse| / 2, stays in p: gradients of a single query, in which no sum hides
    it, exceed the 2x rule's bound by a factor of up to 3.4 (dv over 4,097 keys, 128 wide). From 17 queries on only dq 256 wide
    exceeds it, by 1.3.
    """
    if IN_FP32:
        return tl.exp2(tl.fma(scores, scale, -lse) * LOG2_E)
    return tl.exp2(scores * scale_log2 - lse * LOG2_E)


@triton.jit
def _add_key_gradients(
    dk, dv, k, v, q_base, do_base, lse_base, delta_base, stride_qs, stride_gs, first_k, begin, end, queries, offset,
    scale, scale_log2,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr, RAGGED_Q: tl.constexpr, PRECISION: tl.constexpr, IN_FP32: tl.constexpr,
):  # fmt: skip
    """Add queries begin..end, for one key tile. Scores are (keys, queries); queries beyond the last have q = do = 0: they add 0."""
    for first_q in tl.range(begin, end, BLOCK_Q):
        q = load_tile(q_base, stride_qs, first_q, queries, BLOCK_Q, HEAD_DIM, BLOCK_D, RAGGED_Q)
        q_index = first_q + tl.arange(0, BLOCK_Q)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        lse = load_row(lse_base, q_index, queries, RAGGED_Q)
        p = _recompute_p(scores, lse[None, :], scale, scale_log2, IN_FP32)
        if MASKED:
            k_index = first_k + tl.arange(0, BLOCK_K)[:, None]
            p = tl.where(k_index <= q_index[None, :] + offset, p, 0.0)
        do = load_tile(do_base, stride_gs, first_q, queries, BLOCK_Q, HEAD_DIM, BLOCK_D, RAGGED_Q)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        delta = load_row(delta_base, q_index, queries, RAGGED_Q)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def key_gradients_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_gb, stride_gh, stride_gs, stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs,
    tiles, batch_key_heads, heads_together, key_heads, queries, keys, offset, scale, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, RAGGED_Q: tl.constexpr, HEADS_PER_KEY_HEAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, batch_key_head = program_tile(tiles, batch_key_heads, heads_together)
    batch = (batch_key_head // key_heads).to(tl.int64)
    key_head = (batch_key_head % key_heads).to(tl.int64)
    first_k = tile * BLOCK_K
    k_base = k_ptr + batch * stride_kb + key_head * stride_kh
    v_base = v_ptr + batch * stride_vb + key_head * stride_vh
    k = load_tile(k_base, stride_ks, first_k, keys, BLOCK_K, HEAD_DIM, BLOCK_D, True)
    v = load_tile(v_base, stride_vs, first_k, keys, BLOCK_K, HEAD_DIM, BLOCK_D, True)

    begin = 0
    begin_full = 0
    if CAUSAL:  # the first query that sees any of these keys, and the first that sees them all, rounded to tiles
        last_k = tl.minimum(first_k + BLOCK_K, keys) - 1
        begin = tl.maximum(first_k - offset, 0) // BLOCK_Q * BLOCK_Q
        begin_full = (tl.maximum(last_k - offset, 0) + BLOCK_Q - 1) // BLOCK_Q * BLOCK_Q

    IN_FP32: tl.constexpr = k.dtype == tl.float32 and PRECISION == "ieee"
    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    for member in range(HEADS_PER_KEY_HEAD):
        head = key_head * HEADS_PER_KEY_HEAD + member
        q_base = q_ptr + batch * stride_qb + head * stride_qh
        do_base = do_ptr + batch * stride_gb + head * stride_gh
        row = (batch * key_heads * HEADS_PER_KEY_HEAD + head) * queries
        if CAUSAL:
            dk, dv = _add_key_gradients(
                dk, dv, k, v, q_base, do_base, lse_ptr + row, delta_ptr + row, stride_qs, stride_gs, first_k,
                begin, tl.minimum(begin_full, queries), queries, offset, scale, scale_log2,
                BLOCK_Q, BLOCK_K, HEAD_DIM, BLOCK_D, True, RAGGED_Q, PRECISION, IN_FP32,
            )  # fmt: skip
        if IN_FP32:
            whole_tiles = queries // BLOCK_Q * BLOCK_Q
            for first_of_sum in tl.range(begin_full, whole_tiles, ROWS_PER_SUM):  # [Note: long sums in fp32]
                zeros = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
                dk_sum, dv_sum = _add_key_gradients(
                    zeros, zeros, k, v, q_base, do_base, lse_ptr + row, delta_ptr + row, stride_qs, stride_gs, first_k,
                    first_of_sum, tl.minimum(first_of_sum + ROWS_PER_SUM, whole_tiles), queries, offset, scale,
                    scale_log2, BLOCK_Q, BLOCK_K, HEAD_DIM, BLOCK_D, False, False, PRECISION, IN_FP32,
                )  # fmt: skip
                dk += dk_sum
                dv += dv_sum
            if RAGGED_Q:
                dk, dv = _add_key_gradients(
                    dk, dv, k, v, q_base, do_base, lse_ptr + row, delta_ptr + row, stride_qs, stride_gs, first_k,
                    tl.maximum(begin_full, whole_tiles), queries, queries, offset, scale, scale_log2,
                    BLOCK_Q, BLOCK_K, HEAD_DIM, BLOCK_D, False, True, PRECISION, IN_FP32,
                )  # fmt: skip
        else:
            dk, dv = _add_key_gradients(
                dk, dv, k, v, q_base, do_base, lse_ptr + row, delta_ptr + row, stride_qs, stride_gs, first_k,
                begin_full, queries, queries, offset, scale, scale_log2,
                BLOCK_Q, BLOCK_K, HEAD_DIM, BLOCK_D, False, RAGGED_Q, PRECISION, IN_FP32,
            )  # fmt: skip
    dk_base = dk_ptr + batch * stride_dkb + key_head * stride_dkh
    dv_base = dv_ptr + batch * stride_dvb + key_head * stride_dvh
    store_tile(dk_base, stride_dks, first_k, keys, dk * scale, BLOCK_K, HEAD_DIM, BLOCK_D)
    store_tile(dv_base, stride_dvs, first_k, keys, dv, BLOCK_K, HEAD_DIM, BLOCK_D)


@triton.jit
def _add_query_gradients(
    dq, q, do, lse, delta, k_base, v_base, stride_ks, stride_vs, first_q, begin, end, keys, offset, scale, scale_log2,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, IN_FP32: tl.constexpr,
):  # fmt: skip
    """Add keys begin..end, for one query tile."""
    for first_k in tl.range(begin, end, BLOCK_K):
        k = load_tile(k_base, stride_ks, first_k, keys, BLOCK_K, HEAD_DIM, BLOCK_D, MASKED)
        v = load_tile(v_base, stride_vs, first_k, keys, BLOCK_K, HEAD_DIM, BLOCK_D, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        p = _recompute_p(scores, lse[:, None], scale, scale_log2, IN_FP32)
        if MASKED:
            k_index = first_k + tl.arange(0, BLOCK_K)[None, :]
            seen = k_index < keys
            if CAUSAL:
                seen = seen & (k_index <= first_q + tl.arange(0, BLOCK_Q)[:, None] + offset)
            p = tl.where(seen, p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = add_product(dq, ds.to(k.dtype), k, PRECISION)
    return dq


@triton.jit(do_not_specialize=SIZES)
def query_gradients_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_gb, stride_gh, stride_gs, stride_dqb, stride_dqh, stride_dqs,
    tiles, batch_heads, heads_together, heads, heads_per_key_head, queries, keys, offset, scale, scale_log2,
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
    q_base = q_ptr + batch * stride_qb + head * stride_qh
    do_base = do_ptr + batch * stride_gb + head * stride_gh
    first_q = tile * BLOCK_Q
    q = load_tile(q_base, stride_qs, first_q, queries, BLOCK_Q, HEAD_DIM, BLOCK_D, True)
    do = load_tile(do_base, stride_gs, first_q, queries, BLOCK_Q, HEAD_DIM, BLOCK_D, True)
    q_index = first_q + tl.arange(0, BLOCK_Q)
    row = batch_head.to(tl.int64) * queries + q_index
    lse = tl.load(lse_ptr + row, mask=q_index < queries, other=0.0)
    delta = tl.load(delta_ptr + row, mask=q_index < queries, other=0.0)

    seen_by_any = keys
    seen_by_all = keys
    if CAUSAL:
        seen_by_any = tl.minimum(tl.maximum(tl.minimum(first_q + BLOCK_Q, queries) + offset, 0), keys)
        seen_by_all = tl.minimum(tl.maximum(first_q + 1 + offset, 0), keys)
    end_full = seen_by_all // BLOCK_K * BLOCK_K

    IN_FP32: tl.constexpr = q.dtype == tl.float32 and PRECISION == "ieee"
    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    if CAUSAL or RAGGED_K:
        dq = _add_query_gradients(
            dq, q, do, lse, delta, k_base, v_base, stride_ks, stride_vs, first_q, end_full, seen_by_any, keys, offset,
            scale, scale_log2, BLOCK_Q, BLOCK_K, HEAD_DIM, BLOCK_D, True, CAUSAL, PRECISION, IN_FP32,
        )  # fmt: skip
    dq = _add_query_gradients(
        dq, q, do, lse, delta, k_base, v_base, stride_ks, stride_vs, first_q, 0, end_full, keys, offset, scale, scale_log2,
        BLOCK_Q, BLOCK_K, HEAD_DIM, BLOCK_D, False, CAUSAL, PRECISION, IN_FP32,
    )  # fmt: skip
    dq_base = dq_ptr + batch * stride_dqb + head * stride_dqh
    store_tile(dq_base, stride_dqs, first_q, queries, dq * scale, BLOCK_Q, HEAD_DIM, BLOCK_D)


def launch_backward(
    do_BHSD: Tensor, q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, o_BHSD: Tensor, lse_BHS: Tensor,
    problem: Problem, key_config: TileConfig | None = None, query_config: TileConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, in the layouts of q, k, v. The last stride of each tensor is 1."""
    dq, dk, dv = torch.empty_like(q_BHSD), torch.empty_like(k_BGSD), torch.empty_like(v_BGSD)
    delta = torch.empty_like(lse_BHS)
    meta = CallMeta.backward(do_BHSD, q_BHSD, k_BGSD, v_BGSD, o_BHSD)
    bound = bind_backward(meta, problem, key_config, query_config)
    bound["delta"](o_BHSD, do_BHSD, delta)
    bound["key_gradients"](q_BHSD, k_BGSD, v_BGSD, do_BHSD, lse_BHS, delta, dk, dv)
    bound["query_gradients"](q_BHSD, k_BGSD, v_BGSD, do_BHSD, lse_BHS, delta, dq)
    return dq, dk, dv


@functools.lru_cache(maxsize=PROBLEMS_KEPT)
def bind_backward(
    meta: CallMeta, problem: Problem, key_config: TileConfig | None, query_config: TileConfig | None
) -> dict[str, BoundKernel]:
    """The three kernels for a problem, by name. A tuner times them one by one."""
    batch, heads, queries, head_dim = meta.q_shape
    key_heads, keys = meta.k_shape[1], meta.k_shape[2]
    shape = {"HEAD_DIM": head_dim, "BLOCK_D": padded(head_dim), "queries": queries}
    both = (
        shape
        | strides(q=meta.q_stride, k=meta.k_stride, v=meta.v_stride, g=meta.do_stride)
        | {
            "keys": keys,
            "offset": problem.offset(queries, keys),
            "scale": problem.scale,
            "scale_log2": problem.scale * LOG2_E.value,
            "CAUSAL": problem.causal,
            "PRECISION": problem.arithmetic.dot_precision,
        }
    )
    key_config, query_config = (
        config or choose_row(tile_problem(pass_, head_dim, problem.arithmetic, meta.device)).config
        for config, pass_ in ((key_config, KernelPass.KEY_GRADIENTS), (query_config, KernelPass.QUERY_GRADIENTS))
    )
    key_arguments = {
        **both,
        **strides(dk=meta.like_k, dv=meta.like_v),
        "key_heads": key_heads,
        "HEADS_PER_KEY_HEAD": heads // key_heads,
        "RAGGED_Q": queries % key_config.block_q != 0,
    }
    query_arguments = {
        **both,
        **strides(dq=meta.like_q),
        "heads": heads,
        "heads_per_key_head": heads // key_heads,
        "RAGGED_K": keys % query_config.block_k != 0,
    }
    delta_tiles = triton.cdiv(queries, DELTA_BLOCK_Q)
    delta_arguments = {**shape, **strides(o=meta.o_stride, g=meta.do_stride), "heads": heads, "BLOCK_Q": DELTA_BLOCK_Q}
    return {
        "delta": BoundKernel(
            delta_kernel, delta_tiles * batch * heads, {**delta_arguments, "tiles": delta_tiles}, num_warps=4
        ),
        "key_gradients": _tiled(
            key_gradients_kernel, triton.cdiv(keys, key_config.block_k), batch * key_heads, "batch_key_heads",
            key_arguments, key_config,
        ),
        "query_gradients": _tiled(
            query_gradients_kernel, triton.cdiv(queries, query_config.block_q), batch * heads, "batch_heads",
            query_arguments, query_config,
        ),
    }  # fmt: skip


def _tiled(
    kernel: Any, tiles: int, all_heads: int, heads_name: str, arguments: dict[str, Any], config: TileConfig
) -> BoundKernel:
    """A kernel that runs one program per tile and head."""
    arguments = {
        **arguments,
        heads_name: all_heads,
        "tiles": tiles,
        "heads_together": config.heads_together,
        "BLOCK_Q": config.block_q,
        "BLOCK_K": config.block_k,
    }
    return BoundKernel(kernel, tiles * all_heads, arguments, num_warps=config.num_warps, num_stages=config.num_stages)
