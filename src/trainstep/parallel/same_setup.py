"""Checks that every rank wraps the same module in the same way, before any other message is sent.

Collectives pair up by order alone. Ranks that disagree about a shape, the order of parameters or the strategy send messages that do
not fit each other: gloo then aborts a rank that did nothing wrong, NCCL hangs, and some disagreements train on silently. So the
first message of every wrapper is a hash of a description of itself:

    32 bytes a rank     usually equal on all ranks: then the check is done
    descriptions        only where hashes differ; each rank then says what differs and on which ranks, and raises
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
    """Raise ValueError on every rank if one uses another strategy, other tensors or other options, naming what and which ranks.

    Every rank must call it, before any other message of the same wrapper. `tensors`: all parameters and buffers, in their order,
    with names. Costs one message of 32 bytes a rank, for which the host waits; nothing for a single process.
    """
    ranks = collectives.ranks
    if ranks.world_size == 1:
        return
    text = json.dumps(
        {
            "strategy": strategy,
            "tensors": {name: _properties(tensor) for name, tensor in tensors},
            "options": _plain(options or {}),
        }
    )
    own_hash = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)
    hashes = torch.empty(ranks.world_size * _HASH_BYTES, dtype=torch.uint8, device=ranks.device)
    collectives.all_gather(hashes, own_hash.to(ranks.device), label="setup").wait()
    if len(set(map(tuple, hashes.view(ranks.world_size, _HASH_BYTES).tolist()))) == 1:
        return
    differences = _differences([json.loads(rank_text) for rank_text in collectives.gather_texts(text)])
    more = f"; and {len(differences) - _MOST_NAMED} more" if len(differences) > _MOST_NAMED else ""
    raise ValueError(
        f"{'; '.join(differences[:_MOST_NAMED])}{more}; every rank must wrap the same module with the same options"
    )


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The module's parameters and buffers, with their names."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def named_in_groups(groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """The parameters of an optimizer's groups, with their names if the groups have them, else with their positions."""
    for number, group in enumerate(groups):
        names = group.get("param_names", ())
        for index, parameter in enumerate(group["params"]):
            name = names[index] if index < len(names) else f"params[{index}]"
            yield name if len(groups) == 1 else f"group {number}: {name}", parameter


def options_of_groups(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The options in an optimizer's groups: all but their parameters."""
    return {
        f"group {number}: {name}": value
        for number, group in enumerate(groups)
        for name, value in group.items()
        if name not in ("params", "param_names")
    }


def names_of(module: nn.Module, units: Sequence[nn.Module] | None) -> list[str] | None:
    """The names of the modules in `units` within `module`; None for None."""
    if units is None:
        return None
    names = {submodule: name for name, submodule in module.named_modules()}
    return [names.get(unit, f"a {type(unit).__name__} outside of it") for unit in units]


def _properties(tensor: Tensor) -> dict[str, tuple[str, str]]:
    """The properties that must be equal on all ranks, each a verb and a value."""
    contiguous = tensor.is_contiguous()
    return {
        "kind": ("is", "a parameter" if isinstance(tensor, nn.Parameter) else "a buffer"),
        "shape": ("has shape", str(tuple(tensor.shape))),
        "dtype": ("has dtype", str(tensor.dtype).removeprefix("torch.")),
        "trained": ("is", "trained" if tensor.requires_grad else "frozen"),
        "layout": ("is", "contiguous") if contiguous else ("has strides", str(tensor.stride())),
    }


def _plain(value: Any) -> Any:
    """The option as a JSON value: a function or class as its name, any other object as its type."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in sorted(value, key=str)}  # their order does not matter
    if isinstance(value, (list, tuple)):
        return [_plain(member) for member in value]
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return getattr(value, "__qualname__", f"a {type(value).__name__}")


def _differences(setups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences that say how strategies differ; if these agree, tensors; if these agree, options."""
    # Only the first kind that differs is reported, since one difference often causes the next.
    strategies = [_difference("strategy", [("is", setup["strategy"]) for setup in setups])]
    tensors = _tensor_differences([setup["tensors"] for setup in setups])
    setup_options = [setup["options"] for setup in setups]
    options = [
        _difference(name, [("is", json.dumps(rank_options.get(name))) for rank_options in setup_options])
        for name in _all_keys(setup_options)
    ]
    for candidates in (strategies, tensors, options):
        differences = [difference for difference in candidates if difference is not None]
        if differences:
            return differences
    raise AssertionError("the hashes of the setups differ, but the setups do not")


def _tensor_differences(tensors: Sequence[Mapping[str, Any]]) -> Iterator[str | None]:
    names = _all_keys(tensors)
    lacking = [name for name in names if any(name not in rank_tensors for rank_tensors in tensors)]
    for name in lacking:
        yield _difference(name, [("is", "there" if name in rank_tensors else "missing") for rank_tensors in tensors])
    for name in names:
        of_ranks = [rank_tensors.get(name) for rank_tensors in tensors]
        for key in next(filter(None, of_ranks)):
            yield _difference(name, [properties and tuple(properties[key]) for properties in of_ranks])
    if not lacking:
        positions = [{name: str(position) for position, name in enumerate(rank_tensors)} for rank_tensors in tensors]
        for name in names:
            yield _difference(name, [("is number", rank_positions[name]) for rank_positions in positions])


def _all_keys(mappings: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def _difference(subject: str, values: Sequence[tuple[str, str] | None]) -> str | None:
    """A sentence if the ranks' values differ, the value of the fewest ranks first. A rank whose value is None does not count."""
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
