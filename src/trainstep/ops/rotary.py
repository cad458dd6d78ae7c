"""`rotary` and `rotary_split`: rotary position embedding of q and k (Su 2021), in one pass over memory for both.

    (a, b) -> (a cos - b sin, a sin + b cos),  angle = position theta^(-2 i / D)  for pair i of each head

computed in fp32 and rounded once. A pair is two neighbours (2 i, 2 i + 1), as in the paper and in our model, or (i, i + D / 2), as
in Llama's checkpoints for Hugging Face. The gradient is the rotation backwards.

`rotary_split` also takes q, k and v out of a joint projection, and its gradient joins theirs without a copy before or after. q, k
and v are new tensors, and nothing keeps the projection: writing q and k where the projection was would move a third less and save
no memory after it, but torch.compile takes no operator that both changes its argument and has a gradient.
"""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from trainstep.ops import reference
from trainstep.ops.operators import define, has_kernel, makes_a_graph
from trainstep.spans import span

with suppress(ImportError):  # there is no triton for this platform; has_kernel then says so
    from trainstep.ops.kernels.rotary import empty_heads, launch_rotary, with_unit_stride


def rotary(
    q_BHSD: Tensor, k_BGSD: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = True
) -> tuple[Tensor, Tensor]:
    """q and k rotated, each with any number of heads, in fp32, bf16 or fp16.

    cos and sin: (S, D / 2), or (B, S, D / 2) if batch elements have positions of their own; see ops/reference.py's rotary_tables.
    They have no gradient. Last strides other than 1 cost a copy. On a CPU and in fp64 ops/reference.py runs. ValueError for shapes
    that do not fit together.
    """
    _check(q_BHSD.shape, k_BGSD.shape, cos, sin, q_BHSD.device)
    with span("rotary"):
        if not has_kernel(q_BHSD, k_BGSD):
            tables = _by_head(cos.detach()), _by_head(sin.detach())
            return (
                reference.rotary(q_BHSD, *tables, interleaved=interleaved),
                reference.rotary(k_BGSD, *tables, interleaved=interleaved),
            )
        q, k = _rotary(q_BHSD, k_BGSD, cos, sin, interleaved, False)
        return q, k


def rotary_split(
    qkv: Tensor, cos: Tensor, sin: Tensor, *, heads: int, key_heads: int | None = None, interleaved: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, H, S, D), k and v (B, G, S, D) of a joint projection qkv (B, S, (H + 2 G) D), with q and k rotated.

    They lie in memory as (B, S, heads, D). G is `key_heads`, by default H. Everything else is as for `rotary`.
    """
    key_heads = heads if key_heads is None else key_heads
    if min(heads, key_heads) < 1:
        raise ValueError(f"heads, key_heads: must be at least 1, but are {heads} and {key_heads}")
    if qkv.dim() != 3 or qkv.shape[-1] % (heads + 2 * key_heads):
        raise ValueError(
            f"qkv: must be (B, S, ({heads} + 2 * {key_heads}) D) for {heads} heads and {key_heads} key heads, but has the shape "
            f"{tuple(qkv.shape)}"
        )
    q, k, v = _parts(qkv, heads, key_heads)
    _check(q.shape, k.shape, cos, sin, qkv.device)
    with span("rotary"):
        if not has_kernel(qkv):
            return *rotary(q, k, cos, sin, interleaved=interleaved), v
        q, k, v = _rotary_split(qkv, cos, sin, heads, key_heads, interleaved)
        return q, k, v


def _check(q: torch.Size, k: torch.Size, cos: Tensor, sin: Tensor, device: torch.device) -> None:
    if len(q) != 4 or len(k) != 4 or (q[0], *q[2:]) != (k[0], *k[2:]) or q[-1] % 2:
        raise ValueError(
            f"q, k: must be (B, H, S, D) with the same B, S and even D, but have the shapes {tuple(q)} and {tuple(k)}"
        )
    shapes = [(q[2], q[3] // 2), (q[0], q[2], q[3] // 2)]
    for name, table in {"cos": cos, "sin": sin}.items():
        if tuple(table.shape) not in shapes or table.shape != cos.shape:
            raise ValueError(f"{name}: must have the shape {shapes[0]} or {shapes[1]}, but has {tuple(table.shape)}")
        if table.device != device:  # a kernel that is started directly would read an address of the other device
            raise ValueError(f"{name}: must be on {device} with q and k, but is on {table.device}")


def _by_head(table: Tensor) -> Tensor:
    """(B, S, D / 2) as (B, 1, S, D / 2), which every head uses."""
    return table.unsqueeze(1) if table.dim() == 3 else table


def _parts(qkv: Tensor, heads: int, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of q, k and v in a joint projection, (B, heads, S, D) each."""
    by_head = qkv.unflatten(-1, (heads + 2 * key_heads, -1)).transpose(1, 2)
    q, k, v = by_head.split((heads, key_heads, key_heads), dim=1)
    return q, k, v


