"""What the ranks of a training step send each other: every message of every way of going parallel, from the parameters' sizes.

n parameters, N ranks; bytes are those of the tensor that is reduced, gathered or sent, as parallel/collectives.py counts them.

    naive, overlapped      n all-reduces, and n bytes that say who used what
    flat, bucketed         an all-reduce a bucket: its gradients, each filled up to 8 elements, and a flag for each
    sharded                as bucketed; then every trained parameter is broadcast by its owner, small ones of an owner in one message
    sharded_flat           a unit's gradients reduce-scattered, its parameters all-gathered once; n bytes of who used what
    fsdp                   the same, and a unit that was freed behind its forward is gathered again for backward

Bytes on the wire follow by the ring algorithm: `wire_bytes`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainstep.costs.buckets import assign_owners, plan_buckets
from trainstep.costs.collectives import ring_bytes
from trainstep.costs.flat_layout import FlatLayout, lay_out

WAYS = ("none", "naive", "flat", "overlapped", "bucketed", "sharded", "sharded_flat", "fsdp")
ROOT = "root"
"""The unit of what stands around the blocks."""
_NORM_BYTES, _FOUND_INF_BYTES = 4, 4
"""One fp32 number each."""


@dataclass(frozen=True, kw_only=True)
class ParameterSize:
    """A parameter of a module; a tied one counts once. `unit`: the block that it is gathered and reduced with."""

    name: str
    numel: int
    element_bytes: int
    trained: bool = True
    unit: str = ROOT

    @property
    def nbytes(self) -> int:
        return self.numel * self.element_bytes


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One of WAYS and its options. Raises ValueError for a way whose messages are not known.

    `reduce_element_bytes`: of what gradients are averaged in; None: their own. `micro_batches`: whose gradients are added before
    they are averaged. `clips`, `scales_loss`: shards' norms, and whether one overflowed, are put together in a small message.
    """

    way: str
    ranks: int
    reduce_element_bytes: int | None = None
    bucket_bytes: float = 25 * 2**20
    first_bucket_bytes: float | None = None
    last_bucket_bytes: float | None = None
    pack_below_bytes: float = 2**20
    reshard_after_forward: bool = True
    ahead: int = 1
    micro_batches: int = 1
    clips: bool = False
    scales_loss: bool = False

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise ValueError(f"way: messages of {self.way!r} are not known; known are those of {', '.join(WAYS)}")

    def gradient_bytes(self, parameter: ParameterSize) -> int:
        """Of an element of this parameter's gradient, as it is sent."""
        return self.reduce_element_bytes or parameter.element_bytes


@dataclass(frozen=True, kw_only=True)
class Message:
    """`label`: what it carries, as its span in a trace says: `all_reduce bucket 3`."""

    operation: str
    label: str
    payload_bytes: int

    @property
    def span(self) -> str:
        return f"{self.operation} {self.label}"


@dataclass(frozen=True, kw_only=True)
class Total:
    """Of one operation in a step."""

    messages: int
    payload_bytes: int


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Gradients that share a message."""

    parameters: tuple[ParameterSize, ...]
    element_bytes: int

    @property
    def nbytes(self) -> int:
        """Of its message: a flag for each gradient included."""
        return self.element_bytes * _layout(self.parameters, extra=len(self.parameters)).numel


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Parameters that are gathered and reduced together: all trained or all frozen, of one dtype, in N equal shards."""

    name: str
    parameters: tuple[ParameterSize, ...]
    layout: FlatLayout

    @property
    def trained(self) -> bool:
        return self.parameters[0].trained

    @property
    def element_bytes(self) -> int:
        return self.parameters[0].element_bytes

    @property
    def nbytes(self) -> int:
        """Of the whole, filled up."""
        return self.layout.numel * self.element_bytes


def step_messages(exchange: Exchange, parameters: Sequence[ParameterSize]) -> tuple[Message, ...]:
    """Every message of one step, in no particular order; none where a rank is alone. `parameters`: in the module's order.

    It is taken that forward and backward run every block once, and that tensors have no gaps.
    """
    if exchange.ranks == 1:
        return ()
    trained = [parameter for parameter in parameters if parameter.trained]
    messages = {
        "none": _nothing,
        "naive": _one_by_one,
        "overlapped": _one_by_one,
        "flat": _in_buckets,
        "bucketed": _in_buckets,
        "sharded": _with_owners,
        "sharded_flat": _in_flat_shards,
        "fsdp": _fully_sharded,
    }[exchange.way](exchange, parameters)
    if exchange.way in ("naive", "overlapped", "sharded_flat", "fsdp"):
        messages.append(Message(operation="all_reduce", label="usage", payload_bytes=len(trained)))
    if exchange.way in ("sharded_flat", "fsdp") and exchange.clips:
        messages.append(Message(operation="all_reduce", label="norm", payload_bytes=_NORM_BYTES))
    if exchange.scales_loss:
        messages.append(Message(operation="all_reduce", label="found_inf", payload_bytes=_FOUND_INF_BYTES))
    return tuple(messages)


def totals(messages: Sequence[Message]) -> dict[str, Total]:
    """Messages and payload bytes by operation."""
    found: dict[str, list[int]] = {}
    for message in messages:
        found.setdefault(message.operation, []).append(message.payload_bytes)
    return {operation: Total(messages=len(mine), payload_bytes=sum(mine)) for operation, mine in found.items()}


def wire_bytes(messages: Sequence[Message], ranks: int) -> int:
    """What the busiest rank sends, if every operation goes around a ring."""
    return sum(ring_bytes(message.operation, message.payload_bytes, ranks) for message in messages)


