"""Computes the bytes that each strategy keeps or needs on a rank, and the built-in model's parameters.

peak_memory.py adds the terms up. They follow parallel/ file by file: ddp.py, bucket.py, sharded_optimizer.py, sharded_flat.py,
fsdp.py, flat_buffer.py.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainstep.config.model import ModelConfig
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
from trainstep.plan.optimizer_state import Optimizer, StateBytes, Updated

_WEIGHT_BYTES = {"fp32": 4, "tf32": 4, "bf16_autocast": 4, "fp16_autocast": 4, "bf16": 2, "bf16_master": 2}


@dataclass(frozen=True, kw_only=True)
class Sending:
    """What is held when backward sends a unit: its whole gradients, shards of units sent before, what earlier blocks saved.

    With an update in backward: the same when a part is updated, or its bucket is sent.
    """

    activations_share: float
    """The share of forward's activations that is left, assumed to fall as the blocks' parameters are passed."""
    gradients_bytes: int
    communication_bytes: int


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Bytes on one rank. The gradients of a moment add to `kept_gradients_bytes`, its buffers to `buffers_bytes`."""

    parameters_bytes: int
    state: StateBytes
    whole_gradients_bytes: int
    """All trained parameters' gradients as autograd makes them, which micro-batches before the last leave behind."""
    gradients_bytes: int
    """Synchronised gradients."""
    gradients_before_sync_bytes: int
    kept_gradients_bytes: int = 0
    """Buckets that gradients are views of, held from the start."""
    buffers_from_start_bytes: int = 0
    buffers_bytes: int = 0
    """Buffers held from the first step on."""
    whole_after_forward_bytes: int = 0
    whole_entering_backward_bytes: int = 0
    in_sync_bytes: int = 0
    after_sync_bytes: int = 0
    """Buffers that are held until the optimizer's step."""
    sendings: tuple[Sending, ...] = ()
    """Only for strategies with units and with an update in backward, in backward's order."""


def terms_of(exchange: Exchange, parameters: Sequence[ParameterSize], *, rank: int, optimizer: Optimizer) -> Terms:
    """The terms of one rank."""
    return TERMS[exchange.strategy.name](exchange, parameters, rank=rank, optimizer=optimizer)


def weight_bytes(precision: str) -> int:
    """Bytes of an element of a parameter, its gradient and, without masters, its optimizer state, by RunConfig.precision."""
    return _WEIGHT_BYTES[precision]


def transformer_parameters(model: ModelConfig, precision: str, ops: str = "plain") -> tuple[ParameterSize, ...]:
    """The built-in model's parameters in the module's order; with fused ops, gate and up are one.

    Each block is a unit; embedding, last norm and head are another.
    """
    d, d_ff, element_bytes = model.d_model, model.d_ff, weight_bytes(precision)
    in_block = {
        "attention_norm": d,
        "attention.qkv": 3 * d * d,
        "attention.out": d * d,
        "mlp_norm": d,
        **({"mlp.gate_up": 2 * d * d_ff} if ops == "fused" else {"mlp.gate": d * d_ff, "mlp.up": d * d_ff}),
        "mlp.down": d_ff * d,
    }
    blocks = [
        ParameterSize(
            name=f"blocks.{layer}.{name}.weight", numel=numel, element_bytes=element_bytes, unit=f"blocks.{layer}"
        )
        for layer in range(model.layers)
        for name, numel in in_block.items()
    ]
    around = [
        ParameterSize(name=f"{name}.weight", numel=numel, element_bytes=element_bytes)
        for name, numel in {"embedding": model.vocab_size * d, "norm": d, "head": model.vocab_size * d}.items()
    ]
    return (around[0], *blocks, *around[1:])


def _one_by_one(exchange: Exchange, parameters: Sequence[ParameterSize], *, rank: int, optimizer: Optimizer) -> Terms:
    """Gradients are averaged in place, or in copies of another dtype."""
    trained = [parameter for parameter in parameters if parameter.trained]
    copies = [
        parameter.numel * exchange.gradient_bytes(parameter)
        for parameter in trained
        if exchange.gradient_bytes(parameter) != parameter.element_bytes and exchange.strategy.communicates
    ]
    # `overlapped` keeps all copies until the end. `naive` makes one after another, each before it frees the one before.
    neighbours = max((sum(pair) for pair in zip([0, *copies], copies, strict=False)), default=0)
    updated = [Updated(parameter.numel, parameter.element_bytes) for parameter in trained]
    if optimizer.in_backward:
        return _updated_in_backward(exchange, parameters, trained, optimizer.state(updated))
    gradients_bytes = sum_bytes(trained)
    return Terms(
        parameters_bytes=sum_bytes(parameters),
        state=optimizer.state(updated),
        whole_gradients_bytes=gradients_bytes,
        gradients_bytes=gradients_bytes,
        gradients_before_sync_bytes=gradients_bytes,
        buffers_bytes=len(trained) if MessageKind.USAGE in exchange.strategy.sends else 0,
        in_sync_bytes=sum(copies) if exchange.strategy.overlaps else neighbours,
    )


