"""How far a precision's logits, loss and gradients are from a wider reference: same weights, same batch.

Errors are relative, in the 2-norm, computed in fp64: |x - reference| / |reference|.
"""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from trainstep.config.numerics import NumericsConfig
from trainstep.measure.failures import is_out_of_memory
from trainstep.measure.numerics_gradients import GradientCounts, count_output_gradients
from trainstep.measure.numerics_passes import Pass, Subject, in_dtype, subject_of
from trainstep.records.facts import Fact, facts_of

_CHUNK = 2**24
"""Elements that are compared at a time: in fp64 a whole embedding and its difference would not fit beside the model."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The wider pass, on the host. `reason`: why it is not in fp64, where it is not."""

    dtype: str
    reason: str
    weights: Mapping[str, Any]
    batch: Mapping[str, Any]
    loss: float
    logits: Tensor
    hidden: Tensor
    gradients: Mapping[str, Tensor]
    output_gradients: Mapping[str, GradientCounts]


def reference_of(config: NumericsConfig) -> Reference:
    """The pass in fp64; in fp32 where that is asked for, or where fp64 does not fit or the model does not run in it."""
    reason = "fp32 was asked for"
    if config.reference != "fp32":
        try:
            return _reference(config, torch.float64, "")
        except Exception as error:  # a user's model may raise anything in a dtype it was not written for
            if config.reference == "fp64" or isinstance(error, ImportError):
                raise
            said = "it does not fit in memory" if is_out_of_memory(error) else f"the model does not run in it ({error})"
            reason = f"not fp64: {' '.join(said.split())[:300]}"
    gc.collect()
    if config.device == "cuda":
        torch.cuda.empty_cache()
    return _reference(config, torch.float32, reason)


def _reference(config: NumericsConfig, dtype: torch.dtype, reason: str) -> Reference:
    subject = subject_of(config.run(precision="fp32", attention="plain"))
    weights = {
        name: value.detach().cpu().clone() if isinstance(value, Tensor) else value
        for name, value in subject.module.state_dict().items()
    }
    batch = subject.batch
    if dtype is torch.float64:
        subject = in_dtype(subject, dtype)
    found, output_gradients = count_output_gradients(subject, scale=1.0)
    name = "fp64" if dtype is torch.float64 else "fp32"
    if not (found.loss.isfinite() and found.is_finite):
        what = "a gradient" if found.loss.isfinite() else "its loss"
        raise ValueError(f"model: {what} is not finite in {name} on the first batch, so errors cannot be held to it")
    return Reference(
        dtype=name,
        reason=reason,
        weights=weights,
        batch=batch,
        loss=float(found.loss),
        logits=found.logits.cpu(),
        hidden=found.hidden.cpu(),
        gradients={name: gradient.cpu() for name, gradient in found.gradients.items()},
        output_gradients=output_gradients,
    )


def error_facts(found: Pass, reference: Reference, gradients: Mapping[str, Sequence[Any]]) -> dict[str, Fact]:
    """Errors of logits and loss, median and maximum over parameters; what is not finite is left out, and said."""
    errors = [error for error in gradients["relative_error"] if error is not None]
    values = {
        "error_logits": relative_error(found.logits, reference.logits),
        "error_loss": _finite(abs(float(found.loss) - reference.loss) / max(abs(reference.loss), 1e-300)),
        "error_gradient_median": median(errors) if errors else None,
        "error_gradient_max": max(errors, default=None),
    }
    return facts_of(
        **values,
        reference=reference.dtype,
        logits_module=found.logits_module,
        reference_reason=reference.reason or None,
        gradients_without_error=len(gradients["relative_error"]) - len(errors) or None,
    )


def gradient_table(found: Pass, reference: Reference, scale: float) -> dict[str, list[Any]]:
    """Each parameter's error, worst first; None where it is not finite or the reference is all zeros."""
    rows = [
        (name, relative_error(found.gradients[name], wide, scale), float(wide.double().norm()), wide.numel())
        for name, wide in reference.gradients.items()
        if name in found.gradients
    ]
    rows.sort(key=lambda row: -1.0 if row[1] is None else row[1], reverse=True)
    columns = ("parameter", "relative_error", "reference_norm", "elements")
    return {name: [row[place] for row in rows] for place, name in enumerate(columns)}


def relative_error(found: Tensor, reference: Tensor, scale: float = 1.0) -> float | None:
    """|found / scale - reference| / |reference|, or None where that is no number. The same infinity (a masked logit) is no
    error."""
    off, size = 0.0, 0.0
    for mine, theirs in zip(found.flatten().split(_CHUNK), reference.flatten().split(_CHUNK), strict=True):
        wide = theirs.to(mine.device).double()
        narrow = mine.double() / scale
        off += float(torch.where(narrow == wide, 0.0, narrow - wide).square().sum())
        size += float(wide[wide.isfinite()].square().sum())
    return _finite((off / size) ** 0.5) if size else None


def precise_pass(config: NumericsConfig, reference: Reference) -> Subject:
    """The model in the cell's own precision, with the reference's weights and batch."""
    return subject_of(config.run(), reference.weights, reference.batch)


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
