"""The config of `trainstep memory`: the training step whose memory is recorded."""

from dataclasses import dataclass

from trainstep.config.fields import check_integer, described, part
from trainstep.config.nodes import NODES_HELP, check_nodes
from trainstep.config.parallel import RanksConfig, SyncConfig
from trainstep.config.run import RunConfig
from trainstep.costs.strategies import BASELINE

LARGEST_TRIED = {"batch_size": 4096, "context": 131_072}
"""Searched field -> the value at which a search for the largest that fits stops; the report says 'at least' then."""


@dataclass(frozen=True, kw_only=True)
class RecordedRunConfig(RunConfig):
    """The step whose memory is recorded; it is not timed."""

    has_messages = True

    warmups: int = described("steps before the recorded step; the first creates the optimizer's state", 1)

    def __post_init__(self) -> None:
        check_integer(self, "warmups", at_least=1)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(RanksConfig):
    """The fields of a run that decide its memory. ValueError names the field and the remedy.

    With several ranks, the memory of every rank is recorded, under the parallel strategy `sync`; `batch_size` is per rank.
    """

    ranks: int = described("processes, each with a GPU of its own where there are GPUs; 1: a step in one process", 1)
    nodes: int = described(NODES_HELP, 1)
    sync: SyncConfig = part(SyncConfig(name=BASELINE))
    run: RecordedRunConfig = part(
        without=("learning_rate", "steps", "sync", "cold_compile", "nvtx", "recompute_budget_gib")
    )
    min_share: float = described("smallest share of the peak for which an allocation is listed", 0.005)
    keep_snapshot: str | None = described(
        "folder for the snapshot's file: drag it to pytorch.org/memory_viz, or read it with --from", None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_nodes(self.ranks, self.nodes)
        if not 0 <= self.min_share <= 1:
            raise ValueError(f"min_share: must be a share from 0 to 1, not {self.min_share!r}")
        if self.ranks == 1 and self.sync.strategy.communicates:
            raise ValueError(f"sync: {self.sync.name} is for several ranks; take ranks 2 or more, or sync {BASELINE}")
        if self.ranks > 1 and self.run.mode != "step":
            raise ValueError(f"mode: several ranks run a whole step, not {self.run.mode}; leave it at step")
