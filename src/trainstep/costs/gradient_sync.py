"""The messages that ranks send each other in a training step, for every parallel strategy, from the parameters' sizes.

n is the number of parameters.

    naive, overlapped      n all-reduces, and n bytes that say which rank used which parameter
    flat, bucketed         an all-reduce per bucket: its gradients, each padded to 8 elements, and a flag for each
    sharded                as bucketed; then each owner broadcasts its parameters, the small ones in one message
    sharded_flat           each unit's gradients are reduce-scattered, its parameters all-gathered once; n bytes of usage as above
    fsdp                   as sharded_flat; a unit that was freed after its forward is gathered again for backward

With groups of g ranks (rank_groups.py) units are reduce-scattered and gathered in groups, and 1/g of a unit's gradients is
all-reduced across them. bucketed replaces its all-reduce of S bytes by a reduce-scatter of S in groups, an all-reduce of S / g
across groups and an all-gather of S in groups. A group of one rank sends nothing in itself. Flags of usage go among all ranks.

A message's bytes are those of the tensor that is reduced, gathered or sent, as parallel/collectives.py counts them. `wire_bytes`
computes from them what the ring algorithm sends.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from trainstep.costs.collectives import ring_bytes
from trainstep.costs.exchange import (
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
from trainstep.costs.rank_groups import Level, at_level, level_of, members
from trainstep.costs.strategies import MessageKind, Part

_NORM_BYTES, _FOUND_INF_BYTES = 4, 4  # one fp32 number each


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message. `label`: its content, as in the message's span in a trace: `all_reduce bucket 3` has `bucket 3`.

    `operation`: with its level, where it does not go among all ranks: `all_gather in groups`.
    """

    operation: str
    label: str
    payload_bytes: int

    @property
    def span(self) -> str:
        return f"{self.operation} {self.label}"


@dataclass(frozen=True, kw_only=True)
class Total:
    """The messages of one operation in a step together."""

    messages: int
    payload_bytes: int


def step_messages(exchange: Exchange, parameters: Sequence[ParameterSize]) -> tuple[Message, ...]:
    """Every message of one step, in no particular order; none for a single rank. `parameters`: in the module's order.

    We assume that forward and backward run every block once, and that tensors have no gaps.
    """
    if exchange.ranks == 1:
        return ()
    strategy = exchange.strategy
    messages = [message for kind in strategy.sends for message in _MESSAGES[kind](exchange, parameters)]
    if Part.GRADIENTS in strategy.shards and exchange.clips:
        messages += _in_groups(exchange, "all_reduce", "norm", _NORM_BYTES)
    if exchange.scales_loss:
        messages.append(Message(operation="all_reduce", label="found_inf", payload_bytes=_FOUND_INF_BYTES))
    return tuple(messages)


def totals(messages: Sequence[Message]) -> dict[str, Total]:
    """Messages and payload bytes by operation."""
    payloads: dict[str, list[int]] = {}
    for message in messages:
        payloads.setdefault(message.operation, []).append(message.payload_bytes)
    return {operation: Total(messages=len(sizes), payload_bytes=sum(sizes)) for operation, sizes in payloads.items()}


def wire_bytes(messages: Sequence[Message], ranks: int, shard_ranks: int | None = None) -> int:
    """The most bytes that a rank sends if every operation goes around a ring; a broadcast counts as if this rank passes it on."""
    return sum(sent_bytes(message.operation, message.payload_bytes, ranks, shard_ranks) for message in messages)


def sent_bytes(operation: str, payload_bytes: int, ranks: int, shard_ranks: int | None = None) -> int:
    """Bytes that a rank sends around the ring of the ranks among which this operation goes."""
    return ring_bytes(operation, payload_bytes, len(members(level_of(operation), 0, ranks, shard_ranks)))


def _in_groups(exchange: Exchange, operation: str, label: str, payload_bytes: int) -> list[Message]:
    """A message among the ranks that have every shard once: all ranks without groups, nobody in groups of one."""
    if exchange.shards == 1:
        return []
    name = at_level(operation, Level.IN_GROUPS if exchange.has_groups else Level.ALL)
    return [Message(operation=name, label=label, payload_bytes=payload_bytes)]


