"""What a graph bakes in of an optimizer and a module: numbers of Python's. Learning rates are not baked in.

While a step is captured its learning rates are tensors, which each call fills with what the groups say then. Outside of it they are
the plain numbers that schedulers set and checkpoints keep: a schedule of tensors would make the host wait at every step.
"""

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

State = dict[tuple[Any, str], Hashable]
"""What an optimizer's state holds, by parameter and name."""


class Baked:
    """`change()` names what differs from the last call, so that graphs made before are no longer right; None: nothing does.

    ValueError for an optimizer that no graph can hold.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, module: nn.Module | None, device: torch.device) -> None:
        self._optimizer, self._module, self._device = optimizer, module, device
        self._rates: dict[int, tuple[Tensor, float]] = {}
        """Each group's learning rate: the tensor that the graph reads, and the number in it."""
        self._loaded = self._rate_set_inside = False
        if optimizer is not None:
            if reason := why_not_captured(optimizer):
                raise ValueError(f"optimizer: {reason}")
            optimizer.register_load_state_dict_post_hook(self._note_load)
        self._modules = list(module.modules()) if module is not None else []
        self._parameters: tuple[list[int], list[Tensor]] = [], []
        """The last ones, and who they were before the same ones were left out: each call looks, in as little time as it can."""
        self._seen = list(self._options())

    @property
    def parameters(self) -> list[Tensor]:
        """Whose gradients a step writes: the optimizer's, and those of the module that it does not step."""
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        every = [parameter for group in groups for parameter in group["params"]]
        every += [parameter for module in self._modules for parameter in module._parameters.values()]
        who = list(map(id, every))
        if who != self._parameters[0]:
            self._parameters = who, list({id(each): each for each in every if each is not None}.values())
        return self._parameters[1]

    def change(self) -> str | None:
        options = list(self._options())
        if options == self._seen and not self._loaded:
            return None
        named = [name for name, value in options if (name, value) not in self._seen]
        loaded, self._loaded, self._seen = self._loaded, False, options
        return "the optimizer's state was loaded" if loaded else f"{named[0]} changed" if named else "a group went away"

    @contextmanager
    def rates_in_tensors(self) -> Iterator[None]:
        """Inside, the groups' learning rates are the tensors; a rate that is set inside stays, and `not_again` names it."""
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        plain = {index: group["lr"] for index, group in enumerate(groups) if index in self._rates}
        for index in plain:
            groups[index]["lr"] = self._rates[index][0]
        versions = {index: self._rates[index][0]._version for index in plain}
        try:
            yield
        finally:
            for index, rate in plain.items():
                tensor = self._rates[index][0]
                if tensor._version != versions[index]:  # a schedule filled it
                    self._rate_set_inside, groups[index]["lr"] = True, tensor.item()
                elif groups[index]["lr"] is tensor:
                    groups[index]["lr"] = rate
                else:
                    self._rate_set_inside = True

    def state(self) -> State:
        """What of the optimizer's state only the host can change, to be compared by `not_again`: numbers of Python's, which tensors
        there are, and what is in those that are not on the device."""
        states = self._optimizer.state.items() if self._optimizer is not None else ()
        return {
            (parameter, name): self._host_side(value)
            for parameter, state in states
            for name, value in (state.items() if isinstance(state, Mapping) else ())
            if isinstance(value, Tensor | int | float)
        }

    def not_again(self, before: State, *, captured: bool = False) -> str | None:
        """Why a graph cannot do what the step after `before` did, in a sentence; None where it can.

        `captured`: it was written down, so that state which it made would be made anew at each launch; it is taken away.
        """
        if self._rate_set_inside:
            return "the function sets the learning rate (a scheduler's step?): set it outside, between the calls"
        after, optimizer = self.state(), self._optimizer
        for key, value in before.items():
            if after.get(key) != value:
                return (
                    f"{type(optimizer).__name__} changes `{key[1]}` of its state on the host at every step: "
                    "leave it out of the function, and call its step yourself after each captured forward and backward"
                )
        if captured and (made := after.keys() - before.keys()):
            return f"{type(optimizer).__name__} made state for {len(made)} tensors that had no gradient in the calls before"
        return None

    def drop_state_since(self, before: State) -> None:
        """Take away the state that a capture made and never computed."""
        if self._optimizer is not None:
            for made in self.state().keys() - before.keys():
                del self._optimizer.state[made[0]][made[1]]

    def _host_side(self, value: Tensor | float) -> Hashable:
        if not isinstance(value, Tensor):
            return value
        return id(value), value._version if value.device.type != self._device.type else None

    def _note_load(self, _optimizer: torch.optim.Optimizer) -> None:
        """Loading replaces the tensors of the state."""
        self._loaded = True

    def _options(self) -> Iterator[tuple[str, Any]]:
        yield "train() or eval() of a module", [module.training for module in self._modules]
        yield (
            "a buffer (replaced by another tensor; write into it instead)",
            _places([buffer for module in self._modules for buffer in module._buffers.values() if buffer is not None]),
        )
        parameters = self.parameters
        yield "requires_grad of a parameter", [parameter.requires_grad for parameter in parameters]
        yield "the memory of a parameter", _places(parameters)
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        for index, group in enumerate(groups):
            filled = self._fill_rate(index, group)
            yield f"params of group {index}", list(map(id, group["params"]))
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


def _places(tensors: list[Tensor]) -> tuple[list[int], list[int]]:
    """Which tensors they are, and where their memory is: a graph knows the memory alone."""
    try:
        memory = list(map(Tensor.data_ptr, tensors))
    except RuntimeError:  # of tensors without memory of their own, as some subclasses are
        memory = []
    return list(map(id, tensors)), memory


def why_not_captured(optimizer: torch.optim.Optimizer) -> str | None:
    """Why no graph can hold this optimizer's step, in a sentence; None where one can."""
    if any(
        "capturable" in group and not (group["capturable"] or group.get("fused")) for group in optimizer.param_groups
    ):
        ways = "fused=True or capturable=True" if "fused" in optimizer.defaults else "capturable=True"
        return (
            f"{type(optimizer).__name__} counts its steps on the host: build it with {ways}, or call its step yourself after each "
            "captured forward and backward"
        )
    return None
