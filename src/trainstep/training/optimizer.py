"""AdamW in each of its implementations: torch's three, and ours."""

from typing import Any

import torch

from trainstep.ops.adamw import AdamW
from trainstep.training.wrapping import OptimizerClass


def adamw_named(implementation: str) -> OptimizerClass:
    """The class: ours, or torch's."""
    return AdamW if implementation == "trainstep" else torch.optim.AdamW


def adamw_options(implementation: str, *, learning_rate: float) -> dict[str, Any]:
    """Its options (Loshchilov 2019): torch's as a loop over parameters, in foreach groups, or fused; defaults otherwise."""
    if implementation == "trainstep":
        return {"lr": learning_rate}
    return {"lr": learning_rate, "foreach": implementation == "foreach", "fused": implementation == "fused"}
