"""What a rank holds while a step is replayed, where every rank has whole parameters: one process alone, and gradients averaged.

none, naive and overlapped keep gradients as autograd makes them (parallel/ddp.py); flat, bucketed and sharded replace them by
buckets (bucket.py, sharded_optimizer.py). rank_tensors.py has the calls in their order, and the strategies that shard more.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainstep.config.parallel import RanksConfig
from trainstep.costs.exchange import Bucket, Exchange, ParameterSize, buckets_of, owners_of, pack_bytes, packs_of
from trainstep.costs.strategies import MessageKind
from trainstep.plan.live_tensors import COMMUNICATION, GRADIENTS, PARAMETERS, STATE, TEMPORARY, LiveTensors, Tensor
from trainstep.plan.memory_terms import parts_in_backward
from trainstep.plan.model_ops import widths_of
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
        self.trained = [parameter for parameter in self.parameters if parameter.trained]
        self.run, self.sync, self.rank = setup.config.run, setup.config.sync, setup.rank
        self.masters = self.run.precision == "bf16_master"
        self.is_last = True
        self._whole: dict[str, Tensor] = {}
        """Name -> gradient as autograd made it, added up over micro-batches."""
        self._state: dict[int, list[Tensor]] = {}
        """Number of a piece -> its moments."""
        self._sent: list[Tensor] = []
        """Casts of gradients, which are being averaged."""

    def build(self) -> None:
        """Make what is there before the first step."""
        self.make_parameters()
        if self.masters and self.run.trains:
            for piece in self.pieces():
                self.live.new(_MASTER_BYTES * piece.numel, STATE)

    def make_parameters(self) -> None:
        self.whole_parameters()

    def whole_parameters(self) -> dict[str, Tensor]:
        """The parameters by name. Those of 16 bits are made in fp32 and then cast, one after another: what the allocator reserved
        for fp32 stays reserved, and a capture's stream cannot use it (8B, results/h200/predicted_again.jsonl: 15 GiB)."""
        if widths_of(self.run).weight == _MASTER_BYTES:
            return {parameter.name: self.live.new(parameter.nbytes, PARAMETERS) for parameter in self.parameters}
        made = [self.live.new(_MASTER_BYTES * parameter.numel, PARAMETERS) for parameter in self.parameters]
        cast = {}
        for parameter, wide in zip(self.parameters, made, strict=True):
            cast[parameter.name] = self.live.new(parameter.nbytes, PARAMETERS)
            self.live.drop([wide])
        return cast

    def pieces(self) -> list[Updated]:
        """What this rank updates."""
        return [Updated(parameter.numel, parameter.element_bytes) for parameter in self.trained]

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
            for parameter in filter(self._is_cast, self.trained):
                self._sent.append(self._cast(parameter))
                self.live.drop(self._sent[:-1])
                self._sent = self._sent[-1:]
        self.live.drop(self._sent)
        self._sent = []

    def update(self) -> None:
        """The optimizer's step."""
        self.update_pieces(0, self.pieces())

    def update_pieces(self, first: int, pieces: Sequence[Updated]) -> None:
        """Update these pieces, numbered from `first` on. Their state is made in the first step."""
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
        self._parts = parts_in_backward(self.trained)
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
    """Buckets that gradients become views of: flat, bucketed, sharded (whose ranks update whole tensors that they own).

    With `in_place` a bucket has no memory but its flags: gradients are averaged where autograd made them.
    """

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
        owned = self._owned[self.rank] if self._by_owners else self.trained
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
        elif self.run.update == "by_bucket":
            for number in range(len(self._buckets)):
                self._update_bucket(number)

    def update(self) -> None:
        if self.run.update != "after_backward":
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
        if not self._stay_beside(bucket):
            self.live.drop(self.take_whole(bucket.parameters))
        if self.run.updates_in_backward and number > 0:
            self._update_sent(number - 1)

    def _update_sent(self, number: int) -> None:
        self._update_bucket(number)
        if not self.exchange.in_place:
            self.live.drop([self._flats.pop(number)])

    def _update_bucket(self, number: int) -> None:
        """Update a bucket's parameters and drop their gradients, if these are not views of it."""
        update_part(self, [bucket.parameters for bucket in self._buckets], number)
        self.live.drop(self.take_whole(self._buckets[number].parameters))

    def _new_flat(self, bucket: Bucket) -> Tensor:
        if self.exchange.in_place:
            return self.live.new(len(bucket.parameters) * bucket.element_bytes, COMMUNICATION)
        return self.live.new(bucket.nbytes, COMMUNICATION if self._stay_beside(bucket) else GRADIENTS)

    def _stay_beside(self, bucket: Bucket) -> bool:
        """Whether gradients stay beside their bucket, because it has another dtype or no memory."""
        if self.exchange.in_place:
            return True
        own = all(parameter.element_bytes == bucket.element_bytes for parameter in bucket.parameters)
        return not own and self.sync.keeps_gradient_dtype


def update_part(tensors: Replicated, parts: Sequence[Sequence[ParameterSize]], number: int) -> None:
    """Update one of the parts into which the parameters are divided."""
    first = sum(len(part) for part in parts[:number])
    tensors.update_pieces(first, [Updated(parameter.numel, parameter.element_bytes) for parameter in parts[number]])
