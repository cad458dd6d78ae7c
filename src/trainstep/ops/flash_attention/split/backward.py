"""The backward kernels of fp32_precision="fp16x3": portable/backward.py's two passes on parts.

split/parts.py explains the parts. q, k and v are split again, so that no more memory is kept for the backward pass than elsewhere.
Gradients of the scores, ds, have no tight bound, so `split_query_gradients_kernel` scales each row of a tile by the row's largest
element and leaves each group's largest in `peaks`; `split_key_gradients_kernel`, which runs after it, scales by that. Each has one
loop, masked throughout if anything is masked, as in split/forward.py.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainstep.ops.direct_launch import PROBLEMS_KEPT
from trainstep.ops.flash_attention.portable.forward import LOG2_E
from trainstep.ops.flash_attention.portable.tile_access import load_row, program_tile, store_tile
from trainstep.ops.flash_attention.portable.tiles import KernelPass, TileConfig, choose_row, padded
from trainstep.ops.flash_attention.problem import CallMeta, Problem, strides, tile_problem
from trainstep.ops.flash_attention.split.forward import P_EXPONENT, P_SCALE
from trainstep.ops.flash_attention.split.parts import (
    DO_PEAK,
    DS_PEAK,
    K_PEAK,
    LEAST_INFINITY,
    PART_EXPONENT,
    Q_PEAK,
    SPLIT_SIZES,
    V_PEAK,
    PartsKernel,
    Prologue,
    bits_of,
    dot_parts,
    dot_parts_transposed,
    exponent_at,
    exponent_of,
    load_parts,
    power_of_two,
    scores_factor,
    split,
    times_power_of_two,
    whole_tiles,
)

LEAST_ROW_EXPONENT: tl.constexpr = tl.constexpr(-100)
"""A bound that keeps the two powers of two of a row, up and down, within fp32."""
LEAST_GROUP_EXPONENT: tl.constexpr = tl.constexpr(14)
"""Smaller ds are rounding errors of do v^T, whose terms reach 2^30, and may differ between the two passes."""


@triton.jit
def _probabilities(log2_p):
    """2^log2_p, at most 1, since the rounding of a large log-sum-exp must not make it exceed fp16. NaN stays NaN."""
    return tl.exp2(tl.minimum(log2_p, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _ds_unit(peaks_ptr, groups, group):
    """The exponent that brings every ds of the group below 1/4: this pass may round them a little above the other pass."""
    return -3 - tl.maximum(exponent_at(peaks_ptr, DS_PEAK, groups, group), LEAST_GROUP_EXPONENT)


@triton.jit(do_not_specialize=SPLIT_SIZES)
def split_key_gradients_kernel(
    query_parts, key_parts, peaks_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs,
    tiles, batch_key_heads, heads_together, key_heads, queries, keys, padded_queries, padded_keys, offset,
    scale, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, RAGGED_Q: tl.constexpr, HEADS_PER_KEY_HEAD: tl.constexpr,
):  # fmt: skip
    """Scores are (keys, queries); queries beyond the last have q = do = delta = 0 and add nothing."""
    tile, group = program_tile(tiles, batch_key_heads, heads_together)
    first_k = tile * BLOCK_K
    factor = scores_factor(scale_log2, peaks_ptr, batch_key_heads, group)
    ds_exponent = _ds_unit(peaks_ptr, batch_key_heads, group)
    ds_unit = power_of_two(ds_exponent)
    key_plane = batch_key_heads * padded_keys
    k1, k2 = load_parts(key_parts, group * padded_keys + first_k, key_plane)
    v1, v2 = load_parts(key_parts, 2 * key_plane + group * padded_keys + first_k, key_plane)
    query_plane = batch_key_heads * HEADS_PER_KEY_HEAD * padded_queries
    begin = 0
    if CAUSAL:  # the first query that sees any of these keys, rounded to tiles
        begin = tl.maximum(first_k - offset, 0) // BLOCK_Q * BLOCK_Q
    p_scale = tl.where(first_k + tl.arange(0, BLOCK_K) < keys, P_SCALE, 0.0)

    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    for member in range(HEADS_PER_KEY_HEAD):
        batch_head = group * HEADS_PER_KEY_HEAD + member
        lse_base = lse_ptr + batch_head.to(tl.int64) * queries
        delta_base = delta_ptr + batch_head.to(tl.int64) * queries
        for first_q in tl.range(begin, queries, BLOCK_Q):
            q1, q2 = load_parts(query_parts, batch_head * padded_queries + first_q, query_plane)
            q_index = first_q + tl.arange(0, BLOCK_Q)
            scores = dot_parts_transposed(k1, k2, tl.trans(q1), tl.trans(q2))
            lse = load_row(lse_base, q_index, queries, RAGGED_Q)
            p = _probabilities(scores * factor - (lse * LOG2_E)[None, :]) * p_scale[:, None]
            if CAUSAL:
                k_index = first_k + tl.arange(0, BLOCK_K)[:, None]
                p = tl.where(k_index <= q_index[None, :] + offset, p, 0.0)
            do1, do2 = load_parts(query_parts, 2 * query_plane + batch_head * padded_queries + first_q, query_plane)
            p1, p2 = split(p)
            dv += dot_parts(p1, p2, do1, do2)
            dp = dot_parts_transposed(v1, v2, tl.trans(do1), tl.trans(do2))
            delta = load_row(delta_base, q_index, queries, RAGGED_Q) * ds_unit
            ds1, ds2 = split(p * (dp * ds_unit - delta[None, :]))
            dk += dot_parts(ds1, ds2, q1, q2)

    do_exponent = exponent_at(peaks_ptr, DO_PEAK, batch_key_heads, group) - PART_EXPONENT - P_EXPONENT
    q_exponent = exponent_at(peaks_ptr, Q_PEAK, batch_key_heads, group) - PART_EXPONENT
    v_exponent = exponent_at(peaks_ptr, V_PEAK, batch_key_heads, group) - PART_EXPONENT
    dk = times_power_of_two(dk * scale, q_exponent + v_exponent + do_exponent - ds_exponent)
    dv = times_power_of_two(dv, do_exponent)
    batch = (group // key_heads).to(tl.int64)
    key_head = (group % key_heads).to(tl.int64)
    dk_base = dk_ptr + batch * stride_dkb + key_head * stride_dkh
    dv_base = dv_ptr + batch * stride_dvb + key_head * stride_dvh
    store_tile(dk_base, stride_dks, first_k, keys, dk, BLOCK_K, HEAD_DIM, BLOCK_D)
    store_tile(dv_base, stride_dvs, first_k, keys, dv, BLOCK_K, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=SPLIT_SIZES)
def split_query_gradients_kernel(
    query_parts, key_parts, peaks_ptr, lse_ptr, delta_ptr, dq_ptr, stride_dqb, stride_dqh, stride_dqs,
    tiles, batch_heads, heads_together, heads, heads_per_key_head, queries, keys, padded_queries, padded_keys, offset,
    scale, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, RAGGED_K: tl.constexpr,
):  # fmt: skip
    tile, batch_head = program_tile(tiles, batch_heads, heads_together)
    if CAUSAL:
        tile = tiles - 1 - tile  # the longest rows first
    first_q = tile * BLOCK_Q
    group = batch_head // heads_per_key_head
    groups = batch_heads // heads_per_key_head
    factor = scores_factor(scale_log2, peaks_ptr, groups, group)
    query_plane = batch_heads * padded_queries
    q1, q2 = load_parts(query_parts, batch_head * padded_queries + first_q, query_plane)
    do1, do2 = load_parts(query_parts, 2 * query_plane + batch_head * padded_queries + first_q, query_plane)
    key_plane = groups * padded_keys
    q_index = first_q + tl.arange(0, BLOCK_Q)
    row = batch_head.to(tl.int64) * queries + q_index
    lse_log2 = tl.load(lse_ptr + row, mask=q_index < queries, other=0.0) * LOG2_E
    delta = tl.load(delta_ptr + row, mask=q_index < queries, other=0.0)
    end = keys
    if CAUSAL:
        end = tl.minimum(tl.maximum(tl.minimum(first_q + BLOCK_Q, queries) + offset, 0), keys)

    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    largest = tl.zeros([BLOCK_Q], tl.int32)
    for first_k in tl.range(0, end, BLOCK_K):
        k1, k2 = load_parts(key_parts, group * padded_keys + first_k, key_plane)
        v1, v2 = load_parts(key_parts, 2 * key_plane + group * padded_keys + first_k, key_plane)
        scores = dot_parts(q1, q2, tl.trans(k1), tl.trans(k2))
        p = _probabilities(scores * factor - lse_log2[:, None])
        if CAUSAL or RAGGED_K:
            k_index = first_k + tl.arange(0, BLOCK_K)[None, :]
            seen = k_index < keys
            if CAUSAL:
                seen = seen & (k_index <= q_index[:, None] + offset)
            p = tl.where(seen, p, 0.0)
        dp = dot_parts(do1, do2, tl.trans(v1), tl.trans(v2))
        ds = p * (dp - delta[:, None])
        most = tl.max(bits_of(ds), 1)
        largest = tl.maximum(largest, tl.where(most < LEAST_INFINITY, most, 0))
        exponent = tl.maximum(exponent_of(most), LEAST_ROW_EXPONENT) - PART_EXPONENT
        ds1, ds2 = split(ds * power_of_two(-exponent)[:, None])
        dq += dot_parts(ds1, ds2, k1, k2) * power_of_two(exponent)[:, None]

    tl.atomic_max(peaks_ptr + DS_PEAK * groups + group, tl.max(largest, 0))
    exponent = exponent_at(peaks_ptr, K_PEAK, groups, group) - PART_EXPONENT
    exponent += exponent_at(peaks_ptr, V_PEAK, groups, group) - PART_EXPONENT
    exponent += exponent_at(peaks_ptr, DO_PEAK, groups, group) - PART_EXPONENT
    dq_base = dq_ptr + (batch_head // heads).to(tl.int64) * stride_dqb + (batch_head % heads).to(tl.int64) * stride_dqh
    dq = times_power_of_two(dq * scale, exponent)
    store_tile(dq_base, stride_dqs, first_q, queries, dq, BLOCK_Q, HEAD_DIM, BLOCK_D)


def launch_split_backward(
    do_BHSD: Tensor, q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, o_BHSD: Tensor, lse_BHS: Tensor,
    problem: Problem, key_config: TileConfig | None = None, query_config: TileConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, in the layouts of q, k, v. The last stride of each tensor is 1."""
    dq, dk, dv = torch.empty_like(q_BHSD), torch.empty_like(k_BGSD), torch.empty_like(v_BGSD)
    meta = CallMeta.backward(do_BHSD, q_BHSD, k_BGSD, v_BGSD, o_BHSD)
    prologue, kernels = _bind(meta, problem, key_config, query_config)
    parts = prologue(q_BHSD, k_BGSD, v_BGSD, do_BHSD, o_BHSD)
    inputs = (parts.queries, parts.keys, parts.peaks, lse_BHS, parts.delta)
    kernels["query_gradients"](*inputs, dq)
    kernels["key_gradients"](*inputs, dk, dv)
    return dq, dk, dv


