"""State of a sharded optimizer on its way between ranks and files: gathered, cut into parts, merged.

Only a description of the state (names, dtypes, shapes and plain values, as JSON) and its tensors travel; nothing is unpickled.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainstep.parallel.collectives import Collectives
from trainstep.parallel.ranks import Ranks

_PLAIN = (bool, int, float, str, type(None))


def own_part(state_dict: Mapping[str, Any], owners: Sequence[int | None], ranks: Ranks) -> dict[str, Any]:
    """Of a whole state dict what this rank owns; of a part, the part itself if it is this rank's, else ValueError."""
    plain = {name: value for name, value in state_dict.items() if name != "shard"}
    shard = state_dict.get("shard")
    if shard is None:
        mine = {index for index, owner in enumerate(owners) if owner == ranks.rank}
        state = {key: its for key, its in state_dict["state"].items() if not isinstance(key, int) or key in mine}
        return plain | {"state": state}
    expected = {"rank": ranks.rank, "world_size": ranks.world_size, "owners": list(owners)}
    if shard != expected:
        raise ValueError(
            f"state_dict: this is the part of rank {shard['rank']} of {shard['world_size']}, and does not fit "
            f"rank {ranks.rank} of {ranks.world_size}; put all parts together with merge_state_dicts, which fits anywhere"
        )
    return plain


def merge_state_dicts(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A whole state dict, as an optimizer that is not sharded would write it, from the parts of all ranks in any order.

    ValueError if one is missing, is there twice, or belongs to another set.
    """
    shards = [part.get("shard") for part in parts]
    if not parts or any(shard is None for shard in shards):
        raise ValueError("parts: needs state dicts of a ShardedOptimizer's ranks, at least one")
    ranks = sorted(shard["rank"] for shard in shards)  # type: ignore[index]
    world_size = shards[0]["world_size"]  # type: ignore[index]
    if ranks != list(range(world_size)):
        raise ValueError(f"parts: needs one of each rank from 0 to {world_size - 1}, not of {ranks}")
    if any(shard | {"rank": 0} != shards[0] | {"rank": 0} for shard in shards):  # type: ignore[operator]
        raise ValueError("parts: they were not written together, for parameters have other owners in each")
    first = {name: value for name, value in parts[0].items() if name != "shard"}
    return first | {"state": _in_order({key: its for part in parts for key, its in part["state"].items()})}


def gather_state(state: Mapping[Any, Any], collectives: Collectives, *, keep: bool) -> dict[Any, Any]:
    """The state of all ranks, from parts with keys of their own; tensors are copies on the CPU. Empty without `keep`.

    Every rank must call it. ValueError for state that is not made of tensors, numbers, strings, lists and dicts.
    """
    mine: list[Tensor] = []
    descriptions = _all_gather_json(_describe(state, mine), collectives)
    gathered: dict[Any, Any] = {}
    for source, description in enumerate(descriptions):
        own = iter(mine) if source == collectives.ranks.rank else None
        part = _rebuild(description, _receiver(source, own, collectives, keep))
        if keep:
            gathered |= part
    return _in_order(gathered)


def _receiver(
    source: int, own: Iterator[Tensor] | None, collectives: Collectives, keep: bool
) -> Callable[[torch.dtype, list[int]], Tensor | None]:
    device = collectives.ranks.device

    def receive(dtype: torch.dtype, shape: list[int]) -> Tensor | None:
        mine = None if own is None else next(own).detach().to(device).contiguous()
        sent = torch.empty(shape, dtype=dtype, device=device) if mine is None else mine
        collectives.broadcast(sent, source=source, label="state").wait()
        if not keep:
            return None
        return sent.to("cpu", copy=mine is not None)  # what this rank owns changes with the next step

    return receive


def _describe(value: Any, tensors: list[Tensor]) -> Any:
    """`value` as JSON; its tensors are put at the end of `tensors`, in the order in which _rebuild asks for them."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, Mapping):
        return {"dict": [[key, _describe(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [_describe(item, tensors) for item in value]}
    if isinstance(value, _PLAIN):
        return {"value": value}
    raise ValueError(
        f"state: a {type(value).__name__} cannot be gathered; save each rank's state_dict() and put them together with "
        "merge_state_dicts"
    )


def _rebuild(description: Any, receive: Callable[[torch.dtype, list[int]], Tensor | None]) -> Any:
    ((kind, content),) = description.items()
    if kind == "tensor":
        dtype, shape = content
        return receive(getattr(torch, dtype), shape)
    if kind == "dict":
        return {key: _rebuild(item, receive) for key, item in content}
    if kind == "value":
        return content
    items = [_rebuild(item, receive) for item in content]
    return items if kind == "list" else tuple(items)


def _all_gather_json(value: Any, collectives: Collectives) -> list[Any]:
    """Every rank's value: first how long each is, then all at the length of the longest."""
    ranks = collectives.ranks
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = torch.empty(ranks.world_size, dtype=torch.int64, device=ranks.device)
    collectives.all_gather(lengths, torch.tensor([text.numel()], device=ranks.device), label="state lengths").wait()
    longest = int(lengths.max())
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: text.numel()] = text
    texts = torch.empty(ranks.world_size * longest, dtype=torch.uint8, device=ranks.device)
    collectives.all_gather(texts, padded.to(ranks.device), label="state description").wait()
    rows = texts.cpu().view(ranks.world_size, longest)
    return [json.loads(bytes(row[:length].tolist())) for row, length in zip(rows, lengths.tolist(), strict=True)]


def _in_order(state: dict[Any, Any]) -> dict[Any, Any]:
    return dict(sorted(state.items(), key=lambda item: (not isinstance(item[0], int), item[0])))
