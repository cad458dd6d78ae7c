"""Data parallel with optimizer state and update sharded, in flat parts: ZeRO stages 1 and 2 (Rajbhandari 2020).

Every rank keeps whole parameters, N ranks each 1/N of every unit's averaged gradient and optimizer state. A step:

    1. backward     a unit's gradients are complete: reduce-scatter; each rank keeps its shard of the average
    2. optimizer    unit by unit each rank updates its shard, 1/N of the elements, in place in the flat parameters
    3. all-gather   a unit's shards once they are updated, in the order of the next forward, which waits for a unit where it
                    needs it

For P bytes of parameters a rank sends and receives as much as in an all-reduce (P (N-1)/N twice), but the second half runs behind
the update of later units and the next forward. Ownership goes by elements, not by tensors, so it only suits optimizers that treat
each element alone.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.costs.buckets import bytes_of_mib
from trainstep.parallel.clipping import clip_gradients_
from trainstep.parallel.collectives import DONE, Collectives, Pending
from trainstep.parallel.flat_buffer import FlatBuffer
from trainstep.parallel.gradient_shards import GradientShards
from trainstep.parallel.gradient_sync import HeldTensors, HookedGradients, sent_twice
from trainstep.parallel.launch_order import LaunchOrder
from trainstep.parallel.ranks import Ranks
from trainstep.parallel.same_setup import check_same_setup, names_of
from trainstep.parallel.staging import StagingPool
from trainstep.parallel.units import UnitPlan, merged_units, plan_units
from trainstep.parallel.usage import Usage


class ShardedGradients(HookedGradients):
    """Whole parameters, each rank's part of their gradients.

    `pieces`: for each trained parameter what this rank updates of it, one-dimensional and in place, or None. Their `.grad` is set
    by `finish_gradient_synchronization`; the whole parameters' is None from then on, so clear gradients by `zero_grad` here or of
    the optimizer: the module's does not see the pieces.

    A unit is a block, or neighbouring ones that together hold at most `bucket_mib` MiB of parameters, by default as
    costs/buckets.py chooses: a sixteenth to a quarter of all; math.inf: all blocks are one. Larger units are fewer messages, and
    leave more to send when backward is over. `units`: other modules to cut at, as in plan_units. ValueError for a `bucket_mib`
    that is not positive. `most_in_flight`: units whose gradients are being reduced while another's are made ready.

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
    ) -> None:
        most_bytes = bytes_of_mib("bucket_mib", bucket_mib)
        options = {"units": names_of(module, units), "bucket_mib": bucket_mib, "reduce_dtype": reduce_dtype}
        super().__init__(module, ranks, options=options)
        self._reduce_dtype = reduce_dtype
        self._staging = StagingPool(self.ranks.device)
        self._units: list[_FlatUnit] = []
        self._members: list[list[int]] = []
        """Of each unit, indices of its parameters."""
        self.most_in_flight = most_in_flight
        self.postponed: Callable[[], None] | None = None
        """What a captured step has left to the next (training/captured.py): to be done before parameters or the optimizer's state
        are read in between."""
        self._in_flight: deque[_FlatUnit] = deque()
        self._hooks.append(module.register_state_dict_pre_hook(lambda *_: self.wait_for_parameters()))
        self._hooks.append(module.register_load_state_dict_pre_hook(lambda *_: self.wait_for_parameters()))
        trained = [plan for plan in plan_units(module, units) if plan.parameters[0].requires_grad]
        self._make_units(merged_units(trained, most_bytes))

    def adopt(self, parameters: Sequence[nn.Parameter]) -> list[int]:
        """Take up parameters of the module that were frozen until now; they make units of their own. Their indices.

        Every rank must adopt the same, else ValueError on every rank. ValueError too for one that is not the module's, is frozen,
        or known already.
        """
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        for parameter in parameters:
            if (
                parameter not in names
                or not parameter.requires_grad
                or any(parameter is known for known in self.trained_parameters)
            ):
                name = names.get(parameter, "a parameter")
                raise ValueError(f"{name}: must be a parameter of the wrapped module, trained, and not known yet")
        check_same_setup("adopt", [(names[parameter], parameter) for parameter in parameters], self.collectives)
        first = len(self.trained_parameters)
        self._take_up([(names[parameter], parameter) for parameter in parameters])
        kinds = dict.fromkeys(parameter.dtype for parameter in parameters)
        alike = [[parameter for parameter in parameters if parameter.dtype == kind] for kind in kinds]
        self._make_units(
            [
                UnitPlan(
                    name=f"added {first}",
                    parameter_names=tuple(names[parameter] for parameter in group),
                    parameters=tuple(group),
                    triggers=(self.module,),
                )
                for group in alike
            ]
        )
        return list(range(first, len(self.trained_parameters)))

    def _make_units(self, plans: Sequence[UnitPlan]) -> None:
        index_of = {parameter: index for index, parameter in enumerate(self.trained_parameters)}
        for plan in plans:
            unit = _FlatUnit(plan, self.collectives, self._staging, self._reduce_dtype)
            self._units.append(unit)
            self._members.append([index_of[parameter] for parameter in plan.parameters])
            self._hooks += [trigger.register_forward_pre_hook(_waiter(unit)) for trigger in plan.triggers]
        self._order = LaunchOrder(self._members[::-1])
        self._usage = Usage(self.collectives)

    @property
    def pieces(self) -> list[nn.Parameter | None]:
        """This rank's, in the order of `trained_parameters`."""
        found: dict[int, nn.Parameter | None] = {}
        for unit, members in zip(self._units, self._members, strict=True):
            found.update(zip(members, unit.pieces, strict=True))
        return [found[index] for index in range(len(self.trained_parameters))]

    @property
    def ends(self) -> list[tuple[int, int]]:
        """Where this rank's piece of each parameter begins and ends, in its elements as they lie in memory."""
        found: dict[int, tuple[int, int]] = {}
        for unit, members in zip(self._units, self._members, strict=True):
            found.update(zip(members, unit.ends, strict=True))
        return [found[index] for index in range(len(self.trained_parameters))]

    @property
    def unit_pieces(self) -> list[list[nn.Parameter]]:
        """This rank's by unit, first what the next forward needs first. A unit's number is its place here."""
        return [[piece for piece in unit.pieces if piece is not None] for unit in self._units]

    def gather_parameters(self, numbers: Iterable[int] | None = None) -> None:
        """Start giving every rank the others' updated shards, of the units of these numbers, by default of all in order."""
        for number in range(len(self._units)) if numbers is None else numbers:
            self._units[number].gather()

    def keep_shards(self) -> None:
        """From now on this rank's gradients have memory of their own, the same in every step: one graph leaves them to the next."""
        for unit in self._units:
            unit.keep_shard()

    def wait_for_parameters(self) -> None:
        """Until whole parameters may be read outside a forward. A forward, `state_dict()` and `load_state_dict()` wait."""
        if self.postponed is not None:
            self.postponed()
        for unit in self._units:
            unit.wait()

    def detach(self) -> None:
        """Take the hooks off again, once parameters that are on their way are there."""
        self.wait_for_parameters()
        super().detach()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the module and of this rank's pieces."""
        super().zero_grad(set_to_none)
        for piece in self.pieces:
            if piece is not None and piece.grad is not None:
                piece.grad = None if set_to_none else piece.grad.zero_()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients so that the norm of all ranks' together is at most `max_norm`; one small message."""
        gradients = [piece.grad for piece in self.pieces if piece is not None]
        return clip_gradients_(gradients, max_norm, norm_type, across=self.collectives)

    def held_tensors(self) -> HeldTensors:
        """Flat parameters, of which the module's are views; this rank's shards of gradients; buffers on the way there; flags."""
        units = self._units
        return HeldTensors(
            parameters=[unit.flat for unit in units],
            shards=[shard for unit in units for shard in unit.gradient_shards],
            staging=[*self._staging.free, *(flat for unit in units for flat in unit.in_flight)],
            flags=[self._usage.flags],
        )

    def gather_piecewise(self, values: Sequence[Tensor | None]) -> Iterator[tuple[int, Tensor]]:
        """(index of a parameter, whole tensor in its shape) from what each rank has for its pieces, such as an optimizer's moments.

        Every rank must take all of them.
        """
        for unit, members in zip(self._units, self._members, strict=True):
            yield from zip(members, unit.gather_values([values[index] for index in members]), strict=True)

    def cut(self, index: int, whole: Tensor) -> Tensor:
        """What this rank's piece of that parameter holds of a tensor of its shape."""
        for unit, members in zip(self._units, self._members, strict=True):
            if index in members:
                return unit.cut(members.index(index), whole)
        raise IndexError(index)

    def _gradient_ready(self, index: int) -> None:
        turns = self._order.ready(index)
        if turns is None:
            raise sent_twice(self.names[index])
        for turn in turns:
            self._send(turn)

    def _send(self, turn: int) -> None:
        number = len(self._units) - 1 - turn
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
        for turn in self._order.rest():
            self._send(turn)
        self._usage.send(self._used)
        while self._in_flight:
            self._in_flight.popleft().receive()
        self._staging.clear()
        unused = self._usage.unused_everywhere(self._used)
        for unit, members in zip(self._units, self._members, strict=True):
            unit.hand_over([members.index(index) for index in unused if index in members])


