"""What a graph bakes in of an optimizer and a module: numbers of Python's. Learning rates are not baked in.

While a step is captured its learning rates are tensors, which each call fills with what the groups say then. Outside of it they are
the plain numbers that schedulers set and checkpoints keep: a schedule of tensors would make the host wait at every step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Baked:
    """`change()` names what is otherwise than at the last call, so that graphs made before are no longer right; None: nothing.

    ValueError for an optimizer that no graph can hold.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, module: nn.Module | None, device: torch.device) -> None:
        self._optimizer, self._module, self._device = optimizer, module, device
        self._rates: dict[int, tuple[Tensor, float]] = {}
        """Of each group: the tensor that the graph reads, and the number in it."""
        self._loaded = False
        if optimizer is not None:
            if reason := why_not_captured(optimizer):
                raise ValueError(f"optimizer: {reason}")
            optimizer.register_load_state_dict_post_hook(self._note_load)
        self._seen = list(self._options())

    @property
    def parameters(self) -> list[Tensor]:
        """Whose gradients a step writes."""
        if self._optimizer is not None:
            return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        return list(self._module.parameters()) if self._module is not None else []

    def change(self) -> str | None:
        options = list(self._options())
        if options == self._seen and not self._loaded:
            return None
        named = [name for name, value in options if (name, value) not in self._seen]
        loaded, self._loaded, self._seen = self._loaded, False, options
        return "the optimizer's state was loaded" if loaded else f"{named[0]} changed" if named else "a group went away"

    @contextmanager
    def rates_in_tensors(self) -> Iterator[None]:
        """Inside, the groups' learning rates are the tensors; a rate that is set inside stays."""
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        plain = {index: group["lr"] for index, group in enumerate(groups) if index in self._rates}
        for index in plain:
            groups[index]["lr"] = self._rates[index][0]
        try:
            yield
        finally:
            for index, rate in plain.items():
                if groups[index]["lr"] is self._rates[index][0]:
                    groups[index]["lr"] = rate

    def _note_load(self, _optimizer: torch.optim.Optimizer) -> None:
        """Loading replaces the tensors of the state."""
        self._loaded = True

    def _options(self) -> Iterator[tuple[str, Any]]:
        if self._module is not None:
            yield "module.training", self._module.training
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        for index, group in enumerate(groups):
            filled = self._fill_rate(index, group)
            yield (
                f"params of group {index}",
                [(id(parameter), parameter.requires_grad) for parameter in group["params"]],
            )
            for name, value in group.items():
                if name != "params" and not (name == "lr" and filled):
                    # A tensor is read whenever the graph runs: the same one is the same option
                    yield f"{name} of group {index}", id(value) if isinstance(value, Tensor) else value

    def _fill_rate(self, index: int, group: dict[str, Any]) -> bool:
        """Whether the group's learning rate is in its tensor: of an optimizer whose kernels read it on the device."""
        if self._device.type == "cuda" and group.get("fused") and "capturable" in group:
            group["capturable"] = True  # the kernels are the same; torch refuses to capture them otherwise
        rate = group.get("lr")
        if not isinstance(rate, float | int) or not (group.get("fused") or group.get("capturable")):
            return False
        if index not in self._rates:
            # Of a CPU in fp64, as Python has it; a GPU's kernels read fp32
            dtype = torch.float64 if self._device.type == "cpu" else torch.float32
            self._rates[index] = torch.tensor(rate, dtype=dtype, device=self._device), rate
        tensor, held = self._rates[index]
        if rate != held:
            self._rates[index] = tensor.fill_(rate), rate
        return True


def why_not_captured(optimizer: torch.optim.Optimizer) -> str | None:
    """Why no graph can hold this optimizer's step, in a sentence; None where one can."""
    if any(
        "capturable" in group and not (group["capturable"] or group.get("fused")) for group in optimizer.param_groups
    ):
        return (
            f"{type(optimizer).__name__} counts its steps on the host: build it with fused=True or capturable=True, or call its "
            "step yourself after each captured forward and backward"
        )
    return None
