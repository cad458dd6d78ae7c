"""The kernel of rotary position embedding, which also splits a joint projection into q, k and v, and joins their gradients.

A program takes one position of one batch element, in one of q, k and v, with all its heads: it rotates those of q and k and copies
those of v. Source and target are given by their strides, so that one kernel splits, joins and rotates without either.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainstep.ops.direct_launch import PROBLEMS_KEPT, TRITON_STAGES, BoundKernel
from trainstep.ops.operators import on_device

_TILE = 2048
"""Elements of the heads that a program rotates at once."""
_WARPS = 4


@triton.jit
def _rotate(
    source_ptr, target_ptr, cos, sin, heads, source_stride, target_stride,
    INTERLEAVED: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """(a, b) -> (a cos - b sin, a sin + b cos) for each pair of each head: neighbours, or elements half a head apart."""
    pair = tl.arange(0, HALF)[None, :]
    element = tl.arange(0, 2 * HALF)[None, :]
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)[:, None].to(tl.int64)  # as heads may lie outermost, their places pass 2^31
        source, target = source_ptr + head * source_stride, target_ptr + head * target_stride
        if INTERLEAVED:  # whole heads are loaded and stored, so that neighbouring threads have neighbouring elements
            mask = (head < heads) & (element < HEAD_DIM)
            x = tl.load(source + element, mask=mask, other=0.0).to(tl.float32)
            a, b = tl.split(tl.reshape(x, [HEADS, HALF, 2]))
            rotated = tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), [HEADS, 2 * HALF])
            tl.store(target + element, rotated.to(target_ptr.dtype.element_ty), mask=mask)
        else:
            mask = (head < heads) & (pair < HEAD_DIM // 2)
            a = tl.load(source + pair, mask=mask, other=0.0).to(tl.float32)
            b = tl.load(source + HEAD_DIM // 2 + pair, mask=mask, other=0.0).to(tl.float32)
            tl.store(target + pair, (a * cos - b * sin).to(target_ptr.dtype.element_ty), mask=mask)
            tl.store(target + HEAD_DIM // 2 + pair, (a * sin + b * cos).to(target_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _copy(
    source_ptr, target_ptr, heads, source_stride, target_stride,
    HEAD_DIM: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    element = tl.arange(0, 2 * HALF)[None, :]
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)[:, None].to(tl.int64)
        mask = (head < heads) & (element < HEAD_DIM)
        x = tl.load(source_ptr + head * source_stride + element, mask=mask)
        tl.store(target_ptr + head * target_stride + element, x, mask=mask)


@triton.jit
def rotary_kernel(
    q_ptr, k_ptr, v_ptr, q_target_ptr, k_target_ptr, v_target_ptr, cos_ptr, sin_ptr,
    positions, heads, key_heads,
    q_batch, q_position, q_head, k_batch, k_position, k_head, v_batch, v_position, v_head,
    q_target_batch, q_target_position, q_target_head, k_target_batch, k_target_position, k_target_head,
    v_target_batch, v_target_position, v_target_head, table_batch, table_position,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """`x_batch`, `x_position`, `x_head`: the strides of x. INVERSE rotates back, which is the gradient."""
    batch = (tl.program_id(0) // positions).to(tl.int64)
    position = (tl.program_id(0) % positions).to(tl.int64)
    if tl.program_id(1) == 2:
        _copy(
            v_ptr + batch * v_batch + position * v_position,
            v_target_ptr + batch * v_target_batch + position * v_target_position,
            key_heads, v_head, v_target_head, HEAD_DIM, HEADS, HALF,
        )  # fmt: skip
    else:
        pair = tl.arange(0, HALF)[None, :]
        place = batch * table_batch + position * table_position + pair
        cos = tl.load(cos_ptr + place, mask=pair < HEAD_DIM // 2, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + place, mask=pair < HEAD_DIM // 2, other=0.0).to(tl.float32)
        if INVERSE:
            sin = -sin
        if tl.program_id(1) == 0:
            _rotate(
                q_ptr + batch * q_batch + position * q_position,
                q_target_ptr + batch * q_target_batch + position * q_target_position,
                cos, sin, heads, q_head, q_target_head, INTERLEAVED, HEAD_DIM, HEADS, HALF,
            )  # fmt: skip
        else:
            _rotate(
                k_ptr + batch * k_batch + position * k_position,
                k_target_ptr + batch * k_target_batch + position * k_target_position,
                cos, sin, key_heads, k_head, k_target_head, INTERLEAVED, HEAD_DIM, HEADS, HALF,
            )  # fmt: skip


def launch_rotary(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool,
    inverse: bool,
) -> None:
    """Write q and k rotated, and v if it is given, from sources to targets, all (B, H, S, D) with last stride 1.

    cos and sin: (S, D / 2), or (B, S, D / 2) if they differ by batch element, without gaps.
    """
    (q, k, *_), (q_target, k_target, *_) = sources, targets
    batch, _, positions, width = q.shape
    if batch * positions * width == 0:  # without heads of q there may be some of k
        return
    v, v_target = (k, k_target) if len(sources) == 2 else (sources[2], targets[2])
    tensors = (q, k, v, q_target, k_target, v_target, cos, sin)
    kernel = _bound(
        len(sources), q.shape, k.shape[1], interleaved, inverse,
        tuple([x.stride() for x in tensors]), tuple([x.dtype for x in tensors]), q.device,
    )  # fmt: skip
    with on_device(q.device):
        kernel(*tensors)


@functools.lru_cache(PROBLEMS_KEPT)
def _bound(
    parts: int,
    shape: torch.Size,
    key_heads: int,
    interleaved: bool,
    inverse: bool,
    strides: tuple[tuple[int, ...], ...],
    _dtypes: tuple[torch.dtype, ...],
    _device: torch.device,
) -> BoundKernel:
    """`parts`: 2 (q and k) or 3 (v, too). `strides`: of q, k, v, their targets, cos and sin; sin's are equal to cos's."""
    batch, heads, positions, width = shape
    half = triton.next_power_of_2(width // 2)
    *of_parts, table, _ = strides
    arguments = {"positions": positions, "heads": heads, "key_heads": key_heads}
    for name, stride in zip(("q", "k", "v", "q_target", "k_target", "v_target"), of_parts, strict=True):
        arguments |= {f"{name}_batch": stride[0], f"{name}_position": stride[2], f"{name}_head": stride[1]}
    arguments |= {"table_batch": table[0] if len(table) == 3 else 0, "table_position": table[-2]}
    arguments |= {"INTERLEAVED": interleaved, "INVERSE": inverse, "HEAD_DIM": width, "HALF": half}
    arguments |= {"HEADS": max(1, _TILE // (2 * half))}
    return BoundKernel(rotary_kernel, (batch * positions, parts), arguments, num_warps=_WARPS, num_stages=TRITON_STAGES)


def empty_heads(like: Tensor, batch: int, heads: int, positions: int, width: int) -> Tensor:
    """An uninitialised (B, H, S, D) tensor that lies in memory as (B, S, H, D), as projections make and take it."""
    # No transposed view: autograd lets nobody change a view among an operator's outputs in place.
    strides = (positions * heads * width, width, heads * width, 1)
    return like.new_empty_strided((batch, heads, positions, width), strides)


def with_unit_stride(x: Tensor) -> Tensor:
    """The tensor, or a copy of it, with last stride 1."""
    return x if x.stride(-1) == 1 else x.contiguous(memory_format=torch.contiguous_format)
