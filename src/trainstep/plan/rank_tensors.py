"""What each parallel strategy holds on a rank while a step is replayed: parameters, gradients, optimizer state, buffers.

    tensors = rank_tensors(config, live)        # config: RanksConfig
    tensors.build()
    tensors.begin_micro_batch(is_last=True)
    tensors.before_forward(unit); tensors.after_forward(unit); tensors.forward_over()
    tensors.before_backward(unit); tensors.gradient(parameter, tensor)
    tensors.finish(); tensors.update(); tensors.clear()

Each class follows one file of parallel/: ddp.py, bucket.py, sharded_optimizer.py, sharded_flat.py, fsdp.py. Sizes are those of
costs/exchange.py, from which the messages are counted too. A unit is a block, or the parameters around the blocks (ROOT).
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainstep.config.parallel import RanksConfig
from trainstep.costs.exchange import (
    ROOT,
    Bucket,
    Exchange,
    ParameterSize,
    Unit,
    buckets_of,
    freed_between,
    owners_of,
    pack_bytes,
    packs_of,
    units_sent,
)
from trainstep.costs.strategies import MessageKind
from trainstep.plan.live_tensors import COMMUNICATION, GRADIENTS, PARAMETERS, STATE, TEMPORARY, LiveTensors, Tensor
from trainstep.plan.memory_terms import parts_in_backward, pieces_of, updated_pieces
from trainstep.plan.optimizer_state import Updated

_MASTER_BYTES = 4
_STEP_BYTES = 4
"""AdamW's step counter, one per tensor; the allocator makes 512 bytes of it."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What every strategy is given. `parameters`: in the module's order."""

    config: RanksConfig
    exchange: Exchange
    parameters: Sequence[ParameterSize]
    rank: int
    live: LiveTensors


class Replicated:
    """Whole parameters, gradients and state on every rank: none, naive, overlapped; and one process alone."""

    def __init__(self, setup: Setup) -> None:
        self.live, self.exchange, self.parameters = setup.live, setup.exchange, setup.parameters
        self.run, self.sync, self.rank = setup.config.run, setup.config.sync, setup.rank
        self.masters = self.run.precision == "bf16_master"
        self.is_last = True
        self._whole: dict[str, Tensor] = {}
        """Name -> gradient as autograd made it, added up over micro-batches."""
        self._state: dict[int, list[Tensor]] = {}
        """Number of a piece -> its moments."""
        self._sent: list[Tensor] = []
        """Casts that are being averaged."""

    def build(self) -> None:
        """Make what is there before the first step."""
        self.make_parameters()
        if self.masters and self.run.trains:
            for piece in self.pieces():
                self.live.new(_MASTER_BYTES * piece.numel, STATE)

    def make_parameters(self) -> None:
        for parameter in self.parameters:
            self.live.new(parameter.nbytes, PARAMETERS)

    def pieces(self) -> list[Updated]:
        """What this rank updates."""
        return [Updated(parameter.numel, parameter.element_bytes) for parameter in self.parameters]

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Gradients are sent in the last micro-batch; before it they add up."""
        self.is_last = is_last

    def before_forward(self, unit: str) -> None:
        """A unit's forward begins."""

    def after_forward(self, unit: str) -> None:
        """A unit's forward is over."""

    def forward_over(self, *, trains: bool) -> None:
        """The module's forward is over."""

    def before_backward(self, unit: str) -> None:
        """A unit's backward begins."""

    def gradient(self, parameter: ParameterSize, tensor: Tensor) -> None:
        """Autograd has made a parameter's gradient."""
        if parameter.name in self._whole:
            self.live.drop([tensor])  # added to the gradient of the micro-batch before
        else:
            self._whole[parameter.name] = tensor
        if self.is_last:
            self.gradient_complete(parameter)

    def gradient_complete(self, parameter: ParameterSize) -> None:
        """The gradient of the last micro-batch is there."""
        if self.exchange.strategy.overlaps and self._is_cast(parameter):
            self._sent.append(self._cast(parameter))

    def finish(self) -> None:
        """Synchronise what has not been sent in backward."""
        if not self.exchange.strategy.overlaps and self.exchange.strategy.communicates:
            for parameter in filter(self._is_cast, self.parameters):
                self._sent.append(self._cast(parameter))
                self.live.drop(self._sent[:-1])
                self._sent = self._sent[-1:]
        self.live.drop(self._sent)
        self._sent = []

    def update(self) -> None:
        """The optimizer's step."""
        self.update_pieces(0, self.pieces())

    def update_pieces(self, first: int, pieces: Sequence[Updated]) -> None:
        """Update these pieces, of which the first has this number: their state is made in the first step."""
        live, sizes = self.live, [piece.numel * self._state_bytes(piece) for piece in pieces]
        copies = [live.new(size, TEMPORARY) for size in sizes] if self.masters and self.run.adamw != "trainstep" else []
        for number, size in enumerate(sizes, start=first):
            if number not in self._state:
                self._state[number] = [live.new(_STEP_BYTES, STATE), live.new(size, STATE), live.new(size, STATE)]
        if self.run.adamw == "foreach":
            live.drop([live.new(size, TEMPORARY) for size in sizes])  # the root of every second moment
        elif self.run.adamw == "loop":
            largest = max(sizes, default=0)
            live.drop([live.new(largest, TEMPORARY) for _ in range(2)])
        live.drop(copies)

    def clear(self) -> None:
        """Drop the gradients."""
        self.live.drop(self._whole.values())
        self._whole.clear()

    def take_whole(self, parameters: Iterable[ParameterSize]) -> list[Tensor]:
        """Remove these parameters' whole gradients and return them."""
        names = [parameter.name for parameter in parameters]
        return [self._whole.pop(name) for name in names if name in self._whole]

    def _state_bytes(self, piece: Updated) -> int:
        return _MASTER_BYTES if self.masters else piece.element_bytes

    def _is_cast(self, parameter: ParameterSize) -> bool:
        return (
            self.exchange.gradient_bytes(parameter) != parameter.element_bytes and self.exchange.strategy.communicates
        )

    def _cast(self, parameter: ParameterSize) -> Tensor:
        return self.live.new(parameter.numel * self.exchange.gradient_bytes(parameter), COMMUNICATION)


