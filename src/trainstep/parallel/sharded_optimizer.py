"""Shards the state of any optimizer over ranks by whole parameters (ZeRO stage 1; Rajbhandari 2020, section 5.1).

    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, ranks=ranks, lr=1e-4)

For P bytes of parameters on n ranks a rank keeps about 1/n of the state, and each step sends P bytes more than data parallel alone.
Ranks send their state as a description (names, dtypes, shapes and plain values, as JSON) and tensors; nothing is unpickled.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from trainstep.costs.buckets import assign_owners
from trainstep.parallel.collectives import DONE, Collectives, Pending, Traffic
from trainstep.parallel.flat_buffer import FlatBuffer
from trainstep.parallel.flat_optimizer import FlatShardedOptimizer, lend_scaler_attributes
from trainstep.parallel.gradient_sync import HeldTensors
from trainstep.parallel.ranks import Ranks, ranks_around
from trainstep.parallel.same_setup import check_same_setup, named_in_groups, options_of_groups

_NOT_OPTIONS = ("params", "param_names")
_PLAIN = (bool, int, float, str, type(None))


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer over the parameters that this rank owns. A step, after gradients were averaged:

    1. Every rank has all parameters and all gradients, the same everywhere.
    2. Only the owner of a parameter keeps its state and updates it.
    3. Each owner broadcasts its parameters: P bytes in all, sent whether there was a gradient or not, so that messages pair up.
       A parameter of `pack_below_mib` or more is sent without a copy. An owner's smaller parameters share a message (one for each
       dtype): they are copied into it and out of it, each at a multiple of eight elements. All are started, then waited for.

    (Packing saves messages and costs copies: on gloo it paid below about 1 MiB, docs/log.md. `trainstep collectives` measures what
    a message costs elsewhere.)

    Owners: the largest parameter first, each to the rank with the fewest bytes so far. Frozen parameters have no owner.

    `optimizer_cls(parameter_groups, **kwargs)` makes the rank's own optimizer. Its update of one parameter must not depend on other
    parameters, so not LBFGS. Parameters must be equal on all ranks at the start, as after wrapping the module for gradient
    synchronisation. A closure is called once per step, before the update, on every rank. Schedulers, hooks and `add_param_group`
    work as in any optimizer; hooks that torch keeps for all optimizers are called for the rank's own optimizer too. `state` is that
    of the parameters that this rank owns. Parameters, groups and options must be the same on all ranks, else ValueError on every
    rank.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: Callable[..., torch.optim.Optimizer],
        *,
        ranks: Ranks | None = None,
        pack_below_mib: float = 1.0,
        **kwargs: Any,
    ) -> None:
        self._local: torch.optim.Optimizer | None = None
        super().__init__(params, {})
        self.ranks = ranks or ranks_around(parameter for group in self.param_groups for parameter in group["params"])
        self.collectives = Collectives(self.ranks)
        self.owned_bytes = [0] * self.ranks.world_size
        """Bytes of parameters that each rank owns."""
        self._owners: dict[Tensor, int | None] = {}
        self._pack_below_bytes = pack_below_mib * 2**20
        self._messages: list[_Message] | None = None
        self._loading: Mapping[Any, Any] = {}
        """The rank's part of the state that is being loaded, by index of a parameter."""
        self._check_same(
            self.param_groups, {"optimizer_cls": optimizer_cls, "pack_below_mib": pack_below_mib, **kwargs}
        )
        self._assign([parameter for group in self.param_groups for parameter in group["params"]])
        self._local = optimizer_cls([self._share(group) for group in self.param_groups], **kwargs)
        self.defaults = self._local.defaults
        self.state = self._local.state
        self._read_options()

    @classmethod
    def flat(
        cls, module: torch.nn.Module, optimizer_cls: Callable[..., torch.optim.Optimizer], **options: Any
    ) -> FlatShardedOptimizer:
        """The optimizer with flat shards in place of whole parameters (ZeRO 1 and 2), for optimizers that are element-wise.

        The module's gradients are sharded too, and the gather is hidden behind the next forward, and behind the update where the
        optimizer counts steps tensor by tensor. `options`: those of FlatShardedOptimizer and of the optimizer.
        """
        return FlatShardedOptimizer(module, optimizer_cls, **options)

    @property
    def traffic(self) -> Traffic:
        """Messages and bytes sent so far."""
        return self.collectives.traffic

    @property
    def owners(self) -> list[int | None]:
        """The rank that owns each parameter, in the order of the groups; None for a frozen parameter."""
        return [self._owners[parameter] for group in self.param_groups for parameter in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, each owned by the rank with the fewest bytes so far. ValueError on every rank unless all add the same."""
        super().add_param_group(param_group)
        if self._local is not None:
            self._check_same(self.param_groups[-1:], {})
            self._assign(self.param_groups[-1]["params"])
            self._local.add_param_group(self._share(self.param_groups[-1]))
            self._messages = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that this rank owns and receive the others. ValueError if a parameter was unfrozen meanwhile."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(owner is None and parameter.requires_grad for parameter, owner in self._owners.items()):
            raise ValueError("params: a parameter was unfrozen after the optimizer was made; make the optimizer again")
        local = self._local_optimizer()
        for group, local_group in zip(self.param_groups, local.param_groups, strict=True):
            local_group.update(_options(group))
        lend_scaler_attributes(self, local)
        local.step()
        self._read_options()
        self._exchange()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state: torch's format, only for owned parameters, and under `shard` the owners.

        It loads on the same rank of the same number of ranks; `merge_state_dicts` makes a whole state dict of all ranks' parts.
        """
        shard = {"rank": self.ranks.rank, "world_size": self.ranks.world_size, "owners": self.owners}
        return super().state_dict() | {"shard": shard}

    def gathered_state_dict(self, *, on_all_ranks: bool = False) -> dict[str, Any] | None:
        """The state dict of the same optimizer unsharded, with tensors on the CPU; None on ranks other than the first.

        Every rank must call it. Costs a broadcast per tensor of state, and on each device the memory of the largest tensor.
        """
        whole = super().state_dict()
        keep = on_all_ranks or self.ranks.is_first
        state = gather_state(whole["state"], self.collectives, keep=keep)
        return whole | {"state": state} if keep else None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's own part, or a whole state dict, from any number of ranks or from an unsharded optimizer.

        ValueError for the part of another rank or of another number of ranks. Where the rank's own optimizer loads parameters too
        (MasterWeights), they are sent to the other ranks: all ranks must load.
        """
        part = own_part(state_dict, self.owners, self.ranks)
        # The rank's own optimizer gets the state as it is: the base class would round it to the parameters' dtypes.
        self._loading = part["state"]
        super().load_state_dict(part | {"state": {}})
        self._loading = {}
        if getattr(self._local, "loads_parameters", False):
            with torch.no_grad():
                self._exchange()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch's `load_state_dict` ends here, with the options in the groups. The state belongs to the local optimizer.
        super().__setstate__(state)
        local = self._local_optimizer()
        owned = {parameter for group in local.param_groups for parameter in group["params"]}
        everywhere = [parameter for group in self.param_groups for parameter in group["params"]]
        indices = [index for index, parameter in enumerate(everywhere) if parameter in owned]
        number = {index: place for place, index in enumerate(indices)}
        """Index of an owned parameter among all -> among those of the local optimizer, which have the same order."""
        ends = list(accumulate(len(group["params"]) for group in local.param_groups))
        groups = [
            _options(group) | {"params": list(range(end - len(local_group["params"]), end))}
            for group, local_group, end in zip(self.param_groups, local.param_groups, ends, strict=True)
        ]
        local_state = {number.get(key, key): values for key, values in self._loading.items()}
        local.load_state_dict({"state": local_state, "param_groups": groups})
        self.state = local.state
        self._read_options()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler may leave unscaling and skipping to the optimizer."""
        return getattr(self._local, "_step_supports_amp_scaling", False)

    def held_tensors(self) -> HeldTensors:
        """The flat tensors in which small parameters are sent, from the first step on."""
        return HeldTensors(staging=[message.flat for message in self._messages or () if message.flat is not None])

    def _local_optimizer(self) -> torch.optim.Optimizer:
        assert self._local is not None
        return self._local

    def _check_same(self, groups: Sequence[dict[str, Any]], options: dict[str, Any]) -> None:
        options |= options_of_groups(groups)
        check_same_setup(type(self).__name__, named_in_groups(groups), self.collectives, options=options)

    def _assign(self, parameters: Sequence[Tensor]) -> None:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._owners |= dict.fromkeys(parameters)
        owners = assign_owners([parameter.nbytes for parameter in trained], self.owned_bytes)
        for parameter, owner in zip(trained, owners, strict=True):
            self._owners[parameter] = owner
            self.owned_bytes[owner] += parameter.nbytes

    def _share(self, group: dict[str, Any]) -> dict[str, Any]:
        owned = [parameter for parameter in group["params"] if self._owners[parameter] == self.ranks.rank]
        return {"params": owned} | _options(group)

    def _read_options(self) -> None:
        for group, local_group in zip(self.param_groups, self._local_optimizer().param_groups, strict=True):
            group.update(_options(local_group))

    def _exchange(self) -> None:
        if self.ranks.world_size == 1:
            return
        if self._messages is None:
            self._messages = self._plan()
        for message in self._messages:
            message.send(self.collectives)
        for message in self._messages:
            message.receive()

    def _plan(self) -> list["_Message"]:
        messages: list[_Message] = []
        for owner in range(self.ranks.world_size):
            packed: dict[torch.dtype, list[Tensor]] = {}
            for parameter, parameter_owner in self._owners.items():
                if parameter_owner != owner:
                    continue
                if parameter.nbytes >= self._pack_below_bytes and parameter.is_contiguous():
                    messages.append(_Message(owner, [parameter]))
                else:
                    packed.setdefault(parameter.dtype, []).append(parameter)
            messages += [_Message(owner, parameters) for parameters in packed.values()]
        return messages


class _Message:
    """Parameters of one owner in one message: a contiguous parameter without a copy, others through a flat tensor."""

    def __init__(self, owner: int, parameters: Sequence[Tensor]) -> None:
        self._owner = owner
        self._parameters = list(parameters)
        self._pending: Pending = DONE
        first = self._parameters[0]
        direct = len(self._parameters) == 1 and first.is_contiguous()
        self._buffer = None if direct else FlatBuffer(self._parameters, dtype=first.dtype, device=first.device)

    @property
    def flat(self) -> Tensor | None:
        return None if self._buffer is None else self._buffer.flat

    def send(self, collectives: Collectives) -> None:
        self._is_owner = collectives.ranks.rank == self._owner
        if self._buffer is not None and self._is_owner:
            torch._foreach_copy_(self._buffer.views, self._parameters)
        sent = self._parameters[0].detach() if self._buffer is None else self._buffer.flat
        self._pending = collectives.broadcast(sent, source=self._owner, label=f"parameters of rank {self._owner}")

    def receive(self) -> None:
        self._pending.wait()
        self._pending = DONE
        if self._buffer is not None and not self._is_owner:
            torch._foreach_copy_(self._parameters, self._buffer.views)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in _NOT_OPTIONS}


