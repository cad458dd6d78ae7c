"""Measures how far a precision's logits, loss and gradients are from a wider reference, and what fp16's range loses.

Weights and batch are the same. Errors are relative, in the 2-norm, computed in fp64: |x - reference| / |reference|.

fp16's range is narrow: below 2^-14 a number is subnormal and loses digits, below 2^-25 it is zero, above 65,504 it is infinite. The
table of ranges has the shares of gradients that are lost so, with and without a scaled loss, by layer.
"""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.config.numerics import NumericsConfig
from trainstep.measure.harness.failures import is_out_of_memory
from trainstep.measure.numerics.passes import Pass, Subject, in_dtype, layer_of, run_pass, subject_of
from trainstep.records.facts import Fact, facts_of

_CHUNK = 2**24
"""Elements that are compared at a time: in fp64 a whole embedding and its difference would not fit beside the model."""
START_SCALE = 2.0**16
"""GradScaler's first scale. It doubles every 2000 steps without an overflow and halves at each overflow, so it stays near the
largest power of two that does not overflow, which is what `largest_finite_scale` finds."""
_LARGEST_SCALE = 2.0**40
_SMALLEST_NORMAL = torch.finfo(torch.float16).smallest_normal


@dataclass(frozen=True, kw_only=True)
class GradientCounts:
    """The number of a gradient's elements, and how many are zero, subnormal, or not finite in fp16."""

    elements: int = 0
    zero: int = 0
    subnormal: int = 0
    overflow: int = 0
    in_fp16: bool = False

    def __add__(self, other: "GradientCounts") -> "GradientCounts":
        return GradientCounts(
            elements=self.elements + other.elements,
            zero=self.zero + other.zero,
            subnormal=self.subnormal + other.subnormal,
            overflow=self.overflow + other.overflow,
            in_fp16=True,
        )


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The wider pass, on the host. `reason`: why it is not in fp64, or empty."""

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
    """The pass in fp64; in fp32 if the config says so, if fp64 does not fit, or if the model does not run in it."""
    reason = "fp32 was asked for"
    if config.reference != "fp32":
        try:
            return _reference(config, torch.float64, "")
        except Exception as error:  # a user's model may raise anything in a dtype it was not written for
            if config.reference == "fp64" or isinstance(error, ImportError):
                raise
            cause = (
                "it does not fit in memory" if is_out_of_memory(error) else f"the model does not run in it ({error})"
            )
            reason = f"not fp64: {' '.join(cause.split())[:300]}"
    gc.collect()
    if config.device == "cuda":
        torch.cuda.empty_cache()
    return _reference(config, torch.float32, reason)


def precise_pass(config: NumericsConfig, reference: Reference) -> Subject:
    """The model in the cell's own precision, with the reference's weights and batch."""
    return subject_of(config.run(), reference.weights, reference.batch)


def error_facts(own_pass: Pass, reference: Reference, gradients: Mapping[str, Sequence[Any]]) -> dict[str, Fact]:
    """Errors of logits and loss, and their median and maximum over parameters. Those not finite are left out and counted."""
    errors = [error for error in gradients["relative_error"] if error is not None]
    values = {
        "error_logits": relative_error(own_pass.logits, reference.logits),
        "error_loss": _finite(abs(float(own_pass.loss) - reference.loss) / max(abs(reference.loss), 1e-300)),
        "error_gradient_median": median(errors) if errors else None,
        "error_gradient_max": max(errors, default=None),
    }
    return facts_of(
        **values,
        reference=reference.dtype,
        logits_module=own_pass.logits_module,
        reference_reason=reference.reason or None,
        gradients_without_error=len(gradients["relative_error"]) - len(errors) or None,
    )


def gradient_table(own_pass: Pass, reference: Reference, scale: float) -> dict[str, list[Any]]:
    """Each parameter's error, worst first; None if it is not finite or the reference is all zeros."""
    rows = [
        (name, relative_error(own_pass.gradients[name], wide, scale), float(wide.double().norm()), wide.numel())
        for name, wide in reference.gradients.items()
        if name in own_pass.gradients
    ]
    rows.sort(key=lambda row: -1.0 if row[1] is None else row[1], reverse=True)
    columns = ("parameter", "relative_error", "reference_norm", "elements")
    return {name: [row[place] for row in rows] for place, name in enumerate(columns)}


