"""The terms that peak_memory.py adds up: what each strategy keeps, and what it needs for a moment. Bytes on one rank.

They follow what parallel/ does, file by file: ddp_*.py, bucket.py, sharded_optimizer.py, sharded_flat.py, fsdp.py, staging.py.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    sum_bytes,
    units_sent,
)
from trainstep.costs.strategies import MessageKind

_MOMENTS = 2
"""AdamW's, each of a parameter's size and dtype."""
_STEP_BYTES = 4
"""AdamW's counter, one a tensor: fp32."""


class _Updated(NamedTuple):
    """A tensor that a rank updates."""

    numel: int
    element_bytes: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.element_bytes


@dataclass(frozen=True, kw_only=True)
class Sending:
    """When backward sends a unit: its whole gradients are there, shards of those sent before, and what blocks before it saved."""

    activations_share: float
    """Of what forward saved, what is left, taken to go as the blocks' parameters do."""
    gradients_bytes: int
    communication_bytes: int


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Bytes. `gradients` and `whole_gradients` come on top of `kept_gradients`, other moments' buffers on top of `buffers`."""

    parameters_bytes: int
    state_bytes: int
    update_bytes: int
    """Temporary tensors of the update."""
    whole_gradients_bytes: int
    """As autograd makes them, of all trained parameters: what micro-batches before the last leave behind."""
    gradients_bytes: int
    """Once they are synchronised."""
    gradients_before_sync_bytes: int
    kept_gradients_bytes: int = 0
    """From the start on: buckets that gradients are views of."""
    buffers_from_start_bytes: int = 0
    buffers_bytes: int = 0
    """From the first step on."""
    whole_after_forward_bytes: int = 0
    whole_entering_backward_bytes: int = 0
    in_sync_bytes: int = 0
    sendings: tuple[Sending, ...] = ()
    """Of strategies in units, in backward's order."""


def terms_of(exchange: Exchange, parameters: Sequence[ParameterSize], *, rank: int, adamw: str) -> Terms:
    """Of one rank. `adamw`: RunConfig.adamw, whose implementations take different temporary tensors."""
    return TERMS[exchange.strategy.name](exchange, parameters, rank=rank, adamw=adamw)


def _one_by_one(exchange: Exchange, parameters: Sequence[ParameterSize], *, rank: int, adamw: str) -> Terms:
    """Gradients are averaged where they are, or in copies: overlapped keeps all until the end, naive makes one after another, the
    next before it lets go of the last."""
    trained = [one for one in parameters if one.trained]
    copies = [
        one.numel * exchange.gradient_bytes(one)
        for one in trained
        if exchange.gradient_bytes(one) != one.element_bytes and exchange.strategy.communicates
    ]
    neighbours = max((sum(pair) for pair in zip([0, *copies], copies, strict=False)), default=0)
    updated = [_Updated(one.numel, one.element_bytes) for one in trained]
    gradients_bytes = sum_bytes(trained)
    return Terms(
        parameters_bytes=sum_bytes(parameters),
        state_bytes=_state_bytes(updated),
        update_bytes=_update_bytes(updated, adamw),
        whole_gradients_bytes=gradients_bytes,
        gradients_bytes=gradients_bytes,
        gradients_before_sync_bytes=gradients_bytes,
        buffers_bytes=len(trained) if MessageKind.USAGE in exchange.strategy.sends else 0,
        in_sync_bytes=sum(copies) if exchange.strategy.overlaps else neighbours,
    )


def _in_buckets(exchange: Exchange, parameters: Sequence[ParameterSize], *, rank: int, adamw: str) -> Terms:
    """A bucket takes the place of its gradients once they are there; of those in another dtype it holds copies."""
    trained = [one for one in parameters if one.trained]
    buckets = buckets_of(exchange, parameters)
    copied = [one for one in trained if exchange.gradient_bytes(one) != one.element_bytes]
    unsent = buckets[-1:] if exchange.strategy.overlaps else buckets
    fresh = [one for bucket in unsent for one in bucket.parameters if one not in copied]
    in_place = sum(bucket.nbytes for bucket in buckets if not _copies(bucket))
    beside = sum(bucket.nbytes for bucket in buckets if _copies(bucket))
    by_owners = MessageKind.PARAMETERS_OF_OWNERS in exchange.strategy.sends
    owned = owners_of(exchange, parameters) if by_owners else [trained] * exchange.ranks
    packs = sum(
        pack_bytes(pack)
        for mine in owned
        for pack in packs_of(exchange, mine)
        if len(pack) > 1 and by_owners and exchange.ranks > 1
    )
    updated = [_Updated(one.numel, one.element_bytes) for one in owned[rank]]
    return Terms(
        parameters_bytes=sum_bytes(parameters),
        state_bytes=_state_bytes(updated),
        update_bytes=_update_bytes(updated, adamw),
        whole_gradients_bytes=sum_bytes(trained),
        gradients_bytes=sum_bytes(copied),
        gradients_before_sync_bytes=sum_bytes(copied) + sum_bytes(fresh),
        kept_gradients_bytes=in_place,
        buffers_from_start_bytes=beside,
        buffers_bytes=beside + packs,
    )