# The state of a sharded optimizer between ranks and files: cut into parts, merged, gathered.


def own_part(state_dict: Mapping[str, Any], owners: Sequence[int | None], ranks: Ranks) -> dict[str, Any]:
    """This rank's part of a whole state dict. A part is returned as it is; ValueError if it is another rank's."""
    plain = {name: value for name, value in state_dict.items() if name != "shard"}
    shard = state_dict.get("shard")
    if shard is None:
        owned = {index for index, owner in enumerate(owners) if owner == ranks.rank}
        state = {key: values for key, values in state_dict["state"].items() if not isinstance(key, int) or key in owned}
        return plain | {"state": state}
    expected = {"rank": ranks.rank, "world_size": ranks.world_size, "owners": list(owners)}
    if shard != expected:
        raise ValueError(
            f"state_dict: this is the part of rank {shard['rank']} of {shard['world_size']}, and does not fit "
            f"rank {ranks.rank} of {ranks.world_size}; put all parts together with merge_state_dicts, which fits anywhere"
        )
    return plain


def merge_state_dicts(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state dict of the same optimizer unsharded, from the parts of all ranks in any order.

    ValueError if a part is missing, is given twice, or belongs to another set.
    """
    shards = [part.get("shard") for part in parts]
    if not parts or any(shard is None for shard in shards):
        raise ValueError("parts: needs state dicts of a ShardedOptimizer's ranks, at least one")
    ranks = sorted(shard["rank"] for shard in shards)  # type: ignore[index]
    world_size = shards[0]["world_size"]  # type: ignore[index]
    if ranks != list(range(world_size)):
        raise ValueError(f"parts: needs one part of each rank from 0 to {world_size - 1}, not of {ranks}")
    if any(shard | {"rank": 0} != shards[0] | {"rank": 0} for shard in shards):  # type: ignore[operator]
        raise ValueError("parts: they were not written together: a parameter has different owners in them")
    first = {name: value for name, value in parts[0].items() if name != "shard"}
    return first | {"state": _in_order({key: values for part in parts for key, values in part["state"].items()})}


def gather_state(state: Mapping[Any, Any], collectives: Collectives, *, keep: bool) -> dict[Any, Any]:
    """The state of all ranks, from parts with different keys; tensors are copies on the CPU. Empty without `keep`.

    Every rank must call it. ValueError for state that is not made of tensors, numbers, strings, lists and dicts.
    """
    own_tensors: list[Tensor] = []
    texts = collectives.gather_texts(json.dumps(_describe(state, own_tensors)))
    gathered: dict[Any, Any] = {}
    for source, text in enumerate(texts):
        tensors = iter(own_tensors) if source == collectives.ranks.rank else None
        part = _rebuild(json.loads(text), _receiver(source, tensors, collectives, keep))
        if keep:
            gathered |= part
    return _in_order(gathered)


def _receiver(
    source: int, own_tensors: Iterator[Tensor] | None, collectives: Collectives, keep: bool
) -> Callable[[torch.dtype, list[int]], Tensor | None]:
    """A function that broadcasts the next tensor of rank `source`. `own_tensors`: that rank's tensors, on that rank."""
    device = collectives.ranks.device

    def receive(dtype: torch.dtype, shape: list[int]) -> Tensor | None:
        if own_tensors is None:
            sent = torch.empty(shape, dtype=dtype, device=device)
        else:
            sent = next(own_tensors).detach().to(device).contiguous()
        collectives.broadcast(sent, source=source, label="state").wait()
        if not keep:
            return None
        return sent.to("cpu", copy=own_tensors is not None)  # the next step changes this rank's own tensors

    return receive


def _describe(value: Any, tensors: list[Tensor]) -> Any:
    """`value` as JSON. Its tensors are appended to `tensors`, in the order in which _rebuild asks for them."""
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
        f"state: a {type(value).__name__} cannot be gathered; save each rank's state_dict() and merge them by merge_state_dicts"
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


def _in_order(state: dict[Any, Any]) -> dict[Any, Any]:
    return dict(sorted(state.items(), key=lambda item: (not isinstance(item[0], int), item[0])))
