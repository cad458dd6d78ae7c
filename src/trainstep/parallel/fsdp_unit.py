"""One unit of fully sharded data parallel: its shard, its whole parameters while they are needed, and their gradients' way back.

[Note: storage that comes and goes]
The whole parameters of a unit live in one flat tensor that is made once; only its storage is freed and taken again. What autograd
saved for backward (a transposed view of a weight, say) keeps pointing into it, and finds the same values there once the unit
is gathered again. Nothing reads it in between.

[Note: streams]
On a GPU a collective starts behind what the current stream has been given so far and runs beside what it is given next. So a unit
is gathered ahead by asking before the block in front of it is launched; memory that this block's predecessor freed may be taken for
it at once; and waiting makes the stream wait, not the host. The shard is sent from where it lies: an optimizer updates it when
gradients have been handed over, and every gather has been waited for by then.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from trainstep.parallel.collectives import DONE, Collectives, Pending
from trainstep.parallel.flat_buffer import lay_out, view_like
from trainstep.parallel.fsdp_errors import check_pieces
from trainstep.parallel.gradient_shards import GradientShards
from trainstep.parallel.staging import StagingPool
from trainstep.parallel.units import UnitPlan
from trainstep.spans import span


class UnitState(Enum):
    """What of a unit is in memory on a rank."""

    SHARDED = "1/N of its elements; its parameters are this rank's pieces of them, one-dimensional"
    GATHERING = "its shard, and the whole in the compute dtype, being filled"
    GATHERED = "its shard, and the whole in the compute dtype; its parameters are views of that"


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Where a parameter is between steps. `flat`: this rank's elements, from `first` on, in the order of memory and in place.
    `everywhere`: every rank has all of them."""

    name: str
    parameter: nn.Parameter
    flat: Tensor
    first: int
    shape: torch.Size
    everywhere: bool = False