def _run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> tuple[Tensor, Tensor]:
    targets = _fake(q, k, cos, sin, interleaved, inverse)
    sources = [with_unit_stride(x) for x in (q, k)]
    launch_rotary(sources, targets, cos.contiguous(), sin.contiguous(), interleaved=interleaved, inverse=inverse)
    return targets


def _run_split(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, key_heads: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    targets = _fake_split(qkv, cos, sin, heads, key_heads, interleaved)
    sources = _parts(with_unit_stride(qkv), heads, key_heads)
    launch_rotary(sources, targets, cos.contiguous(), sin.contiguous(), interleaved=interleaved, inverse=False)
    return targets


def _run_join(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    joint = _fake_join(dq, dk, dv, cos, sin, interleaved)
    sources = [with_unit_stride(dx) for dx in (dq, dk, dv)]
    targets = _parts(joint, dq.shape[1], dk.shape[1])
    launch_rotary(sources, targets, cos.contiguous(), sin.contiguous(), interleaved=interleaved, inverse=True)
    return joint


def _fake(
    q: Tensor, k: Tensor, _cos: Tensor, _sin: Tensor, _interleaved: bool, _inverse: bool
) -> tuple[Tensor, Tensor]:
    (batch, heads, positions, width), key_heads = q.shape, k.shape[1]
    return empty_heads(q, batch, heads, positions, width), empty_heads(k, batch, key_heads, positions, width)


def _fake_split(
    qkv: Tensor, _cos: Tensor, _sin: Tensor, heads: int, key_heads: int, _interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    batch, positions, channels = qkv.shape
    width = channels // (heads + 2 * key_heads)
    q, k, v = (empty_heads(qkv, batch, count, positions, width) for count in (heads, key_heads, key_heads))
    return q, k, v


def _fake_join(dq: Tensor, dk: Tensor, _dv: Tensor, _cos: Tensor, _sin: Tensor, _interleaved: bool) -> Tensor:
    batch, heads, positions, width = dq.shape
    return dq.new_empty(batch, positions, (heads + 2 * dk.shape[1]) * width)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, cos, sin, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _save_split(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, cos, sin, *_, ctx.interleaved = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    return *_rotary(dq, dk, cos, sin, ctx.interleaved, not ctx.inverse), None, None, None, None


def _backward_split(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    if makes_a_graph():
        dq, dk = _rotary(dq, dk, cos, sin, ctx.interleaved, True)
        joint = torch.cat((dq, dk, dv), dim=1).transpose(1, 2).flatten(-2)
    else:
        joint = _rotary_join(dq, dk, dv, cos, sin, ctx.interleaved)
    return joint, None, None, None, None, None


_rotary = define(
    "rotary(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, bool inverse) -> (Tensor, Tensor)",
    _run,
    _fake,
    save=_save,
    backward=_backward,
)
_rotary_split = define(
    "rotary_split(Tensor qkv, Tensor cos, Tensor sin, int heads, int key_heads, bool interleaved) -> (Tensor, Tensor, Tensor)",
    _run_split,
    _fake_split,
    save=_save_split,
    backward=_backward_split,
)
_rotary_join = define(
    "rotary_join(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin, bool interleaved) -> Tensor",
    _run_join,
    _fake_join,
)