class UpdatedInBackward(Replicated):
    """One process that updates a block as soon as its gradients are complete (training/update_in_backward.py)."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._parts = parts_in_backward(self.parameters)
        self._missing: list[int] = []
        self._part_of = {parameter.name: number for number, part in enumerate(self._parts) for parameter in part}

    def begin_micro_batch(self, *, is_last: bool) -> None:
        super().begin_micro_batch(is_last=is_last)
        self._missing = [len(part) for part in self._parts]

    def gradient_complete(self, parameter: ParameterSize) -> None:
        number = self._part_of[parameter.name]
        self._missing[number] -= 1
        if self._missing[number] == 0:
            update_part(self, self._parts, number)
            self.live.drop(self.take_whole(self._parts[number]))

    def update(self) -> None:
        pass


class InBuckets(Replicated):
    """Buckets that gradients become views of: flat, bucketed, sharded (whose ranks update whole tensors that they own)."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._buckets = buckets_of(self.exchange, self.parameters)
        self._by_owners = MessageKind.PARAMETERS_OF_OWNERS in self.exchange.strategy.sends
        self._owned = owners_of(self.exchange, self.parameters) if self._by_owners else []
        self._packs_made = False
        self._flats: dict[int, Tensor] = {}
        self._complete: set[str] = set()
        self._next = 0
        """Number of the bucket that is sent next."""

    def build(self) -> None:
        super().build()
        if not self.run.updates_in_backward:
            self._flats = {number: self._new_flat(bucket) for number, bucket in enumerate(self._buckets)}

    def pieces(self) -> list[Updated]:
        owned = self._owned[self.rank] if self._by_owners else self.parameters
        return [Updated(parameter.numel, parameter.element_bytes) for parameter in owned]

    def begin_micro_batch(self, *, is_last: bool) -> None:
        super().begin_micro_batch(is_last=is_last)
        self._complete, self._next = set(), 0

    def gradient_complete(self, parameter: ParameterSize) -> None:
        self._complete.add(parameter.name)
        while self.exchange.strategy.overlaps and self._next < len(self._buckets):
            if any(member.name not in self._complete for member in self._buckets[self._next].parameters):
                return
            self._send()

    def finish(self) -> None:
        while self._next < len(self._buckets):
            self._send()
        if self.run.updates_in_backward:
            self._update_sent(len(self._buckets) - 1)

    def update(self) -> None:
        if self.run.updates_in_backward:
            return
        super().update()
        if self._by_owners and not self._packs_made and self.exchange.ranks > 1:
            self._packs_made = True
            packs = [pack for owned in self._owned for pack in packs_of(self.exchange, owned) if len(pack) > 1]
            for pack in packs:
                self.live.new(pack_bytes(pack), COMMUNICATION)

    def _send(self) -> None:
        number, bucket = self._next, self._buckets[self._next]
        self._next += 1
        if number not in self._flats:
            self._flats[number] = self._new_flat(bucket)
        if not self._copies_back(bucket):
            self.live.drop(self.take_whole(bucket.parameters))
        if self.run.updates_in_backward and number > 0:
            self._update_sent(number - 1)

    def _update_sent(self, number: int) -> None:
        update_part(self, [bucket.parameters for bucket in self._buckets], number)
        self.live.drop([*self.take_whole(self._buckets[number].parameters), self._flats.pop(number)])

    def _new_flat(self, bucket: Bucket) -> Tensor:
        return self.live.new(bucket.nbytes, COMMUNICATION if self._copies_back(bucket) else GRADIENTS)

    def _copies_back(self, bucket: Bucket) -> bool:
        """Whether gradients stay beside their bucket, because it has another dtype."""
        own = all(parameter.element_bytes == bucket.element_bytes for parameter in bucket.parameters)
        return not own and self.sync.keeps_gradient_dtype


