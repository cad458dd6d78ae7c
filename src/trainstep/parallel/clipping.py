"""Gradient clipping by the norm over all ranks' gradients (Pascanu 2013), and loss scaling that agrees over ranks.

    total = norm over all gradients;  gradient *= min(1, max_norm / (total + 1e-6))

The result is that of one process with all gradients. Norms are taken in fp32 for gradients of every dtype. The host never waits for
the device.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainstep.parallel.collectives import Collectives
from trainstep.parallel.ranks import Ranks, ranks_of_default_group

_EPSILON = 1e-6
"""The value in torch.nn.utils.clip_grad_norm_."""


def clip_gradients_(
    gradients: Sequence[Tensor | None],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    across: Collectives | None = None,
    alike: Sequence[Tensor | None] = (),
) -> Tensor:
    """Scale the gradients in place; returns the norm before, an fp32 tensor without dimensions.

    `across`: the ranks over which gradients are sharded, whose norms are combined; None where every rank has all gradients.
    `alike`: further gradients, equal on all ranks, which count once. ValueError for a `norm_type` below 1.
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
        worst = torch.stack([norm, norm.isnan().to(norm.dtype)])  # a maximum over ranks may ignore NaN
        across.all_reduce(worst, reduction="maximum", label="norm").wait()
        return worst[0].where(worst[1] == 0, torch.nan)
    powers = norm**norm_type
    across.all_reduce(powers, label="norm").wait()
    return powers ** (1 / norm_type)


def _real(gradient: Tensor) -> Tensor:
    """A real tensor of the same norm, in a dtype of which torch can take a norm in fp32."""
    magnitude = gradient.abs() if gradient.is_complex() else gradient
    return magnitude.float() if magnitude.dtype == torch.float64 else magnitude


class RankedGradScaler(torch.amp.GradScaler):
    """torch's GradScaler (Micikevicius 2018) for ranks: where a gradient is infinite or NaN on any rank, all ranks skip the step.

    With averaged gradients every rank sees the same overflow. With sharded gradients only the rank that holds the part does, and
    it alone would skip the step and halve its scale.

    `step` and `unscale_` send one fp32 number per optimizer and step (the maximum over ranks), so every rank must call them alike.
    The host does not wait for the device more often than with torch's scaler: never with an optimizer that skips steps itself.
    """

    def __init__(self, ranks: Ranks | None = None, **kwargs: Any) -> None:
        self.ranks = ranks or ranks_of_default_group()
        self.collectives = Collectives(self.ranks)
        super().__init__(self.ranks.device.type, **kwargs)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # torch calls this once per step, with or without `unscale_`. A rank without a gradient takes part too.
        flags_of_devices = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        worst = found_inf.clone()
        for flag in flags_of_devices.values():
            worst = torch.maximum(worst, flag.to(worst.device))
        self.collectives.all_reduce(worst, reduction="maximum", label="found_inf").wait()
        return {worst.device: worst}
