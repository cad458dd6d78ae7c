"""How gradients and parameters are grouped for their exchange between ranks: buckets, units and owners.

The groups follow from the parameters' sizes. Both the messages (gradient_sync.py) and the memory (plan/peak_memory.py) are computed
from the same groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainstep.costs.buckets import FlatLayout, assign_owners, lay_out, neighbours, plan_buckets, usual_bucket_bytes
from trainstep.costs.rank_groups import check_shard_ranks
from trainstep.costs.strategies import MessageKind, Strategy

ROOT = "root"
"""The unit of the parameters outside the blocks."""


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
    """A parallel strategy and its options. ValueError for a strategy of torch's, because its messages are not known.

    `bucket_bytes`: gradients in a bucket, or parameters in a unit of sharded_flat; None: the default of costs/buckets.py.
    `reduce_element_bytes`: bytes of an element of the gradients that are averaged; None: of the gradients' own dtype.
    `compute_element_bytes`: bytes of an element that fsdp gathers and computes with; None: of the parameters' own dtype.
    `in_place`: a bucket's gradients are averaged where they are, not in a copy.
    `shard_ranks`: ranks in a group (costs/rank_groups.py), which has all shards, and averages go across groups; None: all ranks are
    one group. bucketed, which keeps no shards, averages slices of a bucket this way.
    `micro_batches`: number of batches whose gradients are added before they are averaged. `clips`, `scales_loss`: a small
    message combines the norms of the ranks' shards, or whether a gradient overflowed on any rank.
    """

    strategy: Strategy
    ranks: int
    reduce_element_bytes: int | None = None
    compute_element_bytes: int | None = None
    bucket_bytes: float | None = None
    first_bucket_bytes: float | None = None
    last_bucket_bytes: float | None = None
    pack_below_bytes: float = 2**20
    reshard_after_forward: bool = True
    ahead: int = 1
    in_place: bool = False
    shard_ranks: int | None = None
    micro_batches: int = 1
    clips: bool = False
    scales_loss: bool = False

    def __post_init__(self) -> None:
        if self.strategy.counterpart is not None:
            raise ValueError(
                f"strategy: messages of {self.strategy.name} are not known; take ours of its kind, {self.strategy.counterpart}"
            )
        if self.shard_ranks is not None:
            check_shard_ranks(self.ranks, self.shard_ranks)

    @property
    def shards(self) -> int:
        """The number of shards: a rank keeps 1/shards of what is sharded."""
        return self.shard_ranks or self.ranks

    @property
    def has_groups(self) -> bool:
        """Whether there are several groups of ranks."""
        return self.shards < self.ranks

    def gradient_bytes(self, parameter: ParameterSize) -> int:
        """Bytes of an element of this parameter's gradient, as it is sent."""
        return self.reduce_element_bytes or parameter.element_bytes

    def compute_bytes(self, parameter: ParameterSize) -> int:
        """Bytes of an element of this parameter, and of its gradient from autograd, while a block runs."""
        return self.compute_element_bytes or parameter.element_bytes


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Gradients that share a message. `parts`: into how many equal parts its flat tensor divides."""

    parameters: tuple[ParameterSize, ...]
    element_bytes: int
    parts: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of its message, which has a flag for each gradient."""
        return self.element_bytes * _layout(self.parameters, parts=self.parts, extra=len(self.parameters)).numel


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
        """Bytes of the whole unit, padding included."""
        return self.layout.numel * self.element_bytes


def buckets_of(exchange: Exchange, parameters: Sequence[ParameterSize]) -> list[Bucket]:
    """The buckets of the trained parameters' gradients, in the order of sending; one bucket per dtype if all are sent at once."""
    trained = [parameter for parameter in parameters if parameter.trained]
    element_bytes = [exchange.gradient_bytes(parameter) for parameter in trained]
    sizes = [parameter.numel * size for parameter, size in zip(trained, element_bytes, strict=True)]
    at_once = MessageKind.GRADIENTS_AT_ONCE in exchange.strategy.sends
    bucket_bytes = usual_bucket_bytes(sum(sizes)) if exchange.bucket_bytes is None else exchange.bucket_bytes
    plan = plan_buckets(
        sizes,
        element_bytes,
        bucket_bytes=float("inf") if at_once else bucket_bytes,
        first_bucket_bytes=None if at_once else exchange.first_bucket_bytes,
        last_bucket_bytes=None if at_once else exchange.last_bucket_bytes,
    )
    parts = exchange.shards if exchange.has_groups else 1
    return [
        Bucket(
            parameters=tuple(trained[index] for index in indices), element_bytes=element_bytes[indices[0]], parts=parts
        )
        for indices in plan
    ]