class FSDPUnit:
    """Takes a unit's parameters over: from here on they are pieces, save between `wait_for_unshard` and `reshard`.

    The shard keeps the parameters' dtype; what is gathered and computed with is `compute_dtype`, cast before it is sent.
    """

    def __init__(
        self,
        plan: UnitPlan,
        collectives: Collectives,
        staging: StagingPool,
        *,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        ranks = collectives.ranks
        self.name = plan.name
        self.parameters = plan.parameters
        self.parameter_names = plan.parameter_names
        self.trains = plan.parameters[0].requires_grad
        self.state = UnitState.SHARDED
        self._collectives = collectives
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
        """A parameter and what it is while the unit is gathered."""
        self._as_pieces = [(index, parameter, self.pieces[index]) for index, parameter in enumerate(plan.parameters)]
        """A parameter's number here, the parameter, and what it is while the unit is sharded."""
        self._present = [
            (index, parameter, self._places[index]) for index, parameter, piece in self._as_pieces if piece.numel()
        ]
        """The same of those of which this rank has a piece: number, parameter, and where its shard has it."""
        self._own_part = self._whole[slice(*self.layout.shard(ranks.rank, ranks.world_size))]
        self._storage = self._whole.untyped_storage()
        self._whole_bytes = self._storage.nbytes()
        self._storage.resize_(0)  # [Note: storage that comes and goes]
        self._gathering: Pending = DONE
        self._held: list[tuple[nn.Parameter, Tensor]] = []
        """Gradients: of pieces, while the parameters are whole."""
        self.unsent: list[Tensor | None] = [None] * len(plan.parameters)
        """Gradients: whole ones that have not been reduced yet."""
        self._reduced: Tensor | None = None
        self._gradients = GradientShards(
            plan.name,
            self._templates,
            self.layout,
            dtype=dtype,
            reduce_dtype=reduce_dtype,
            collectives=collectives,
            staging=staging,
        )
        for _, parameter, piece in self._as_pieces:
            parameter.data = piece

    def unshard(self) -> None:
        """Start gathering the whole parameters, unless that is done. ValueError where they are no longer this unit's pieces."""
        if self.state is not UnitState.SHARDED:
            return
        check_pieces(self.parameter_names, self._as_pieces)
        with span(f"unshard {self.name}"):
            self._storage.resize_(self._whole_bytes)  # may run out of memory: then it is sharded as before
        self.state = UnitState.GATHERING
        sent = self.shard if self.shard.dtype == self._whole.dtype else self._own_part.copy_(self.shard)
        self._gathering = self._collectives.all_gather(self._whole, sent, label=self.name)

    def wait_for_unshard(self) -> None:
        """From here on the parameters are whole."""
        self.unshard()
        if self.state is not UnitState.GATHERING:
            return
        self._gathering.wait()
        self._gathering = DONE
        self.state = UnitState.GATHERED
        for parameter, view in self._as_wholes:
            if parameter.grad is not None:
                self._held.append((parameter, parameter.grad))
                parameter.grad = None
            parameter.data = view

    def reshard(self) -> None:
        """Free the whole parameters. A gradient that autograd has added to them is kept, to be reduced."""
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
            for parameter, gradient in self._held:
                parameter.grad = gradient
            self._held.clear()
        self._storage.resize_(0)
        self.state = UnitState.SHARDED

    @torch.no_grad()
    def _sum(self, before: Tensor, gradient: Tensor) -> Tensor:
        """Of several backward passes, in the shard's dtype."""
        return before.to(self.shard.dtype).add_(gradient)

    def send_gradients(self) -> None:
        """Sharded: start reducing what is kept."""
        self._gradients.send(self.unsent)
        self.unsent = [None] * len(self.parameters)

    def receive_gradients(self) -> None:
        """Wait for this rank's shard of the average."""
        self._reduced = self._gradients.receive()

    def hand_over_gradients(self, used: Sequence[bool]) -> None:
        """Sharded: give each piece its part of the average, added to a gradient that it still has."""
        reduced, self._reduced = self._reduced, None
        assert self.state is UnitState.SHARDED and reduced is not None
        for index, parameter, place in self._present:
            if used[index]:
                piece = reduced[place]
                parameter.grad = piece if parameter.grad is None else parameter.grad.add_(piece)

    @property
    def flats(self) -> list[Tensor]:
        """This rank's shard; the whole, whose storage is empty while it is sharded."""
        return [self.shard, self._whole]

    @property
    def gradient_shards(self) -> list[Tensor]:
        """This rank's gradients, as long as no piece has them as its `.grad`."""
        held = [gradient for _, gradient in self._held]
        return held if self._reduced is None else [*held, self._reduced]

    @property
    def in_flight(self) -> list[Tensor]:
        """What gradients are reduced in and to."""
        return self._gradients.in_flight

    def placed(self) -> Iterator[Placed]:
        """Where its parameters are."""
        for index, (name, parameter) in enumerate(zip(self.parameter_names, self.parameters, strict=True)):
            first, _ = self.ends(index)
            yield Placed(name=name, parameter=parameter, flat=self.pieces[index], first=first, shape=self.shape(index))

    def piece_of(self, shard: Tensor, index: int) -> Tensor:
        """What a tensor laid out as this rank's shard holds of parameter `index`."""
        return shard[self._places[index]]

    def ends(self, index: int) -> tuple[int, int]:
        """First and end element of parameter `index` that this rank holds."""
        ranks = self._collectives.ranks
        return self.layout.piece(index, ranks.rank, ranks.world_size)

    def shape(self, index: int) -> torch.Size:
        """Of the whole parameter."""
        return self._templates[index].shape

    @torch.no_grad()
    def gathered(self, shard: Tensor) -> list[Tensor]:
        """Whole tensors from every rank's shard of something laid out as the parameters are. Waits."""
        whole = torch.empty(self.layout.numel, dtype=shard.dtype, device=shard.device)
        self._collectives.all_gather(whole, shard, label=f"{self.name} whole").wait()
        return self._views(whole)

    @torch.no_grad()
    def load(self, index: int, whole: Tensor) -> None:
        """Take this rank's piece of a whole parameter."""
        first, end = self.ends(index)
        template = self._templates[index]
        arranged = torch.empty_strided(
            template.shape, template.stride(), dtype=self.shard.dtype, device=self.shard.device
        )
        arranged.copy_(whole)
        self.pieces[index].copy_(arranged.as_strided((template.numel(),), (1,))[first:end])

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Of a flat tensor of all parameters, each in its own shape."""
        return [
            view_like(flat, start, template)
            for start, template in zip(self.layout.starts, self._templates, strict=True)
        ]

    def _place(self, index: int) -> slice:
        """Where this rank's shard has parameter `index`."""
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
