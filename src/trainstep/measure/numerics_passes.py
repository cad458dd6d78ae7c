"""One forward and backward, kept: the loss, the logits and the gradients that the workload `numerics` compares.

The module stands in eval mode, so that dropout draws nothing; gradients flow all the same.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.config.run import RunConfig
from trainstep.training.build import build_step

_LAYER = re.compile(r"(?:.*?\.)?\d+(?=\.|$)")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model with its weights in one precision, and the batch it reads."""

    module: nn.Module
    batch: Mapping[str, Any]
    autocast: tuple[str, torch.dtype] | None

    def context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.autocast[0], dtype=self.autocast[1]) if self.autocast else nullcontext()


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What one pass gave. `gradients`: by parameter, of those that have one, still multiplied by the loss's scale."""

    loss: Tensor
    logits: Tensor
    logits_module: str
    hidden: Tensor
    """What enters the last normalisation, or the logits' module where there is none."""
    gradients: dict[str, Tensor]

    @property
    def is_finite(self) -> bool:
        return all(bool(gradient.isfinite().all()) for gradient in self.gradients.values())


def subject_of(
    run: RunConfig, weights: Mapping[str, Any] | None = None, batch: Mapping[str, Any] | None = None
) -> Subject:
    """The model of a run with these weights and this batch where given, else with its own first.

    Sets torch's fp32 matmul mode to what the precision asks.
    """
    assembly = build_step(dataclasses.replace(run, mode="forward_backward"))
    assembly.module.eval()
    if weights is not None:
        assembly.module.load_state_dict(weights)
    own = assembly.next_batch(0)
    taken = own if batch is None else {name: _as_in(own.get(name), value) for name, value in batch.items()}
    return Subject(module=assembly.module, batch=taken, autocast=assembly.step.autocast)


def in_dtype(subject: Subject, dtype: torch.dtype) -> Subject:
    """The same module, changed in place, and its batch with every floating-point number in another dtype."""
    batch = {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in subject.batch.items()
    }
    return Subject(module=subject.module.to(dtype), batch=batch, autocast=None)


def run_pass(
    subject: Subject,
    *,
    scale: float = 1.0,
    on_output: Callable[[str, nn.Module, Tensor], None] | None = None,
) -> Pass:
    """Forward and backward of `scale` times the loss. `on_output`: called with each module's path and first output."""
    for parameter in subject.module.parameters():
        parameter.grad = None
    seen = _Seen()
    with _watched(subject.module, seen, on_output):
        with subject.context():
            output = subject.module(**subject.batch)
        loss = output if isinstance(output, Tensor) else output.loss
        (loss * scale).backward()
    gradients = {
        name: parameter.grad for name, parameter in subject.module.named_parameters() if parameter.grad is not None
    }
    for parameter in subject.module.parameters():
        parameter.grad = None
    named = getattr(output, "logits", None)
    logits, hidden = (named if isinstance(named, Tensor) else seen.logits), seen.hidden
    if logits is None or hidden is None:
        raise ValueError("model: no module of it with parameters returns a tensor, so it has no logits to compare")
    return Pass(
        loss=loss.detach(),
        logits=logits.detach(),
        logits_module=seen.logits_module,
        hidden=hidden.detach(),
        gradients=gradients,
    )


def layer_of(parameter: str) -> str:
    """`blocks.3` of `blocks.3.mlp.up.weight`, `embedding` of `embedding.weight`."""
    found = _LAYER.match(parameter)
    return found[0] if found else parameter.rpartition(".")[0] or parameter


def first_tensor(value: Any) -> Tensor | None:
    """The first floating-point tensor in what a module takes or returns."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return next((found for part in parts if (found := first_tensor(part)) is not None), None)


@dataclass
class _Seen:
    logits: Tensor | None = None
    logits_module: str = ""
    hidden: Tensor | None = None
    hidden_is_norm: bool = False


@contextmanager
def _watched(
    module: nn.Module, seen: _Seen, on_output: Callable[[str, nn.Module, Tensor], None] | None
) -> Iterator[None]:
    """Note the last leaf with parameters, which gives the logits, and the last normalisation."""
    handles = []
    for path, child in module.named_modules():
        if path:
            handles.append(child.register_forward_hook(_hook(path, seen, on_output)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(
    path: str, seen: _Seen, on_output: Callable[[str, nn.Module, Tensor], None] | None
) -> Callable[[nn.Module, Any, Any], None]:
    def hook(child: nn.Module, inputs: Any, output: Any) -> None:
        tensor, entering = first_tensor(output), first_tensor(inputs)
        if tensor is None:
            return
        is_leaf = next(child.children(), None) is None and next(child.parameters(recurse=False), None) is not None
        if is_leaf:
            seen.logits, seen.logits_module = tensor, path
        is_norm = "norm" in type(child).__name__.lower()
        if is_leaf and entering is not None and (is_norm or not seen.hidden_is_norm):
            seen.hidden, seen.hidden_is_norm = entering, is_norm
        if on_output is not None:
            on_output(path, child, tensor)

    return hook


def _as_in(own: Any, value: Any) -> Any:
    """The value in the dtype that a batch of this precision has it in."""
    return value.to(own.dtype) if isinstance(value, Tensor) and isinstance(own, Tensor) else value