def gradients_sent(exchange: Exchange, parameters: Sequence[ParameterSize]) -> list[tuple[int, int]]:
    """Elements and bytes of each message of gradients, in the order of sending: one a parameter, or one a bucket."""
    if MessageKind.GRADIENTS_ONE_BY_ONE in exchange.strategy.sends:
        return [
            (parameter.numel, parameter.numel * exchange.gradient_bytes(parameter))
            for parameter in reversed(parameters)
        ]
    return [
        (sum(parameter.numel for parameter in bucket.parameters), bucket.nbytes)
        for bucket in buckets_of(exchange, parameters)
    ]


def units_sent(exchange: Exchange, parameters: Sequence[ParameterSize]) -> list[Unit]:
    """The units of a strategy in the order of forward: single blocks if it shards parameters, else several blocks together."""
    if exchange.strategy.shards_parameters:
        return units_of(parameters, exchange.shards)
    return flat_units_of(parameters, exchange.shards, exchange.bucket_bytes)


def units_of(parameters: Sequence[ParameterSize], shards: int) -> list[Unit]:
    """Units in the order of forward, beginning with the parameters outside the blocks.

    Each is cut into `shards` equal shards. A block has several units if it mixes dtypes, or frozen and trained parameters.
    """
    groups: dict[tuple[str, int, bool], list[ParameterSize]] = {}
    for parameter in sorted(parameters, key=lambda parameter: parameter.unit != ROOT):  # stable: blocks stay in order
        groups.setdefault((parameter.unit, parameter.element_bytes, parameter.trained), []).append(parameter)
    names = list(dict.fromkeys(name for name, _, _ in groups))
    ordered = sorted(groups.items(), key=lambda item: names.index(item[0][0]))
    return [
        Unit(name=name, parameters=tuple(members), layout=_layout(members, parts=shards))
        for (name, _, _), members in ordered
    ]


def flat_units_of(parameters: Sequence[ParameterSize], shards: int, most_bytes: float | None = None) -> list[Unit]:
    """Units of sharded_flat: trained parameters only, of neighbouring blocks together up to `most_bytes` (costs/buckets.py)."""
    units = [unit for unit in units_of(parameters, shards) if unit.trained]
    sizes = [sum_bytes(unit.parameters) for unit in units]
    kinds = [(unit.name == ROOT, unit.element_bytes) for unit in units]
    merged = []
    for group in neighbours(sizes, kinds, most_bytes):
        members = tuple(parameter for index in group for parameter in units[index].parameters)
        name = joined_name([units[index].name for index in group])
        merged.append(Unit(name=name, parameters=members, layout=_layout(members, parts=shards)))
    return merged


def joined_name(names: Sequence[str]) -> str:
    """The name of units that share a message: `block 0 to block 3`."""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def owners_of(exchange: Exchange, parameters: Sequence[ParameterSize]) -> list[list[ParameterSize]]:
    """Trained parameters by the rank that updates them."""
    trained = [parameter for parameter in parameters if parameter.trained]
    owned: list[list[ParameterSize]] = [[] for _ in range(exchange.ranks)]
    owners = assign_owners([parameter.nbytes for parameter in trained], [0] * exchange.ranks)
    for parameter, owner in zip(trained, owners, strict=True):
        owned[owner].append(parameter)
    return owned


def packs_of(exchange: Exchange, owned: Sequence[ParameterSize]) -> list[list[ParameterSize]]:
    """The messages of an owner: each large parameter has its own message, and small parameters share one message per dtype."""
    large = [[parameter] for parameter in owned if parameter.nbytes >= exchange.pack_below_bytes]
    small: dict[int, list[ParameterSize]] = {}
    for parameter in owned:
        if parameter.nbytes < exchange.pack_below_bytes:
            small.setdefault(parameter.element_bytes, []).append(parameter)
    return [*large, *small.values()]


def pack_bytes(pack: Sequence[ParameterSize]) -> int:
    """Bytes of one message of an owner: a single parameter without padding, or several in a flat tensor."""
    return pack[0].nbytes if len(pack) == 1 else pack[0].element_bytes * _layout(pack).numel


def freed_between(unit: Unit, units: Sequence[Unit], exchange: Exchange) -> bool:
    """Whether fsdp frees this unit after its forward and gathers it again for backward."""
    # The parameters outside the blocks stay, and so does the last block, because backward needs it first.
    return exchange.reshard_after_forward and unit.name not in (ROOT, units[-1].name)


def sum_bytes(parameters: Sequence[ParameterSize]) -> int:
    """Bytes of all these parameters."""
    return sum(parameter.nbytes for parameter in parameters)


def _layout(parameters: Sequence[ParameterSize], *, parts: int = 1, extra: int = 0) -> FlatLayout:
    return lay_out([parameter.numel for parameter in parameters], parts=parts, extra=extra)
