"""Data parallel with gradients and optimizer state sharded in flat parts: ZeRO stages 1 and 2 (Rajbhandari 2020).

Each of N ranks keeps whole parameters, and 1/N of every unit's averaged gradient and optimizer state. A step:

    1. backward     once a unit's gradients are complete: reduce-scatter; each rank keeps its shard of the average
    2. optimizer    unit by unit each rank updates its shard, 1/N of the elements, in place in the flat parameters
    3. all-gather   of a unit's shards once they are updated, in the order of the next forward, which waits for each unit
                    before its block

For P bytes of parameters a rank sends and receives as much as in an all-reduce (P (N-1)/N twice), but the second half is hidden
behind the update of later units and the next forward. A rank owns elements, not whole tensors, so the optimizer must treat each
element alone.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trainstep.costs.buckets import bytes_of_mib
from trainstep.parallel.clipping import clip_gradients_
from trainstep.parallel.collectives import DONE, Pending, ShardGroups
from trainstep.parallel.copies.messages import CopyEngines
from trainstep.parallel.flat_buffer import FlatBuffer, GradientShards, StagingPool
from trainstep.parallel.gradient_sync import HeldTensors, HookedGradients
from trainstep.parallel.launch_order import LaunchOrder, Usage
from trainstep.parallel.ranks import Ranks
from trainstep.parallel.same_setup import check_same_setup, names_of
from trainstep.parallel.units import UnitPlan, merged_units, plan_units

_T = TypeVar("_T")


class ShardedGradients(HookedGradients):
    """Keeps whole parameters and this rank's shard of their gradients.

    `pieces`: for each trained parameter the part of it that this rank updates, one-dimensional and a view, or None.
    `finish_gradient_synchronization` sets the `.grad` of pieces and clears that of whole parameters, so clear gradients by
    `zero_grad` here or of the optimizer: the module's does not see the pieces.

    A unit is a block, or neighbouring blocks that together hold at most `bucket_mib` MiB of parameters, by default a sixteenth to a
    quarter of all (costs/buckets.py); math.inf: all blocks are one unit. Larger units mean fewer messages, and more left to send
    when backward is over. `units`: other modules to cut at, as in plan_units. ValueError for a `bucket_mib` that is not positive.
    `most_in_flight`: number of units whose gradients may be reduced at the same time. `transport`: as in BucketedDDP.
    `shard_ranks`: shard in groups of this many consecutive ranks, and average across groups (collectives.py).

    Blocks may be compiled: `block.forward = torch.compile(block.forward)`, so that the hooks here stay outside.
    """

    def __init__(
        self,
        module: nn.Module,
        ranks: Ranks | None = None,
        *,
        units: Sequence[nn.Module] | None = None,
        bucket_mib: float | None = None,
        reduce_dtype: torch.dtype | None = None,
        most_in_flight: int = 1,
        transport: CopyEngines | None = None,
        shard_ranks: int | None = None,
    ) -> None:
        most_bytes = bytes_of_mib("bucket_mib", bucket_mib)
        options = {"units": names_of(module, units), "bucket_mib": bucket_mib, "reduce_dtype": reduce_dtype}
        super().__init__(module, ranks, options=options, transport=transport, shard_ranks=shard_ranks)
        self._reduce_dtype = reduce_dtype
        self._staging = StagingPool(self.ranks.device)
        self._units: list[_FlatUnit] = []
        self._members: list[list[int]] = []
        """For each unit the indices of its parameters."""
        self.most_in_flight = most_in_flight
        self.postponed: Callable[[], None] | None = None
        """The update that a captured step has left to the next step (training/captured.py); it must run before parameters or the
        optimizer's state are read in between."""
        self._in_flight: deque[_FlatUnit] = deque()
        self._hooks.append(module.register_state_dict_pre_hook(lambda *_: self.wait_for_parameters()))
        self._hooks.append(module.register_load_state_dict_pre_hook(lambda *_: self.wait_for_parameters()))
        trained = [plan for plan in plan_units(module, units) if plan.parameters[0].requires_grad]
        self._make_units(merged_units(trained, most_bytes))

    def adopt(self, parameters: Sequence[nn.Parameter]) -> list[int]:
        """Add parameters of the module that were frozen until now, in units of their own; returns their indices.

        Every rank must adopt the same parameters, else ValueError on every rank. ValueError too for a parameter that is not the
        module's, is frozen, or is known already.
        """
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        for parameter in parameters:
            if (
                parameter not in names
                or not parameter.requires_grad
                or any(parameter is trained for trained in self.trained_parameters)
            ):
                name = names.get(parameter, "a parameter")
                raise ValueError(f"{name}: must be a parameter of the wrapped module, trained, and not known yet")
        check_same_setup("adopt", [(names[parameter], parameter) for parameter in parameters], self.collectives)
        first = len(self.trained_parameters)
        self._add_parameters([(names[parameter], parameter) for parameter in parameters])
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            group = [parameter for parameter in parameters if parameter.dtype == dtype]
            plan = UnitPlan(
                name=f"added {first}",
                parameter_names=tuple(names[parameter] for parameter in group),
                parameters=tuple(group),
                triggers=(self.module,),
            )
            self._make_units([plan])
        return list(range(first, len(self.trained_parameters)))

    @property
    def pieces(self) -> list[nn.Parameter | None]:
        """This rank's pieces, in the order of `trained_parameters`."""
        return self._by_parameter([unit.pieces for unit in self._units])

    @property
    def ends(self) -> list[tuple[int, int]]:
        """The first and end element of this rank's piece of each parameter, counted in the order of memory."""
        return self._by_parameter([unit.ends for unit in self._units])

    @property
    def unit_pieces(self) -> list[list[nn.Parameter]]:
        """This rank's pieces by unit, in the order in which a forward needs the units. A unit's number is its index here."""
        return [[piece for piece in unit.pieces if piece is not None] for unit in self._units]

    def gather_parameters(self, numbers: Iterable[int] | None = None) -> None:
        """Start gathering the updated shards of the units with these numbers, by default of all units in order."""
        for number in range(len(self._units)) if numbers is None else numbers:
            self._units[number].gather()

    def keep_shards(self) -> None:
        """From now on this rank's gradients have the same memory in every step, so that one graph can leave them to the next."""
        for unit in self._units:
            unit.keep_shard()

    def wait_for_parameters(self) -> None:
        """Wait until whole parameters may be read. A forward, `state_dict()` and `load_state_dict()` wait by themselves."""
        if self.postponed is not None:
            self.postponed()
        for unit in self._units:
            unit.wait()

    def detach(self) -> None:
        """Wait until the parameters are whole, then remove the hooks."""
        self.wait_for_parameters()
        super().detach()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the module and of this rank's pieces."""
        super().zero_grad(set_to_none)
        for piece in self.pieces:
            if piece is not None and piece.grad is not None:
                piece.grad = None if set_to_none else piece.grad.zero_()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients so that their norm over all ranks is at most `max_norm`; sends one small message."""
        gradients = [piece.grad for piece in self.pieces if piece is not None]
        return clip_gradients_(gradients, max_norm, norm_type, across=self.groups.shards)

    def held_tensors(self) -> HeldTensors:
        """Flat parameters, of which the module's are views; this rank's shards of gradients; staging buffers; flags."""
        units = self._units
        return HeldTensors(
            parameters=[unit.flat for unit in units],
            shards=[shard for unit in units for shard in unit.gradient_shards],
            staging=[*self._staging.free, *(flat for unit in units for flat in unit.in_flight)],
            flags=[self._usage.flags],
        )

    def gather_piecewise(self, values: Sequence[Tensor | None], dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """Gather values like pieces, such as an optimizer's moments: yields (index of a parameter, whole tensor in its shape).

        `dtype`: that of the values. Every rank must consume the whole iterator.
        """
        for unit, members in zip(self._units, self._members, strict=True):
            yield from zip(members, unit.gather_values([values[index] for index in members], dtype), strict=True)

    def cut(self, index: int, whole: Tensor) -> Tensor:
        """The part of `whole`, a tensor in the shape of parameter `index`, that this rank's piece of the parameter covers."""
        for unit, members in zip(self._units, self._members, strict=True):
            if index in members:
                return unit.cut(members.index(index), whole)
        raise IndexError(index)

    def _make_units(self, plans: Sequence[UnitPlan]) -> None:
        index_of = {parameter: index for index, parameter in enumerate(self.trained_parameters)}
        for plan in plans:
            unit = _FlatUnit(plan, self.groups, self._staging, self._reduce_dtype)
            self._units.append(unit)
            self._members.append([index_of[parameter] for parameter in plan.parameters])
            self._hooks += [trigger.register_forward_pre_hook(_waiter(unit)) for trigger in plan.triggers]
        self._order = LaunchOrder(self._members[::-1])
        self._usage = Usage(self.collectives)

    def _by_parameter(self, values_of_units: Sequence[Sequence[_T]]) -> list[_T]:
        """Values by unit and member, in the order of `trained_parameters`."""
        values: dict[int, _T] = {}
        for members, unit_values in zip(self._members, values_of_units, strict=True):
            values.update(zip(members, unit_values, strict=True))
        return [values[index] for index in range(len(self.trained_parameters))]

    def _send(self, message_index: int) -> None:
        number = len(self._units) - 1 - message_index
        unit, members = self._units[number], self._members[number]
        gradients = self._gradients(members)
        unit.send(gradients)
        for index, gradient in zip(members, gradients, strict=True):
            self._used[index] = gradient is not None
            self.trained_parameters[index].grad = None
        self._in_flight.append(unit)
        if len(self._in_flight) > self.most_in_flight:
            self._in_flight.popleft().receive()

    def _finish(self) -> None:
        for message_index in self._order.rest():
            self._send(message_index)
        self._usage.send(self._used)
        while self._in_flight:
            self._in_flight.popleft().receive()
        self._staging.clear()
        unused = self._usage.unused_everywhere(self._used)
        for unit, members in zip(self._units, self._members, strict=True):
            unit.hand_over([members.index(index) for index in unused if index in members])