class _FlatUnit:
    """A unit's parameters in one flat tensor on every rank; this rank's shard of it is what it updates."""

    def __init__(
        self, plan: UnitPlan, collectives: Collectives, staging: StagingPool, reduce_dtype: torch.dtype | None
    ) -> None:
        ranks = collectives.ranks
        self._name = plan.name
        self._collectives = collectives
        self._pending: Pending = DONE
        self._received: Tensor | None = None
        self._kept: Tensor | None = None
        """The shard of gradients, where it has memory of its own, and its parts: the same tensors in every step."""
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
        self.pieces = [nn.Parameter(self._shard[place]) if place.stop > place.start else None for place in self._places]
        held = [(index, self._places[index], piece) for index, piece in enumerate(self.pieces) if piece is not None]
        edges = sorted({0, self._shard.numel(), *(edge for _, place, _ in held for edge in (place.start, place.stop))})
        self._part_sizes = [end - begin for begin, end in pairwise(edges)]
        """Of pieces, and of the filling between them: `split` cuts a shard into all of them by one call."""
        self._held = [(index, edges.index(place.start), piece) for index, place, piece in held]
        """Of each piece the parameter's number, the part's, and the piece itself."""
        self._gradients = GradientShards(
            plan.name,
            self._weights.views,
            layout,
            dtype=dtype,
            reduce_dtype=reduce_dtype,
            collectives=collectives,
            staging=staging,
        )

    @property
    def flat(self) -> Tensor:
        """Its whole parameters."""
        return self._weights.flat

    @property
    def gradient_shards(self) -> list[Tensor]:
        """This rank's: of its pieces, or the shard that they will have theirs of."""
        pieces = [piece.grad for _, _, piece in self._held if piece.grad is not None]
        return [*pieces, *(shard for shard in (self._received, self._kept) if shard is not None)]

    @property
    def in_flight(self) -> list[Tensor]:
        return self._gradients.in_flight

    def keep_shard(self) -> None:
        self._kept = torch.empty_like(self._shard)
        self._kept_parts = self._kept.split(self._part_sizes)

    def send(self, gradients: Sequence[Tensor | None]) -> None:
        adds = any(piece.grad is not None for _, _, piece in self._held)  # to what may be in the shard that is kept
        self._gradients.send(gradients, into=None if adds else self._kept)

    def receive(self) -> None:
        self._received = self._gradients.receive()

    def hand_over(self, unused: Collection[int]) -> None:
        """Give each piece, but those of the parameters `unused`, its part of the gradient, added to one that it still has.

        Under no_grad.
        """
        shard, self._received = self._received, None
        assert shard is not None
        parts = self._kept_parts if shard is self._kept else shard.split(self._part_sizes)
        for index, part, piece in self._held:
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
    def gather_values(self, values: Sequence[Tensor | None]) -> list[Tensor]:
        gathered = FlatBuffer(
            self._weights.views,
            dtype=self._shard.dtype,
            device=self._shard.device,
            parts=self._collectives.ranks.world_size,
        )
        shard = torch.zeros_like(self._shard)
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
