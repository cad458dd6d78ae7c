"""The 2x rule: how far a result may be from the truth is what plain PyTorch loses in the same dtype, and no hand-picked number.

max |result - ref64| <= 2 max |same dtype - ref64| + eps(dtype) max |ref64|, where ref64 is reference.py in float64 and the other
the same in the result's dtype.
"""

import torch
from torch import Tensor


def largest_error(result: Tensor, truth: Tensor) -> float:
    """max |result - truth|, in float64."""
    return (result.detach().double().to(truth.device) - truth.detach()).abs().max().item()


def allowed_error(
    same_dtype: Tensor, truth: Tensor, dtype: torch.dtype, *, times: int = 2, terms: float | None = None
) -> float:
    """The largest error that a result of this dtype may have.

    `times`: 4 instead of 2 where fp32 products may be made of three TF32 ones. `terms` instead of max |ref64|: the size of the
    terms that cancel in a result, where the reference happens to cancel their roundings too.
    """
    size = truth.abs().max().item() if terms is None else terms
    return times * largest_error(same_dtype, truth) + torch.finfo(dtype).eps * size
