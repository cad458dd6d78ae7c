"""The config of `trainstep parallel`: a training step on several ranks under a parallel strategy with its options."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any

from trainstep.config.fields import check_choices, check_integer, check_parts, described, flat_name, part
from trainstep.config.nodes import NODES_HELP, check_nodes
from trainstep.config.run import RunConfig
from trainstep.costs.rank_groups import check_shard_ranks
from trainstep.costs.strategies import BASELINE, STRATEGIES, Strategy, strategy_named

OURS = tuple(strategy.name for strategy in STRATEGIES if strategy.counterpart is None)
PEERS = tuple(strategy.name for strategy in STRATEGIES if strategy.counterpart is not None)
SYNCS = OURS + PEERS
_MOST_RANKS = 1024


def _sync_help() -> str:
    """`naive, flat: gradients averaged; fsdp: parameters too`."""
    groups = groupby(STRATEGIES, key=lambda strategy: strategy.meaning)
    return "; ".join(f"{', '.join(strategy.name for strategy in group)}: {meaning}" for meaning, group in groups)


def _users(option: str) -> str:
    """The strategies that have an option: `flat, bucketed and sharded`."""
    *others, last = (strategy.name for strategy in STRATEGIES if option in strategy.options)
    return f"{', '.join(others)} and {last}" if others else last


TRANSPORTS = ("library", "copies")
"""How messages travel."""


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """One parallel strategy and its options. ValueError names the field and the remedy."""

    name: str = described(_sync_help(), "bucketed", SYNCS, flat_name="sync")
    bucket_mib: float | None = described(
        "MiB of gradients in a message, or of the neighbouring blocks' parameters that sharded_flat sends together; default: a "
        "quarter of all bytes, falling to a sixteenth from 32 GiB on, but at least 25 for buckets; torch's strategies: 25",
        None,
    )
    first_bucket_mib: float | None = described("MiB of the first message, if different", None)
    last_bucket_mib: float | None = described("MiB of the last message, if different", None)
    reduce_dtype: str = described(
        "dtype in which gradients are averaged; own: their own; fp32: for gradients of bf16 weights",
        "own",
        ("own", "bf16", "fp32"),
    )
    keeps_gradient_dtype: bool = described(
        "copy gradients that were averaged in reduce_dtype back to their own; otherwise they stay in their buckets, which adamw "
        "trainstep takes",
        True,
    )
    in_place: bool = described(
        f"average gradients where they are, a bucket as one grouped message, without copying them into a flat bucket "
        f"({_users('in_place')})",
        False,
    )
    compute_dtype: str = described(
        f"dtype in which {_users('compute_dtype')} gather parameters and compute; own: their own; the optimizer always updates "
        "parameters in their own dtype",
        "own",
        ("own", "bf16"),
    )
    reshard_after_forward: bool = described(
        f"free a block's parameters after its forward ({_users('reshard_after_forward')})", True
    )
    ahead: int = described(f"number of blocks gathered in advance by {_users('ahead')}, 0 to 2", 1)
    shard_ranks: int | None = described(
        "ranks in a group, usually those of a node: each group has all shards, and averages go across groups, so that links "
        f"between nodes carry 1/N of the bytes ({_users('shard_ranks')}); default: all ranks are one group",
        None,
    )
    transport: str = described(
        "how large messages travel; library: by NCCL or gloo; copies: by the GPUs' copy engines into each other's memory, between "
        f"ranks of one machine ({_users('transport')})",
        "library",
        TRANSPORTS,
    )
    inbox_mib: int = described(
        "MiB of each rank's memory for messages that arrive by copies, besides what torch allocates; with 1024 bucketed by_bucket "
        "was faster on four GPUs, and fsdp in fp32 slower",
        256,
    )

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("bucket_mib", "first_bucket_mib", "last_bucket_mib"):
            size = getattr(self, name)
            if size is None:
                continue
            if not isinstance(size, int | float) or isinstance(size, bool) or not 0 < size < math.inf:
                raise ValueError(f"{name}: must be a positive number of MiB, not {size!r}")
        check_integer(self, "inbox_mib", at_least=1)
        if self.ahead not in (0, 1, 2):
            raise ValueError(f"ahead: must be 0, 1 or 2, not {self.ahead!r}")
        self._check_dtypes()
        self._check_messages()

    def _check_dtypes(self) -> None:
        if not self.keeps_gradient_dtype and (self.reduce_dtype == "own" or not self._takes("keeps_gradient_dtype")):
            raise ValueError(
                f"keeps_gradient_dtype: only gradients that {_users('keeps_gradient_dtype')} average in another reduce_dtype "
                "can stay in that"
            )
        if self.compute_dtype != "own" and not self._takes("compute_dtype"):
            raise ValueError(
                f"compute_dtype: only {_users('compute_dtype')} gather parameters in another dtype; with {self.name} take "
                "precision bf16_autocast"
            )
        if self.reduce_dtype != "own" and self.strategy.communicates and not self._takes("reduce_dtype"):
            raise ValueError(f"reduce_dtype: {self.name} averages gradients in their own dtype; leave it at own")

    def _check_messages(self) -> None:
        if self.in_place and not self._takes("in_place") and self.strategy.communicates:
            raise ValueError(f"in_place: {self.name} has no buckets; leave it out, or take {_users('in_place')}")
        if self.in_place and self.reduce_dtype != "own":
            raise ValueError("in_place: reduce_dtype averages gradients in a copy; leave one of the two out")
        if self.transport != "library" and self.strategy.communicates and not self._takes("transport"):
            raise ValueError(
                f"transport: {self.name} sends by the library; leave it at library, or take {_users('transport')}"
            )
        if self.shard_ranks is None:
            return
        check_integer(self, "shard_ranks", at_least=1)
        if self.strategy.communicates and not self._takes("shard_ranks"):
            raise ValueError(f"shard_ranks: {self.name} has no groups; leave it out, or take {_users('shard_ranks')}")
        if self.in_place:
            raise ValueError("in_place: shard_ranks averages slices of a copy; leave one of the two out")

    @property
    def strategy(self) -> Strategy:
        return strategy_named(self.name)

    def _takes(self, option: str) -> bool:
        return option in self.strategy.options


@dataclass(frozen=True, kw_only=True)
class RanksConfig:
    """A training step on several ranks under a parallel strategy, as the formulas of plan/ take it."""

    ranks: int
    sync: SyncConfig
    run: RunConfig

    def __post_init__(self) -> None:
        check_parts(self)
        check_integer(self, "ranks", at_least=1, at_most=_MOST_RANKS)
        run, sync = self.run, self.sync
        if sync.shard_ranks is not None and sync.strategy.communicates:
            check_shard_ranks(self.ranks, sync.shard_ranks)
        if run.update == "by_bucket" and self.ranks == 1:
            raise ValueError(
                "ranks: update by_bucket hides messages, and one rank sends none; take 2 or more, or after_backward"
            )
        if run.compile == "model" and sync.strategy.in_units:
            raise ValueError(
                f"compile: {sync.name} gathers parameters block by block, which a model compiled whole hides; take block"
            )
        if self.ranks == 1 and sync.strategy.counterpart is not None:
            raise ValueError(f"ranks: {sync.name} needs several ranks; take 2 or more")
        if sync.strategy.shards_parameters and run.precision == "bf16_master":
            raise ValueError(
                f"precision: {sync.name} needs no masters beside its shards, which stay fp32 where compute_dtype is bf16; take "
                "that with precision fp32"
            )
        if run.update != "after_backward" and not sync.strategy.updates_in_parts:
            able = ", ".join(strategy.name for strategy in STRATEGIES if strategy.updates_in_parts)
            raise ValueError(
                f"update: {sync.name} updates after_backward alone; take that, or sync {able.replace(', ', ' or ')}"
            )
        if run.recompute_budget_gib is not None and sync.strategy.counterpart is not None:
            raise ValueError(
                f"recompute_budget_gib: {sync.name} is torch's and does not show what it gathers and sends; take sync "
                f"{sync.strategy.counterpart}, or give recompute"
            )
        if not sync.keeps_gradient_dtype and run.adamw != "trainstep":
            raise ValueError(f"adamw: {run.adamw} takes gradients in the parameters' dtype alone; take trainstep")


@dataclass(frozen=True, kw_only=True)
class RankRunConfig(RunConfig):
    """The step of one rank."""

    has_messages = True

    batch_size: int = described("sequences in a rank's (micro-)batch", 2)
    steps: int = described("timed steps, each synchronised", 10)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(RanksConfig):
    """The training step of every rank, and the parallel strategy. ValueError names the field."""

    ranks: int = described("processes, each with a GPU of its own where there are GPUs", 2)
    nodes: int = described(NODES_HELP, 1)
    sync: SyncConfig = part(SyncConfig())
    run: RankRunConfig = part(without=("mode", "sync", "cold_compile", "nvtx"))
    window_steps: int = described(
        "steps in a window, which is timed as a whole, so that work that runs into the next step counts; all windows together have "
        "as many steps as are timed singly, and each turn has at least one window",
        10,
    )
    check_agreement: bool = described("after the timed steps, check by hash that replicas are equal on all ranks", True)
    inspect: bool = described(
        "after the timed steps, run some ten more, which count messages and FLOPs, measure memory by phase and record traces; "
        "false: times, losses and peaks alone, for steps that take seconds",
        True,
    )
    keep_trace: str | None = described(
        "folder for the trace of one step, a .json.gz per rank: open them together in Perfetto (ui.perfetto.dev)", None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_nodes(self.ranks, self.nodes)
        check_integer(self, "window_steps", at_least=1)
        if self.keep_trace is not None and not self.inspect:
            raise ValueError("keep_trace: only an inspected step has a trace; leave it out, or take inspect true")
        if self.keep_trace is not None and self.run.capture != "none":
            raise ValueError(
                "keep_trace: a graph's messages have no names in a trace; leave it out, or take capture none"
            )


USED_BY = {
    option: tuple(strategy.name for strategy in STRATEGIES if option in strategy.options)
    for option in map(flat_name, fields(SyncConfig))
    if option != "sync"
}
"""Option -> the strategies that have it."""
STRATEGY_FIELDS = frozenset(("sync", *USED_BY))
"""The fields of a parallel strategy. Strategies are compared with each other whatever their options."""


def needless(values: Mapping[str, Any]) -> frozenset[str]:
    """The options that the strategy `sync` in these values does not have. If they were kept, equal cells would look different."""
    sync = values.get("sync", SyncConfig.name) or BASELINE  # the command line reads the name `none` as None
    return frozenset(name for name, users in USED_BY.items() if sync in SYNCS and sync not in users)
