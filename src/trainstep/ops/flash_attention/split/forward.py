"""The forward kernel of fp32_precision="fp16x3": portable/forward.py on parts, with three products per dot.

split/parts.py explains the parts. There is one loop, masked throughout if anything is masked: two loops would cost more registers
than they save here, and ptxas for Hopper serialises every wgmma of the second (C7515). Probabilities, at most 1, are multiplied by
2^15 and then split.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainstep.ops.direct_launch import PROBLEMS_KEPT
from trainstep.ops.flash_attention.portable.forward import LN_2, LOG2_E
from trainstep.ops.flash_attention.portable.tile_access import program_tile, store_tile
from trainstep.ops.flash_attention.portable.tiles import KernelPass, TileConfig, choose_row, padded
from trainstep.ops.flash_attention.problem import CallMeta, Problem, strides, tile_problem
from trainstep.ops.flash_attention.split.parts import (
    PART_EXPONENT,
    SPLIT_SIZES,
    V_PEAK,
    PartsKernel,
    Prologue,
    dot_parts,
    exponent_at,
    load_parts,
    scores_factor,
    split,
    times_power_of_two,
    whole_tiles,
)

P_EXPONENT: tl.constexpr = tl.constexpr(15)
P_SCALE: tl.constexpr = tl.constexpr(32768.0)


@triton.jit(do_not_specialize=SPLIT_SIZES)
def split_forward_kernel(
    query_parts, key_parts, peaks_ptr, o_ptr, lse_ptr, stride_ob, stride_oh, stride_os,
    tiles, batch_heads, heads_together, heads, heads_per_key_head, queries, keys, padded_queries, padded_keys, offset,
    scale_log2,
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
    q1, q2 = load_parts(query_parts, batch_head * padded_queries + first_q, batch_heads * padded_queries)
    plane = groups * padded_keys
    end = keys
    if CAUSAL:
        end = tl.minimum(tl.maximum(tl.minimum(first_q + BLOCK_Q, queries) + offset, 0), keys)

    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)  # in the units of scaled q and k
    for first_k in tl.range(0, end, BLOCK_K):
        k1, k2 = load_parts(key_parts, group * padded_keys + first_k, plane)
        scores = dot_parts(q1, q2, tl.trans(k1), tl.trans(k2))
        if CAUSAL or RAGGED_K:
            k_index = first_k + tl.arange(0, BLOCK_K)[None, :]
            seen = k_index < keys
            if CAUSAL:
                seen = seen & (k_index <= first_q + tl.arange(0, BLOCK_Q)[:, None] + offset)
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        finite_max = new_max
        if CAUSAL or RAGGED_K:  # a row may have seen no key yet
            finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2((scores - finite_max[:, None]) * factor)  # in this order p never exceeds 1, for all roundings
        shrink = tl.exp2((row_max - finite_max) * factor)
        row_sum = row_sum * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        p1, p2 = split(p * P_SCALE)
        v1, v2 = load_parts(key_parts, 2 * plane + group * padded_keys + first_k, plane)
        acc += dot_parts(p1, p2, v1, v2)
        row_max = new_max

    q_index = first_q + tl.arange(0, BLOCK_Q)
    lse = (row_max * factor + tl.log2(row_sum)) * LN_2
    tl.store(lse_ptr + batch_head.to(tl.int64) * queries + q_index, lse, mask=q_index < queries)
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    o = times_power_of_two(acc, exponent_at(peaks_ptr, V_PEAK, groups, group) - PART_EXPONENT - P_EXPONENT)
    o_base = o_ptr + (batch_head // heads).to(tl.int64) * stride_ob + (batch_head % heads).to(tl.int64) * stride_oh
    store_tile(o_base, stride_os, first_q, queries, o, BLOCK_Q, HEAD_DIM, BLOCK_D)


def launch_split_forward(
    q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, problem: Problem, config: TileConfig | None = None
) -> tuple[Tensor, Tensor]:
    """o, in q's layout, and lse (B, H, S). The last stride of each tensor is 1."""
    o = torch.empty_like(q_BHSD)
    lse = torch.empty(q_BHSD.shape[:3], dtype=torch.float32, device=q_BHSD.device)
    prologue, kernel = _bind(CallMeta.forward(q_BHSD, k_BGSD, v_BGSD), problem, config)
    parts = prologue(q_BHSD, k_BGSD, v_BGSD)
    kernel(parts.queries, parts.keys, parts.peaks, o, lse)
    return o, lse


@functools.lru_cache(maxsize=PROBLEMS_KEPT)
def _bind(meta: CallMeta, problem: Problem, config: TileConfig | None) -> tuple[Prologue, PartsKernel]:
    """The launches for a problem."""
    tile = tile_problem(KernelPass.FORWARD, meta.q_shape[3], problem.arithmetic, meta.device)
    config = config or choose_row(tile).config
    padded_rows = (whole_tiles(meta.q_shape[2], config.block_q), whole_tiles(meta.k_shape[2], config.block_k))
    prologue = Prologue(meta, padded_rows)
    return prologue, bind_split_forward(meta, prologue, problem, config)


def bind_split_forward(meta: CallMeta, prologue: Prologue, problem: Problem, config: TileConfig) -> PartsKernel:
    """The kernel for a problem, which reads the prologue's parts. A tuner times it alone."""
    batch, heads, queries, head_dim = meta.q_shape
    key_heads, keys = meta.k_shape[1], meta.k_shape[2]
    tiles = triton.cdiv(queries, config.block_q)
    arguments = strides(o=meta.like_q) | {
        "tiles": tiles,
        "batch_heads": batch * heads,
        "heads_together": config.heads_together,
        "heads": heads,
        "heads_per_key_head": heads // key_heads,
        "queries": queries,
        "keys": keys,
        "padded_queries": prologue.query_shape[-2],
        "padded_keys": prologue.key_shape[-2],
        "offset": problem.offset(queries, keys),
        "scale_log2": problem.scale * LOG2_E.value,
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded(head_dim),
        "BLOCK_Q": config.block_q,
        "BLOCK_K": config.block_k,
        "CAUSAL": problem.causal,
        "RAGGED_K": keys % config.block_k != 0,
    }
    return PartsKernel(
        (prologue.query_shape, prologue.key_shape), (config.block_q, config.block_k), split_forward_kernel,
        tiles * batch * heads, arguments, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
