"""Fully sharded data parallel: each rank keeps 1/N of parameters, gradients and optimizer state.

This is ZeRO stage 3 (Rajbhandari 2020).

    forward     a unit is gathered before its block runs, the next units while it runs, and freed after it
    backward    units are gathered again, in reverse; a unit's gradients are reduce-scattered and it is freed
    optimizer   updates this rank's pieces: `torch.optim.AdamW(module.parameters())`, made after wrapping

For P bytes of parameters in the compute dtype and G of gradients in the reduce dtype a rank sends P (N-1)/N twice and G (N-1)/N
once per step; keeping parameters gathered after forward saves one of the two gathers, and costs P bytes of memory.
"""

import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.modules.module import _IncompatibleKeys

from trainstep.parallel.clipping import clip_gradients_
from trainstep.parallel.copies.messages import CopyEngines
from trainstep.parallel.flat_buffer import StagingPool, in_memory_order
from trainstep.parallel.fsdp_unit import FSDPUnit, PassOrder, Placed, UnitsAt, UnitState, explain_shapes
from trainstep.parallel.gradient_sync import HeldTensors, HookedGradients, sent_twice
from trainstep.parallel.launch_order import LaunchOrder, Usage
from trainstep.parallel.ranks import Ranks
from trainstep.parallel.same_setup import names_of
from trainstep.parallel.units import UnitsOf, chosen_units, is_single_unit, plan_units
from trainstep.parallel.whole_parameters import (
    IgnoredParameters,
    checked_device,
    gathered_parameters,
    load_whole,
)