def relative_error(value: Tensor, reference: Tensor, scale: float = 1.0) -> float | None:
    """|value / scale - reference| / |reference|, or None if that is no number. Equal infinities (a masked logit) are no error."""
    difference, size = 0.0, 0.0
    chunks = zip(value.flatten().split(_CHUNK), reference.flatten().split(_CHUNK), strict=True)
    for value_chunk, reference_chunk in chunks:
        exact = reference_chunk.to(value_chunk.device).double()
        unscaled = value_chunk.double() / scale
        difference += float(torch.where(unscaled == exact, 0.0, unscaled - exact).square().sum())
        size += float(exact[exact.isfinite()].square().sum())
    return _finite((difference / size) ** 0.5) if size else None


def largest_finite_scale(subject: Subject) -> float | None:
    """The largest power of two by which the loss can be multiplied without an infinite gradient; None if there is none."""
    scale = START_SCALE
    if run_pass(subject, scale=scale).is_finite:
        while scale < _LARGEST_SCALE and run_pass(subject, scale=2 * scale).is_finite:
            scale *= 2
        return scale
    while scale >= 1:
        scale /= 2
        if run_pass(subject, scale=scale).is_finite:
            return scale
    return None


def range_table(
    subject: Subject, gradients: Mapping[str, Tensor], output_gradients: Mapping[str, GradientCounts], scale: float
) -> dict[str, list[Any]]:
    """Shares of lost elements by layer: without a scale, with this scale, and with twice it (overflow).

    The shares count the parameters' gradients that were computed in fp16, and the gradients of the modules' outputs, which carry
    them from layer to layer. An element that is zero in the reference too does not count.
    """
    parameters, outputs = {}, {}
    for factor in (1.0, scale, 2 * scale):  # one pass at a time: each holds a gradient of the whole model
        scaled_pass, counts = count_output_gradients(subject, scale=factor)
        parameters[factor] = _by_layer(_parameter_counts(scaled_pass, gradients))
        outputs[factor] = _by_layer(_without_zeros(counts, output_gradients))
    rows = [_row("parameters", layer, parameters, scale) for layer in parameters[1.0]]
    rows += [_row("outputs", layer, outputs, scale) for layer in outputs[1.0]]
    names = (
        "of",
        "layer",
        "elements",
        "zero_unscaled",
        "subnormal_unscaled",
        "zero_scaled",
        "subnormal_scaled",
        "overflow_at_twice",
    )
    return {name: [row[name] for row in rows] for name in names}


def count_output_gradients(subject: Subject, *, scale: float) -> tuple[Pass, dict[str, GradientCounts]]:
    """Run a pass, and count the elements of the gradient of each leaf module's output: module path -> counts."""
    sums_of: dict[str, tuple[bool, int, Tensor]] = {}

    def on_output(path: str, module: nn.Module, output: Tensor) -> None:
        if output.requires_grad and next(module.children(), None) is None:
            output.register_hook(lambda gradient: sums_of.__setitem__(path, _sums(gradient)))

    scaled_pass = run_pass(subject, scale=scale, on_output=on_output)
    return scaled_pass, {path: _counts(*sums) for path, sums in sums_of.items()}


def _reference(config: NumericsConfig, dtype: torch.dtype, reason: str) -> Reference:
    subject = subject_of(config.run(precision="fp32", attention="plain"))
    weights = {
        name: value.detach().cpu().clone() if isinstance(value, Tensor) else value
        for name, value in subject.module.state_dict().items()
    }
    batch = subject.batch
    if dtype is torch.float64:
        subject = in_dtype(subject, dtype)
    wide_pass, output_gradients = count_output_gradients(subject, scale=1.0)
    name = "fp64" if dtype is torch.float64 else "fp32"
    if not (wide_pass.loss.isfinite() and wide_pass.is_finite):
        quantity = "a gradient" if wide_pass.loss.isfinite() else "its loss"
        raise ValueError(
            f"model: {quantity} is not finite in {name} on the first batch, so errors cannot be held to it"
        )
    return Reference(
        dtype=name,
        reason=reason,
        weights=weights,
        batch=batch,
        loss=float(wide_pass.loss),
        logits=wide_pass.logits.cpu(),
        hidden=wide_pass.hidden.cpu(),
        gradients={name: gradient.cpu() for name, gradient in wide_pass.gradients.items()},
        output_gradients=output_gradients,
    )


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


