"""The reference of each op in plain PyTorch, any device, any dtype: what models run and kernels are held to.

Shapes: B batch, H heads, S positions, D head width, C channels.
"""

import math

import torch
from torch import Tensor

from trainstep.spans import span


def attention(
    q_BHSD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    causal_alignment: str = "top_left",
) -> Tensor:
    """softmax(scale q k^T + mask) v with the S x S matrix written out; scale defaults to 1 / sqrt(D).

    Causal: query i sees keys 0..i (top_left), or 0..i + keys - queries (bottom_right: the last query sees every key). A query
    that sees no key gives 0. With fewer heads in k and v, each serves a run of neighbouring query heads. Returns v's dtype.
    """
    blind = None
    with span("attention scores"):
        scores = _scores(q_BHSD, _repeat_heads(k_BHSD, q_BHSD), scale)
        if causal:
            hidden = _hidden_pairs(q_BHSD, k_BHSD, causal_alignment)
            scores = scores.masked_fill(hidden, float("-inf"))
            if causal_alignment == "bottom_right":
                blind = hidden.all(dim=-1, keepdim=True)
                scores = scores.masked_fill(blind, 0.0)  # softmax of nothing would be NaN, and so would its gradient
    with span("attention softmax"):
        probabilities = torch.softmax(scores, dim=-1)
        if blind is not None:
            probabilities = probabilities.masked_fill(blind, 0.0)
    with span("attention values"):
        return (probabilities.to(v_BHSD.dtype) @ _repeat_heads(v_BHSD, q_BHSD)).to(v_BHSD.dtype)


def attention_lse(
    q_BHSD: Tensor, k_BHSD: Tensor, *, causal: bool, scale: float | None = None, causal_alignment: str = "top_left"
) -> Tensor:
    """log(sum(exp(scores))) of each query, (B, H, S), natural, in fp32 or wider; -inf for a query that sees no key."""
    scores = _scores(q_BHSD, _repeat_heads(k_BHSD, q_BHSD), scale)
    if causal:
        scores = scores.masked_fill(_hidden_pairs(q_BHSD, k_BHSD, causal_alignment), float("-inf"))
    return torch.logsumexp(_wide(scores), dim=-1)


def _scores(q_BHSD: Tensor, k_BHSD: Tensor, scale: float | None) -> Tensor:
    return (q_BHSD @ k_BHSD.transpose(-2, -1)) * (scale if scale is not None else 1 / math.sqrt(q_BHSD.shape[-1]))


def _repeat_heads(x_BHSD: Tensor, q_BHSD: Tensor) -> Tensor:
    repeats = q_BHSD.shape[-3] // x_BHSD.shape[-3]
    return x_BHSD if repeats == 1 else x_BHSD.repeat_interleave(repeats, dim=-3)


def _hidden_pairs(q_BHSD: Tensor, k_BHSD: Tensor, causal_alignment: str) -> Tensor:
    """(queries, keys), true where the query must not see the key."""
    queries, keys = q_BHSD.shape[-2], k_BHSD.shape[-2]
    offset = keys - queries if causal_alignment == "bottom_right" else 0
    return ~torch.ones(queries, keys, dtype=torch.bool, device=q_BHSD.device).tril(offset)


def rms_norm(x: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32 or wider inside, back in x's dtype (Zhang 2019)."""
    wide = _wide(x)
    inverse_rms = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * inverse_rms * _wide(weight_C)).to(x.dtype)


def rotary_tables(positions: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of position x theta^(-2i / D), each (S, D / 2) in fp32 (Su 2021, section 3.4).

    Angles in fp64: in fp32 the angle of position 100,000 would be off by 0.002.
    """
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(positions, device=device, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def rotary(x_BHSD: Tensor, cos_SD2: Tensor, sin_SD2: Tensor) -> Tensor:
    """Turn each adjacent pair (x_2i, x_2i+1) by its angle; fp32 or wider inside, back in x's dtype."""
    even, odd = _wide(x_BHSD).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos_SD2 - odd * sin_SD2, even * sin_SD2 + odd * cos_SD2), dim=-1)
    return turned.flatten(-2).to(x_BHSD.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020)."""
    return torch.nn.functional.silu(gate) * up


def adamw_(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """One update in place (Loshchilov 2019, algorithm 2), in fp32 or wider inside.

    step (), on the parameter's device: updates so far, this one included.
    m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
    p = p - lr weight_decay p - lr m' / (sqrt(v') + eps),  m' = m / (1 - beta1^step),  v' = v / (1 - beta2^step)
    """
    wide_step = step.double()  # 1 - 0.999^1 would keep four digits in fp32
    correction1, correction2 = 1 - beta1**wide_step, 1 - beta2**wide_step
    p, g, m, v = _wide(parameter), gradient.to(_wide(parameter).dtype), _wide(exp_avg), _wide(exp_avg_sq)
    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    denominator = v.sqrt() / correction2.sqrt().to(v.dtype) + eps
    p = p * (1 - lr * weight_decay) - (lr / correction1).to(p.dtype) * (m / denominator)
    parameter.copy_(p)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
