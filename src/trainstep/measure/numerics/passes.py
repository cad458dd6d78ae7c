"""Runs one forward and backward and keeps loss, logits and gradients, which the workload `numerics` compares.

The module is in eval mode, so that dropout draws no random numbers; gradients are computed all the same.
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
    """The results of one pass. `gradients`: by the name of each parameter that has one, still multiplied by the loss's scale."""

    loss: Tensor
    logits: Tensor
    logits_module: str
    hidden: Tensor
    """The input of the last normalisation, or of the logits' module if there is none."""
    gradients: dict[str, Tensor]

    @property
    def is_finite(self) -> bool:
        return all(bool(gradient.isfinite().all()) for gradient in self.gradients.values())


def subject_of(
    run: RunConfig, weights: Mapping[str, Any] | None = None, batch: Mapping[str, Any] | None = None
) -> Subject:
    """The run's model, with these weights and this batch if given, else with its own weights and first batch.

    Sets torch's fp32 matmul mode as the precision requires.
    """
    assembly = build_step(dataclasses.replace(run, mode="forward_backward"))
    assembly.module.eval()
    if weights is not None:
        assembly.module.load_state_dict(weights)
    own_batch = assembly.next_batch(0)
    if batch is not None:
        own_batch = {name: _in_dtype_of(own_batch.get(name), value) for name, value in batch.items()}
    return Subject(module=assembly.module, batch=own_batch, autocast=assembly.step.autocast)


def _in_dtype_of(like: Any, value: Any) -> Any:
    """The value in the dtype of a tensor of the precision's own batch."""
    return value.to(like.dtype) if isinstance(value, Tensor) and isinstance(like, Tensor) else value


def in_dtype(subject: Subject, dtype: torch.dtype) -> Subject:
    """The subject in this dtype: its module is converted in place, its batch is copied."""
    batch = {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in subject.batch.items()
    }
    return Subject(module=subject.module.to(dtype), batch=batch, autocast=None)


def run_pass(
    subject: Subject, *, scale: float = 1.0, on_output: Callable[[str, nn.Module, Tensor], None] | None = None
) -> Pass:
    """Run forward, and backward of `scale` times the loss. `on_output` is called with each module's path and first output."""
    for parameter in subject.module.parameters():
        parameter.grad = None
    outputs = _ModelOutputs()
    with _watched(subject.module, outputs, on_output):
        with subject.context():
            output = subject.module(**subject.batch)
        loss = output if isinstance(output, Tensor) else output.loss
        (loss * scale).backward()
    gradients = {
        name: parameter.grad for name, parameter in subject.module.named_parameters() if parameter.grad is not None
    }
    for parameter in subject.module.parameters():
        parameter.grad = None
    named_logits = getattr(output, "logits", None)
    logits, hidden = (named_logits if isinstance(named_logits, Tensor) else outputs.logits), outputs.hidden
    if logits is None or hidden is None:
        raise ValueError("model: no module of it with parameters returns a tensor, so it has no logits to compare")
    return Pass(
        loss=loss.detach(),
        logits=logits.detach(),
        logits_module=outputs.logits_module,
        hidden=hidden.detach(),
        gradients=gradients,
    )


def layer_of(parameter: str) -> str:
    """The layer of a parameter: `blocks.3` for `blocks.3.mlp.up.weight`, `embedding` for `embedding.weight`."""
    layer = _LAYER.match(parameter)
    return layer[0] if layer else parameter.rpartition(".")[0] or parameter


def first_tensor(value: Any) -> Tensor | None:
    """The first floating-point tensor in a module's inputs or outputs."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return next((tensor for part in parts if (tensor := first_tensor(part)) is not None), None)


@dataclass
class _ModelOutputs:
    """The logits are the output of the last leaf module with parameters; see `Pass.hidden` for `hidden`."""

    logits: Tensor | None = None
    logits_module: str = ""
    hidden: Tensor | None = None
    hidden_is_norm: bool = False


@contextmanager
def _watched(
    module: nn.Module, outputs: _ModelOutputs, on_output: Callable[[str, nn.Module, Tensor], None] | None
) -> Iterator[None]:
    """A context in which every module's forward fills `outputs` and calls `on_output`."""
    handles = [
        child.register_forward_hook(_hook(path, outputs, on_output)) for path, child in module.named_modules() if path
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(
    path: str, outputs: _ModelOutputs, on_output: Callable[[str, nn.Module, Tensor], None] | None
) -> Callable[[nn.Module, Any, Any], None]:
    def hook(child: nn.Module, inputs: Any, output: Any) -> None:
        tensor, entering = first_tensor(output), first_tensor(inputs)
        if tensor is None:
            return
        is_leaf = next(child.children(), None) is None and next(child.parameters(recurse=False), None) is not None
        if is_leaf:
            outputs.logits, outputs.logits_module = tensor, path
        is_norm = "norm" in type(child).__name__.lower()
        if is_leaf and entering is not None and (is_norm or not outputs.hidden_is_norm):
            outputs.hidden, outputs.hidden_is_norm = entering, is_norm
        if on_output is not None:
            on_output(path, child, tensor)

    return hook
