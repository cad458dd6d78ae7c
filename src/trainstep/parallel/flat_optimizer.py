"""The optimizer of ShardedGradients: any element-wise optimizer, over this rank's pieces of the parameters."""

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainstep.parallel.collectives import Collectives
from trainstep.parallel.copies.messages import CopyEngines
from trainstep.parallel.ranks import Ranks, ranks_around
from trainstep.parallel.same_setup import check_same_setup, named_tensors, names_of, options_of_groups
from trainstep.parallel.sharded_flat import ShardedGradients
from trainstep.parallel.units import ELEMENT_WISE, groups_by_tensor, may_step_by_unit, step_unit


class FlatShardedOptimizer(Optimizer):
    """Made by `ShardedOptimizer.flat`. `gradient_sync` is the other half: finish it before `step`.

    `param_groups` are those of the inner optimizer, so schedulers and hyperparameters work as on that. Its tensors are pieces: clip
    by `gradient_sync.clip_grad_norm_`, not by torch's function, which would see only this rank's part of the norm.
    `units`, `bucket_mib`, `reduce_dtype`, `most_in_flight`, `transport`, `shard_ranks`: as in ShardedGradients.

    A unit is sent to the other ranks while the next unit's pieces are updated, if the inner optimizer counts its steps tensor by
    tensor: the element-wise classes of torch.optim, and classes with `counts_steps_by_tensor = True` in their body. It then steps
    once per unit, with copies of its groups that hold only that unit's pieces. With other optimizers, and where there are hooks on
    its step (on those of all optimizers, or put on it by `optimizer_cls`), all pieces are updated first, in one step. An error in
    `step` leaves updated what was updated before it; all units are sent anyway, so that ranks stay in step.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer_cls: Callable[..., Optimizer],
        *,
        ranks: Ranks | None = None,
        groups: Sequence[Mapping[str, Any]] | None = None,
        units: Sequence[nn.Module] | None = None,
        bucket_mib: float | None = None,
        reduce_dtype: torch.dtype | None = None,
        most_in_flight: int = 1,
        transport: CopyEngines | None = None,
        shard_ranks: int | None = None,
        element_wise: bool = False,
        **kwargs: Any,
    ) -> None:
        name = getattr(optimizer_cls, "__name__", str(optimizer_cls))
        if name not in ELEMENT_WISE and not element_wise:
            raise ValueError(
                f"optimizer_cls: {name} is not known to treat each element alone, and flat shards cut tensors anywhere; "
                "use ShardedOptimizer, which keeps tensors whole, or pass element_wise=True if it does"
            )
        trained = {parameter: name for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._index_of = {parameter: index for index, parameter in enumerate(trained)}
        chosen = [dict(group) for group in groups] if groups else [{"params": list(trained)}]
        self._members = [self._indices(group["params"]) for group in chosen]
        self._check_cover(list(trained.values()))
        ranks = ranks or ranks_around(trained)
        options = {
            "optimizer_cls": optimizer_cls,
            "units": names_of(module, units),
            "bucket_mib": bucket_mib,
            "reduce_dtype": reduce_dtype,
            "transport": transport,
            "shard_ranks": shard_ranks,
            **kwargs,
            **options_of_groups(chosen),
            **{f"group {number}: parameters": members for number, members in enumerate(self._members)},
        }
        check_same_setup(type(self).__name__, named_tensors(module), Collectives(ranks), options=options)
        self.gradient_sync = ShardedGradients(
            module,
            ranks,
            units=units,
            bucket_mib=bucket_mib,
            reduce_dtype=reduce_dtype,
            most_in_flight=most_in_flight,
            transport=transport,
            shard_ranks=shard_ranks,
        )
        pieces = self.gradient_sync.pieces
        inner = optimizer_cls(
            [
                {**group, "params": [pieces[index] for index in members if pieces[index] is not None]}
                for group, members in zip(chosen, self._members, strict=True)
            ],
            **kwargs,
        )
        super().__init__(inner.param_groups, inner.defaults)
        self._inner = inner
        self.param_groups = self._inner.param_groups
        self.state = self._inner.state
        self._step_supports_amp_scaling = getattr(self._inner, "_step_supports_amp_scaling", False)
        self._versions: dict[Tensor, int] = {}
        """Whole parameter -> its version at the end of the last step."""
        self._note_versions()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update this rank's pieces and start sending them to the other ranks; the next forward waits where it must.

        A closure must run backward and finish gradient synchronisation itself.
        """
        lend_scaler_attributes(self, self._inner)
        self.gradient_sync.wait_for_parameters()
        self._pass_on_changes()
        if not may_step_by_unit(self._inner):
            loss = self._inner.step(closure)
            self.gradient_sync.gather_parameters()
            return loss
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_by_unit()
        return loss

    def _pass_on_changes(self) -> None:
        """Tell an inner optimizer that keeps copies of its tensors of values that were written to whole parameters."""
        values_changed = getattr(self._inner, "values_changed", None)
        if values_changed is None:
            return
        sync = self.gradient_sync
        pairs = zip(sync.trained_parameters, sync.pieces, strict=True)
        values_changed([p for whole, p in pairs if p is not None and whole._version != self._versions.get(whole)])
        self._note_versions()

    def _note_versions(self) -> None:
        self._versions = {whole: whole._version for whole in self.gradient_sync.trained_parameters}

    def _step_by_unit(self) -> None:
        """Update a unit's pieces and send them while the next unit's are updated, so that the link does not wait for all."""
        group_of = groups_by_tensor(self._inner)
        units = self.gradient_sync.unit_pieces
        unsent = deque(range(len(units)))
        try:
            for pieces in units:
                step_unit(self._inner, pieces, group_of)
                self.gradient_sync.gather_parameters([unsent.popleft()])
        finally:
            self.gradient_sync.gather_parameters(unsent)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the module that were unfrozen after it was wrapped. Every rank must add the same."""
        if not hasattr(self, "_inner"):
            super().add_param_group(param_group)
            return
        self.gradient_sync.wait_for_parameters()
        added = _listed(param_group["params"])
        members = self.gradient_sync.adopt(added)
        self._index_of.update(zip(added, members, strict=True))
        self._members.append(members)
        pieces = self.gradient_sync.pieces
        self._inner.add_param_group({**param_group, "params": [pieces[i] for i in members if pieces[i] is not None]})

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard. It loads on the same rank of the same number of ranks; `gathered_state_dict` loads anywhere."""
        self.gradient_sync.wait_for_parameters()
        return {**self._inner.state_dict(), "shard": self._shard()}

    def _shard(self) -> dict[str, Any]:
        """The rank, the number of ranks, and for each trained parameter the first and end element of the rank's piece.

        Ranks are those of a group (`shard_ranks`): the same place in any group has the same shard.
        """
        edges = [edge for ends in self.gradient_sync.ends for edge in ends]
        ranks = self.gradient_sync.groups.shards.ranks
        return {"rank": ranks.rank, "world_size": ranks.world_size, "pieces": edges}

    def gathered_state_dict(self) -> dict[str, Any]:
        """The state dict of the inner optimizer unsharded, on every rank; it loads there and here. All ranks must call it."""
        sync = self.gradient_sync
        sync.wait_for_parameters()
        pieces = sync.pieces
        states = [dict(self.state.get(piece, {})) if piece is not None else {} for piece in pieces]
        dtype_of = self._agreed_keys(states)
        whole: list[dict[str, Any]] = [{} for _ in pieces]
        for key, dtype in dtype_of.items():
            values = [state.get(key) for state in states]
            if dtype is not None:
                for index, tensor in sync.gather_piecewise(values, dtype):
                    whole[index][key] = tensor.clone()
            else:
                scalars = self._scalars(values)
                for index, value in enumerate(scalars):
                    if value is not None:
                        whole[index][key] = value
        stepped = self._scalars([torch.tensor(1.0) if state else None for state in states])
        order = [index for members in self._members for index in members]
        groups, first = [], 0
        for group, members in zip(self._inner.state_dict()["param_groups"], self._members, strict=True):
            groups.append({**group, "params": list(range(first, first + len(members)))})
            first += len(members)
        state = {place: whole[index] for place, index in enumerate(order) if stepped[index] is not None}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state dict, from any number of ranks, or this rank's own shard. ValueError for another rank's shard.

        Where the inner optimizer loads parameters too (MasterWeights), they are sent to the other ranks: all ranks must load.
        """
        self.gradient_sync.wait_for_parameters()
        shard = state_dict.get("shard")
        if shard is not None:
            self._check_shard(shard)
            self._inner.load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})
        else:
            self._inner.load_state_dict(self._cut(state_dict))
        self.param_groups = self._inner.param_groups
        self.state = self._inner.state
        if getattr(self._inner, "loads_parameters", False):
            self.gradient_sync.gather_parameters()
            self._note_versions()

    def _check_shard(self, shard: Mapping[str, Any]) -> None:
        own_shard = self._shard()
        if (shard["rank"], shard["world_size"]) != (own_shard["rank"], own_shard["world_size"]):
            raise ValueError(
                f"state_dict: is the shard of rank {shard['rank']} of {shard['world_size']}, and this is rank {own_shard['rank']} "
                f"of {own_shard['world_size']}; save gathered_state_dict() to load at another number of ranks"
            )
        if shard.get("pieces") != own_shard["pieces"]:
            raise ValueError(
                "state_dict: its shards were cut at other elements, by another bucket_mib or units, or by an earlier version; load "
                "it into an optimizer with the same options, or save gathered_state_dict(), which loads anywhere"
            )

    def _cut(self, whole: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of a whole state dict, in the inner optimizer's numbering of pieces."""
        pieces = self.gradient_sync.pieces
        state: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        place = number = 0
        for group, members in zip(whole["param_groups"], self._members, strict=True):
            numbers = []
            for index in members:
                if pieces[index] is not None:
                    numbers.append(number)
                    if place in whole["state"]:
                        values = whole["state"][place].items()
                        state[number] = {key: self._cut_value(index, key, value) for key, value in values}
                    number += 1
                place += 1
            groups.append({**group, "params": numbers})
        return {"state": state, "param_groups": groups}

    def _cut_value(self, index: int, key: str, value: Any) -> Any:
        """The piece's part of a tensor like the parameter; a copy of any other tensor; any other value as it is."""
        sync = self.gradient_sync
        if key != "step" and isinstance(value, Tensor) and value.shape == sync.trained_parameters[index].shape:
            return sync.cut(index, value)
        return value.clone() if isinstance(value, Tensor) else value

    def _agreed_keys(self, states: Sequence[Mapping[str, Any]]) -> dict[str, torch.dtype | None]:
        """Keys of the state on any rank, also one without pieces: the dtype of tensors like their pieces, None for numbers."""
        dtype_of: dict[str, str | None] = {}
        for state in states:
            for key, value in state.items():
                is_piece = isinstance(value, Tensor) and value.dim() > 0
                dtype_of[key] = str(value.dtype).removeprefix("torch.") if is_piece else dtype_of.get(key)
        agreed: dict[str, str | None] = {}
        for text in self.gradient_sync.collectives.gather_texts(json.dumps(dtype_of)):
            for key, dtype in json.loads(text).items():
                agreed[key] = dtype or agreed.get(key)
        return {key: getattr(torch, dtype) if dtype else None for key, dtype in sorted(agreed.items())}

    def _scalars(self, values: Sequence[Any]) -> list[Any]:
        """One value per parameter: the largest of the ranks that have a piece of it, which all agree; None if no rank has one."""
        device = self.gradient_sync.ranks.device
        filled = [-1.0 if value is None else float(value) for value in values]
        largest = torch.tensor(filled, dtype=torch.float64, device=device)
        self.gradient_sync.collectives.all_reduce(largest, reduction="maximum", label="optimizer state").wait()
        return [None if value < 0 else torch.tensor(value, dtype=torch.float32) for value in largest.tolist()]

    def _indices(self, parameters: Any) -> list[int]:
        listed = _listed(parameters)
        if any(parameter not in self._index_of for parameter in listed):
            raise ValueError("groups: holds a parameter that is frozen, or not the module's")
        return [self._index_of[parameter] for parameter in listed]

    def _check_cover(self, names: Sequence[str]) -> None:
        listed = [index for members in self._members for index in members]
        if sorted(listed) != list(range(len(self._index_of))):
            missing = set(range(len(self._index_of))) - set(listed)
            problem = f"leave out {names[min(missing)]}" if missing else "name a parameter twice"
            raise ValueError(f"groups: {problem}; every trained parameter of the module belongs to one group")


def lend_scaler_attributes(outer: Optimizer, inner: Optimizer) -> None:
    """Give `inner` the attributes that GradScaler sets on a fused optimizer at a step, and remove those of the step before."""
    for name in ("grad_scale", "found_inf"):
        if hasattr(outer, name):
            setattr(inner, name, getattr(outer, name))
        elif hasattr(inner, name):
            delattr(inner, name)


def _listed(parameters: Any) -> list[Any]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
