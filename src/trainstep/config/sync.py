"""How the ranks of a run keep their gradients and parameters together."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any

from trainstep.config.fields import check_choices, described, flat_name
from trainstep.costs.strategies import STRATEGIES, YARDSTICK, Strategy, strategy_named

OURS = tuple(strategy.name for strategy in STRATEGIES if strategy.counterpart is None)
PEERS = tuple(strategy.name for strategy in STRATEGIES if strategy.counterpart is not None)
SYNCS = OURS + PEERS


def needless(values: Mapping[str, Any]) -> frozenset[str]:
    """The options that the strategy which these values name, `sync`, does not have: they would tell alike cells apart."""
    sync = values.get("sync", SyncConfig.name) or YARDSTICK  # a person's none is no value yet
    return frozenset(name for name, users in USED_BY.items() if sync in SYNCS and sync not in users)


def _meanings() -> str:
    """`naive, flat: gradients averaged; fsdp: parameters too`."""
    groups = groupby(STRATEGIES, key=lambda strategy: strategy.meaning)
    return "; ".join(f"{', '.join(strategy.name for strategy in alike)}: {meaning}" for meaning, alike in groups)


def _users(option: str) -> str:
    """`flat, bucketed and sharded`."""
    *others, last = (strategy.name for strategy in STRATEGIES if option in strategy.options)
    return f"{', '.join(others)} and {last}" if others else last


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """One parallel strategy and its options. Raises ValueError naming the field and the way out."""

    name: str = described(_meanings(), "bucketed", SYNCS, flat_name="sync")
    bucket_mib: float | None = described(
        "MiB of gradients in a message, or of parameters in neighbouring blocks that sharded_flat sends together; by default "
        "a quarter of all, the less the more there are, a sixteenth from 32 GiB on, but of buckets at least 25; torch's: 25",
        None,
    )
    first_bucket_mib: float | None = described("of the first message, if another", None)
    last_bucket_mib: float | None = described("of the last message, if another", None)
    reduce_dtype: str = described("gradients are averaged in: own, their own dtype, or bf16", "own", ("own", "bf16"))
    keeps_gradient_dtype: bool = described(
        "gradients averaged in bf16 are copied back to fp32; without, they stay in their buckets, which adamw trainstep takes",
        True,
    )
    compute_dtype: str = described(
        f"parameters are gathered and computed with, by {_users('compute_dtype')}, in: own, their own dtype, or bf16; what is "
        "updated keeps its own",
        "own",
        ("own", "bf16"),
    )
    reshard_after_forward: bool = described(
        f"a block's parameters are freed behind its forward, by {_users('reshard_after_forward')}", True
    )
    ahead: int = described(f"blocks gathered before their turn by {_users('ahead')}, 0 to 2", 1)

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("bucket_mib", "first_bucket_mib", "last_bucket_mib"):
            size = getattr(self, name)
            if size is None:
                continue
            if not isinstance(size, int | float) or isinstance(size, bool) or not 0 < size < math.inf:
                raise ValueError(f"{name}: must be a positive number of MiB, not {size!r}")
        if self.ahead not in (0, 1, 2):
            raise ValueError(f"ahead: must be 0, 1 or 2, not {self.ahead!r}")
        if not self.keeps_gradient_dtype and (self.reduce_dtype == "own" or not self._takes("keeps_gradient_dtype")):
            raise ValueError(
                f"keeps_gradient_dtype: only gradients that {_users('keeps_gradient_dtype')} average with reduce_dtype bf16 can "
                "stay so"
            )
        if self.compute_dtype != "own" and not self._takes("compute_dtype"):
            raise ValueError(
                f"compute_dtype: only {_users('compute_dtype')} gather parameters in another dtype; with {self.name} take "
                "precision bf16_autocast"
            )
        if self.reduce_dtype != "own" and self.strategy.communicates and not self._takes("reduce_dtype"):
            raise ValueError(f"reduce_dtype: {self.name} averages gradients in their own dtype here; leave it at own")

    @property
    def strategy(self) -> Strategy:
        return strategy_named(self.name)

    def _takes(self, option: str) -> bool:
        return option in self.strategy.options


USED_BY = {
    option: tuple(strategy.name for strategy in STRATEGIES if option in strategy.options)
    for option in map(flat_name, fields(SyncConfig))
    if option != "sync"
}
"""Option -> the strategies that it means something to."""
OF_A_STRATEGY = frozenset(("sync", *USED_BY))
"""Together they are one parallel strategy: strategies are compared whatever their options."""
