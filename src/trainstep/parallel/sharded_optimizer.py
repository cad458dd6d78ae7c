"""Any optimizer with its state spread over ranks, by whole parameters (ZeRO stage 1; Rajbhandari 2020, section 5.1).

    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, ranks=ranks, lr=1e-4)

For P bytes of parameters on n ranks a rank keeps about 1/n of the state, and each step sends P bytes more than data parallel alone.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainstep.costs.buckets import assign_owners
from trainstep.parallel.collectives import DONE, Collectives, Pending, Traffic
from trainstep.parallel.flat_buffer import FlatBuffer
from trainstep.parallel.flat_optimizer import FlatShardedOptimizer
from trainstep.parallel.gradient_sync import HeldTensors
from trainstep.parallel.ranks import Ranks, ranks_around
from trainstep.parallel.same_setup import check_same_setup, named_in_groups, options_of_groups
from trainstep.parallel.sharded_state import gather_state, own_part

_NOT_OPTIONS = ("params", "param_names")


class ShardedOptimizer(torch.optim.Optimizer):
    """One optimizer a rank, over the parameters that the rank owns. A step, with gradients averaged before:

    1. Every rank has all parameters and all gradients, the same everywhere.
    2. The owner of a parameter, and nobody else, keeps its state and updates it.
    3. Each owner broadcasts what it owns: P bytes in all, sent whether there was a gradient or not, so that messages pair up.
       A parameter of `pack_below_mib` or more goes as it lies; an owner's smaller ones share a message (one for each dtype), are
       copied into it and out of it, each at a multiple of eight elements. All are started, then waited for.

    (Packing saves messages and costs copies: on gloo it paid below about 1 MiB, docs/log.md. `trainstep collectives` says what
    a message costs elsewhere.)

    Owners: the largest parameter first, each to the rank with the fewest bytes so far. Frozen parameters have none.

    `optimizer_cls(parameter_groups, **kwargs)` makes the rank's own optimizer. What it does to one parameter must not depend on
    others: not LBFGS. Parameters begin equal on all ranks, as after wrapping the module for gradient synchronisation. A closure is
    called once a step, before the update, on every rank. Schedulers, hooks and `add_param_group` work as in any optimizer; hooks
    that torch keeps for all optimizers are called for the rank's own one too. `state` holds what this rank owns. Parameters, groups
    and options must be the same on all ranks, else ValueError on every rank.
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
        """Bytes of parameters, by owner."""
        self._owners: dict[Tensor, int | None] = {}
        self._pack_below_bytes = pack_below_mib * 2**20
        self._messages: list[_Message] | None = None
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
        """Flat shards in place of whole parameters (ZeRO 1 and 2): the module's gradients are sharded too, and the gather hides
        behind the update and the next forward. For element-wise optimizers (behind the update only where steps are counted tensor
        by tensor); options as FlatShardedOptimizer's, and the optimizer's own.
        """
        return FlatShardedOptimizer(module, optimizer_cls, **options)

    @property
    def traffic(self) -> Traffic:
        """Messages and bytes sent so far."""
        return self.collectives.traffic

    @property
    def owners(self) -> list[int | None]:
        """The rank that owns each parameter, in the order of the groups; None of a frozen one."""
        return [self._owners[parameter] for group in self.param_groups for parameter in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Further parameters, given to whoever has least so far. Every rank must add the same, else ValueError on every rank."""
        super().add_param_group(param_group)
        if self._local is not None:
            self._check_same(self.param_groups[-1:], {})
            self._assign(self.param_groups[-1]["params"])
            self._local.add_param_group(self._share(self.param_groups[-1]))
            self._messages = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update what this rank owns, and receive the rest. ValueError if a parameter was unfrozen since it was given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(owner is None and parameter.requires_grad for parameter, owner in self._owners.items()):
            raise ValueError(
                "params: one that was frozen when the optimizer was made now is not; make the optimizer anew"
            )
        local = self._own()
        for group, mine in zip(self.param_groups, local.param_groups, strict=True):
            mine.update(_options(group))
        with _LentAttributes(self, local, ("grad_scale", "found_inf")):
            local.step()
        self._read_options()
        self._exchange()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """This rank's part: torch's format with the state of owned parameters alone, and under `shard` who owns which.

        `load_state_dict` takes it back on the same rank of as many ranks; `merge_state_dicts` makes a whole one of all ranks'.
        """
        shard = {"rank": self.ranks.rank, "world_size": self.ranks.world_size, "owners": self.owners}
        return super().state_dict() | {"shard": shard}

    def gathered_state_dict(self, *, on_all_ranks: bool = False) -> dict[str, Any] | None:
        """What the optimizer would write if it were not sharded, its tensors on the CPU; None on ranks other than the first.

        Every rank must call it. Costs a broadcast a tensor of state, and on each device the memory of the largest of them.
        """
        whole = super().state_dict()
        keep = on_all_ranks or self.ranks.is_first
        state = gather_state(whole["state"], self.collectives, keep=keep)
        return whole | {"state": state} if keep else None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state, written by any number of ranks or by an optimizer that is not sharded, or this rank's own part.

        ValueError for another rank's part, or one of another number of ranks.
        """
        super().load_state_dict(own_part(state_dict, self.owners, self.ranks))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Where torch's `load_state_dict` ends: options are in the groups here, and the state belongs to the local optimizer."""
        super().__setstate__(state)
        local = self._own()
        mine = [parameter for group in local.param_groups for parameter in group["params"]]
        number = {parameter: index for index, parameter in enumerate(mine)}
        groups = [
            _options(group) | {"params": [number[parameter] for parameter in own["params"]]}
            for group, own in zip(self.param_groups, local.param_groups, strict=True)
        ]
        local.load_state_dict(
            {"state": {number.get(key, key): it for key, it in self.state.items()}, "param_groups": groups}
        )
        self.state = local.state
        self._read_options()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether GradScaler may leave unscaling and skipping to the optimizer."""
        return getattr(self._local, "_step_supports_amp_scaling", False)

    def held_tensors(self) -> HeldTensors:
        """What small parameters travel in together, from the first step on."""
        return HeldTensors(staging=[message.flat for message in self._messages or () if message.flat is not None])

    def _own(self) -> torch.optim.Optimizer:
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
        for group, mine in zip(self.param_groups, self._own().param_groups, strict=True):
            group.update(_options(mine))

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
            for parameter in (parameter for parameter, its in self._owners.items() if its == owner):
                if parameter.nbytes >= self._pack_below_bytes and parameter.is_contiguous():
                    messages.append(_Message(owner, [parameter]))
                else:
                    packed.setdefault(parameter.dtype, []).append(parameter)
            messages += [_Message(owner, parameters) for parameters in packed.values()]
        return messages


class _Message:
    """Parameters of one owner that travel together: one as it lies, several (or one with gaps) by way of a flat tensor."""

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
        self._is_mine = collectives.ranks.rank == self._owner
        if self._buffer is not None and self._is_mine:
            torch._foreach_copy_(self._buffer.views, self._parameters)
        sent = self._parameters[0].detach() if self._buffer is None else self._buffer.flat
        self._pending = collectives.broadcast(sent, source=self._owner, label=f"parameters of rank {self._owner}")

    def receive(self) -> None:
        self._pending.wait()
        self._pending = DONE
        if self._buffer is not None and not self._is_mine:
            torch._foreach_copy_(self._parameters, self._buffer.views)


class _LentAttributes:
    """What GradScaler sets on the optimizer that it steps, set on the one within for as long."""

    def __init__(self, lender: object, borrower: object, names: Sequence[str]) -> None:
        self._lent = {name: getattr(lender, name) for name in names if hasattr(lender, name)}
        self._borrower = borrower

    def __enter__(self) -> None:
        for name, value in self._lent.items():
            setattr(self._borrower, name, value)

    def __exit__(self, *_error: object) -> None:
        for name in self._lent:
            delattr(self._borrower, name)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in _NOT_OPTIONS}
