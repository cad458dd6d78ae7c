"""What fp16's narrow range does to gradients: the share that is lost below it, with and without a scaled loss, by layer.

Below 2^-14 an fp16 number is subnormal and loses digits, below 2^-25 it is zero; above 65,504 it is infinite.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.measure.numerics_passes import Pass, Subject, layer_of, run_pass

START_SCALE = 2.0**16
"""Where GradScaler begins. It doubles every 2000 steps without an overflow and halves at each: it stays near the largest
power of two that does not overflow, which is what `largest_finite_scale` looks for."""
_LARGEST_SCALE = 2.0**40
_SMALLEST_NORMAL = torch.finfo(torch.float16).smallest_normal


@dataclass(frozen=True, kw_only=True)
class GradientCounts:
    """Elements of a gradient in fp16, and those that are zero, subnormal, or not finite."""

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


def largest_finite_scale(subject: Subject) -> float | None:
    """The largest power of two that the loss may be multiplied by without an infinite gradient; None if none may."""
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
    subject: Subject,
    gradients: Mapping[str, Tensor],
    output_gradients: Mapping[str, GradientCounts],
    scale: float,
) -> dict[str, list[Any]]:
    """Shares by layer, without a scale, with this one, and at twice it (overflow): of the parameters' gradients that were
    computed in fp16, and of the gradients of the modules' outputs, which carry them from layer to layer.

    An element that is zero in the reference too counts nowhere.
    """
    parameters, outputs = {}, {}
    for factor in (1.0, scale, 2 * scale):  # one pass at a time: each holds a gradient of the whole model
        found, counts = count_output_gradients(subject, scale=factor)
        parameters[factor] = _by_layer(_parameter_counts(found, gradients))
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
    """A pass, and the counts of the gradient of each leaf module's output, by the module's path."""
    seen: dict[str, tuple[bool, int, Tensor]] = {}

    def on_output(path: str, module: nn.Module, output: Tensor) -> None:
        if output.requires_grad and next(module.children(), None) is None:
            output.register_hook(lambda gradient: seen.__setitem__(path, _sums(gradient)))

    found = run_pass(subject, scale=scale, on_output=on_output)
    return found, {path: _counts(*sums) for path, sums in seen.items()}


def _sums(gradient: Tensor) -> tuple[bool, int, Tensor]:
    """On the device still, so that backward does not wait."""
    magnitude = gradient.abs()
    kinds = (magnitude == 0, (magnitude > 0) & (magnitude < _SMALLEST_NORMAL), ~magnitude.isfinite())
    return gradient.dtype == torch.float16, gradient.numel(), torch.stack([kind.sum() for kind in kinds])


def _counts(in_fp16: bool, elements: int, sums: Tensor) -> GradientCounts:
    zero, subnormal, overflow = map(int, sums.tolist())
    return GradientCounts(elements=elements, zero=zero, subnormal=subnormal, overflow=overflow, in_fp16=in_fp16)


def _parameter_counts(found: Pass, gradients: Mapping[str, Tensor]) -> dict[str, GradientCounts]:
    """Those whose gradient was computed in fp16, which shows in that it is exactly a tensor of fp16."""
    counted = {}
    for name, gradient in found.gradients.items():
        if name not in gradients or not _is_of_fp16(gradient):
            continue
        kept = gradient[gradients[name].to(gradient.device) != 0].half()
        counted[name] = _counts(*_sums(kept))
    return {name: one for name, one in counted.items() if one.elements}


def _is_of_fp16(gradient: Tensor) -> bool:
    """Whether every element is a number of fp16; an overflow leaves NaN behind it, which equals nothing."""
    return bool(((gradient == gradient.half().to(gradient.dtype)) | gradient.isnan()).all())


def _without_zeros(
    counts: Mapping[str, GradientCounts], reference: Mapping[str, GradientCounts]
) -> dict[str, GradientCounts]:
    """fp16 outputs alone, less the zeros that the reference has as well (a masked position, a closed relu)."""
    kept = {}
    for path, one in counts.items():
        zeros = min(reference[path].zero, one.zero) if path in reference else 0
        if one.in_fp16 and one.elements > zeros:
            kept[f"{path}."] = GradientCounts(
                elements=one.elements - zeros,
                zero=one.zero - zeros,
                subnormal=one.subnormal,
                overflow=one.overflow,
                in_fp16=True,
            )
    return kept


def _by_layer(counts: Mapping[str, GradientCounts]) -> dict[str, GradientCounts]:
    layers: dict[str, GradientCounts] = {}
    for name, one in counts.items():
        layers[layer_of(name)] = layers.get(layer_of(name), GradientCounts()) + one
    return dict(sorted(layers.items(), key=lambda item: _natural(item[0])))


def _natural(layer: str) -> list[tuple[int, str]]:
    """blocks.2 before blocks.10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in layer.split(".")]


def _row(of: str, layer: str, found: Mapping[float, Mapping[str, GradientCounts]], scale: float) -> dict[str, Any]:
    nothing = GradientCounts()
    plain, scaled, twice = (found[factor].get(layer, nothing) for factor in (1.0, scale, 2 * scale))
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
