"""The table of parallel strategies: one row for each, with its messages, its shards and its options.

Two further places have what a row cannot hold, under the strategy's name: its constructor (training/parallelism.py) and, for
strategies of ours, the terms of its memory (plan/memory_terms.py).
"""

from dataclasses import dataclass
from enum import Enum, auto

BASELINE = "none"
"""The strategy without communication, with which the others are compared."""


class Part(Enum):
    """What can be sharded."""

    GRADIENTS = auto()
    OPTIMIZER_STATE = auto()
    PARAMETERS = auto()


class MessageKind(Enum):
    """Kinds of messages. gradient_sync.py has the number and bytes of each kind in a step."""

    GRADIENTS_ONE_BY_ONE = auto()
    GRADIENTS_AT_ONCE = auto()
    GRADIENTS_IN_BUCKETS = auto()
    GRADIENTS_OF_UNITS = auto()
    PARAMETERS_OF_OWNERS = auto()
    """Whole tensors, from the rank that updated them."""
    UPDATED_UNITS = auto()
    """Parameters, once per step."""
    NEEDED_UNITS = auto()
    """Parameters, for each pass that needs them after they were freed."""
    USAGE = auto()
    """Which rank used which parameters, if the gradients' messages do not have that."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One parallel strategy. `meaning`: its help text, which neighbouring rows with the same text share."""

    name: str
    meaning: str
    counterpart: str | None = None
    """For a strategy of torch's: our strategy that does the same. Torch's messages and buffers are not known."""
    shards: frozenset[Part] = frozenset()
    """The parts of which a rank stores 1/N; N: the ranks of its group (rank_groups.py), usually all."""
    sends: tuple[MessageKind, ...] = ()
    """Its messages in a step, without the small messages of clipping and loss scaling; empty if they are not known."""
    overlaps: bool = False
    """Whether gradients are sent during backward."""
    in_units: bool = False
    """Whether it has hooks on the blocks, which a model compiled as a whole would not call."""
    most_in_flight: int = 0
    """The most units whose gradients are being reduced at a time, besides the unit that is being prepared; 0: it sends no units.
    More would need more buffers, and were not faster (docs/log.md)."""
    updates_in_parts: bool = False
    """Whether parameters may be updated in backward, or bucket by bucket (RunConfig.update)."""
    options: tuple[str, ...] = ()
    """Fields of SyncConfig that it uses."""

    @property
    def communicates(self) -> bool:
        return bool(self.sends) or self.counterpart is not None

    @property
    def shards_parameters(self) -> bool:
        return Part.PARAMETERS in self.shards


_BUCKET_OPTIONS = (
    "bucket_mib",
    "first_bucket_mib",
    "last_bucket_mib",
    "reduce_dtype",
    "keeps_gradient_dtype",
    "in_place",
    "transport",
    "inbox_mib",
)
_STATE = frozenset((Part.OPTIMIZER_STATE,))
_ALL = frozenset(Part)

STRATEGIES = (
    Strategy(name=BASELINE, meaning="each rank trains alone, the baseline", updates_in_parts=True),
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
        options=("reduce_dtype", "keeps_gradient_dtype", "transport", "inbox_mib"),
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
        updates_in_parts=True,
        options=(*_BUCKET_OPTIONS, "shard_ranks"),
    ),
    Strategy(
        name="sharded",
        meaning="also optimizer state sharded by whole tensors (ZeRO 1)",
        shards=_STATE,
        sends=(MessageKind.GRADIENTS_IN_BUCKETS, MessageKind.PARAMETERS_OF_OWNERS),
        overlaps=True,
        options=_BUCKET_OPTIONS,
    ),
    Strategy(
        name="sharded_flat",
        meaning="gradients and optimizer state in flat shards (ZeRO 1, 2)",
        shards=_STATE | {Part.GRADIENTS},
        sends=(MessageKind.GRADIENTS_OF_UNITS, MessageKind.UPDATED_UNITS, MessageKind.USAGE),
        overlaps=True,
        in_units=True,
        most_in_flight=1,  # a unit is several blocks
        options=("bucket_mib", "reduce_dtype", "shard_ranks", "transport", "inbox_mib"),
    ),
    Strategy(
        name="fsdp",
        meaning="parameters sharded too",
        shards=_ALL,
        sends=(MessageKind.GRADIENTS_OF_UNITS, MessageKind.NEEDED_UNITS, MessageKind.USAGE),
        overlaps=True,
        in_units=True,
        most_in_flight=2,  # a unit is one block
        options=(
            *("reduce_dtype", "compute_dtype", "reshard_after_forward", "ahead"),
            *("shard_ranks", "transport", "inbox_mib"),
        ),
    ),
    Strategy(name="torch_ddp", meaning="torch's own", counterpart="bucketed", overlaps=True, options=("bucket_mib",)),
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
        options=("reduce_dtype", "compute_dtype", "reshard_after_forward", "shard_ranks"),
    ),
)
_BY_NAME = {strategy.name: strategy for strategy in STRATEGIES}


def strategy_named(name: str) -> Strategy:
    """The row with this name. KeyError if there is none."""
    return _BY_NAME[name]
