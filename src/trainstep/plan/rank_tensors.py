"""What each parallel strategy holds on a rank while a step is replayed: parameters, gradients, optimizer state, buffers.

    tensors = rank_tensors(Setup(config=..., exchange=..., parameters=..., rank=0, live=live))
    tensors.build()
    tensors.begin_micro_batch(is_last=True)
    tensors.before_forward(unit); tensors.after_forward(unit); tensors.forward_over(trains=True)
    tensors.before_backward(unit); tensors.gradient(parameter, tensor)
    tensors.finish(); tensors.update(); tensors.clear()

The classes here follow parallel/sharded_flat.py and fsdp.py, those of replicated_tensors.py the other strategies. Sizes are those
of costs/exchange.py, from which the messages are counted too. A unit is a block, or the parameters around the blocks (ROOT).
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from trainstep.costs.exchange import ROOT, ParameterSize, Unit, freed_between, units_sent
from trainstep.plan.live_tensors import COMMUNICATION, GRADIENTS, PARAMETERS, Tensor
from trainstep.plan.memory_terms import pieces_of, updated_pieces
from trainstep.plan.optimizer_state import Updated
from trainstep.plan.replicated_tensors import InBuckets, Replicated, Setup, UpdatedInBackward

_LEAST_COPIED_BYTES = 2**20
"""Smaller messages go through the library. A test compares it with `least_bytes` of parallel/copies/messages.py."""


class InUnits(Replicated):
    """Gradients in flat shards: sharded_flat. A unit's whole gradients go through a staging buffer to this rank's shard.

    With transport copies peers read the gradients where they are, which then live until the message has arrived.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.units = units_sent(self.exchange, self.parameters)
        trained = [unit for unit in self.units if unit.trained]
        self._backward = trained[::-1]
        self._complete: set[str] = set()
        self._next = 0
        self._in_flight: deque[tuple[Unit, Tensor | None, Sequence[Tensor], Sequence[Tensor]]] = deque()
        """Units that are being reduced, with the staging buffer or the gradients themselves, and the tensor for the average
        unless it is a kept shard."""
        self._kept_shards = False
        """Whether this rank's gradients stay in the same memory: one graph leaves them to the next (training/captured.py)."""
        self._shelves: dict[tuple[tuple[int, ...], int], list[Tensor]] = {}
        """Kind of unit -> staging buffers that no message uses."""
        self._shards: list[Tensor] = []
        numels = pieces_of(trained, self.rank, self.exchange.shards)
        self._pieces = [updated_pieces(unit.parameters, numels) for unit in trained]

    def make_parameters(self) -> None:
        # The module is built first; each unit's parameters are freed when the unit has copied them.
        whole = self.whole_parameters()
        for unit in self.units:
            self.make_unit(unit)
            self.live.drop([whole[parameter.name] for parameter in unit.parameters])

    def build(self) -> None:
        super().build()
        if self.run.capture != "none" and self.run.trains and not self.exchange.strategy.shards_parameters:
            self._kept_shards = True
            for unit in self.units:
                self.live.new(unit.nbytes // self.exchange.shards, GRADIENTS)

    def make_unit(self, unit: Unit) -> None:
        """Make a unit's own tensors of parameters."""
        self.live.new(unit.nbytes, PARAMETERS)

    def pieces(self) -> list[Updated]:
        return [piece for pieces in self._pieces for piece in pieces]

    def begin_micro_batch(self, *, is_last: bool) -> None:
        super().begin_micro_batch(is_last=is_last)
        self._complete, self._next = set(), 0

    def gradient_complete(self, parameter: ParameterSize) -> None:
        self._complete.add(parameter.name)
        while self._next < len(self._backward):
            if any(member.name not in self._complete for member in self._backward[self._next].parameters):
                return
            self._send()

    def finish(self) -> None:
        while self._next < len(self._backward):
            self._send()
        while self._in_flight:
            self._receive()
        for shelf in self._shelves.values():
            self.live.drop(shelf)
        self._shelves.clear()

    def update(self) -> None:
        first = 0
        for pieces in self._pieces:
            self.update_pieces(first, pieces)
            first += len(pieces)

    def clear(self) -> None:
        super().clear()
        self.live.drop(self._shards)
        self._shards = []

    def _send(self) -> None:
        unit = self._backward[self._next]
        self._next += 1
        self.before_sending(unit)
        whole = self.take_whole(unit.parameters)
        staging = None
        if not self._sent_where_they_are(unit, whole):
            shelf = self._shelves.setdefault(self._kind(unit), [])
            staging = shelf.pop() if shelf else self.live.new(self._sent_bytes(unit), COMMUNICATION)
        own_dtype = self._sent_bytes(unit) == unit.nbytes
        shards = (
            ()
            if self._kept_shards and own_dtype
            else (self.live.new(self._sent_bytes(unit) // self.exchange.shards, GRADIENTS),)
        )
        if staging is not None:
            self.live.drop(whole)
            whole = []
        self._in_flight.append((unit, staging, whole, shards))
        if len(self._in_flight) > self.exchange.strategy.most_in_flight:
            self._receive()

    def before_sending(self, unit: Unit) -> None:
        """A unit's gradients are complete."""

    def _receive(self) -> None:
        unit, staging, whole, shards = self._in_flight.popleft()
        if staging is not None:
            self._shelves[self._kind(unit)].append(staging)
        self.live.drop(whole)
        if self._kept_shards:
            self.live.drop(shards)
        elif self._sent_bytes(unit) == unit.nbytes:
            self._shards += shards
        else:
            self._shards.append(self.live.new(unit.nbytes // self.exchange.shards, GRADIENTS))
            self.live.drop(shards)

    def _sent_where_they_are(self, unit: Unit, whole: Sequence[Tensor]) -> bool:
        """Whether copies send these gradients: all are there, dense, in the dtype in which they are averaged."""
        sizes = [parameter.numel * self.exchange.gradient_bytes(parameter) for parameter in unit.parameters]
        return (
            self.sync.transport == "copies"
            and self.exchange.shards > 1
            and self._sent_bytes(unit) >= _LEAST_COPIED_BYTES
            and [tensor.nbytes for tensor in whole] == sizes
        )

    def _sent_bytes(self, unit: Unit) -> int:
        return unit.layout.numel * self.exchange.gradient_bytes(unit.parameters[0])

    def _kind(self, unit: Unit) -> tuple[tuple[int, ...], int]:
        return unit.layout.sizes, self._sent_bytes(unit)


class Sharded(InUnits):
    """Parameters in shards too, gathered around each use: fsdp."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._gathered: dict[str, Tensor] = {}
        """Unit -> its whole parameters."""
        self._order = list(dict.fromkeys(unit.name for unit in self.units))
        self._named = {name: [unit for unit in self.units if unit.name == name] for name in self._order}
        """Name -> its units: two, for example, if a block is trained in part."""

    def make_unit(self, unit: Unit) -> None:
        whole = self.live.new(unit.nbytes, PARAMETERS)  # the shard is cut from it
        self.live.new(unit.nbytes // self.exchange.shards, PARAMETERS)
        self.live.drop([whole])
        nbytes = unit.layout.numel * self.exchange.compute_bytes(unit.parameters[0])
        self.live.drop([self.live.new(nbytes, COMMUNICATION)])  # the gathered unit, whose storage is emptied

    def update(self) -> None:
        self.update_pieces(0, self.pieces())

    def before_forward(self, unit: str) -> None:
        if unit == ROOT and self.exchange.reshard_after_forward:
            self._free(list(self._gathered))
        self._gather([unit, *self._after(self._order, unit)])

    def after_forward(self, unit: str) -> None:
        if freed_between(self._named[unit][0], self.units, self.exchange):
            self._free([unit])

    def forward_over(self, *, trains: bool) -> None:
        if not trains:
            self._free(list(self._gathered))

    def before_backward(self, unit: str) -> None:
        self._gather([unit, *(self._after([*self._order[:0:-1], ROOT], unit) if unit != ROOT else ())])

    def gradient(self, parameter: ParameterSize, tensor: Tensor) -> None:
        before = self._whole.get(parameter.name)
        if before is not None and before.nbytes != parameter.nbytes:  # the sum of micro-batches has the shard's dtype
            self._whole[parameter.name] = self.live.new(parameter.nbytes, GRADIENTS)
            self.live.drop([before])
        super().gradient(parameter, tensor)
        if not self.is_last and self.exchange.reshard_after_forward and parameter.unit != ROOT:
            self._complete.add(parameter.name)
            members = [member for unit in self._named[parameter.unit] for member in unit.parameters if member.trained]
            if all(member.name in self._complete for member in members):
                self._free([parameter.unit])

    def before_sending(self, unit: Unit) -> None:
        self._free([unit.name])

    def finish(self) -> None:
        super().finish()
        self._free(list(self._gathered))

    def _after(self, order: Sequence[str], unit: str) -> Sequence[str]:
        place = order.index(unit) + 1 if unit in order else 0  # no parameters are around the blocks
        return order[place : place + self.exchange.ahead]

    def _gather(self, units: Iterable[str]) -> None:
        for name in units:
            if name in self._named and name not in self._gathered:
                nbytes = sum(
                    unit.layout.numel * self.exchange.compute_bytes(unit.parameters[0]) for unit in self._named[name]
                )
                self._gathered[name] = self.live.new(nbytes, COMMUNICATION)

    def _free(self, units: Iterable[str]) -> None:
        self.live.drop([self._gathered.pop(name) for name in units if name in self._gathered])


_CLASSES: Mapping[str, Callable[[Setup], Replicated]] = {
    "none": Replicated,
    "naive": Replicated,
    "overlapped": Replicated,
    "flat": InBuckets,
    "bucketed": InBuckets,
    "sharded": InBuckets,
    "sharded_flat": InUnits,
    "fsdp": Sharded,
}


def rank_tensors(setup: Setup) -> Replicated:
    """The tensors of this setup's strategy."""
    if setup.config.run.updates_in_backward and not setup.exchange.strategy.communicates:
        return UpdatedInBackward(setup)
    return _CLASSES[setup.exchange.strategy.name](setup)
