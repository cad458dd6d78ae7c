"""The reference of each op in plain PyTorch: models run it, and kernels are tested against it.

Any device, any dtype. Shapes: B batch, H heads, S positions, D head width, C channels.
The accuracy rule for kernels is at the end of the file.
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
    """softmax(scale q k^T + mask) v with the whole S x S matrix; scale defaults to 1 / sqrt(D).

    Causal: query i sees keys 0..i (top_left), or 0..i + keys - queries (bottom_right: the last query sees every key). A query
    that sees no key gives 0. With fewer heads in k and v, each is used by several neighbouring query heads. Returns v's dtype.
    """
    blind = None
    with span("attention scores"):
        scores = _scores(q_BHSD, _repeat_heads(k_BHSD, q_BHSD), scale)
        if causal:
            hidden = _hidden_pairs(q_BHSD, k_BHSD, causal_alignment)
            scores = scores.masked_fill(hidden, float("-inf"))
            if causal_alignment == "bottom_right":
                blind = hidden.all(dim=-1, keepdim=True)
                scores = scores.masked_fill(blind, 0.0)  # a softmax over -inf alone is NaN, and so is its gradient
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
    """(queries, keys), True where the query must not see the key."""
    queries, keys = q_BHSD.shape[-2], k_BHSD.shape[-2]
    offset = keys - queries if causal_alignment == "bottom_right" else 0
    return ~torch.ones(queries, keys, dtype=torch.bool, device=q_BHSD.device).tril(offset)


def rms_norm(x: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32 or wider, in x's dtype (Zhang 2019)."""
    wide = _wide(x)
    inverse_rms = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * inverse_rms * _wide(weight_C)).to(x.dtype)


def rotary_tables(positions: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of position x theta^(-2i / D), each (S, D / 2) in fp32 (Su 2021, section 3.4)."""
    # Angles are in fp64: in fp32 the angle of position 100,000 would be off by 0.002.
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(positions, device=device, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def rotary(x_BHSD: Tensor, cos_SD2: Tensor, sin_SD2: Tensor, *, interleaved: bool = True) -> Tensor:
    """Rotate each pair by its angle, computed in fp32 or wider, in x's dtype.

    Interleaved, a pair is adjacent, (x_2i, x_2i+1), as in the paper; else (x_i, x_(i + D/2)), as in Hugging Face's Llama.
    """
    wide = _wide(x_BHSD)
    a, b = wide.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else wide.chunk(2, dim=-1)
    rotated = (a * cos_SD2 - b * sin_SD2, a * sin_SD2 + b * cos_SD2)
    joined = torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)
    return joined.to(x_BHSD.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020)."""
    return torch.nn.functional.silu(gate) * up


def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, in fp32 or wider: dy up s (1 + gate (1 - s)) and dy gate s, with s = sigmoid(gate)."""
    wide_dy, wide_gate = _wide(dy), _wide(gate)
    s = torch.sigmoid(wide_gate)
    dgate, dup = wide_dy * _wide(up) * s * (1 + wide_gate * (1 - s)), wide_dy * wide_gate * s
    return dgate.to(gate.dtype), dup.to(up.dtype)


def linear_cross_entropy(
    hidden: Tensor,
    weight_VC: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy of logits z = hidden W^T, in fp32 or wider, averaged or summed over targets that are not `ignore_index`.

    lse - (1 - smoothing) z[target] - smoothing mean(z) + z_loss lse^2, with lse = log(sum(exp(z))) (Szegedy 2016, section 7; the
    last term: Chowdhery 2022, section 5).
    """
    z = _wide(torch.nn.functional.linear(hidden, weight_VC)).flatten(0, -2)
    labels = targets.flatten()
    counts = labels != ignore_index
    lse = torch.logsumexp(z, dim=-1)
    losses = lse - (1 - label_smoothing) * z.gather(-1, labels.where(counts, 0).unsqueeze(-1)).squeeze(-1)
    if label_smoothing:  # else 0 * mean(z), which is NaN where a logit is -inf
        losses = losses - label_smoothing * z.mean(dim=-1)
    total = (losses + z_loss * lse.square()).masked_fill(~counts, 0.0).sum()
    return total / counts.sum() if reduction == "mean" else total


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
    """One AdamW update in place (Loshchilov 2019, algorithm 2), computed in fp32 or wider.

    step (), on the parameter's device: the number of updates, with this update.
    m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
    p = p - lr weight_decay p - lr m' / (sqrt(v') + eps),  m' = m / (1 - beta1^step),  v' = v / (1 - beta2^step)
    """
    wide_step = step.double()  # in fp32, 1 - 0.999^1 would have four digits
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


# The 2x rule: a result may be twice as far from the truth as plain PyTorch in the same dtype; no tolerance is chosen by
# hand.
#
#     max |result - ref64| <= 2 max |same dtype - ref64| + eps(dtype) max |ref64|
#
# ref64 is the reference above in float64, and `same dtype` the reference in the result's dtype.


def largest_error(result: Tensor, truth: Tensor) -> float:
    """max |result - truth|, in float64."""
    return (result.detach().double().to(truth.device) - truth.detach()).abs().max().item()


def allowed_error(
    same_dtype: Tensor, truth: Tensor, dtype: torch.dtype, *, times: int = 2, terms: float | None = None
) -> float:
    """The largest error that a result of this dtype may have.

    `times`: 4 instead of 2 where an fp32 product may be computed as three TF32 products. `terms`, instead of max |ref64|: the size
    of the terms that cancel in a result, for results where the reference happens to cancel their rounding errors too.
    """
    size = truth.abs().max().item() if terms is None else terms
    return times * largest_error(same_dtype, truth) + torch.finfo(dtype).eps * size
