"""Finds which dtype each module really computes in, why autocast had no effect, and what sums lose in 16 bits.

The sums show why sums stay in fp32: the same additions are made with accumulators of 16 and of 32 bits. torch's own sums of 16-bit
tensors accumulate in fp32, so a 16-bit accumulator is spelled out here, one addition after the other.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from trainstep.measure.numerics.passes import Pass, Subject, run_pass
from trainstep.ops import reference

Columns = dict[str, list[object]]
Rows = list[dict[str, object]]
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
"""The number of a repeated block in a module's path."""
_ADDENDS, _ADDEND = 1000, 0.01
_VECTORS = 256
"""The number of vectors that are reduced, enough for a median."""
_OUTLIER = 1000.0
"""Largest magnitude of the scaled activations: trained models have single channels as large (Sun 2024, arXiv 2402.17762)."""
_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class ModuleDtypes:
    """The dtypes of one module, or of several alike modules, in words such as `fp16`; `–` if there is none."""

    module: str
    kind: str
    parameters: str
    output: str
    output_gradient: str
    gradient: str


@dataclass(kw_only=True)
class DtypeWatch:
    """What was noted during a pass. `autocast_seen`: whether autocast was on inside the modules."""

    modules: list[ModuleDtypes] = field(default_factory=list)
    autocast_seen: bool = False
    autocast_warnings: list[str] = field(default_factory=list)
    """torch's warnings about autocast."""


def watch_dtypes(subject: Subject, scale: float = 1.0) -> tuple[Pass, DtypeWatch]:
    """Run one pass and note each module's dtypes, in the order of their first outputs."""
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
        watched = run_pass(subject, scale=scale, on_output=on_output)
    messages = [str(warning.message) for warning in caught]
    watch.autocast_warnings = [message for message in messages if "autocast" in message.lower()]
    for path, (module, dtype) in outputs.items():
        parameters = dict(module.named_parameters(prefix=path, recurse=False))
        watch.modules.append(
            ModuleDtypes(
                module=path,
                kind=type(module).__name__,
                parameters=dtype_words(parameter.dtype for parameter in parameters.values()),
                output=dtype_words([dtype]),
                output_gradient=dtype_words([gradients[path]] if path in gradients else []),
                gradient=dtype_words(watched.gradients[name].dtype for name in parameters if name in watched.gradients),
            )
        )
    return watched, watch


def dtype_words(dtypes: Iterable[torch.dtype]) -> str:
    """The dtypes in words: `fp16`, `bf16, fp32`, or `–` for none."""
    words = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
    names = sorted({str(dtype).removeprefix("torch.") for dtype in dtypes})
    return ", ".join(words.get(name, name) for name in names) or "–"


def folded(modules: Sequence[ModuleDtypes]) -> list[ModuleDtypes]:
    """Rows in which alike modules of repeated blocks share a row: `blocks.0-11.mlp.up`."""
    groups: dict[ModuleDtypes, list[int]] = {}
    for row in modules:
        number = _NUMBER.search(row.module)
        pattern = replace(row, module=_NUMBER.sub("*", row.module, count=1))
        groups.setdefault(pattern, []).extend([int(number[0])] if number else [])
    return [
        replace(pattern, module=pattern.module.replace("*", _ranges(sorted(numbers)), 1))
        for pattern, numbers in groups.items()
    ]


def why_no_effect(subject: Subject, watch: DtypeWatch) -> str | None:
    """A sentence that says why no module's output is in autocast's dtype; None if an output is, or without autocast."""
    if subject.autocast is None:
        return None
    device, dtype = subject.autocast
    autocast_dtype = dtype_words([dtype])
    if any(row.output == autocast_dtype for row in watch.modules):
        return None
    parameters = list(subject.module.parameters())
    elsewhere = {parameter.device.type for parameter in parameters} - {device}
    if watch.autocast_warnings:
        return f"autocast had no effect: torch says: {watch.autocast_warnings[0]}"
    if elsewhere:
        return f"autocast had no effect: it is for {device}, and the model is on {', '.join(sorted(elsewhere))}"
    if not watch.autocast_seen:
        return "autocast had no effect: it is off where the modules run: the model turns it off, or runs outside its context"
    if parameters and all(parameter.dtype == torch.float64 for parameter in parameters):
        return "autocast had no effect: it leaves fp64 alone, and the weights are fp64"
    return (
        f"autocast had no effect: no module of the model runs an operation that it casts to {autocast_dtype} "
        "(matrix products, convolutions and attention)"
    )


