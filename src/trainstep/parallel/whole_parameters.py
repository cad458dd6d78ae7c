"""FSDP's whole parameters: those that it ignores, and its state dict, which is gathered to save it and cut to load it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.parallel.bucket import make_buckets, plan_buckets
from trainstep.parallel.collectives import Collectives, ShardGroups
from trainstep.parallel.flat_buffer import made_dense
from trainstep.parallel.fsdp_unit import FSDPUnit

_EXTRA = "_extra_state"
"""torch's key for a module's own extra state."""


class IgnoredParameters:
    """Parameters that FSDP leaves whole on every rank; one message per dtype averages their gradients, after those of the units.

    Averaged gradients are equal on all ranks to the bit, so an optimizer over `module.parameters()` keeps these parameters equal as
    long as it updates each from its own gradient and state alone.

    `ignored`: modules and parameters of the module, else ValueError. `named`: all these parameters and their names.
    """

    def __init__(self, module: nn.Module, ignored: Sequence[nn.Module | nn.Parameter]) -> None:
        chosen: set[Tensor] = set()
        known = set(module.parameters())
        if isinstance(ignored, (nn.Module, Tensor)) or not isinstance(ignored, Iterable):
            raise ValueError(f"ignored: must list modules and parameters, not be a {type(ignored).__name__}")
        for entry in ignored:
            if not isinstance(entry, (nn.Module, nn.Parameter)):
                raise ValueError(f"ignored: a {type(entry).__name__} is neither a module nor a parameter")
            parameters = set(entry.parameters()) if isinstance(entry, nn.Module) else {entry}
            if not parameters <= known:
                raise ValueError(f"ignored: a {type(entry).__name__} is not part of the module")
            chosen |= parameters
        self.named = {parameter: name for name, parameter in module.named_parameters() if parameter in chosen}
        self.indices: list[int] = []
        """Indices of the trained ones in FSDP's list of trained parameters."""

    def take_over(
        self, trained: Sequence[nn.Parameter], reduce_dtype: torch.dtype | None, collectives: Collectives
    ) -> None:
        """Make the buckets for their gradients, which are averaged over all ranks at once."""
        self._groups = ShardGroups(collectives)
        for parameter in self.named:
            parameter.data = made_dense(parameter.data)
        self.indices = [index for index, parameter in enumerate(trained) if parameter in self.named]
        members = [trained[index] for index in self.indices]
        self._plan = plan_buckets(members, bucket_bytes=math.inf, dtype=reduce_dtype)
        self.buckets = make_buckets("ignored", members, self._plan, dtype=reduce_dtype, keeps_dtype=True)

    def send(self, gradients: Sequence[Tensor | None]) -> None:
        """Start averaging. `gradients`: in the order of `indices`."""
        for bucket, members in zip(self.buckets, self._plan, strict=True):
            bucket.send(self._groups, [gradients[member] for member in members])

    def receive(self) -> None:
        """Wait for the averages and make them the parameters' gradients. Call under no_grad."""
        for bucket in self.buckets:
            bucket.receive()


# The state dict of whole parameters.


def checked_device(device: torch.device | str) -> torch.device:
    """The device. ValueError where it does not exist: raised before any rank waits for another's message."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device: {device!r} is not available here: {str(error).splitlines()[0]}") from None


def gathered_parameters(
    units: Sequence[FSDPUnit], device: torch.device, *, kept: bool = True
) -> dict[nn.Parameter, Tensor]:
    """A whole copy of each parameter on `device`; {} unless `kept`. A collective: ranks that keep nothing must call it too."""
    whole: dict[nn.Parameter, Tensor] = {}
    for unit in units:
        unit.reshard()
        tensors = unit.gathered(unit.shard)
        if kept:
            copies = [tensor.to(device, copy=True) for tensor in tensors]
            whole.update(zip(unit.parameters, copies, strict=True))
    return whole


def load_whole(
    module: nn.Module, current: Mapping[str, Any], units: Sequence[FSDPUnit], state: Mapping[str, Any], *, strict: bool
) -> tuple[list[str], list[str]]:
    """Load the whole `state` into the module; returns the names only in `current`, its state dict, and those only in `state`.

    ValueError, before anything is changed, for a value that is not a tensor or has another shape, and if `strict` for such a name.
    """
    places = {parameter: (unit, index) for unit in units for index, parameter in enumerate(unit.parameters)}
    missing = [name for name in current if name not in state]
    unexpected = [name for name in state if name not in current]
    if strict and (missing or unexpected):
        where = "the module" if missing else "the state dict"
        raise ValueError(f"state: {min(missing or unexpected)} is only in {where}")
    both = {name: value for name, value in current.items() if name in state}
    for name, value in both.items():
        if not name.endswith(_EXTRA):
            unit, index = places.get(value, (None, 0))
            _check(name, value.shape if unit is None else unit.shape(index), state[name])
    for name, value in both.items():
        if name.endswith(_EXTRA):
            module.get_submodule(name.removesuffix(_EXTRA).removesuffix(".")).set_extra_state(state[name])
            continue
        unit, index = places.get(value, (None, 0))
        if unit is None:
            value.detach().copy_(state[name])
        else:
            unit.reshard()
            unit.load(index, state[name])
    return missing, unexpected


def _check(name: str, shape: torch.Size, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"state: {name} is a {type(value).__name__}, but in the module it is a tensor")
    if value.shape != shape:
        raise ValueError(f"state: {name} has shape {tuple(value.shape)}, but in the module {tuple(shape)}")
