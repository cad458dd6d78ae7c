"""A unit of FSDP (its shard, whole parameters and gradients), and the order in which a pass needs units.

[Note: storage that comes and goes]
The whole parameters of a unit live in one flat tensor that is made once; only its storage is freed and allocated again. Tensors
that autograd saved for backward (a transposed view of a weight, say) keep pointing into it, and find the same values there once the
unit is gathered again. Nothing reads it in between.

[Note: streams]
On a GPU a collective runs after the work that the current stream has been given so far, and beside the work that it is given next.
So a unit is gathered ahead by starting its collective before the preceding block is launched. The collective may at once use
memory that earlier blocks have freed, and waiting for it makes the stream wait, not the host. The shard is sent without a copy: an
optimizer updates it only after gradients have been handed over, and every gather has been waited for by then.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from trainstep.parallel.collectives import DONE, Pending, ShardGroups
from trainstep.parallel.flat_buffer import GradientShards, StagingPool, lay_out, view_like
from trainstep.parallel.units import UnitPlan
from trainstep.spans import span

_SHAPE_ERRORS = re.compile(r"\b(size|shape|dimension|dim|must be \d-D)", re.IGNORECASE)
_MOST_NAMED = 3


class UnitState(Enum):
    """The part of a unit that is in memory on a rank."""

    SHARDED = "1/N of its elements; its parameters are this rank's pieces of them, one-dimensional"
    GATHERING = "its shard, and the whole in the compute dtype, being filled"
    GATHERED = "its shard, and the whole in the compute dtype; its parameters are views of that"


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Where a parameter is between steps.

    `flat`: a view of this rank's elements, from number `first` on, in the order of memory. `everywhere`: all ranks have all of it.
    """

    name: str
    parameter: nn.Parameter
    flat: Tensor
    first: int
    shape: torch.Size
    everywhere: bool = False


