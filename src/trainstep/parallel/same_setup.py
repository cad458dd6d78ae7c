"""Whether every rank wraps the same module in the same way, found out before anything depends on it.

Collectives pair up by order alone. Ranks that disagree about a shape, the order of parameters or the strategy send messages that do
not fit each other: gloo then aborts a rank that did nothing wrong, NCCL hangs, and some disagreements train on silently. So the
first thing that each wrapper sends, whichever it is, is a hash of its own description:

    32 bytes a rank     equal on all ranks, as a rule: that was all
    descriptions        only where hashes differ; each rank then says what differs, where, and raises
"""

import hashlib
import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.parallel.collectives import Collectives

_HASH_BYTES = 32
_MOST_NAMED = 3
_MOST_RANKS = 8
_MOST_CHARACTERS = 100


def check_same_setup(
    strategy: str,
    tensors: Iterable[tuple[str, Tensor]],
    collectives: Collectives,
    *,
    options: Mapping[str, Any] | None = None,
) -> None:
    """ValueError on every rank if one is about to use another strategy, other tensors or other options, naming what and where.

    Every rank must call it, before any other message of the same wrapper. `tensors`: all parameters and buffers, in their order, by
    names. Costs one message of 32 bytes a rank, for which the host waits; nothing for a process on its own.
    """
    ranks = collectives.ranks
    if ranks.world_size == 1:
        return
    text = json.dumps(
        {
            "strategy": strategy,
            "tensors": {name: _described(tensor) for name, tensor in tensors},
            "options": _plain(options or {}),
        }
    )
    own_hash = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)
    hashes = torch.empty(ranks.world_size * _HASH_BYTES, dtype=torch.uint8, device=ranks.device)
    collectives.all_gather(hashes, own_hash.to(ranks.device), label="setup").wait()
    if len(set(map(tuple, hashes.view(ranks.world_size, _HASH_BYTES).tolist()))) == 1:
        return
    differences = _differences([json.loads(told) for told in collectives.gather_texts(text)])
    more = f"; and {len(differences) - _MOST_NAMED} more" if len(differences) > _MOST_NAMED else ""
    raise ValueError(
        f"{'; '.join(differences[:_MOST_NAMED])}{more}; every rank must wrap the same module with the same options"
    )


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The module's parameters and buffers."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def named_in_groups(groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """The parameters of an optimizer's groups, by their names if the groups have them, else by their places."""
    for number, group in enumerate(groups):
        names = group.get("param_names", ())
        for place, parameter in enumerate(group["params"]):
            name = names[place] if place < len(names) else f"params[{place}]"
            yield name if len(groups) == 1 else f"group {number}: {name}", parameter


def options_of_groups(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the groups of an optimizer have beside their parameters."""
    return {
        f"group {number}: {name}": value
        for number, group in enumerate(groups)
        for name, value in group.items()
        if name not in ("params", "param_names")
    }


def names_of(module: nn.Module, units: Sequence[nn.Module] | None) -> list[str] | None:
    """What the modules in `units` are called within `module`; None for None."""
    if units is None:
        return None
    names = {submodule: name for name, submodule in module.named_modules()}
    return [names.get(unit, f"a {type(unit).__name__} outside of it") for unit in units]


def _described(tensor: Tensor) -> dict[str, tuple[str, str]]:
    """What must be equal on all ranks: a verb and a value for each property."""
    contiguous = tensor.is_contiguous()
    return {
        "kind": ("is", "a parameter" if isinstance(tensor, nn.Parameter) else "a buffer"),
        "shape": ("has shape", str(tuple(tensor.shape))),
        "dtype": ("has dtype", str(tensor.dtype).removeprefix("torch.")),
        "trained": ("is", "trained" if tensor.requires_grad else "frozen"),
        "layout": ("is", "contiguous") if contiguous else ("has strides", str(tensor.stride())),
    }


def _plain(value: Any) -> Any:
    """The option as a JSON value; a function or class by its name, anything else by its type."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in sorted(value, key=str)}  # their order says nothing
    if isinstance(value, (list, tuple)):
        return [_plain(member) for member in value]
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return getattr(value, "__qualname__", f"a {type(value).__name__}")


def _differences(setups: Sequence[Mapping[str, Any]]) -> list[str]:
    """What differs: strategies; if these agree, tensors; if these agree, options. One difference often causes the next."""
    strategies = [_difference("strategy", [("is", setup["strategy"]) for setup in setups])]
    tensors = _differences_of_tensors([setup["tensors"] for setup in setups])
    options = [setup["options"] for setup in setups]
    of_options = [
        _difference(name, [("is", json.dumps(of_rank.get(name))) for of_rank in options]) for name in _united(options)
    ]
    for candidates in (strategies, tensors, of_options):
        differences = [difference for difference in candidates if difference is not None]
        if differences:
            return differences
    raise AssertionError("hashes differ, and what was hashed does not")


def _differences_of_tensors(tensors: Sequence[Mapping[str, Any]]) -> Iterator[str | None]:
    names = _united(tensors)
    lacking = [name for name in names if any(name not in of_rank for of_rank in tensors)]
    for name in lacking:
        yield _difference(name, [("is", "there" if name in of_rank else "missing") for of_rank in tensors])
    for name in names:
        of_ranks = [of_rank.get(name) for of_rank in tensors]
        for key in next(filter(None, of_ranks)):
            yield _difference(name, [properties and tuple(properties[key]) for properties in of_ranks])
    if not lacking:
        places = [{name: str(place) for place, name in enumerate(of_rank)} for of_rank in tensors]
        for name in names:
            yield _difference(name, [("is number", of_rank[name]) for of_rank in places])


def _united(of_ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys that any of them has, in their order."""
    return list(dict.fromkeys(key for of_rank in of_ranks for key in of_rank))


def _difference(subject: str, values: Sequence[tuple[str, str] | None]) -> str | None:
    """One sentence if the ranks' values differ, the fewest ranks first. None: a rank that has no value does not count."""
    ranks_with: dict[tuple[str, str], list[int]] = {}
    for rank, value in enumerate(values):
        if value is not None:
            ranks_with.setdefault(value, []).append(rank)
    if len(ranks_with) < 2:
        return None
    groups = sorted(ranks_with.items(), key=lambda group: (len(group[1]), -group[1][0]))
    same_verb = len({verb for verb, _ in ranks_with}) == 1
    phrases = [
        f"{'' if same_verb and number else f'{verb} '}{textwrap.shorten(value, _MOST_CHARACTERS)} on {_listed(ranks)}"
        for number, ((verb, value), ranks) in enumerate(groups)
    ]
    return f"{subject}: {' and '.join(phrases)}"


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_RANKS]))
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