def _sharded_flat(exchange: Exchange, parameters: Sequence[ParameterSize], *, rank: int, adamw: str) -> Terms:
    """Parameters are whole in flat units, and flat shards are updated unit by unit.

    Whole gradients of a unit live until they are copied for sending; then a rank keeps its shard of the average.
    """
    units = units_sent(exchange, parameters)
    trained = [unit for unit in units if unit.trained]
    held = _pieces(trained, rank, exchange.ranks)
    return Terms(
        parameters_bytes=sum(unit.nbytes for unit in trained)
        + sum_bytes([one for one in parameters if not one.trained]),
        state_bytes=_state_bytes(_updated(parameters, held)),
        update_bytes=max(_update_bytes(_updated(unit.parameters, held), adamw) for unit in trained),
        whole_gradients_bytes=sum(sum_bytes(unit.parameters) for unit in trained),
        gradients_bytes=_gradient_shards_bytes(trained, rank, exchange.ranks),
        gradients_before_sync_bytes=_before_sync_bytes(exchange, trained),
        buffers_bytes=sum(len(unit.parameters) for unit in trained),
        in_sync_bytes=_staging_bytes(exchange, trained),
        sendings=_sendings(exchange, units, ()),
    )


def _fsdp(exchange: Exchange, parameters: Sequence[ParameterSize], *, rank: int, adamw: str) -> Terms:
    """Parameters are shards, gathered for a while; all are updated at once. Gradients as in _sharded_flat, but that whole ones of
    earlier micro-batches are kept apart."""
    units = units_sent(exchange, parameters)
    trained = [unit for unit in units if unit.trained]
    updated = _updated(parameters, _pieces(trained, rank, exchange.ranks))
    kept_whole = [unit for unit in units if not freed_between(unit, units, exchange)]
    names = [name for name in dict.fromkeys(unit.name for unit in units) if name != ROOT]
    frozen = [
        unit
        for unit in units
        if not unit.trained and (unit.name in (ROOT, *names[:1]) or not exchange.reshard_after_forward)
    ]  # those of other blocks are free again
    ahead = names[:-1][::-1][: exchange.ahead]
    gathered_ahead = [unit for unit in units if unit.name in ahead and unit not in kept_whole]
    return Terms(
        parameters_bytes=_shards_bytes(units, exchange.ranks),
        state_bytes=_state_bytes(updated),
        update_bytes=_update_bytes(updated, adamw),
        whole_gradients_bytes=sum(_earlier_bytes(exchange, unit) for unit in trained),
        gradients_bytes=_gradient_shards_bytes(trained, rank, exchange.ranks),
        gradients_before_sync_bytes=_earlier_bytes(exchange, trained[0]) + _before_sync_bytes(exchange, trained),
        buffers_bytes=sum(len(unit.parameters) for unit in trained),
        whole_after_forward_bytes=_whole_bytes(exchange, kept_whole),
        whole_entering_backward_bytes=_whole_bytes(exchange, [*kept_whole, *gathered_ahead]),
        in_sync_bytes=_staging_bytes(exchange, trained) + _whole_bytes(exchange, frozen),
        sendings=_sendings(exchange, units, kept_whole),
    )


def _pieces(trained: Sequence[Unit], rank: int, ranks: int) -> dict[str, int]:
    """Parameter -> how many of its elements this rank updates."""
    return {
        one.name: end - begin
        for unit in trained
        for one, (begin, end) in zip(unit.parameters, _ends(unit, rank, ranks), strict=True)
    }


def _updated(parameters: Sequence[ParameterSize], held: Mapping[str, int]) -> list[_Updated]:
    """Those that this rank updates, of which it holds so many elements."""
    return [_Updated(held[one.name], one.element_bytes) for one in parameters if held.get(one.name)]


def _gradient_shards_bytes(trained: Sequence[Unit], rank: int, ranks: int) -> int:
    """The averages', once all are there: of units that this rank has a piece of."""
    return _shards_bytes(
        [unit for unit in trained if any(end > begin for begin, end in _ends(unit, rank, ranks))], ranks
    )