class FSDPUnit:
    """Turns a unit's parameters into this rank's pieces; they are whole only between `wait_for_unshard` and `reshard`.

    The shard keeps the parameters' dtype; it is cast to `compute_dtype` before it is gathered.
    """

    def __init__(
        self,
        plan: UnitPlan,
        groups: ShardGroups,
        staging: StagingPool,
        *,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        ranks = groups.shards.ranks
        self.name = plan.name
        self.parameters = plan.parameters
        self.parameter_names = plan.parameter_names
        self.trains = plan.parameters[0].requires_grad
        self.state = UnitState.SHARDED
        self._collectives = groups.shards
        self._templates = [
            torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
            for parameter in plan.parameters
        ]
        self.layout = lay_out(self._templates, parts=ranks.world_size)
        dtype = plan.parameters[0].dtype
        self.shard = self._own_shard(dtype)
        self._places = [self._place(index) for index in range(len(plan.parameters))]
        self.pieces = [self.piece_of(self.shard, index) for index in range(len(plan.parameters))]
        self._whole = torch.empty(self.layout.numel, dtype=compute_dtype or dtype, device=ranks.device)
        self._as_wholes = list(zip(plan.parameters, self._views(self._whole), strict=True))
        """Each parameter and its data while the unit is gathered."""
        self._as_pieces = [(index, parameter, self.pieces[index]) for index, parameter in enumerate(plan.parameters)]
        """Each parameter's number, the parameter, and its data while the unit is sharded."""
        self._present = [
            (index, parameter, self._places[index]) for index, parameter, piece in self._as_pieces if piece.numel()
        ]
        """For each parameter of which this rank has a piece: its number, the parameter, and its place in the shard."""
        self._own_part = self._whole[slice(*self.layout.shard(ranks.rank, ranks.world_size))]
        self._storage = self._whole.untyped_storage()
        self._whole_bytes = self._storage.nbytes()
        self._storage.resize_(0)  # [Note: storage that comes and goes]
        self._gathering: Pending = DONE
        self._piece_gradients: list[tuple[nn.Parameter, Tensor]] = []
        """Gradients of pieces, kept here while the parameters are whole."""
        self.unsent: list[Tensor | None] = [None] * len(plan.parameters)
        """Whole gradients that have not been reduced yet."""
        self._reduced: Tensor | None = None
        self._gradients = GradientShards(
            plan.name,
            self._templates,
            self.layout,
            dtype=dtype,
            reduce_dtype=reduce_dtype,
            groups=groups,
            staging=staging,
        )
        for _, parameter, piece in self._as_pieces:
            parameter.data = piece

    def unshard(self) -> None:
        """Start gathering the whole parameters, unless it has started. ValueError where they are no longer this unit's pieces."""
        if self.state is not UnitState.SHARDED:
            return
        check_pieces(self.parameter_names, self._as_pieces)
        with span(f"unshard {self.name}"):
            self._storage.resize_(self._whole_bytes)  # may run out of memory: then it is sharded as before
        self.state = UnitState.GATHERING
        sent = self.shard if self.shard.dtype == self._whole.dtype else self._own_part.copy_(self.shard)
        self._gathering = self._collectives.all_gather(self._whole, sent, label=self.name)

    def wait_for_unshard(self) -> None:
        """Gather the whole parameters, and wait: from here on the parameters are whole."""
        self.unshard()
        if self.state is not UnitState.GATHERING:
            return
        self._gathering.wait()
        self._gathering = DONE
        self.state = UnitState.GATHERED
        for parameter, view in self._as_wholes:
            if parameter.grad is not None:
                self._piece_gradients.append((parameter, parameter.grad))
                parameter.grad = None
            parameter.data = view

    def reshard(self) -> None:
        """Free the whole parameters. Whole gradients that autograd has made are kept, to be reduced."""
        if self.state is UnitState.SHARDED:
            return
        if self.state is UnitState.GATHERING:
            self._gathering.wait()
            self._gathering = DONE
        else:
            for index, parameter, piece in self._as_pieces:
                if (gradient := parameter.grad) is not None:
                    before = self.unsent[index]
                    self.unsent[index] = gradient if before is None else self._sum(before, gradient)
                    parameter.grad = None
                parameter.data = piece
            for parameter, gradient in self._piece_gradients:
                parameter.grad = gradient
            self._piece_gradients.clear()
        self._storage.resize_(0)
        self.state = UnitState.SHARDED

    @torch.no_grad()
    def _sum(self, before: Tensor, gradient: Tensor) -> Tensor:
        """The sum of two backward passes, in the shard's dtype."""
        return before.to(self.shard.dtype).add_(gradient)

    def send_gradients(self) -> None:
        """Start reducing the kept gradients. The unit must be sharded."""
        self._gradients.send(self.unsent)
        self.unsent = [None] * len(self.parameters)

    def receive_gradients(self) -> None:
        """Wait for this rank's shard of the average."""
        self._reduced = self._gradients.receive()

    def hand_over_gradients(self, used: Sequence[bool]) -> None:
        """Give each piece its part of the average, added to a gradient that it still has. The unit must be sharded."""
        reduced, self._reduced = self._reduced, None
        assert self.state is UnitState.SHARDED and reduced is not None
        for index, parameter, place in self._present:
            if used[index]:
                piece = reduced[place]
                parameter.grad = piece if parameter.grad is None else parameter.grad.add_(piece)

    @property
    def flats(self) -> list[Tensor]:
        """This rank's shard, and the whole parameters, whose storage is empty while the unit is sharded."""
        return [self.shard, self._whole]

    @property
    def gradient_shards(self) -> list[Tensor]:
        """This rank's gradients that no piece has as its `.grad`."""
        gradients = [gradient for _, gradient in self._piece_gradients]
        return gradients if self._reduced is None else [*gradients, self._reduced]

    @property
    def in_flight(self) -> list[Tensor]:
        """The tensors from and into which gradients are being reduced."""
        return self._gradients.in_flight

    def placed(self) -> Iterator[Placed]:
        """Where the unit's parameters are."""
        for index, (name, parameter) in enumerate(zip(self.parameter_names, self.parameters, strict=True)):
            first, _ = self.ends(index)
            yield Placed(name=name, parameter=parameter, flat=self.pieces[index], first=first, shape=self.shape(index))

    def piece_of(self, shard: Tensor, index: int) -> Tensor:
        """The part of parameter `index` in a tensor with the layout of this rank's shard."""
        return shard[self._places[index]]

    def ends(self, index: int) -> tuple[int, int]:
        """First and end element of parameter `index` that this rank holds."""
        ranks = self._collectives.ranks
        return self.layout.piece(index, ranks.rank, ranks.world_size)

    def shape(self, index: int) -> torch.Size:
        """The shape of the whole parameter."""
        return self._templates[index].shape

    @torch.no_grad()
    def gathered(self, shard: Tensor) -> list[Tensor]:
        """Gather whole tensors from every rank's shard, in the layout of the parameters. Waits."""
        whole = torch.empty(self.layout.numel, dtype=shard.dtype, device=shard.device)
        self._collectives.all_gather(whole, shard, label=f"{self.name} whole").wait()
        return self._views(whole)

    @torch.no_grad()
    def load(self, index: int, whole: Tensor) -> None:
        """Set this rank's piece from a whole parameter."""
        first, end = self.ends(index)
        template = self._templates[index]
        arranged = torch.empty_strided(
            template.shape, template.stride(), dtype=self.shard.dtype, device=self.shard.device
        )
        arranged.copy_(whole)
        self.pieces[index].copy_(arranged.as_strided((template.numel(),), (1,))[first:end])

    def _views(self, flat: Tensor) -> list[Tensor]:
        """The parameters, each in its own shape, in a flat tensor of all of them."""
        return [
            view_like(flat, start, template)
            for start, template in zip(self.layout.starts, self._templates, strict=True)
        ]

    def _place(self, index: int) -> slice:
        """The place of parameter `index` in this rank's shard; empty where it has no piece of it."""
        first, end = self.ends(index)
        ranks = self._collectives.ranks
        start = self.layout.starts[index] - self.layout.shard(ranks.rank, ranks.world_size)[0]
        return slice(start + first, start + end) if end > first else slice(0)

    def _own_shard(self, dtype: torch.dtype) -> Tensor:
        ranks = self._collectives.ranks
        with torch.no_grad():
            flat = torch.zeros(self.layout.numel, dtype=dtype, device=ranks.device)
            for view, parameter in zip(self._views(flat), self.parameters, strict=True):
                view.copy_(parameter)
        first, end = self.layout.shard(ranks.rank, ranks.world_size)
        return flat[first:end].clone()


# Errors for programs that read a parameter outside its block or cast it after wrapping.


def explain_shapes(pieces: Iterable[tuple[str, Tensor]], output: Any) -> None:
    """Add a note to an error about shapes, naming the parameters whose pieces have as many elements as the error mentions.

    Called after the module's forward, also after a forward that raised. `pieces`: those of units that are sharded now.
    """
    error = sys.exc_info()[1]
    if output is not None or type(error) is not RuntimeError or not _SHAPE_ERRORS.search(str(error)):
        return
    numbers = {int(number) for number in re.findall(r"\d+", str(error))}
    named = [f"{name} ({piece.numel()} elements here)" for name, piece in pieces if piece.numel() in numbers]
    which = ", ".join(named[:_MOST_NAMED]) or "a parameter of another block"
    error.add_note(
        "FSDP: outside its own block's forward a parameter is this rank's piece of it, one-dimensional. "
        f"If this was {which}: call the block that it belongs to, or make the module that uses it and that block one unit "
        "(units=[...])"
    )


def check_pieces(names: Sequence[str], pieces: Sequence[tuple[int, nn.Parameter, Tensor]]) -> None:
    """ValueError where a parameter of a unit was cast, or the first parameter with a piece on this rank no longer is that piece."""
    # A cast is detected on every rank, also on a rank without a piece: else the others would wait for that rank.
    for index, parameter, piece in pieces:
        if parameter.dtype != piece.dtype or (piece.numel() and parameter.data_ptr() != piece.data_ptr()):
            raise ValueError(
                f"{names[index]}: is no longer the piece that FSDP made of it; move or cast the module before it is wrapped "
                "(FSDP computes in compute_dtype), and load values by load_full_state_dict or load_checkpoint"
            )
        if piece.numel():
            return


# The order of a pass.

UnitsAt = Mapping[nn.Module, Sequence[FSDPUnit]]
"""Trigger -> units."""


class PassOrder:
    """For each trigger, the units that a pass needs next and those that backward is done with, by the last complete forward.

    They are computed when the order of a forward changes, which is rare, and looked up at every trigger, which must cost the host
    little. `needs`: the units that each trigger's forward needs, first the outermost module's, which backward needs to its end.
    `ahead`: the number of triggers whose units come next.
    """

    def __init__(self, needs: UnitsAt, *, ahead: int) -> None:
        self._needs = needs
        self._ahead = ahead
        self._triggers: Sequence[nn.Module] = ()
        self.learn(list(needs))

    def learn(self, triggers: Sequence[nn.Module]) -> None:
        """Take the order of a complete forward of the outermost module."""
        if triggers == self._triggers:
            return
        self._triggers = triggers
        self.last = triggers[-1]
        """The trigger whose backward comes first."""
        self.next_in_forward: UnitsAt = self._next(triggers)
        self.next_in_backward: UnitsAt = self._next(triggers[::-1])
        self.behind_in_backward: UnitsAt = self._behind(triggers[::-1])
        """Units of triggers that backward has passed, without those that this trigger or the outermost module needs."""

    def _next(self, triggers: Sequence[nn.Module]) -> UnitsAt:
        units_at: dict[nn.Module, list[FSDPUnit]] = {}
        for place, trigger in enumerate(triggers, start=1):
            following = triggers[place : place + self._ahead]
            # setdefault: a trigger that is called twice counts at its first call
            units_at.setdefault(trigger, [unit for later in following for unit in self._needs[later]])
        return units_at

    def _behind(self, triggers: Sequence[nn.Module]) -> UnitsAt:
        units_at: dict[nn.Module, list[FSDPUnit]] = {}
        behind: dict[FSDPUnit, None] = {}
        outermost = triggers[-1]
        for trigger in triggers[:-1]:
            units_at.setdefault(trigger, [unit for unit in behind if unit not in self._needs[trigger]])
            behind.update((unit, None) for unit in self._needs[trigger] if unit not in self._needs[outermost])
        return units_at
