"""What a graph depends on: static tensors for its batch, and baked-in values of an optimizer and a module.

[Note: static inputs] A graph reads its batch from tensors at fixed addresses, into which each call's batch is copied. As in
an eager step, what the step writes into its batch reaches the caller's batch, and a tensor that is in the batch twice is
one tensor.

[Note: baked values] A graph keeps the numbers of an optimizer and a module that Python knew at the capture, except the
learning rates. While a step is captured its learning rates are tensors, and each call fills them with the current rates.
Outside the capture they are the plain numbers that schedulers set and checkpoints keep, because a schedule of tensors
would make the host wait at every step.
"""

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from trainstep.capture.waits import NotCapturable

_CONSTANTS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)

State = dict[tuple[Any, str], Hashable]
"""(parameter, name) -> what the host can change of this value in an optimizer's state."""


def shape_of(batch: Any) -> Hashable:
    """What must be equal for one graph to take two batches.

    That is: their structure; shapes, layouts and dtypes of their tensors; which of these are the same tensor; every other
    value. Raises NotCapturable for a batch with anything but dense tensors and plain values in dicts, lists and tuples.
    """
    leaves, structure = tree_flatten(batch)
    return structure, tuple(map(_kind, leaves)), _first_places(leaves)


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device."""
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, batch)


def detached(outputs: Any) -> Any:
    """A step's outputs without their autograd history, which would keep activations as long as the graph lives."""
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, outputs)


def copies(outputs: Any) -> Any:
    """Copies of a step's outputs, because the graph's next launch overwrites their memory.

    Raises ValueError for an output that is neither a tensor nor a plain value.
    """
    return tree_map(_copy, outputs)


class StaticInputs:
    """The batch with which a step is captured: `batch`. `fill` copies another batch of the same shape into it."""

    def __init__(self, batch: Any, device: torch.device) -> None:
        leaves, structure = tree_flatten(batch)
        first_places = _first_places(leaves)
        self._places = sorted(set(first_places) - {-1})
        """The place of each distinct tensor among the leaves: its first, if it is there more than once."""
        static = {place: _copy_with_layout(leaves[place], device) for place in self._places}
        self._static = list(static.values())
        self._written: list[int] = []
        self._versions = self._current_versions()
        pairs = zip(leaves, first_places, strict=True)
        self.batch = tree_unflatten([static.get(place, leaf) for leaf, place in pairs], structure)

    def fill(self, batch: Any) -> None:
        for static, tensor in zip(self._static, self._tensors(batch), strict=True):
            static.copy_(tensor, non_blocking=True)

    def note_written(self) -> None:
        """Note, after the capture, into which tensors the step wrote: every launch writes into them."""
        changes = zip(self._versions, self._current_versions(), strict=True)
        self._written = [index for index, (before, now) in enumerate(changes) if before != now]

    def write_back(self, batch: Any) -> None:
        """Copy what the step wrote into its batch to the caller's batch, if that is on the device."""
        if self._written:
            tensors = self._tensors(batch)
            for index in self._written:
                if tensors[index].device == self._static[index].device:
                    tensors[index].copy_(self._static[index])

    def _tensors(self, batch: Any) -> list[Tensor]:
        leaves = tree_flatten(batch)[0]
        return [leaves[place] for place in self._places]

    def _current_versions(self) -> list[int]:
        return [0 if tensor.is_inference() else tensor._version for tensor in self._static]


def _first_places(leaves: list[Any]) -> tuple[int, ...]:
    """For each leaf the first place of the same tensor; -1 for a leaf that is no tensor."""
    places: dict[int, int] = {}
    return tuple(
        places.setdefault(id(leaf), place) if isinstance(leaf, Tensor) else -1 for place, leaf in enumerate(leaves)
    )