def _in_buckets(exchange: Exchange, parameters: Sequence[ParameterSize], *, rank: int, optimizer: Optimizer) -> Terms:
    """A bucket replaces its gradients once they are complete; gradients in another dtype are copied into it."""
    trained = [parameter for parameter in parameters if parameter.trained]
    buckets = buckets_of(exchange, parameters)
    copied = [parameter for parameter in trained if exchange.gradient_bytes(parameter) != parameter.element_bytes]
    unsent = buckets[-1:] if exchange.strategy.overlaps else buckets
    fresh = [parameter for bucket in unsent for parameter in bucket.parameters if parameter not in copied]
    in_place = sum(bucket.nbytes for bucket in buckets if not _copies(bucket))
    beside_gradients = sum(bucket.nbytes for bucket in buckets if _copies(bucket))
    by_owners = MessageKind.PARAMETERS_OF_OWNERS in exchange.strategy.sends
    owned = owners_of(exchange, parameters) if by_owners else [trained] * exchange.ranks
    packs = sum(
        pack_bytes(pack)
        for parameters_of_rank in owned
        for pack in packs_of(exchange, parameters_of_rank)
        if len(pack) > 1 and by_owners and exchange.ranks > 1
    )
    updated = [Updated(parameter.numel, parameter.element_bytes) for parameter in owned[rank]]
    if optimizer.in_backward:
        return _updated_in_backward(exchange, parameters, trained, optimizer.state(updated))
    if exchange.in_place:  # no buckets, but their flags
        copied, fresh, in_place, beside_gradients = trained, [], 0, _flags_bytes(buckets)
    return Terms(
        parameters_bytes=sum_bytes(parameters),
        state=optimizer.state(updated),
        whole_gradients_bytes=sum_bytes(trained),
        gradients_bytes=0 if optimizer.by_bucket else sum_bytes(copied),
        gradients_before_sync_bytes=sum_bytes(copied) + sum_bytes(fresh),
        kept_gradients_bytes=in_place,
        buffers_from_start_bytes=beside_gradients,
        buffers_bytes=beside_gradients + packs,
    )


def _updated_in_backward(
    exchange: Exchange, parameters: Sequence[ParameterSize], trained: Sequence[ParameterSize], state: StateBytes
) -> Terms:
    """A block's gradients, or a bucket and the one before it, live until their update; only the last bucket waits for the step."""
    sends = exchange.strategy.communicates
    parts: list[Sequence[ParameterSize]]
    buckets = buckets_of(exchange, parameters) if sends else []
    parts = [bucket.parameters for bucket in buckets] or parts_in_backward(trained)
    blocks_bytes = sum(parameter.nbytes for parameter in trained if parameter.unit != ROOT)
    sendings, gone_bytes = [], 0
    for index, part in enumerate(parts):
        gone_bytes += sum(parameter.nbytes for parameter in part if parameter.unit != ROOT)
        under_way = buckets[max(0, index - 1) : index + 1]
        waiting = [bucket for bucket in under_way[:-1] if _keeps_gradients(exchange, bucket)]
        sendings.append(
            Sending(
                activations_share=1 - gone_bytes / blocks_bytes if blocks_bytes else 0.0,
                gradients_bytes=sum_bytes(part)
                + sum(bucket.nbytes for bucket in under_way if not _keeps_gradients(exchange, bucket))
                + sum(sum_bytes(bucket.parameters) for bucket in waiting),
                communication_bytes=sum(bucket.nbytes for bucket in under_way if _copies(bucket)),
            )
        )
    last = buckets[-1:]
    flags_bytes = _flags_bytes(buckets) if exchange.in_place else 0
    return Terms(
        parameters_bytes=sum_bytes(parameters),
        state=state,
        whole_gradients_bytes=0,
        buffers_from_start_bytes=flags_bytes,
        buffers_bytes=flags_bytes,
        gradients_bytes=sum(
            sum_bytes(bucket.parameters) if _keeps_gradients(exchange, bucket) else bucket.nbytes for bucket in last
        ),
        gradients_before_sync_bytes=sendings[-1].gradients_bytes,
        in_sync_bytes=sendings[-1].communication_bytes,
        after_sync_bytes=sum(bucket.nbytes for bucket in last if _copies(bucket)),
        sendings=tuple(sendings),
    )