def _sums(gradient: Tensor) -> tuple[bool, int, Tensor]:
    """Whether the gradient is in fp16, its elements, and the three counts, still on the device so that backward does not wait."""
    magnitude = gradient.abs()
    kinds = (magnitude == 0, (magnitude > 0) & (magnitude < _SMALLEST_NORMAL), ~magnitude.isfinite())
    return gradient.dtype == torch.float16, gradient.numel(), torch.stack([kind.sum() for kind in kinds])


def _counts(in_fp16: bool, elements: int, sums: Tensor) -> GradientCounts:
    zero, subnormal, overflow = map(int, sums.tolist())
    return GradientCounts(elements=elements, zero=zero, subnormal=subnormal, overflow=overflow, in_fp16=in_fp16)


def _parameter_counts(scaled_pass: Pass, gradients: Mapping[str, Tensor]) -> dict[str, GradientCounts]:
    """The counts of gradients that were computed in fp16, without elements that are zero in the reference."""
    counts = {}
    for name, gradient in scaled_pass.gradients.items():
        if name in gradients and _is_exact_in_fp16(gradient):
            counted = gradient[gradients[name].to(gradient.device) != 0].half()
            if counted.numel():
                counts[name] = _counts(*_sums(counted))
    return counts


def _is_exact_in_fp16(gradient: Tensor) -> bool:
    """Whether every element is exactly a number of fp16, as after a computation in fp16, or a NaN that an overflow left."""
    return bool(((gradient == gradient.half().to(gradient.dtype)) | gradient.isnan()).all())


def _without_zeros(
    counts: Mapping[str, GradientCounts], reference: Mapping[str, GradientCounts]
) -> dict[str, GradientCounts]:
    """The counts of fp16 outputs, less the zeros that the reference has too (a masked position, a closed relu)."""
    kept = {}
    for path, count in counts.items():
        zeros = min(reference[path].zero, count.zero) if path in reference else 0
        if count.in_fp16 and count.elements > zeros:
            kept[f"{path}."] = GradientCounts(
                elements=count.elements - zeros,
                zero=count.zero - zeros,
                subnormal=count.subnormal,
                overflow=count.overflow,
                in_fp16=True,
            )
    return kept


def _by_layer(counts: Mapping[str, GradientCounts]) -> dict[str, GradientCounts]:
    layers: dict[str, GradientCounts] = {}
    for name, count in counts.items():
        layers[layer_of(name)] = layers.get(layer_of(name), GradientCounts()) + count
    return dict(sorted(layers.items(), key=lambda item: _natural(item[0])))


def _natural(layer: str) -> list[tuple[int, str]]:
    """A sort key with blocks.2 before blocks.10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in layer.split(".")]


def _row(of: str, layer: str, counts: Mapping[float, Mapping[str, GradientCounts]], scale: float) -> dict[str, Any]:
    plain, scaled, twice = (counts[factor].get(layer, GradientCounts()) for factor in (1.0, scale, 2 * scale))
    return {
        "of": of,
        "layer": layer,
        "elements": plain.elements,
        "zero_unscaled": _share(plain.zero, plain),
        "subnormal_unscaled": _share(plain.subnormal, plain),
        "zero_scaled": _share(scaled.zero, scaled),
        "subnormal_scaled": _share(scaled.subnormal, scaled),
        "overflow_at_twice": _share(twice.overflow, twice),
    }


def _share(count: int, of: GradientCounts) -> float:
    return count / of.elements if of.elements else 0.0
