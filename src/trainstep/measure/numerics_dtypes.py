"""Which dtype each module really computes in: watched during a pass, and why autocast had no effect where it had none."""

import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from trainstep.measure.numerics_passes import Pass, Subject, run_pass

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


@dataclass(frozen=True, kw_only=True)
class ModuleDtypes:
    """One module, or several alike. Words such as `fp16`; `–` where there is nothing."""

    module: str
    kind: str
    parameters: str
    output: str
    output_gradient: str
    gradient: str


@dataclass(kw_only=True)
class DtypeWatch:
    """What a pass of a subject showed. `autocast_seen`: whether autocast was on inside the modules."""

    modules: list[ModuleDtypes] = field(default_factory=list)
    autocast_seen: bool = False
    said: list[str] = field(default_factory=list)
    """Warnings that torch gave about autocast."""


def watch_dtypes(subject: Subject, scale: float = 1.0) -> tuple[Pass, DtypeWatch]:
    """One pass, and each module's dtypes in the order of their first outputs."""
    watch = DtypeWatch()
    outputs: dict[str, tuple[nn.Module, torch.dtype]] = {}
    gradients: dict[str, torch.dtype] = {}

    def on_output(path: str, module: nn.Module, output: Tensor) -> None:
        outputs[path] = (module, output.dtype)
        watch.autocast_seen |= torch.is_autocast_enabled(output.device.type)
        if output.requires_grad:
            output.register_hook(lambda gradient: gradients.__setitem__(path, gradient.dtype))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run_pass(subject, scale=scale, on_output=on_output)
    watch.said = [str(one.message) for one in caught if "autocast" in str(one.message).lower()]
    for path, (module, dtype) in outputs.items():
        own = dict(module.named_parameters(prefix=path, recurse=False))
        watch.modules.append(
            ModuleDtypes(
                module=path,
                kind=type(module).__name__,
                parameters=dtype_words(parameter.dtype for parameter in own.values()),
                output=dtype_words([dtype]),
                output_gradient=dtype_words([gradients[path]] if path in gradients else []),
                gradient=dtype_words(found.gradients[name].dtype for name in own if name in found.gradients),
            )
        )
    return found, watch


def dtype_words(dtypes: Iterable[torch.dtype]) -> str:
    """`fp16`, `bf16, fp32`, or `–`."""
    words = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
    found = sorted({str(dtype).removeprefix("torch.") for dtype in dtypes})
    return ", ".join(words.get(name, name) for name in found) or "–"


def folded(modules: Sequence[ModuleDtypes]) -> list[ModuleDtypes]:
    """Repeated blocks whose modules are alike in one line: `blocks.0-11.mlp.up`."""
    groups: dict[tuple[str, ...], list[ModuleDtypes]] = {}
    for one in modules:
        pattern = _NUMBER.sub("*", one.module, count=1)
        alike = (pattern, one.kind, one.parameters, one.output, one.output_gradient, one.gradient)
        groups.setdefault(alike, []).append(one)
    return [_fold(pattern, group) for (pattern, *_), group in groups.items()]


def _fold(pattern: str, group: Sequence[ModuleDtypes]) -> ModuleDtypes:
    numbers = sorted(int(found[0]) for one in group if (found := _NUMBER.search(one.module)))
    fields = {name: getattr(group[0], name) for name in ("kind", "parameters", "output", "output_gradient", "gradient")}
    return ModuleDtypes(module=pattern.replace("*", _ranges(numbers), 1), **fields)


def _ranges(numbers: Sequence[int]) -> str:
    """`0-2,5` of 0, 1, 2 and 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def why_no_effect(subject: Subject, watch: DtypeWatch) -> str | None:
    """Why no module's output is in autocast's dtype, in a sentence; None where one is, or where there is no autocast."""
    if subject.autocast is None:
        return None
    device, dtype = subject.autocast
    asked = dtype_words([dtype])
    if any(one.output == asked for one in watch.modules):
        return None
    parameters = list(subject.module.parameters())
    elsewhere = {parameter.device.type for parameter in parameters} - {device}
    if watch.said:
        return f"autocast had no effect: torch says: {watch.said[0]}"
    if elsewhere:
        return f"autocast had no effect: it is for {device}, and the model is on {', '.join(sorted(elsewhere))}"
    if not watch.autocast_seen:
        return "autocast had no effect: it is off where the modules run: the model turns it off, or runs outside its context"
    if parameters and all(parameter.dtype == torch.float64 for parameter in parameters):
        return "autocast had no effect: it leaves fp64 alone, and the weights are fp64"
    return (
        f"autocast had no effect: no module of the model runs an operation that it casts to {asked} "
        "(matrix products, convolutions and attention)"
    )