def _flags_bytes(buckets: Sequence[Bucket]) -> int:
    return sum(len(bucket.parameters) * bucket.element_bytes for bucket in buckets)


def parts_in_backward(trained: Sequence[ParameterSize]) -> list[Sequence[ParameterSize]]:
    """What one process updates together, in backward's order: blocks, and each parameter around them."""
    parts: dict[tuple[str, int], list[ParameterSize]] = {}
    for parameter in reversed(trained):
        name = parameter.name if parameter.unit == ROOT else parameter.unit
        parts.setdefault((name, parameter.element_bytes), []).append(parameter)
    return list(parts.values())


def _sharded_flat(exchange: Exchange, parameters: Sequence[ParameterSize], *, rank: int, optimizer: Optimizer) -> Terms:
    """Parameters are whole, in flat units, and a rank updates flat shards unit by unit.

    A unit's whole gradients live until they are copied for sending; then a rank keeps its shard of the average.
    """
    units = units_sent(exchange, parameters)
    trained = [unit for unit in units if unit.trained]
    frozen = [parameter for parameter in parameters if not parameter.trained]
    pieces = pieces_of(trained, rank, exchange.shards)
    return Terms(
        parameters_bytes=sum(unit.nbytes for unit in trained) + sum_bytes(frozen),
        state=optimizer.state(
            updated_pieces(parameters, pieces), steps=[updated_pieces(unit.parameters, pieces) for unit in trained]
        ),
        whole_gradients_bytes=sum(sum_bytes(unit.parameters) for unit in trained),
        gradients_bytes=_gradient_shards_bytes(trained, rank, exchange.shards),
        gradients_before_sync_bytes=_before_sync_bytes(exchange, trained),
        buffers_bytes=sum(len(unit.parameters) for unit in trained),
        in_sync_bytes=_staging_bytes(exchange, trained),
        sendings=_sendings(exchange, units, ()),
    )


def _fsdp(exchange: Exchange, parameters: Sequence[ParameterSize], *, rank: int, optimizer: Optimizer) -> Terms:
    """Parameters are shards, gathered for a while; a rank updates all its shards at once.

    Gradients are as in `_sharded_flat`, but whole gradients of earlier micro-batches are kept beside them.
    """
    units = units_sent(exchange, parameters)
    trained = [unit for unit in units if unit.trained]
    updated = updated_pieces(parameters, pieces_of(trained, rank, exchange.shards))
    kept_whole = [unit for unit in units if not freed_between(unit, units, exchange)]
    names = [name for name in dict.fromkeys(unit.name for unit in units) if name != ROOT]
    frozen_whole = [  # frozen units of other blocks are resharded by then
        unit
        for unit in units
        if not unit.trained and (unit.name in (ROOT, *names[:1]) or not exchange.reshard_after_forward)
    ]
    ahead = names[:-1][::-1][: exchange.ahead]
    gathered_ahead = [unit for unit in units if unit.name in ahead and unit not in kept_whole]
    return Terms(
        parameters_bytes=_shards_bytes(units, exchange.shards),
        state=optimizer.state(updated),
        whole_gradients_bytes=sum(_earlier_bytes(exchange, unit) for unit in trained),
        gradients_bytes=_gradient_shards_bytes(trained, rank, exchange.shards),
        gradients_before_sync_bytes=_earlier_bytes(exchange, trained[0]) + _before_sync_bytes(exchange, trained),
        buffers_bytes=sum(len(unit.parameters) for unit in trained),
        whole_after_forward_bytes=_whole_bytes(exchange, kept_whole),
        whole_entering_backward_bytes=_whole_bytes(exchange, [*kept_whole, *gathered_ahead]),
        in_sync_bytes=_staging_bytes(exchange, trained) + _whole_bytes(exchange, frozen_whole),
        sendings=_sendings(exchange, units, kept_whole),
    )


def pieces_of(trained: Sequence[Unit], rank: int, shards: int) -> dict[str, int]:
    """Parameter's name -> how many of its elements this rank updates; `shards`: in a unit, one for each rank of a group."""
    return {
        parameter.name: end - begin
        for unit in trained
        for parameter, (begin, end) in zip(unit.parameters, _ends(unit, rank, shards), strict=True)
    }


def updated_pieces(parameters: Sequence[ParameterSize], pieces: Mapping[str, int]) -> list[Updated]:
    """The pieces of these parameters that this rank updates."""
    return [
        Updated(pieces[parameter.name], parameter.element_bytes)
        for parameter in parameters
        if pieces.get(parameter.name)
    ]


