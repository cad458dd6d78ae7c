"""The 2x rule of ops/reference.py, as an assertion."""

import torch
from torch import Tensor

from trainstep.ops.reference import allowed_error, largest_error


def assert_as_accurate_as(
    result: Tensor,
    same_dtype_reference: Tensor,
    fp64_reference: Tensor,
    what: str = "",
    *,
    times: int = 2,
    terms: float | None = None,
) -> None:
    """Check the 2x rule, and that all values are finite. `times` and `terms` are those of allowed_error."""
    assert fp64_reference.dtype == torch.float64
    assert result.dtype == same_dtype_reference.dtype
    assert result.shape == same_dtype_reference.shape == fp64_reference.shape
    assert result.isfinite().all(), f"{what}: not finite"
    error = largest_error(result, fp64_reference)
    allowed = allowed_error(same_dtype_reference, fp64_reference, result.dtype, times=times, terms=terms)
    assert error <= allowed, f"{what}: off by {error:.3g}, and {allowed:.3g} is allowed"
