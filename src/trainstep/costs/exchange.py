"""How the ranks of a training step exchange gradients and parameters, and what travels together: buckets, units, owners.

All from the parameters' sizes: what is sent (gradient_sync.py) and what is held (plan/peak_memory.py) follow from the same groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainstep.costs.buckets import assign_owners, neighbours, plan_buckets, usual_bucket_bytes
from trainstep.costs.flat_layout import FlatLayout, lay_out
from trainstep.costs.strategies import MessageKind, Strategy

ROOT = "root"
"""The unit of what stands around the blocks."""


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
    """A strategy and its options. Raises ValueError for one of torch's, whose messages are not known.

    `bucket_bytes`: of a bucket's gradients, of the parameters of a unit of sharded_flat; None: as costs/buckets.py chooses.
    `reduce_element_bytes`: of what gradients are averaged in; None: their own. `compute_element_bytes`: of what fsdp gathers and
    computes with; None: the parameters' own. `micro_batches`: whose gradients are added before they are averaged. `clips`,
    `scales_loss`: shards' norms, and whether one overflowed, are put together in a small message.
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
    micro_batches: int = 1
    clips: bool = False
    scales_loss: bool = False

    def __post_init__(self) -> None:
        if self.strategy.counterpart is not None:
            raise ValueError(
                f"strategy: messages of {self.strategy.name} are not known; take ours of its kind, {self.strategy.counterpart}"
            )

    def gradient_bytes(self, parameter: ParameterSize) -> int:
        """Of an element of this parameter's gradient, as it is sent."""
        return self.reduce_element_bytes or parameter.element_bytes

    def compute_bytes(self, parameter: ParameterSize) -> int:
        """Of an element of this parameter, and of the gradient that autograd makes of it, where a block runs."""
        return self.compute_element_bytes or parameter.element_bytes


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


def buckets_of(exchange: Exchange, parameters: Sequence[ParameterSize]) -> list[Bucket]:
    """The buckets of the trained parameters' gradients, in the order in which they are sent; one, or one a dtype, where all
    are sent at once."""
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
    return [
        Bucket(parameters=tuple(trained[index] for index in indices), element_bytes=element_bytes[indices[0]])
        for indices in plan
    ]


def units_sent(exchange: Exchange, parameters: Sequence[ParameterSize]) -> list[Unit]:
    """Of a strategy in units, in the order of forward: single blocks where parameters are sharded too, else joined ones."""
    if exchange.strategy.shards_parameters:
        return units_of(parameters, exchange.ranks)
    return flat_units_of(parameters, exchange.ranks, exchange.bucket_bytes)


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


def flat_units_of(parameters: Sequence[ParameterSize], ranks: int, most_bytes: float | None = None) -> list[Unit]:
    """Units of sharded_flat: what is trained, neighbouring blocks together up to `most_bytes` (costs/buckets.py)."""
    units = [unit for unit in units_of(parameters, ranks) if unit.trained]
    sizes = [sum_bytes(unit.parameters) for unit in units]
    kinds = [(unit.name == ROOT, unit.element_bytes) for unit in units]
    merged = []
    for group in neighbours(sizes, kinds, most_bytes):
        members = tuple(one for index in group for one in units[index].parameters)
        name = joined_name([units[index].name for index in group])
        merged.append(Unit(name=name, parameters=members, layout=_layout(members, parts=ranks)))
    return merged


def joined_name(names: Sequence[str]) -> str:
    """Of units that travel together."""
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


def sum_bytes(parameters: Sequence[ParameterSize]) -> int:
    """Of all of them."""
    return sum(parameter.nbytes for parameter in parameters)


def _layout(parameters: Sequence[ParameterSize], *, parts: int = 1, extra: int = 0) -> FlatLayout:
    return lay_out([parameter.numel for parameter in parameters], parts=parts, extra=extra)