def _gradient_shards_bytes(trained: Sequence[Unit], rank: int, shards: int) -> int:
    """The averaged gradients of the units of which this rank has a piece."""
    return _shards_bytes(
        [unit for unit in trained if any(end > begin for begin, end in _ends(unit, rank, shards))], shards
    )


def _before_sync_bytes(exchange: Exchange, trained: Sequence[Unit]) -> int:
    """Gradients when the last unit is sent: its whole gradients, and shards of the units that were sent before."""
    # The last unit that backward completes is the first of forward.
    at_once = exchange.strategy.most_in_flight + 1
    under_way, received = trained[:at_once], trained[at_once:]
    shards = sum(_sent_bytes(exchange, unit) // exchange.shards for unit in under_way)
    return _computed_bytes(exchange, trained[0].parameters) + shards + _shards_bytes(received, exchange.shards)


def _sendings(exchange: Exchange, units: Sequence[Unit], kept_whole: Sequence[Unit]) -> tuple[Sending, ...]:
    """Each sending of a unit. `kept_whole`: with fsdp, units that stay whole until they are sent, while the next are gathered."""
    fully = exchange.strategy.shards_parameters
    backward = [unit for unit in reversed(units) if unit.trained]
    blocks_bytes = sum(unit.nbytes for unit in backward if unit.name != ROOT)
    sendings, gone_bytes, shards_bytes = [], 0, 0
    for index, unit in enumerate(backward):
        left = backward[index + 1 :]
        earlier_bytes = sum(_earlier_bytes(exchange, later) if fully else sum_bytes(later.parameters) for later in left)
        gone_bytes += 0 if unit.name == ROOT else unit.nbytes
        shards_bytes += _sent_bytes(exchange, unit) // exchange.shards
        ahead = [later for later in left if later.name != ROOT][: exchange.ahead] if fully else []
        whole = dict.fromkeys([later for later in left if later in kept_whole] + ahead)
        sendings.append(
            Sending(
                activations_share=1 - gone_bytes / blocks_bytes if blocks_bytes else 0.0,
                gradients_bytes=_computed_bytes(exchange, unit.parameters)
                + shards_bytes
                + (earlier_bytes if exchange.micro_batches > 1 else 0),
                communication_bytes=_staging_bytes(exchange, backward[: index + 1])
                + _whole_bytes(exchange, list(whole)),
            )
        )
    return tuple(sendings)


def _staging_bytes(exchange: Exchange, trained: Sequence[Unit]) -> int:
    """Staging buffers: units of the same shapes share as many as are ever under way together, until the last has arrived."""
    most: Counter[tuple[tuple[int, ...], int]] = Counter()
    for index in range(len(trained)):
        together = trained[index : index + exchange.strategy.most_in_flight + 1]
        most |= Counter((unit.layout.sizes, _sent_bytes(exchange, unit)) for unit in together)
    return sum(nbytes * count for (_, nbytes), count in most.items())


def _sent_bytes(exchange: Exchange, unit: Unit) -> int:
    return unit.layout.numel * exchange.gradient_bytes(unit.parameters[0])


def _whole_bytes(exchange: Exchange, units: Sequence[Unit]) -> int:
    """The gathered parameters of these units."""
    return sum(unit.layout.numel * exchange.compute_bytes(unit.parameters[0]) for unit in units)


def _computed_bytes(exchange: Exchange, parameters: Sequence[ParameterSize]) -> int:
    """Whole gradients as autograd makes them."""
    return sum(parameter.numel * exchange.compute_bytes(parameter) for parameter in parameters)


def _earlier_bytes(exchange: Exchange, unit: Unit) -> int:
    """A unit's whole gradients that fsdp keeps from micro-batches before the last."""
    if exchange.micro_batches == 1:
        return 0
    # One micro-batch's gradients stay as autograd made them; the sum of several is in the parameters' dtype.
    return _computed_bytes(exchange, unit.parameters) if exchange.micro_batches == 2 else sum_bytes(unit.parameters)


def _ends(unit: Unit, rank: int, shards: int) -> list[tuple[int, int]]:
    return [unit.layout.piece(index, rank % shards, shards) for index in range(len(unit.parameters))]


def _shards_bytes(units: Sequence[Unit], shards: int) -> int:
    return sum(unit.nbytes // shards for unit in units)


def _keeps_gradients(exchange: Exchange, bucket: Bucket) -> bool:
    """Whether gradients stay tensors of their own beside the bucket, or in its place."""
    return exchange.in_place or _copies(bucket)


def _copies(bucket: Bucket) -> bool:
    return any(parameter.element_bytes != bucket.element_bytes for parameter in bucket.parameters)


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
"""Our strategies (costs/strategies.py) -> the function of their terms."""
