"""Turns an op and an implementation's name into a function of the op's tensors, by name, that returns a tuple of its outputs.

`function_of(config)` gives it, or raises CellFailed if its package is not installed. References are ops/reference.py's; they also
run in fp64 to check values. An update writes its tensors and returns those that it has changed.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from trainstep.config.op import PACKAGES, OpConfig
from trainstep.measure.op.peers import EPS, PEERS, Function
from trainstep.ops import reference
from trainstep.ops.adamw import AdamW
from trainstep.ops.linear_cross_entropy import linear_cross_entropy
from trainstep.ops.rms_norm import rms_norm
from trainstep.ops.rotary import rotary
from trainstep.ops.swiglu import swiglu

_LR, _BETAS, _ADAMW_EPS, _WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 1e-2


def function_of(config: OpConfig) -> Function:
    """The config's implementation. CellFailed if it is not installed."""
    name = config.implementation
    if name in PACKAGES:
        return PEERS[name, config.op]()
    if name == "compile":
        # A process measures many cells, and after a few recompilations of a function torch would run it eagerly.
        torch.compiler.reset()
        compiled: Function = torch.compile(REFERENCES[config.op], dynamic=False)
        return compiled
    if name == "eager":
        return REFERENCES[config.op]
    if config.op == "adamw":
        return _Update(AdamW if name == "trainstep" else partial(torch.optim.AdamW, fused=True))
    if config.op == "linear_cross_entropy":
        return partial(_loss, sum_dtype=torch.float32 if config.sum_dtype == "fp32" else None)
    return (_OURS if name == "trainstep" else _TORCH)[config.op]


class _Update:
    """An optimizer's step as a function of the tensors; it makes a new optimizer for a new parameter."""

    def __init__(self, optimizer_class: Callable[..., torch.optim.Optimizer]) -> None:
        self._class = optimizer_class
        self._optimizer: torch.optim.Optimizer | None = None
        self._parameter: Tensor | None = None

    def __call__(
        self, parameter: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor
    ) -> tuple[Tensor, ...]:
        if self._optimizer is None or self._parameter is not parameter:
            leaf = nn.Parameter(parameter)
            leaf.grad = gradient
            self._parameter = parameter
            self._optimizer = self._class([leaf], lr=_LR, betas=_BETAS, eps=_ADAMW_EPS, weight_decay=_WEIGHT_DECAY)
            # An optimizer counts this update itself; the reference is given the count.
            self._optimizer.state[leaf] = {"step": step - 1, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        self._optimizer.step()
        return parameter, exp_avg, exp_avg_sq


def _rms_norm_reference(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return (reference.rms_norm(x, weight, EPS),)


def _add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    h = x + residual
    return reference.rms_norm(h, weight, EPS), h


def _rotary_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return reference.rotary(q, cos, sin, interleaved=False), reference.rotary(k, cos, sin, interleaved=False)


def _swiglu_reference(x: Tensor) -> tuple[Tensor, ...]:
    return (reference.swiglu(*x.chunk(2, dim=-1)),)


def _loss_reference(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    return (reference.linear_cross_entropy(x, weight, targets),)


def _loss(x: Tensor, weight: Tensor, targets: Tensor, *, sum_dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    return (linear_cross_entropy(x, weight, targets, sum_dtype=sum_dtype),)


def _adamw_reference(
    parameter: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor
) -> tuple[Tensor, ...]:
    beta1, beta2 = _BETAS
    reference.adamw_(
        parameter, gradient, exp_avg, exp_avg_sq, step, lr=_LR, beta1=beta1, beta2=beta2, eps=_ADAMW_EPS,
        weight_decay=_WEIGHT_DECAY,
    )  # fmt: skip
    return parameter, exp_avg, exp_avg_sq


REFERENCES: Mapping[str, Function] = {
    "rms_norm": _rms_norm_reference,
    "add_rms_norm": _add_rms_norm_reference,
    "rotary": _rotary_reference,
    "swiglu": _swiglu_reference,
    "linear_cross_entropy": _loss_reference,
    "adamw": _adamw_reference,
}
_OURS: Mapping[str, Function] = {
    "rms_norm": lambda x, weight: (rms_norm(x, weight, EPS),),
    "add_rms_norm": lambda x, residual, weight: rms_norm(x, weight, EPS, residual=residual),
    "rotary": lambda q, k, cos, sin: rotary(q, k, cos, sin, interleaved=False),
    "swiglu": lambda x: (swiglu(x),),
}
_TORCH: Mapping[str, Function] = {
    "rms_norm": lambda x, weight: (nn.functional.rms_norm(x, x.shape[-1:], weight, EPS),),
}


def why_refused(config: OpConfig, error: Exception) -> str | None:
    """A sentence if the first call's error is a refusal of the case; None if it is a fault."""
    name = config.implementation
    if name in PACKAGES and isinstance(error, ValueError | AssertionError | NotImplementedError):
        return f"implementation: {name} does not take this case: {str(error) or 'it gives no reason'}"
    if type(error).__name__ == "OutOfResources":  # Triton's error for too much shared memory
        return f"implementation: {name} does not fit this GPU: {error}"
    return None