class _FlatUnit:
    """A unit's parameters in one flat tensor, whole on every rank. Each rank updates its own shard of the tensor."""

    def __init__(
        self, plan: UnitPlan, groups: ShardGroups, staging: StagingPool, reduce_dtype: torch.dtype | None
    ) -> None:
        ranks = groups.shards.ranks
        self._name = plan.name
        self._collectives = groups.shards
        self._pending: Pending = DONE
        self._received: Tensor | None = None
        self._kept: Tensor | None = None
        """The shard of gradients that is the same tensor in every step; None without keep_shard()."""
        self._kept_parts: Sequence[Tensor] = ()
        dtype = plan.parameters[0].dtype
        self._weights = FlatBuffer(plan.parameters, dtype=dtype, device=ranks.device, parts=ranks.world_size)
        self._shard = self._weights.shard(ranks.rank, ranks.world_size)
        with torch.no_grad():
            for parameter, view in zip(plan.parameters, self._weights.views, strict=True):
                view.copy_(parameter)
                parameter.data = view
        layout = self._weights.layout
        self.ends = [layout.piece(index, ranks.rank, ranks.world_size) for index in range(len(plan.parameters))]
        first, _ = layout.shard(ranks.rank, ranks.world_size)
        self._places = [
            slice(start + begin - first, start + end - first)
            for start, (begin, end) in zip(layout.starts, self.ends, strict=True)
        ]
        # Without `.data` a piece would share the version of the flat tensor, which a gather raises; MasterWeights reads it.
        self.pieces = [
            nn.Parameter(self._shard[place].data) if place.stop > place.start else None for place in self._places
        ]
        owned = [(index, self._places[index], piece) for index, piece in enumerate(self.pieces) if piece is not None]
        edges = sorted({0, self._shard.numel(), *(edge for _, place, _ in owned for edge in (place.start, place.stop))})
        self._part_sizes = [end - begin for begin, end in pairwise(edges)]
        """Sizes of pieces and of the padding between them, so that `split` cuts a shard into all of them by one call."""
        self._owned = [(index, edges.index(place.start), piece) for index, place, piece in owned]
        """For each piece the number of its parameter, the number of its part, and the piece."""
        self._gradients = GradientShards(
            plan.name,
            self._weights.views,
            layout,
            dtype=dtype,
            reduce_dtype=reduce_dtype,
            groups=groups,
            staging=staging,
        )

    @property
    def flat(self) -> Tensor:
        """The unit's whole parameters."""
        return self._weights.flat

    @property
    def gradient_shards(self) -> list[Tensor]:
        """This rank's gradients: those of its pieces, and the shards of which pieces will get theirs."""
        pieces = [piece.grad for _, _, piece in self._owned if piece.grad is not None]
        return [*pieces, *(shard for shard in (self._received, self._kept) if shard is not None)]

    @property
    def in_flight(self) -> list[Tensor]:
        return self._gradients.in_flight

    def keep_shard(self) -> None:
        self._kept = torch.empty_like(self._shard)
        self._kept_parts = self._kept.split(self._part_sizes)

    def send(self, gradients: Sequence[Tensor | None]) -> None:
        # Pieces that still have a gradient may have it in the kept shard, and the new one is added to it.
        adds = any(piece.grad is not None for _, _, piece in self._owned)
        self._gradients.send(gradients, into=None if adds else self._kept)

    def receive(self) -> None:
        self._received = self._gradients.receive()

    def hand_over(self, unused: Collection[int]) -> None:
        """Give each piece its part of the gradient, added to a gradient that it still has; none to those of `unused` parameters.

        Call under no_grad.
        """
        shard, self._received = self._received, None
        assert shard is not None
        parts = self._kept_parts if shard is self._kept else shard.split(self._part_sizes)
        for index, part, piece in self._owned:
            if index not in unused:
                before = piece.grad
                piece.grad = parts[part] if before is None else before.add_(parts[part])

    def gather(self) -> None:
        self.wait()
        self._pending = self._collectives.all_gather(self._weights.flat, self._shard, label=self._name)

    def wait(self) -> None:
        if self._pending is not DONE:
            self._pending.wait()
            self._pending = DONE

    @torch.no_grad()
    def gather_values(self, values: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor]:
        gathered = FlatBuffer(
            self._weights.views,
            dtype=dtype,
            device=self._shard.device,
            parts=self._collectives.ranks.world_size,
        )
        shard = torch.zeros_like(self._shard, dtype=dtype)
        for value, place in zip(values, self._places, strict=True):
            if value is not None:
                shard[place] = value
        self._collectives.all_gather(gathered.flat, shard, label=f"{self._name} state").wait()
        return gathered.views

    def cut(self, member: int, whole: Tensor) -> Tensor:
        view = self._weights.views[member]
        arranged = torch.empty_strided(view.shape, view.stride(), dtype=whole.dtype, device=view.device).copy_(whole)
        begin, end = self.ends[member]
        return arranged.as_strided((view.numel(),), (1,))[begin:end].clone()


def _waiter(unit: _FlatUnit) -> Callable[..., None]:
    def wait(_module: nn.Module, _inputs: Any) -> None:
        unit.wait()

    waiter: Callable[..., None] = torch.compiler.disable(wait)
    return waiter
