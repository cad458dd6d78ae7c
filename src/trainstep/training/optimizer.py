"""AdamW in each of torch's implementations."""

from collections.abc import Iterable

import torch
from torch import nn


def adamw(parameters: Iterable[nn.Parameter], *, implementation: str, learning_rate: float) -> torch.optim.AdamW:
    """AdamW (Loshchilov 2019) as a loop over parameters, in foreach groups, or fused; torch's defaults otherwise."""
    return torch.optim.AdamW(
        parameters, lr=learning_rate, foreach=implementation == "foreach", fused=implementation == "fused"
    )
