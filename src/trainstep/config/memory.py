"""Where the memory of one training step goes: a cell of the workload `memory`."""

from dataclasses import dataclass

from trainstep.config.fields import check_integer, described, part
from trainstep.config.parallel import RanksConfig
from trainstep.config.run import RunConfig
from trainstep.config.sync import SyncConfig
from trainstep.costs.strategies import YARDSTICK

LARGEST_TRIED = {"batch_size": 4096, "context": 131_072}
"""Where a search for the largest that fits stops, by the field that is searched: more is 'at least' this."""


@dataclass(frozen=True, kw_only=True)
class RecordedRunConfig(RunConfig):
    """The step whose memory is looked at; it is not timed."""

    warmups: int = described("steps before the recorded one: the first makes the optimizer's state", 1)

    def __post_init__(self) -> None:
        check_integer(self, "warmups", at_least=1)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(RanksConfig):
    """The fields of a run that decide what it holds. Raises ValueError naming the field and the way out.

    With several ranks: what each of them holds, kept together as `sync` says; `batch_size` is a rank's.
    """

    ranks: int = described("processes, with a GPU each where there are GPUs; 1: a step on its own", 1)
    sync: SyncConfig = part(SyncConfig(name=YARDSTICK))
    run: RecordedRunConfig = part(without=("capture", "learning_rate", "steps", "sync", "cold_compile", "nvtx"))
    min_share: float = described("share of the peak under which an allocation is not listed", 0.005)
    keep_snapshot: str | None = described(
        "folder for the snapshot's file: drag it to pytorch.org/memory_viz, or read it with --from", None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.min_share <= 1:
            raise ValueError(f"min_share: must be a share from 0 to 1, not {self.min_share!r}")
        if self.ranks == 1 and self.sync.strategy.communicates:
            raise ValueError(
                f"sync: {self.sync.name} keeps several ranks together; take ranks 2 or more, or sync {YARDSTICK}"
            )
        if self.ranks > 1 and self.run.mode != "step":
            raise ValueError(f"mode: of several ranks a whole step is looked at, not {self.run.mode}; leave it at step")