def _across_groups(exchange: Exchange, label: str, payload_bytes: int) -> list[Message]:
    """The average of a shard over all groups; `payload_bytes`: bytes of the whole, not of the shard."""
    if not exchange.has_groups:
        return []
    name = at_level("all_reduce", Level.ACROSS_GROUPS)
    return [Message(operation=name, label=label, payload_bytes=payload_bytes // exchange.shards)]


def _one_by_one(exchange: Exchange, parameters: Sequence[ParameterSize]) -> list[Message]:
    return [
        Message(
            operation="all_reduce",
            label=parameter.name,
            payload_bytes=parameter.numel * exchange.gradient_bytes(parameter),
        )
        for parameter in parameters
        if parameter.trained
    ]


def _in_buckets(name: str, exchange: Exchange, parameters: Sequence[ParameterSize]) -> list[Message]:
    messages = []
    for number, bucket in enumerate(buckets_of(exchange, parameters)):
        label = f"{name} {number}"
        if exchange.has_groups:
            messages += _in_groups(exchange, "reduce_scatter", label, bucket.nbytes)
            messages += _across_groups(exchange, label, bucket.nbytes)
            messages += _in_groups(exchange, "all_gather", label, bucket.nbytes)
        else:
            messages.append(Message(operation="all_reduce", label=label, payload_bytes=bucket.nbytes))
    return messages


def _owners_parameters(exchange: Exchange, parameters: Sequence[ParameterSize]) -> list[Message]:
    return [
        Message(operation="broadcast", label=f"parameters of rank {owner}", payload_bytes=pack_bytes(pack))
        for owner, owned in enumerate(owners_of(exchange, parameters))
        for pack in packs_of(exchange, owned)
    ]


def _reduced_units(exchange: Exchange, parameters: Sequence[ParameterSize]) -> list[Message]:
    messages = []
    for unit in units_sent(exchange, parameters):
        if unit.trained:
            payload_bytes = unit.layout.numel * exchange.gradient_bytes(unit.parameters[0])
            messages += _in_groups(exchange, "reduce_scatter", unit.name, payload_bytes)
            messages += _across_groups(exchange, unit.name, payload_bytes)
    return messages


def _updated_units(exchange: Exchange, parameters: Sequence[ParameterSize]) -> list[Message]:
    return [message for unit in units_sent(exchange, parameters) for message in _gathered(exchange, unit)]


def _needed_units(exchange: Exchange, parameters: Sequence[ParameterSize]) -> list[Message]:
    units = units_sent(exchange, parameters)
    passes = exchange.micro_batches if exchange.reshard_after_forward else 1
    return [
        message
        for unit in units
        for message in _gathered(exchange, unit) * (passes * (2 if freed_between(unit, units, exchange) else 1))
    ]


def _gathered(exchange: Exchange, unit: Unit) -> list[Message]:
    payload_bytes = unit.layout.numel * exchange.compute_bytes(unit.parameters[0])
    return _in_groups(exchange, "all_gather", unit.name, payload_bytes)


def _usage(_exchange: Exchange, parameters: Sequence[ParameterSize]) -> list[Message]:
    flags_bytes = sum(parameter.trained for parameter in parameters)
    return [Message(operation="all_reduce", label="usage", payload_bytes=flags_bytes)]


_MESSAGES: Mapping[MessageKind, Callable[[Exchange, Sequence[ParameterSize]], list[Message]]] = {
    MessageKind.GRADIENTS_ONE_BY_ONE: _one_by_one,
    MessageKind.GRADIENTS_AT_ONCE: partial(_in_buckets, "flat"),
    MessageKind.GRADIENTS_IN_BUCKETS: partial(_in_buckets, "bucket"),
    MessageKind.GRADIENTS_OF_UNITS: _reduced_units,
    MessageKind.PARAMETERS_OF_OWNERS: _owners_parameters,
    MessageKind.UPDATED_UNITS: _updated_units,
    MessageKind.NEEDED_UNITS: _needed_units,
    MessageKind.USAGE: _usage,
}
