"""The parallel strategies, a row each: all that others need to know of one by its name.

What a row cannot hold stands under its name in two more places: its constructor (training/parallelism.py), and of ours the terms of
what it holds (plan/memory_terms.py).
"""

from dataclasses import dataclass
from enum import Enum, auto

YARDSTICK = "none"
"""Ranks that do not talk: what the others are held against."""


class Part(Enum):
    """What can be sharded."""

    GRADIENTS = auto()
    OPTIMIZER_STATE = auto()
    PARAMETERS = auto()


class MessageKind(Enum):
    """Messages of one kind. gradient_sync.py has the formula of each: how many in a step, of how many bytes."""

    GRADIENTS_ONE_BY_ONE = auto()
    GRADIENTS_AT_ONCE = auto()
    GRADIENTS_IN_BUCKETS = auto()
    GRADIENTS_OF_UNITS = auto()
    PARAMETERS_OF_OWNERS = auto()
    """Whole tensors, from the rank that updated them."""
    UPDATED_UNITS = auto()
    """Parameters, once a step."""
    NEEDED_UNITS = auto()
    """Parameters, for each pass that needs them and found them freed."""
    USAGE = auto()
    """Who used what, where gradients do not carry it."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """`meaning`: for people; neighbours with the same one share it."""

    name: str
    meaning: str
    counterpart: str | None = None
    """Of torch's own: which of ours does the same. Torch sends by itself, so its messages and buffers are not known."""
    shards: frozenset[Part] = frozenset()
    """What a rank holds 1/N of."""
    sends: tuple[MessageKind, ...] = ()
    """In a step, as far as we know; small messages of clipping and loss scaling aside."""
    overlaps: bool = False
    """Whether gradients are sent while backward goes on."""
    in_units: bool = False
    """Whether its hooks stand on the blocks: a model compiled whole would swallow them."""
    most_in_flight: int = 0
    """How many units' gradients are being reduced, besides the one that is made ready; 0: it does not send units. More hold more
    buffers, and were no quicker (docs/log.md)."""
    options: tuple[str, ...] = ()
    """Fields of SyncConfig that mean something to it."""

    @property
    def communicates(self) -> bool:
        return bool(self.sends) or self.counterpart is not None

    @property
    def shards_parameters(self) -> bool:
        return Part.PARAMETERS in self.shards


_BUCKET_OPTIONS = ("bucket_mib", "first_bucket_mib", "last_bucket_mib", "reduce_dtype", "keeps_gradient_dtype")
_STATE = frozenset((Part.OPTIMIZER_STATE,))
_ALL = frozenset(Part)

STRATEGIES = (
    Strategy(name=YARDSTICK, meaning="each rank trains for itself, the yardstick"),
    Strategy(
        name="naive",
        meaning="gradients averaged (DDP)",
        sends=(MessageKind.GRADIENTS_ONE_BY_ONE, MessageKind.USAGE),
        options=("reduce_dtype",),
    ),
    Strategy(
        name="flat",
        meaning="gradients averaged (DDP)",
        sends=(MessageKind.GRADIENTS_AT_ONCE,),
        options=("reduce_dtype", "keeps_gradient_dtype"),
    ),
    Strategy(
        name="overlapped",
        meaning="gradients averaged (DDP)",
        sends=(MessageKind.GRADIENTS_ONE_BY_ONE, MessageKind.USAGE),
        overlaps=True,
        options=("reduce_dtype",),
    ),
    Strategy(
        name="bucketed",
        meaning="gradients averaged (DDP)",
        sends=(MessageKind.GRADIENTS_IN_BUCKETS,),
        overlaps=True,
        options=_BUCKET_OPTIONS,
    ),
    Strategy(
        name="sharded",
        meaning="and optimizer state by whole tensors (ZeRO 1)",
        shards=_STATE,
        sends=(MessageKind.GRADIENTS_IN_BUCKETS, MessageKind.PARAMETERS_OF_OWNERS),
        overlaps=True,
        options=_BUCKET_OPTIONS,
    ),
    Strategy(
        name="sharded_flat",
        meaning="gradients and state in flat shards (ZeRO 1, 2)",
        shards=_STATE | {Part.GRADIENTS},
        sends=(MessageKind.GRADIENTS_OF_UNITS, MessageKind.UPDATED_UNITS, MessageKind.USAGE),
        overlaps=True,
        in_units=True,
        most_in_flight=1,  # a unit is several blocks
        options=("bucket_mib", "reduce_dtype"),
    ),
    Strategy(
        name="fsdp",
        meaning="parameters too",
        shards=_ALL,
        sends=(MessageKind.GRADIENTS_OF_UNITS, MessageKind.NEEDED_UNITS, MessageKind.USAGE),
        overlaps=True,
        in_units=True,
        most_in_flight=2,  # a unit is one block
        options=("reduce_dtype", "compute_dtype", "reshard_after_forward", "ahead"),
    ),
    Strategy(
        name="torch_ddp",
        meaning="torch's own",
        counterpart="bucketed",
        overlaps=True,
        options=("bucket_mib",),
    ),
    Strategy(
        name="torch_zero",
        meaning="torch's own",
        counterpart="sharded",
        shards=_STATE,
        overlaps=True,
        options=("bucket_mib",),
    ),
    Strategy(
        name="torch_fsdp2",
        meaning="torch's own",
        counterpart="fsdp",
        shards=_ALL,
        overlaps=True,
        in_units=True,
        options=("reduce_dtype", "compute_dtype", "reshard_after_forward"),
    ),
)
_BY_NAME = {strategy.name: strategy for strategy in STRATEGIES}


def strategy_named(name: str) -> Strategy:
    """KeyError for a name that no row has."""
    return _BY_NAME[name]
