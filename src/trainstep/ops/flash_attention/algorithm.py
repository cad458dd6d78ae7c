"""FlashAttention-2 in readable PyTorch, on any device (Dao 2023, algorithms 1 and 2).

The online softmax is that of Milakov and Gimelshein 2018. The code has the kernels' loops and names and works a tile at a time, so
that the S x S matrix never exists.
For each tile of queries, over the tiles of keys that it sees, first the tiles that the mask leaves whole, then those that it cuts:

    scores = scale q k^T;  new_max = max(row_max, rowmax(scores));  p = exp(scores - new_max)
    row_sum = row_sum exp(row_max - new_max) + rowsum(p);  acc = acc exp(row_max - new_max) + p v
    o = acc / row_sum;  lse = row_max + log(row_sum)

and backward, p recomputed from lse:

    delta = rowsum(do o);  p = exp(scores - lse);  ds = p (do v^T - delta)
    dv = p^T do;  dk = scale ds^T q;  dq = scale ds k

Shapes: B batch, H query heads, G key heads (H a multiple of G), S positions, D head width. Inside, query heads are (G, H / G):
each key head is broadcast to its query heads, and k and v are never repeated.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

BLOCK_Q = 128
BLOCK_K = 128


@dataclass(frozen=True, kw_only=True)
class Mask:
    """The keys that query i sees: all, or under a causal mask keys j <= i + offset."""

    causal: bool
    offset: int

    def keys_seen(self, first_q: int, end_q: int, keys: int) -> tuple[int, int]:
        """(leading keys that all queries first_q..end_q see, leading keys that any of them sees)."""
        if not self.causal:
            return keys, keys
        return tuple(min(max(seen + self.offset, 0), keys) for seen in (first_q + 1, end_q))  # type: ignore[return-value]

    def hide(self, scores: Tensor, first_q: int, first_k: int) -> Tensor:
        """The scores of a tile, -inf where the query does not see the key."""
        q = first_q + torch.arange(scores.shape[-2], device=scores.device)
        k = first_k + torch.arange(scores.shape[-1], device=scores.device)
        return scores.masked_fill(k[None, :] > q[:, None] + self.offset, float("-inf"))


def flash_attention_tiled(
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    *,
    causal: bool,
    causal_alignment: str = "top_left",
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention's output, with gradients, and its log-sum-exp, without; memory is linear in S."""
    offset = k_BGSD.shape[2] - q_BHSD.shape[2] if causal_alignment == "bottom_right" else 0
    scale = scale if scale is not None else 1 / math.sqrt(q_BHSD.shape[-1])
    o, lse = _TiledAttention.apply(q_BHSD, k_BGSD, v_BGSD, Mask(causal=causal, offset=offset), scale)  # type: ignore[no-untyped-call]
    return o, lse


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
        o, lse = forward(q, k, v, mask, scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.mark_non_differentiable(lse)
        ctx.mask, ctx.scale = mask, scale  # type: ignore[attr-defined]
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, do: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors  # type: ignore[attr-defined]
        dq, dk, dv = backward(do, q, k, v, o, lse, ctx.mask, ctx.scale)  # type: ignore[attr-defined]
        return dq, dk, dv, None, None


def forward(
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    mask: Mask,
    scale: float,
    block_q: int = BLOCK_Q,
    block_k: int = BLOCK_K,
) -> tuple[Tensor, Tensor]:
    """o, in q's layout, and lse (B, H, S) in fp32 or wider."""
    q, k, v = _by_key_head(q_BHSD, k_BGSD), k_BGSD.unsqueeze(2), v_BGSD.unsqueeze(2)
    o = torch.empty_like(q_BHSD)
    lse = q_BHSD.new_empty(q_BHSD.shape[:-1], dtype=_wide_dtype(q))
    o_tiles, lse_tiles = _by_key_head(o, k_BGSD), lse.view(q.shape[:-1])
    for first_q in range(0, q.shape[-2], block_q):
        rows = slice(first_q, min(first_q + block_q, q.shape[-2]))
        q_tile = _wide(q[..., rows, :])
        acc = torch.zeros_like(q_tile)
        row_sum = acc.new_zeros(acc.shape[:-1])
        row_max = torch.full_like(row_sum, float("-inf"))
        for columns, masked in _key_tiles(mask, rows, k.shape[-2], block_k):
            scores = (q_tile @ _wide(k[..., columns, :]).mT) * scale
            if masked:
                scores = mask.hide(scores, rows.start, columns.start)
            new_max = torch.maximum(row_max, scores.amax(dim=-1))
            finite_max = new_max.masked_fill(new_max == float("-inf"), 0.0)  # -inf: the row has seen no key yet
            p = torch.exp(scores - finite_max[..., None])
            shrink = torch.exp(row_max - finite_max)
            row_sum = row_sum * shrink + p.sum(dim=-1)
            acc = acc * shrink[..., None] + _wide(p.to(v.dtype)) @ _wide(v[..., columns, :])
            row_max = new_max
        o_tiles[..., rows, :] = (acc / row_sum.masked_fill(row_sum == 0, 1.0)[..., None]).to(o.dtype)
        lse_tiles[..., rows] = row_max + torch.log(row_sum)
    return o, lse


def backward(
    do_BHSD: Tensor,
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    o_BHSD: Tensor,
    lse_BHS: Tensor,
    mask: Mask,
    scale: float,
    block_q: int = BLOCK_Q,
    block_k: int = BLOCK_K,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, in the layouts of q, k, v. One pass: tiles run in order, so no two of them add to a gradient at once."""
    q, do, k, v = (
        _by_key_head(q_BHSD, k_BGSD),
        _by_key_head(do_BHSD, k_BGSD),
        k_BGSD.unsqueeze(2),
        v_BGSD.unsqueeze(2),
    )
    lse = lse_BHS.view(q.shape[:-1])
    delta = (_wide(do) * _wide(_by_key_head(o_BHSD, k_BGSD))).sum(dim=-1)
    dq = torch.zeros_like(q, dtype=lse.dtype)
    dk, dv = (torch.zeros_like(x.squeeze(2), dtype=lse.dtype) for x in (k, v))
    for first_q in range(0, q.shape[-2], block_q):
        rows = slice(first_q, min(first_q + block_q, q.shape[-2]))
        q_tile, do_tile = _wide(q[..., rows, :]), _wide(do[..., rows, :])
        for columns, masked in _key_tiles(mask, rows, k.shape[-2], block_k):
            k_tile, v_tile = _wide(k[..., columns, :]), _wide(v[..., columns, :])
            scores = (q_tile @ k_tile.mT) * scale
            if masked:
                scores = mask.hide(scores, rows.start, columns.start)
            lse_tile = lse[..., rows, None]
            p = torch.exp(scores - lse_tile.masked_fill(lse_tile == float("-inf"), 0.0))
            ds = p * (do_tile @ v_tile.mT - delta[..., rows, None])
            p, ds = _wide(p.to(q.dtype)), _wide(ds.to(q.dtype))
            dv[..., columns, :] += (p.mT @ do_tile).sum(dim=2)
            dk[..., columns, :] += scale * (ds.mT @ q_tile).sum(dim=2)
            dq[..., rows, :] += scale * ds @ k_tile
    return (
        torch.empty_like(q_BHSD).copy_(dq.view(q_BHSD.shape)),
        torch.empty_like(k_BGSD).copy_(dk),
        torch.empty_like(v_BGSD).copy_(dv),
    )


def _key_tiles(mask: Mask, rows: slice, keys: int, block_k: int) -> Iterator[tuple[slice, bool]]:
    """The tiles of keys that a tile of queries sees, and whether the mask cuts them; tiles that it hides whole are left out."""
    seen_by_all, seen_by_any = mask.keys_seen(rows.start, rows.stop, keys)
    for first_k in range(0, seen_by_any, block_k):
        end_k = min(first_k + block_k, seen_by_any)
        yield slice(first_k, end_k), end_k > seen_by_all


def _by_key_head(x_BHSD: Tensor, k_BGSD: Tensor) -> Tensor:
    """(B, G, H / G, S, D): a view, since it only splits a dimension."""
    split: Tensor = x_BHSD.unflatten(1, (k_BGSD.shape[1], -1))
    return split


def _wide(x: Tensor) -> Tensor:
    return x.to(_wide_dtype(x))


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