def buckets_of(exchange: Exchange, parameters: Sequence[ParameterSize]) -> list[Bucket]:
    """The buckets of the trained parameters' gradients, in the order in which they are sent; one, or one a dtype, of way flat."""
    trained = [parameter for parameter in parameters if parameter.trained]
    element_bytes = [exchange.gradient_bytes(parameter) for parameter in trained]
    flat = exchange.way == "flat"
    plan = plan_buckets(
        [parameter.numel * size for parameter, size in zip(trained, element_bytes, strict=True)],
        element_bytes,
        bucket_bytes=float("inf") if flat else exchange.bucket_bytes,
        first_bucket_bytes=None if flat else exchange.first_bucket_bytes,
        last_bucket_bytes=None if flat else exchange.last_bucket_bytes,
    )
    return [
        Bucket(parameters=tuple(trained[index] for index in indices), element_bytes=element_bytes[indices[0]])
        for indices in plan
    ]


def units_of(parameters: Sequence[ParameterSize], ranks: int) -> list[Unit]:
    """Units in the order of forward: first what stands around the blocks; of a block that mixes dtypes, or frozen parameters
    with trained ones, several."""
    groups: dict[tuple[str, int, bool], list[ParameterSize]] = {}
    for parameter in sorted(parameters, key=lambda one: one.unit != ROOT):  # stable: blocks stay in order
        groups.setdefault((parameter.unit, parameter.element_bytes, parameter.trained), []).append(parameter)
    names = list(dict.fromkeys(name for name, _, _ in groups))
    ordered = sorted(groups.items(), key=lambda item: names.index(item[0][0]))
    return [
        Unit(name=name, parameters=tuple(mine), layout=_layout(mine, parts=ranks)) for (name, _, _), mine in ordered
    ]


def owners_of(exchange: Exchange, parameters: Sequence[ParameterSize]) -> list[list[ParameterSize]]:
    """Trained parameters by the rank that updates them."""
    trained = [parameter for parameter in parameters if parameter.trained]
    owned: list[list[ParameterSize]] = [[] for _ in range(exchange.ranks)]
    owners = assign_owners([parameter.nbytes for parameter in trained], [0] * exchange.ranks)
    for parameter, owner in zip(trained, owners, strict=True):
        owned[owner].append(parameter)
    return owned


def packs_of(exchange: Exchange, owned: Sequence[ParameterSize]) -> list[list[ParameterSize]]:
    """What an owner sends: large parameters each for itself, small ones together, one message for each dtype."""
    alone = [[parameter] for parameter in owned if parameter.nbytes >= exchange.pack_below_bytes]
    packed: dict[int, list[ParameterSize]] = {}
    for parameter in owned:
        if parameter.nbytes < exchange.pack_below_bytes:
            packed.setdefault(parameter.element_bytes, []).append(parameter)
    return [*alone, *packed.values()]


def pack_bytes(pack: Sequence[ParameterSize]) -> int:
    """Of one message of an owner: one parameter as it lies, several in a flat tensor."""
    return pack[0].nbytes if len(pack) == 1 else pack[0].element_bytes * _layout(pack).numel


def freed_between(unit: Unit, units: Sequence[Unit], exchange: Exchange) -> bool:
    """Whether fsdp frees this unit behind its forward: not those around the blocks, nor the last block's, which backward
    needs first."""
    return exchange.reshard_after_forward and unit.name not in (ROOT, units[-1].name)


def _nothing(_exchange: Exchange, _parameters: Sequence[ParameterSize]) -> list[Message]:
    return []


def _one_by_one(exchange: Exchange, parameters: Sequence[ParameterSize]) -> list[Message]:
    return [
        Message(operation="all_reduce", label=one.name, payload_bytes=one.numel * exchange.gradient_bytes(one))
        for one in parameters
        if one.trained
    ]


def _in_buckets(exchange: Exchange, parameters: Sequence[ParameterSize]) -> list[Message]:
    name = "flat" if exchange.way == "flat" else "bucket"
    return [
        Message(operation="all_reduce", label=f"{name} {number}", payload_bytes=bucket.nbytes)
        for number, bucket in enumerate(buckets_of(exchange, parameters))
    ]


def _with_owners(exchange: Exchange, parameters: Sequence[ParameterSize]) -> list[Message]:
    return _in_buckets(exchange, parameters) + [
        Message(operation="broadcast", label=f"parameters of rank {owner}", payload_bytes=pack_bytes(pack))
        for owner, owned in enumerate(owners_of(exchange, parameters))
        for pack in packs_of(exchange, owned)
    ]


def _in_flat_shards(exchange: Exchange, parameters: Sequence[ParameterSize]) -> list[Message]:
    units = [unit for unit in units_of(parameters, exchange.ranks) if unit.trained]
    return [_reduced(exchange, unit) for unit in units] + [_gathered(unit) for unit in units]


def _fully_sharded(exchange: Exchange, parameters: Sequence[ParameterSize]) -> list[Message]:
    units = units_of(parameters, exchange.ranks)
    passes = exchange.micro_batches if exchange.reshard_after_forward else 1
    return [_reduced(exchange, unit) for unit in units if unit.trained] + [
        _gathered(unit) for unit in units for _ in range(passes * (2 if freed_between(unit, units, exchange) else 1))
    ]


def _reduced(exchange: Exchange, unit: Unit) -> Message:
    payload_bytes = unit.layout.numel * exchange.gradient_bytes(unit.parameters[0])
    return Message(operation="reduce_scatter", label=unit.name, payload_bytes=payload_bytes)


def _gathered(unit: Unit) -> Message:
    return Message(operation="all_gather", label=unit.name, payload_bytes=unit.nbytes)


def _layout(parameters: Sequence[ParameterSize], *, parts: int = 1, extra: int = 0) -> FlatLayout:
    return lay_out([parameter.numel for parameter in parameters], parts=parts, extra=extra)