@functools.lru_cache(maxsize=PROBLEMS_KEPT)
def _bind(
    meta: CallMeta, problem: Problem, key_config: TileConfig | None, query_config: TileConfig | None
) -> tuple[Prologue, dict[str, PartsKernel]]:
    """The launches for a problem."""
    key_config, query_config = (
        config or choose_row(tile_problem(pass_, meta.q_shape[3], problem.arithmetic, meta.device)).config
        for config, pass_ in ((key_config, KernelPass.KEY_GRADIENTS), (query_config, KernelPass.QUERY_GRADIENTS))
    )
    padded_queries = whole_tiles(meta.q_shape[2], key_config.block_q, query_config.block_q)
    padded_keys = whole_tiles(meta.k_shape[2], key_config.block_k, query_config.block_k)
    prologue = Prologue(meta, (padded_queries, padded_keys))
    return prologue, bind_split_backward(meta, prologue, problem, key_config, query_config)


def bind_split_backward(
    meta: CallMeta, prologue: Prologue, problem: Problem, key_config: TileConfig, query_config: TileConfig
) -> dict[str, PartsKernel]:
    """The two kernels for a problem, by name, which read the prologue's parts."""
    batch, heads, queries, head_dim = meta.q_shape
    key_heads, keys = meta.k_shape[1], meta.k_shape[2]
    both = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded(head_dim),
        "queries": queries,
        "keys": keys,
        "padded_queries": prologue.query_shape[-2],
        "padded_keys": prologue.key_shape[-2],
        "offset": problem.offset(queries, keys),
        "scale": problem.scale,
        "scale_log2": problem.scale * LOG2_E.value,
        "CAUSAL": problem.causal,
    }
    key_arguments = {
        **both,
        **strides(dk=meta.like_k, dv=meta.like_v),
        "batch_key_heads": batch * key_heads,
        "key_heads": key_heads,
        "HEADS_PER_KEY_HEAD": heads // key_heads,
        "RAGGED_Q": queries % key_config.block_q != 0,
    }
    query_arguments = {
        **both,
        **strides(dq=meta.like_q),
        "batch_heads": batch * heads,
        "heads": heads,
        "heads_per_key_head": heads // key_heads,
        "RAGGED_K": keys % query_config.block_k != 0,
    }
    key_tiles, query_tiles = triton.cdiv(keys, key_config.block_k), triton.cdiv(queries, query_config.block_q)
    shapes = (prologue.query_shape, prologue.key_shape)
    return {
        "key_gradients": _tiled(
            shapes, split_key_gradients_kernel, key_tiles, batch * key_heads, key_arguments, key_config
        ),
        "query_gradients": _tiled(
            shapes, split_query_gradients_kernel, query_tiles, batch * heads, query_arguments, query_config
        ),
    }


def _tiled(
    shapes: tuple[tuple[int, ...], ...], kernel: Any, tiles: int, all_heads: int, arguments: dict[str, Any],
    config: TileConfig,
) -> PartsKernel:  # fmt: skip
    """A kernel that reads parts of these shapes and runs one program per tile and head."""
    arguments = {
        **arguments,
        "tiles": tiles,
        "heads_together": config.heads_together,
        "BLOCK_Q": config.block_q,
        "BLOCK_K": config.block_k,
    }
    return PartsKernel(
        shapes, (config.block_q, config.block_k), kernel, tiles * all_heads, arguments, num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