class FSDP(HookedGradients):
    """Wraps a module in place; the module is called as before, through its `__call__`.

    `units`: modules that are gathered as one, listed or by class (the outermost modules of it); by default each block, and the
    parameters around the blocks (see plan_units). `ignored`: modules and parameters that stay whole. Between steps any
    other parameter is this rank's piece of it, one-dimensional and perhaps empty: an element-wise optimizer over
    `module.parameters()` updates the pieces, and its state is sharded like them.

    `compute_dtype`: dtype of gathered parameters and so of the computation; the pieces and the update keep the parameters' own.
    `reduce_dtype`: dtype in which gradients are averaged. `reshard_after_forward` False: units are gathered once per step.
    `ahead`: number of modules whose units are gathered before they are needed, 0 to 2. `most_in_flight`: number of units whose
    gradients may be reduced at the same time. `transport`: as in BucketedDDP. `shard_ranks`: shard in groups of this many
    consecutive ranks, usually those of a node, and average across groups (collectives.py). Every rank must run the same units in
    the same order; parameters within a unit may go unused. Blocks may be compiled: `block.forward = torch.compile(block.forward)`,
    so that the hooks stay outside.

    A parameter is whole only inside its unit's forward and backward. A module that reads a parameter of another unit without
    calling that unit's `forward` sees a piece (an error about shapes says so in a note), and a `detach()`ed parameter kept for
    backward reads memory that may be freed. Move and cast the module before wrapping it: afterwards ValueError names the parameter.
    Between `finish_gradient_synchronization()` and the optimizer's step run no forward that records gradients: the units that it
    leaves whole would not be updated. After a forward that raised, run a complete forward before `zero_grad()`.
    """

    def __init__(
        self,
        module: nn.Module,
        ranks: Ranks | None = None,
        *,
        units: UnitsOf | None = None,
        ignored: Sequence[nn.Module | nn.Parameter] = (),
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
        ahead: int = 1,
        most_in_flight: int = 2,
        transport: CopyEngines | None = None,
        shard_ranks: int | None = None,
    ) -> None:
        if ahead not in (0, 1, 2):
            raise ValueError(f"ahead: must be 0, 1 or 2, not {ahead!r}")
        units, ignored_parameters = chosen_units(module, units), IgnoredParameters(module, ignored)
        options = {
            "units": names_of(module, units),
            "ignored": list(ignored_parameters.named.values()),
            "compute_dtype": compute_dtype,
            "reduce_dtype": reduce_dtype,
            "reshard_after_forward": reshard_after_forward,
            "ahead": ahead,
        }
        super().__init__(module, ranks, options=options, transport=transport, shard_ranks=shard_ranks)
        self._reshard_after_forward = reshard_after_forward
        self._ignored = ignored_parameters
        self._ignored.take_over(self.trained_parameters, reduce_dtype, self.collectives)
        plans = plan_units(module, units, ignored=self._ignored.named)
        if units is None and plans and is_single_unit(module):
            _warn_of_single_unit(module)
        self._staging = StagingPool(self.ranks.device)
        index_of = {parameter: index for index, parameter in enumerate(self.trained_parameters)}
        self.units = [
            FSDPUnit(plan, self.groups, self._staging, compute_dtype=compute_dtype, reduce_dtype=reduce_dtype)
            for plan in plans
        ]
        self._trained = [unit for unit in self.units if unit.trains][::-1]
        """Units with trained parameters, in the order in which backward completes them."""
        self._members_of = {unit: [index_of[parameter] for parameter in unit.parameters] for unit in self._trained}
        self._order = LaunchOrder(list(self._members_of.values()))
        self._usage = Usage(self.collectives)
        self.most_in_flight = most_in_flight
        self._in_flight: deque[FSDPUnit] = deque()
        self._sent: set[FSDPUnit] = set()
        """Units whose gradients have been sent in this step."""
        self._concluded: set[FSDPUnit] = set()
        """Units that backward is done with in this pass, and that no module has needed since."""
        self._triggers = {unit: plan.triggers for unit, plan in zip(self.units, plans, strict=True)}
        self._unit_of = {index: unit for unit, members in self._members_of.items() for index in members}
        """Index of a trained parameter -> its unit."""
        triggers = dict.fromkeys([module, *(trigger for plan in plans for trigger in plan.triggers)])
        self._needs = {trigger: [u for u in self.units if trigger in self._triggers[u]] for trigger in triggers}
        self._freed_behind = {
            trigger: [unit for unit in needed if trigger is module or unit not in self._needs[module]]
            for trigger, needed in self._needs.items()
        }
        """Trigger -> units that no module needs any more when the trigger's forward is over."""
        self._pass_order = PassOrder(self._needs, ahead=ahead)
        self._in_forward = False
        """Whether the module's own forward is running; a block that runs outside of it is recomputed for its backward."""
        self._triggers_seen: list[nn.Module] = []
        """Triggers that the current forward has called, in order."""
        self._awaited: Counter[nn.Module] = Counter()
        """For each trigger the number of its forwards that had no backward yet."""
        self._at_backward = {trigger: partial(self._before_backward, trigger) for trigger in triggers}
        self._reading_state = False
        for trigger in triggers:
            self._hooks.append(trigger.register_forward_pre_hook(torch.compiler.disable(self._before_forward)))
            self._hooks.append(trigger.register_forward_hook(torch.compiler.disable(self._after_forward)))
        self._hooks += [
            module.register_forward_hook(torch.compiler.disable(self._explain_shapes), always_call=True),
            module.register_state_dict_pre_hook(self._refuse_state_dict),
            module.register_load_state_dict_pre_hook(self._refuse_to_load),
        ]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients so that their norm over all ranks is at most `max_norm`; sends one small message."""
        whole = [parameter.grad for parameter in self._ignored.named]
        pieces = [piece.grad for index, piece in enumerate(self.trained_parameters) if index in self._unit_of]
        return clip_gradients_(pieces, max_norm, norm_type, across=self.groups.shards, alike=whole)

    def detach(self) -> None:
        """Remove the hooks and make the parameters whole. A collective: all ranks must call it."""
        super().detach()
        for unit in self.units:
            unit.reshard()
            for parameter, whole in zip(unit.parameters, unit.gathered(unit.shard), strict=True):
                parameter.grad = None
                parameter.data = whole

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:  # type: ignore[override]
        """The whole state dict, as `full_state_dict()`, with the module's own names. A collective: all ranks must call it.

        Where only rank 0 saves, call `full_state_dict(on_rank_0_only=True)` on every rank. For a sharded state, save_checkpoint.
        """
        state = {} if destination is None else destination
        state.update((prefix + name, value) for name, value in self.full_state_dict().items())
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a whole state, the same on every rank, by `load_full_state_dict`. `assign` has no effect. Not a collective."""
        return _IncompatibleKeys(*self.load_full_state_dict(state_dict, strict=strict))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of pieces, and the whole gradients that no_sync() has kept to be sent."""
        for unit in self.units:
            unit.reshard()
            unit.unsent = [None] * len(unit.parameters)
        super().zero_grad(set_to_none)

    def full_state_dict(self, *, on_rank_0_only: bool = False, device: torch.device | str = "cpu") -> dict[str, Any]:
        """The module's `state_dict` with whole parameters, copied to `device`. A collective: all ranks must call it.

        `on_rank_0_only`: {} on the other ranks.
        """
        kept = self.ranks.is_first or not on_rank_0_only
        device = checked_device(device)
        whole = gathered_parameters(self.units, device, kept=kept)
        return {
            name: whole[value] if isinstance(value, nn.Parameter) and value in whole else _copied(value, device)
            for name, value in (self._own_state() if kept else {}).items()
        }

    def load_full_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> tuple[list[str], list[str]]:
        """Load whole parameters and buffers, of which each rank takes its pieces; `state` must be the same on every rank.

        Returns the names that only the module has, and those that only `state` has; ValueError if there are any and `strict`, and
        for a shape that is not the module's.
        """
        return load_whole(self.module, self._own_state(), self.units, state, strict=strict)

    @contextmanager
    def gathered(self, part: nn.Module) -> Iterator[None]:
        """Gather the parameters of a part, to run it by its `forward` alone, and free them at the end. A collective."""
        units = [unit for unit in self.units if not {*part.parameters()}.isdisjoint(unit.parameters)]
        for unit in units:
            unit.wait_for_unshard()
        try:
            yield
        finally:
            for unit in units:
                unit.reshard()

    def held_tensors(self) -> HeldTensors:
        """Shards of parameters and gathered parameters; whole gradients that wait to be sent (micro-batches' under no_sync()),
        shards of gradients that no piece has as its `.grad` yet, and the staging buffers between the two; flags."""
        return HeldTensors(
            buckets=[bucket.flat for bucket in self._ignored.buckets],
            parameters=[flat for unit in self.units for flat in unit.flats],
            gradients=[gradient for unit in self.units for gradient in unit.unsent if gradient is not None],
            shards=[shard for unit in self.units for shard in unit.gradient_shards],
            staging=[*self._staging.free, *(flat for unit in self.units for flat in unit.in_flight)],
            flags=[self._usage.flags],
        )

    def placed(self) -> Iterator[Placed]:
        """Where every parameter is, for checkpoints. All units must be sharded."""
        for unit in self.units:
            yield from unit.placed()
        for parameter, name in self._ignored.named.items():
            flat = in_memory_order(parameter)
            yield Placed(name=name, parameter=parameter, flat=flat, first=0, shape=parameter.shape, everywhere=True)

    def _before_forward(self, trigger: nn.Module, _inputs: Any) -> None:
        if trigger is self.module:
            self._in_forward = True
            self._triggers_seen = []
            self._concluded.clear()
            if self._reshard_after_forward:
                # Free what earlier passes left whole: a rank may have broken one off, and all must gather the same units.
                for unit in self.units:
                    unit.reshard()
        if self._in_forward:
            self._triggers_seen.append(trigger)
            self._make_whole(trigger, self._pass_order.next_in_forward)
        else:
            self._make_whole(trigger, {})

    def _after_forward(self, trigger: nn.Module, _inputs: Any, output: Any) -> None:
        training = torch.is_grad_enabled()
        recomputed = training and not self._in_forward
        if trigger is self.module:
            self._in_forward = False
            self._pass_order.learn(self._triggers_seen)
        if training and not (recomputed and self._awaited[trigger] > 0):  # else the first forward has put a hook for it
            self._await_backward(trigger, [tensor for tensor in _tensors(output) if tensor.requires_grad])
        if trigger is self.module and not training:  # units gathered ahead and not used would miss the next update
            for unit in self.units:
                unit.reshard()
        comes_next = recomputed or (training and trigger in (self.module, self._pass_order.last))
        if comes_next or (training and not self._reshard_after_forward):
            return
        for unit in self._freed_behind[trigger]:
            unit.reshard()

    def _await_backward(self, trigger: nn.Module, outputs: Sequence[Tensor]) -> None:
        if not outputs:
            return
        self._awaited[trigger] += 1
        hook = self._at_backward[trigger]
        if len(outputs) == 1:  # the hook for several tensors would do too, but costs the host twice as much
            outputs[0].register_hook(hook)
        else:
            register_multi_grad_hook(outputs, hook, mode="any")

    def _explain_shapes(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        sharded = [unit for unit in self.units if unit.state is UnitState.SHARDED] if output is None else []
        explain_shapes(
            (named for unit in sharded for named in zip(unit.parameter_names, unit.pieces, strict=True)), output
        )

    def _before_backward(self, trigger: nn.Module, _gradient: Tensor) -> None:
        self._awaited[trigger] -= 1
        if self._reshard_after_forward:
            self._conclude(self._pass_order.behind_in_backward.get(trigger, ()))
        self._make_whole(trigger, self._pass_order.next_in_backward)

    def _conclude(self, behind: Sequence[FSDPUnit]) -> None:
        """Send and free the units of blocks that backward is done with, whether or not it brought every gradient."""
        # A unit with all its gradients was sent when the last one came. But a parameter may go unused, perhaps on one
        # rank only, and all ranks must send a unit before they gather the next, or messages would not pair up.
        for unit in [unit for unit in behind if unit not in self._concluded]:
            if self._is_awaited(unit):
                continue
            if self._syncing and unit not in self._sent:
                for index in self._members_of.get(unit, []):
                    for message_index in self._order.ready(index) or []:
                        self._send(message_index)
            unit.reshard()
            self._concluded.add(unit)

    def _is_awaited(self, unit: FSDPUnit) -> bool:
        return any(self._awaited[trigger] > 0 for trigger in self._triggers[unit])

    def _make_whole(self, trigger: nn.Module, comes_next: UnitsAt) -> None:
        for unit in self._needs[trigger]:
            self._concluded.discard(unit)
            unit.wait_for_unshard()
        for unit in comes_next.get(trigger, ()):
            if unit not in self._sent:
                self._concluded.discard(unit)
                unit.unshard()

    def _gradient_ready(self, index: int) -> None:
        unit = self._unit_of.get(index)
        if unit is None or self._is_awaited(unit):
            return  # another rank may use it in a block that still waits for its backward, and send it only after that
        message_indices = self._order.ready(index)
        if message_indices is None:
            raise sent_twice(self.names[index])
        for message_index in message_indices:
            self._send(message_index)

    def _send(self, message_index: int) -> None:
        unit = self._trained[message_index]
        unit.reshard()
        members = self._members_of[unit]
        self._refuse_sparse(members, unit.unsent)
        for index, gradient in zip(members, unit.unsent, strict=True):
            self._used[index] = gradient is not None
        unit.send_gradients()
        self._sent.add(unit)
        self._in_flight.append(unit)
        if len(self._in_flight) > self.most_in_flight:
            self._in_flight.popleft().receive_gradients()

    def _finish(self) -> None:
        for message_index in self._order.rest():
            self._send(message_index)
        self._sent.clear()
        self._concluded.clear()
        self._awaited.clear()
        ignored = self._gradients(self._ignored.indices)
        for index, gradient in zip(self._ignored.indices, ignored, strict=True):
            self._used[index] = gradient is not None
        self._ignored.send(ignored)
        self._usage.send(self._used)
        while self._in_flight:
            self._in_flight.popleft().receive_gradients()
        self._ignored.receive()
        self._staging.clear()
        for unit in self.units:
            unit.reshard()
        unused = set(self._usage.unused_everywhere(self._used))
        for unit, members in self._members_of.items():
            unit.hand_over_gradients([index not in unused for index in members])

    def _own_state(self) -> dict[str, Any]:
        """The module's own state dict, in which sharded parameters are pieces."""
        self._reading_state = True
        try:
            return self.module.state_dict(keep_vars=True)
        finally:
            self._reading_state = False

    def _refuse_state_dict(self, *_: Any) -> None:
        if not self._reading_state:
            raise ValueError(
                "state_dict: this rank has pieces of the parameters; call full_state_dict(), or save_checkpoint for a sharded one"
            )

    def _refuse_to_load(self, *_: Any) -> None:
        raise ValueError(
            "load_state_dict: this rank has pieces of the parameters; call load_full_state_dict(), or load_checkpoint"
        )


def _warn_of_single_unit(module: nn.Module) -> None:
    warnings.warn(
        f"FSDP: the whole {type(module).__name__} is one unit, gathered at once, since it has no ModuleList or Sequential "
        "of blocks; name the blocks: units=[...], or their class",
        stacklevel=3,
    )


def _tensors(output: Any) -> Iterable[Tensor]:
    """The tensors in a module's output: in lists, tuples, dicts and objects' attributes."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)
    elif hasattr(output, "__dict__"):
        for value in vars(output).values():
            if isinstance(value, Tensor):
                yield value


def _copied(value: Any, device: torch.device | str) -> Any:
    return value.detach().to(device, copy=True) if isinstance(value, Tensor) else value