def _copy_with_layout(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy with the same strides, on which the choice of kernels and so their rounding depends."""
    if tensor.device.type != device.type or _shares_memory_with_itself(tensor):
        return tensor.detach().to(device, copy=True)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)


def _shares_memory_with_itself(tensor: Tensor) -> bool:
    """Whether elements of the tensor may lie at the same address, as in an expanded tensor."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    if isinstance(leaf, _CONSTANTS):
        return leaf
    raise ValueError(f"function: returns a {type(leaf).__name__}; let it return tensors (`return output.loss`)")


def _kind(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        if leaf.requires_grad:
            raise NotCapturable(
                "batch: holds a tensor that requires grad, whose gradient a graph would keep; detach() it"
            )
        if leaf.layout != torch.strided or leaf.is_nested:
            raise NotCapturable(
                f"batch: holds a {'nested' if leaf.is_nested else 'sparse'} tensor; a graph takes dense ones"
            )
        return leaf.dtype, tuple(leaf.shape), None if leaf.is_contiguous() else leaf.stride()
    if isinstance(leaf, _CONSTANTS):
        return type(leaf), leaf
    raise NotCapturable(
        f"batch: holds a {type(leaf).__name__}; a captured step takes tensors and plain values in dicts, lists and tuples "
        "(of an object that is like a dict: dict(batch))"
    )


class Baked:
    """Notices changes of the values that a graph has baked in. [Note: baked values]

    Raises ValueError for an optimizer that no graph can hold.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, module: nn.Module | None, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self._rates: dict[int, tuple[Tensor, float]] = {}
        """Index of a group -> its learning rate: the tensor that the graph reads, and the number in this tensor."""
        self._loaded = self._rate_set_inside = False
        if optimizer is not None:
            if reason := why_not_captured(optimizer):
                raise ValueError(f"optimizer: {reason}")
            optimizer.register_load_state_dict_post_hook(self._note_load)
        self._modules = list(module.modules()) if module is not None else []
        # Cached, because every call asks for them: the ids of all parameters, and the distinct parameters.
        self._parameters: tuple[list[int], list[Tensor]] = [], []
        self._last_options = list(self._options())

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that may get gradients in a step: the optimizer's and the module's, each once."""
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        every = [parameter for group in groups for parameter in group["params"]]
        every += [parameter for module in self._modules for parameter in module._parameters.values()]
        ids = list(map(id, every))
        if ids != self._parameters[0]:
            distinct = {id(parameter): parameter for parameter in every if parameter is not None}
            self._parameters = ids, list(distinct.values())
        return self._parameters[1]

    def change(self) -> str | None:
        """What has changed since the last call, so that earlier graphs are wrong now, in words; None if nothing has."""
        options = list(self._options())
        if options == self._last_options and not self._loaded:
            return None
        names = [name for name, value in options if (name, value) not in self._last_options]
        loaded, self._loaded, self._last_options = self._loaded, False, options
        return "the optimizer's state was loaded" if loaded else f"{names[0]} changed" if names else "a group went away"

    @contextmanager
    def rates_in_tensors(self) -> Iterator[None]:
        """Replace the groups' learning rates by tensors inside the block; `not_again` reports a rate that is set there."""
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
                if tensor._version != versions[index]:  # a schedule wrote into the tensor
                    self._rate_set_inside, groups[index]["lr"] = True, tensor.item()
                elif groups[index]["lr"] is tensor:
                    groups[index]["lr"] = rate
                else:
                    self._rate_set_inside = True

    def state(self) -> State:
        """The part of the optimizer's state that only the host can change, for `not_again` to compare.

        That is: Python's numbers, the identity of tensors, and the versions of tensors that are not on the device.
        """
        states = self._optimizer.state.items() if self._optimizer is not None else ()
        return {
            (parameter, name): self._host_side(value)
            for parameter, state in states
            for name, value in (state.items() if isinstance(state, Mapping) else ())
            if isinstance(value, Tensor | int | float)
        }

    def not_again(self, before: State, *, captured: bool = False) -> str | None:
        """Why a graph cannot repeat the step after the state `before`, in a sentence; None if it can.

        `captured`: the step was recorded, so a launch would make again the state that it made.
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
        """Remove the state that a capture made, because a capture computes nothing."""
        if self._optimizer is not None:
            for parameter, name in self.state().keys() - before.keys():
                del self._optimizer.state[parameter][name]

    def _host_side(self, value: Tensor | float) -> Hashable:
        if not isinstance(value, Tensor):
            return value
        return id(value), value._version if value.device.type != self._device.type else None

    def _note_load(self, _optimizer: torch.optim.Optimizer) -> None:
        self._loaded = True  # loading has replaced the tensors of the state

    def _options(self) -> Iterator[tuple[str, Any]]:
        """Everything that a graph bakes in: its name, and a value to compare."""
        parameters = self.parameters
        buffers = [buffer for module in self._modules for buffer in module._buffers.values() if buffer is not None]
        yield "train() or eval() of a module", [module.training for module in self._modules]
        yield "a buffer (replaced by another tensor; write into it instead)", _memory_of(buffers)
        yield "requires_grad of a parameter", [parameter.requires_grad for parameter in parameters]
        yield "the memory of a parameter", _memory_of(parameters)
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        for index, group in enumerate(groups):
            filled = self._fill_rate(index, group)
            yield f"params of group {index}", list(map(id, group["params"]))
            for name, value in group.items():
                if name != "params" and not (name == "lr" and filled):
                    # A graph reads an option's tensor at each launch, so only its identity must stay.
                    yield f"{name} of group {index}", id(value) if isinstance(value, Tensor) else value

    def _fill_rate(self, index: int, group: dict[str, Any]) -> bool:
        """Write the group's learning rate into its tensor; False if its optimizer's kernels do not read a tensor."""
        if self._device.type == "cuda" and group.get("fused") and "capturable" in group:
            group["capturable"] = True  # the kernels are the same, but torch refuses to capture them without this
        rate = group.get("lr")
        if not isinstance(rate, float | int) or not (group.get("fused") or group.get("capturable")):
            return False
        if index not in self._rates:
            # fp64 on a CPU, like Python's numbers; a GPU's kernels read fp32.
            dtype = torch.float64 if self._device.type == "cpu" else torch.float32
            self._rates[index] = torch.tensor(rate, dtype=dtype, device=self._device), rate
        tensor, last_rate = self._rates[index]
        if rate != last_rate:
            self._rates[index] = tensor.fill_(rate), rate
        return True


def _memory_of(tensors: list[Tensor]) -> tuple[list[int], list[int]]:
    """The identity of the tensors and the addresses of their memory, which is all that a graph knows of them."""
    try:
        addresses = list(map(Tensor.data_ptr, tensors))
    except RuntimeError:  # some subclasses of Tensor have no memory of their own
        addresses = []
    return list(map(id, tensors)), addresses


def why_not_captured(optimizer: torch.optim.Optimizer) -> str | None:
    """Why no graph can hold this optimizer's step, in a sentence; None if a graph can hold it."""
    if any(
        "capturable" in group and not (group["capturable"] or group.get("fused")) for group in optimizer.param_groups
    ):
        options = "fused=True or capturable=True" if "fused" in optimizer.defaults else "capturable=True"
        return (
            f"{type(optimizer).__name__} counts its steps on the host: build it with {options}, or call its step yourself after "
            "each captured forward and backward"
        )
    return None