def _before_sync_bytes(exchange: Exchange, trained: Sequence[Unit]) -> int:
    """The last unit that backward completes is the first of forward: when it is sent, those before it are shards already."""
    at_once = exchange.strategy.most_in_flight + 1
    on_the_way, received = trained[:at_once], trained[at_once:]
    shards = sum(_sent_bytes(exchange, unit) // exchange.ranks for unit in on_the_way)
    return _computed_bytes(exchange, trained[0].parameters) + shards + _shards_bytes(received, exchange.ranks)


def _sendings(exchange: Exchange, units: Sequence[Unit], kept_whole: Sequence[Unit]) -> tuple[Sending, ...]:
    """`kept_whole`: units of fsdp that are whole until they are sent. The next ones are being gathered beside them."""
    fully = exchange.strategy.shards_parameters
    backward = [unit for unit in reversed(units) if unit.trained]
    blocks_bytes = sum(unit.nbytes for unit in backward if unit.name != ROOT)
    found, gone_bytes, shards_bytes = [], 0, 0
    for index, unit in enumerate(backward):
        left = backward[index + 1 :]
        earlier = sum(_earlier_bytes(exchange, one) if fully else sum_bytes(one.parameters) for one in left)
        gone_bytes += 0 if unit.name == ROOT else unit.nbytes
        shards_bytes += _sent_bytes(exchange, unit) // exchange.ranks
        ahead = [one for one in left if one.name != ROOT][: exchange.ahead] if fully else []
        whole = dict.fromkeys([one for one in left if one in kept_whole] + ahead)
        found.append(
            Sending(
                activations_share=1 - gone_bytes / blocks_bytes if blocks_bytes else 0.0,
                gradients_bytes=_computed_bytes(exchange, unit.parameters)
                + shards_bytes
                + (earlier if exchange.micro_batches > 1 else 0),
                communication_bytes=_staging_bytes(exchange, backward[: index + 1])
                + _whole_bytes(exchange, list(whole)),
            )
        )
    return tuple(found)


def _staging_bytes(exchange: Exchange, trained: Sequence[Unit]) -> int:
    """Buffers are shared by units of the same shapes: as many as are ever on their way together, kept until the last is there."""
    most: Counter[tuple[tuple[int, ...], int]] = Counter()
    for index in range(len(trained)):
        together = trained[index : index + exchange.strategy.most_in_flight + 1]
        most |= Counter((unit.layout.sizes, _sent_bytes(exchange, unit)) for unit in together)
    return sum(nbytes * count for (_, nbytes), count in most.items())


def _sent_bytes(exchange: Exchange, unit: Unit) -> int:
    return unit.layout.numel * exchange.gradient_bytes(unit.parameters[0])


def _whole_bytes(exchange: Exchange, units: Sequence[Unit]) -> int:
    """Of units while they are gathered."""
    return sum(unit.layout.numel * exchange.compute_bytes(unit.parameters[0]) for unit in units)


def _computed_bytes(exchange: Exchange, parameters: Sequence[ParameterSize]) -> int:
    """Of whole gradients as autograd makes them."""
    return sum(one.numel * exchange.compute_bytes(one) for one in parameters)


def _earlier_bytes(exchange: Exchange, unit: Unit) -> int:
    """Of a unit's whole gradients that fsdp keeps of micro-batches before the last: one's as autograd made them, the sum of
    several in the parameters' dtype."""
    if exchange.micro_batches == 1:
        return 0
    return _computed_bytes(exchange, unit.parameters) if exchange.micro_batches == 2 else sum_bytes(unit.parameters)


def _ends(unit: Unit, rank: int, ranks: int) -> list[tuple[int, int]]:
    return [unit.layout.piece(index, rank, ranks) for index in range(len(unit.parameters))]


def _shards_bytes(units: Sequence[Unit], ranks: int) -> int:
    return sum(unit.nbytes // ranks for unit in units)


def _copies(bucket: Bucket) -> bool:
    return any(one.element_bytes != bucket.element_bytes for one in bucket.parameters)


def _state_bytes(updated: Sequence[_Updated]) -> int:
    return sum(_MOMENTS * one.nbytes + _STEP_BYTES for one in updated)


def _update_bytes(updated: Sequence[_Updated], adamw: str) -> int:
    """fused and ours: none (on a GPU); foreach: the root of every second moment; loop: two tensors of a parameter's size, and the
    last one's root."""
    sizes = [one.nbytes for one in updated]
    one_by_one = max((last + 2 * size for last, size in zip([0, *sizes], sizes, strict=False)), default=0)
    return {"fused": 0, "trainstep": 0, "foreach": sum(sizes), "loop": one_by_one}[adamw]


TERMS: Mapping[str, Callable[..., Terms]] = {
    "none": _one_by_one,
    "naive": _one_by_one,
    "flat": _in_buckets,
    "overlapped": _one_by_one,
    "bucketed": _in_buckets,
    "sharded": _in_buckets,
    "sharded_flat": _sharded_flat,
    "fsdp": _fsdp,
}
"""Strategy of ours (costs/strategies.py) -> its terms."""
