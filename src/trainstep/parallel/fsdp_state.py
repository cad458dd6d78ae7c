"""FSDP's state dict of whole parameters: gathered from all ranks to be saved, cut into pieces to be loaded."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.parallel.fsdp_unit import FSDPUnit

_EXTRA = "_extra_state"
"""What torch calls the key of a module's own extra state."""


def checked_device(device: torch.device | str) -> torch.device:
    """The device; ValueError where there is none of that name, before any rank waits for another's message."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device: {device!r} is not to be had here: {str(error).splitlines()[0]}") from None


def gathered_parameters(
    units: Sequence[FSDPUnit], device: torch.device, *, kept: bool = True
) -> dict[nn.Parameter, Tensor]:
    """Each parameter's whole copy on `device`; a collective, in which a rank takes part that keeps nothing of it."""
    whole: dict[nn.Parameter, Tensor] = {}
    for unit in units:
        unit.reshard()
        tensors = unit.gathered(unit.shard)
        if kept:
            whole.update({p: tensor.to(device, copy=True) for p, tensor in zip(unit.parameters, tensors, strict=True)})
    return whole


def load_whole(
    module: nn.Module, own: Mapping[str, Any], units: Sequence[FSDPUnit], state: Mapping[str, Any], *, strict: bool
) -> tuple[list[str], list[str]]:
    """Take `state`, whole, into the module whose state dict `own` is; the names only in `own`, and those only in `state`.

    ValueError, before anything is changed, for a value that is no tensor or of another shape, and if `strict` for a name.
    """
    places = {parameter: (unit, index) for unit in units for index, parameter in enumerate(unit.parameters)}
    missing = [name for name in own if name not in state]
    unexpected = [name for name in state if name not in own]
    if strict and (missing or unexpected):
        where = "the module" if missing else "the state dict"
        raise ValueError(f"state: {min(missing or unexpected)} is only in {where}")
    both = {name: value for name, value in own.items() if name in state}
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


def _check(name: str, shape: torch.Size, given: Any) -> None:
    if not isinstance(given, Tensor):
        raise ValueError(f"state: {name} is a {type(given).__name__}, and the module's a tensor")
    if given.shape != shape:
        raise ValueError(f"state: {name} is {tuple(given.shape)}, and the module's {tuple(shape)}")
