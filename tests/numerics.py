"""The 2x rule: how far a result may be from the truth is what plain PyTorch loses in the same dtype, and no hand-picked number."""

import torch
from torch import Tensor


def assert_as_accurate_as(
    result: Tensor,
    same_dtype_reference: Tensor,
    fp64_reference: Tensor,
    what: str = "",
    *,
    times: int = 2,
    terms: float | None = None,
) -> None:
    """max|result - ref64| <= 2 max|same dtype - ref64| + eps(dtype) max|ref64|, on values that are all finite.

    `times`: 4 instead of 2 where fp32 products may be made of three TF32 ones. `terms` instead of max|ref64|: the size of the terms
    that cancel in a result, where the reference happens to cancel their roundings too.
    """
    assert fp64_reference.dtype == torch.float64
    assert result.dtype == same_dtype_reference.dtype
    assert result.shape == same_dtype_reference.shape == fp64_reference.shape
    assert result.isfinite().all(), f"{what}: not finite"
    error = _distance(result, fp64_reference)
    allowed = times * _distance(same_dtype_reference, fp64_reference)
    allowed += torch.finfo(result.dtype).eps * (terms if terms is not None else fp64_reference.abs().max().item())
    assert error <= allowed, f"{what}: off by {error:.3g}, and {allowed:.3g} is allowed"


def _distance(result: Tensor, truth: Tensor) -> float:
    return (result.detach().double().to(truth.device) - truth.detach()).abs().max().item()
