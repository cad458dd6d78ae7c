"""FSDP's state dict of whole parameters: gathers it from all ranks to save it, cuts it into pieces to load it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.parallel.fsdp_unit import FSDPUnit

_EXTRA = "_extra_state"
"""torch's key for a module's own extra state."""


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
