"""Why sums stay in fp32: the same additions with accumulators of 16 and of 32 bits, and what each loses.

torch's own sums of 16-bit tensors accumulate in fp32, so a 16-bit accumulator is spelled out here, one addition after the other.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from trainstep.measure.numerics_dtypes import dtype_words
from trainstep.ops import reference

Columns = dict[str, list[object]]
Rows = list[dict[str, object]]

_ADDENDS, _ADDEND = 1000, 0.01
_VECTORS = 256
"""Vectors that are reduced; enough for a median."""
_OUTLIER = 1000.0
"""Largest magnitude of the scaled activations: trained models have single channels as large (Sun 2024, arXiv 2402.17762)."""
_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


def accumulate(addend_dtype: torch.dtype, accumulator_dtype: torch.dtype) -> float:
    """0.01 in one dtype added 1000 times into an accumulator of another; as in every textbook, exact would be 10."""
    total = torch.zeros((), dtype=accumulator_dtype)
    addend = torch.tensor(_ADDEND, dtype=addend_dtype)
    for _ in range(_ADDENDS):
        total += addend.to(accumulator_dtype)
    return float(total)


def accumulation_table() -> Columns:
    """The four ways of the textbook, and bf16."""
    fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
    total = torch.zeros((), dtype=fp32)
    for _ in range(_ADDENDS):
        total += torch.tensor(_ADDEND, dtype=fp16)  # torch promotes the addend itself
    rows = {
        "fp32 into fp32": accumulate(fp32, fp32),
        "fp16 into fp16": accumulate(fp16, fp16),
        "fp16 into fp32": float(total),
        "fp16 upcast to fp32, into fp32": accumulate(fp16, fp32),
        "bf16 into bf16": accumulate(bf16, bf16),
        "bf16 into fp32": accumulate(bf16, fp32),
    }
    return {
        "how": list(rows),
        "total": list(rows.values()),
        "error": [abs(value - 10.0) / 10.0 for value in rows.values()],
    }


def reductions_table(hidden: Tensor, logits: Tensor) -> Columns:
    """Mean, variance and softmax's sum over these vectors in 16-bit numbers with 16-bit and with fp32 accumulators.

    Errors are relative to fp64 over the same 16-bit numbers, so that they are the accumulator's alone.
    """
    activations, scores = _vectors(hidden), _vectors(logits)
    largest = float(activations.abs().max()) if activations.numel() else 0.0
    outliers = activations * (_OUTLIER / max(largest, 1e-30))
    cases: list[tuple[str, str, Tensor, Callable[[Tensor], Tensor]]] = [
        ("mean of magnitudes", "activations", activations, torch.abs),
        ("mean of squares", "activations", activations, torch.square),
        ("mean of squares", f"scaled to {_OUTLIER:,.0f} at most", outliers, torch.square),
        ("softmax's sum", "logits", scores, _shifted_exponential),
    ]
    rows: Rows = []
    for what, values, vectors, term in cases:
        for dtype in _SIXTEEN_BIT:
            for accumulator in (dtype, torch.float32):
                rows.append({"what": what, "values": values, **_reduction(vectors, term, dtype, accumulator)})
    rows += _normalisations(activations, "activations") + _normalisations(
        outliers, f"scaled to {_OUTLIER:,.0f} at most"
    )
    return {name: [row[name] for row in rows] for name in rows[0]}


def _reduction(
    vectors: Tensor, term: Callable[[Tensor], Tensor], dtype: torch.dtype, accumulator: torch.dtype
) -> dict[str, object]:
    rounded = vectors.to(dtype)
    exact = term(rounded.double()).sum(dim=-1)
    terms = term(rounded.to(accumulator))
    total = torch.zeros(len(terms), dtype=accumulator, device=terms.device)
    for column in terms.unbind(-1):
        total = total + column
    return _row(dtype, accumulator, total, exact)


def _normalisations(vectors: Tensor, values: str) -> Rows:
    """RMSNorm with everything rounded to 16 bits inside (but torch's own mean, which accumulates in fp32), and as the model
    has it: fp32 inside, rounded once at the end."""
    rows: Rows = []
    for dtype in _SIXTEEN_BIT:
        rounded = vectors.to(dtype)
        weight = torch.ones(vectors.shape[-1], dtype=dtype, device=vectors.device)
        exact = reference.rms_norm(rounded.double(), weight.double(), 1e-5)
        inverse_rms = torch.rsqrt(rounded.square().mean(dim=-1, keepdim=True) + 1e-5)
        inside = {dtype: rounded * inverse_rms * weight, torch.float32: reference.rms_norm(rounded, weight, 1e-5)}
        for accumulator, normed in inside.items():
            rows.append({"what": "RMSNorm", "values": values, **_row(dtype, accumulator, normed, exact)})
    return rows


def _row(dtype: torch.dtype, accumulator: torch.dtype, result: Tensor, exact: Tensor) -> dict[str, object]:
    """Errors of vectors are in the 2-norm. Lost: infinite, or all zero (the inverse of an infinity) where it should not be."""
    wide, exact = result.double(), exact.double()
    if exact.dim() == 1:
        wide, exact = wide.unsqueeze(-1), exact.unsqueeze(-1)
    sizes = exact.norm(dim=-1)
    lost = ~wide.isfinite().all(dim=-1) | ((wide == 0).all(dim=-1) & (sizes > 0))
    errors = (wide - exact).norm(dim=-1) / sizes.clamp_min(1e-300)
    kept = errors[~lost]
    return {
        "numbers": dtype_words([dtype]),
        "accumulator": dtype_words([accumulator]),
        "error_median": float(kept.median()) if len(kept) else None,
        "error_max": float(kept.max()) if len(kept) else None,
        "overflow_share": float(lost.double().mean()) if len(lost) else None,
    }


def _vectors(tensor: Tensor) -> Tensor:
    """At most so many vectors over the last dimension, in fp64, of those whose largest number is finite."""
    flat = tensor.detach().reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.detach().reshape(1, 1)
    return flat[flat.amax(dim=-1).isfinite()][:_VECTORS].double()


def _shifted_exponential(scores: Tensor) -> Tensor:
    return torch.exp(scores - scores.amax(dim=-1, keepdim=True))