class InUnits(Replicated):
    """Gradients in flat shards: sharded_flat. A unit's whole gradients go through a staging buffer to this rank's shard."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.units = units_sent(self.exchange, self.parameters)
        self._backward = self.units[::-1]
        self._complete: set[str] = set()
        self._next = 0
        self._in_flight: deque[tuple[Unit, Tensor, tuple[Tensor, ...]]] = deque()
        """Units that are being reduced, with staging buffer and, unless it is a kept shard, the tensor for the average."""
        self._kept_shards = False
        """Whether this rank's gradients stay in the same memory: one graph leaves them to the next (training/captured.py)."""
        self._shelves: dict[tuple[tuple[int, ...], int], list[Tensor]] = {}
        """Kind of unit -> staging buffers that no message uses."""
        self._shards: list[Tensor] = []
        numels = pieces_of(self.units, self.rank, self.exchange.ranks)
        self._pieces = [updated_pieces(unit.parameters, numels) for unit in self.units]

    def make_parameters(self) -> None:
        # The module is built first; each unit's parameters are freed when the unit has copied them.
        whole = {parameter.name: self.live.new(parameter.nbytes, PARAMETERS) for parameter in self.parameters}
        for unit in self.units:
            self.make_unit(unit)
            self.live.drop([whole[parameter.name] for parameter in unit.parameters])

    def build(self) -> None:
        super().build()
        if self.run.capture != "none" and self.run.trains and not self.exchange.strategy.shards_parameters:
            self._kept_shards = True
            for unit in self.units:
                self.live.new(unit.nbytes // self.exchange.ranks, GRADIENTS)

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
        shelf = self._shelves.setdefault(self._kind(unit), [])
        staging = shelf.pop() if shelf else self.live.new(self._sent_bytes(unit), COMMUNICATION)
        own_dtype = self._sent_bytes(unit) == unit.nbytes
        shards = (
            ()
            if self._kept_shards and own_dtype
            else (self.live.new(self._sent_bytes(unit) // self.exchange.ranks, GRADIENTS),)
        )
        self.live.drop(self.take_whole(unit.parameters))
        self._in_flight.append((unit, staging, shards))
        if len(self._in_flight) > self.exchange.strategy.most_in_flight:
            self._receive()

    def before_sending(self, unit: Unit) -> None:
        """A unit's gradients are complete."""

    def _receive(self) -> None:
        unit, staging, shards = self._in_flight.popleft()
        self._shelves[self._kind(unit)].append(staging)
        if self._kept_shards:
            self.live.drop(shards)
        elif self._sent_bytes(unit) == unit.nbytes:
            self._shards += shards
        else:
            self._shards.append(self.live.new(unit.nbytes // self.exchange.ranks, GRADIENTS))
            self.live.drop(shards)

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
        self._unit = {unit.name: unit for unit in self.units}
        self._order = [unit.name for unit in self.units]

    def make_unit(self, unit: Unit) -> None:
        whole = self.live.new(unit.nbytes, PARAMETERS)  # the shard is cut from it
        self.live.new(unit.nbytes // self.exchange.ranks, PARAMETERS)
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
        if freed_between(self._unit[unit], self.units, self.exchange):
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
            if all(member.name in self._complete for member in self._unit[parameter.unit].parameters):
                self._free([parameter.unit])

    def before_sending(self, unit: Unit) -> None:
        self._free([unit.name])

    def finish(self) -> None:
        super().finish()
        self._free(list(self._gathered))

    def _after(self, order: Sequence[str], unit: str) -> Sequence[str]:
        place = order.index(unit) + 1
        return order[place : place + self.exchange.ahead]

    def _gather(self, units: Iterable[str]) -> None:
        for name in units:
            if name not in self._gathered:
                unit = self._unit[name]
                nbytes = unit.layout.numel * self.exchange.compute_bytes(unit.parameters[0])
                self._gathered[name] = self.live.new(nbytes, COMMUNICATION)

    def _free(self, units: Iterable[str]) -> None:
        self.live.drop([self._gathered.pop(name) for name in units if name in self._gathered])


def update_part(tensors: Replicated, parts: Sequence[Sequence[ParameterSize]], number: int) -> None:
    """Update one of the parts into which the parameters are divided."""
    first = sum(len(part) for part in parts[:number])
    tensors.update_pieces(first, [Updated(parameter.numel, parameter.element_bytes) for parameter in parts[number]])


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