def accumulate(addend_dtype: torch.dtype, accumulator_dtype: torch.dtype) -> float:
    """The sum of 1000 times 0.01 in one dtype, added into an accumulator of another. Exact would be 10."""
    total = torch.zeros((), dtype=accumulator_dtype)
    addend = torch.tensor(_ADDEND, dtype=addend_dtype)
    for _ in range(_ADDENDS):
        total += addend.to(accumulator_dtype)
    return float(total)


def accumulation_table() -> Columns:
    """The sum and its error in the four cases of textbooks, and in bf16."""
    fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
    total = torch.zeros((), dtype=fp32)
    for _ in range(_ADDENDS):
        total += torch.tensor(_ADDEND, dtype=fp16)  # torch promotes the addend
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
    """Means, softmax's sum and RMSNorm over these vectors in 16-bit numbers, with 16-bit and with fp32 accumulators.

    Errors are relative to fp64 over the same 16-bit numbers, so they are caused by the accumulator alone.
    """
    activations, scores = _vectors(hidden), _vectors(logits)
    largest = float(activations.abs().max()) if activations.numel() else 0.0
    outliers = activations * (_OUTLIER / max(largest, 1e-30))
    cases: list[tuple[str, str, Tensor, Callable[[Tensor], Tensor]]] = [
        ("mean of magnitudes", "activations", activations, torch.abs),
        ("mean of squares", "activations", activations, torch.square),
        ("mean of squares", f"scaled to {_OUTLIER:,.0f} at most", outliers, torch.square),
        ("softmax's sum", "logits", scores, lambda x: torch.exp(x - x.amax(dim=-1, keepdim=True))),
    ]
    rows: Rows = []
    for what, values, vectors, term in cases:
        for dtype in _SIXTEEN_BIT:
            for accumulator in (dtype, torch.float32):
                rows.append({"what": what, "values": values, **_reduction(vectors, term, dtype, accumulator)})
    rows += _normalisations(activations, "activations")
    rows += _normalisations(outliers, f"scaled to {_OUTLIER:,.0f} at most")
    return {name: [row[name] for row in rows] for name in rows[0]}


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers as text: `0-2,5` for 0, 1, 2 and 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


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
    """RMSNorm with all steps rounded to 16 bits, and as the model has it: in fp32, rounded once at the end."""
    rows: Rows = []
    for dtype in _SIXTEEN_BIT:
        rounded = vectors.to(dtype)
        weight = torch.ones(vectors.shape[-1], dtype=dtype, device=vectors.device)
        exact = reference.rms_norm(rounded.double(), weight.double(), 1e-5)
        # torch's own mean accumulates in fp32 all the same.
        inverse_rms = torch.rsqrt(rounded.square().mean(dim=-1, keepdim=True) + 1e-5)
        results = {dtype: rounded * inverse_rms * weight, torch.float32: reference.rms_norm(rounded, weight, 1e-5)}
        for accumulator, result in results.items():
            rows.append({"what": "RMSNorm", "values": values, **_row(dtype, accumulator, result, exact)})
    return rows


def _row(dtype: torch.dtype, accumulator: torch.dtype, result: Tensor, exact: Tensor) -> dict[str, object]:
    """A row of errors, for vectors in the 2-norm. `overflow_share`: the share of results that were lost."""
    wide, exact = result.double(), exact.double()
    if exact.dim() == 1:
        wide, exact = wide.unsqueeze(-1), exact.unsqueeze(-1)
    sizes = exact.norm(dim=-1)
    # A result is lost if it is infinite, or all zeros (the inverse of an infinity) where it should not be.
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
    """Vectors over the last dimension, in fp64: at most `_VECTORS` of those with a finite largest number."""
    flat = tensor.detach().reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.detach().reshape(1, 1)
    return flat[flat.amax(dim=-1).isfinite()][:_VECTORS].double()
