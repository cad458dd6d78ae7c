"""Clipping gradients by their norm, as one process holding all of them would (Pascanu 2013).

    total = norm over all gradients;  gradient *= min(1, max_norm / (total + 1e-6))

Norms are taken in fp32 whatever the gradients' dtype is. Nothing waits for the device.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trainstep.parallel.collectives import Collectives

_EPSILON = 1e-6
"""As torch.nn.utils.clip_grad_norm_ has it."""


def clip_gradients_(
    gradients: Sequence[Tensor | None],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    across: Collectives | None = None,
    alike: Sequence[Tensor | None] = (),
) -> Tensor:
    """Scale the gradients in place; returns the norm before, an fp32 tensor without dimensions.

    `across`: gradients are this rank's part of a whole that is spread over these ranks; their norms are put together. `alike`: more
    gradients, which all ranks have alike, and which count once.
    ValueError for a norm that is not at least 1.
    """
    if not norm_type >= 1:
        raise ValueError(f"norm_type: must be at least 1, or inf, not {norm_type}")
    present = [gradient for gradient in gradients if gradient is not None and gradient.numel()]
    whole = [gradient for gradient in alike if gradient is not None and gradient.numel()]
    counted = present if across is not None and not across.ranks.is_first else [*present, *whole]
    total = _norm(counted, norm_type, across)
    scale = (max_norm / (total + _EPSILON)).clamp(max=1.0)
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in (*present, *whole):
        by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for group in by_kind.values():
        torch._foreach_mul_(group, scale)
    return total


def _norm(gradients: Sequence[Tensor], norm_type: float, across: Collectives | None) -> Tensor:
    device = gradients[0].device if gradients else torch.device("cpu") if across is None else across.ranks.device
    real = [_real(gradient) for gradient in gradients]
    norms = torch._foreach_norm(real, norm_type, dtype=torch.float32) if real else []
    norm = torch.linalg.vector_norm(torch.stack(tuple(norms)), norm_type) if norms else torch.zeros((), device=device)
    if across is None:
        return norm
    if math.isinf(norm_type):
        worst = torch.stack([norm, norm.isnan().to(norm.dtype)])  # a maximum may pass over NaN
        across.all_reduce(worst, reduction="maximum", label="norm").wait()
        return worst[0].where(worst[1] == 0, torch.nan)
    powers = norm**norm_type
    across.all_reduce(powers, label="norm").wait()
    return powers ** (1 / norm_type)


def _real(gradient: Tensor) -> Tensor:
    """What a norm in fp32 can be taken of."""
    magnitude = gradient.abs() if gradient.is_complex() else gradient
    return magnitude.float() if magnitude.dtype == torch.float64 else magnitude
