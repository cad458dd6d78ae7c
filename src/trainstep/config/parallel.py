"""A training step on several ranks, one parallel strategy: a cell of the workload `parallel`."""

from dataclasses import dataclass

from trainstep.config.fields import check_integer, check_parts, described, part
from trainstep.config.run import RunConfig
from trainstep.config.sync import SyncConfig

_MOST_RANKS = 1024


@dataclass(frozen=True, kw_only=True)
class RanksConfig:
    """A step on so many ranks and how they are kept together: what the formulas of plan/ look at."""

    ranks: int
    sync: SyncConfig
    run: RunConfig

    def __post_init__(self) -> None:
        check_parts(self)
        check_integer(self, "ranks", at_least=1, at_most=_MOST_RANKS)
        run, sync = self.run, self.sync
        if run.compile == "model" and sync.strategy.in_units:
            raise ValueError(
                f"compile: {sync.name} gathers block by block, which a whole compiled model hides; take block"
            )
        if self.ranks == 1 and sync.strategy.counterpart is not None:
            raise ValueError(f"ranks: {sync.name} needs others to talk to; take 2 or more ranks")
        if (self.ranks > 1 or sync.strategy.communicates) and run.precision == "bf16_master":
            raise ValueError(
                "precision: bf16_master is for one process; on several ranks take fsdp with compute_dtype bf16: weights stay fp32"
            )
        if not sync.keeps_gradient_dtype and run.adamw != "trainstep":
            raise ValueError(f"adamw: {run.adamw} refuses bf16 gradients of fp32 parameters; take trainstep")


@dataclass(frozen=True, kw_only=True)
class RankRunConfig(RunConfig):
    """The step of one rank."""

    batch_size: int = described("sequences in a rank's (micro-)batch", 2)
    steps: int = described("timed steps, each synchronised", 10)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(RanksConfig):
    """A run of every rank, and how they are kept together. Raises ValueError naming the field."""

    ranks: int = described("processes; with a GPU each where there are GPUs", 2)
    sync: SyncConfig = part(SyncConfig())
    run: RankRunConfig = part(without=("mode", "sync", "cold_compile", "nvtx"))
    window_steps: int = described(
        "steps of a window, timed as one: what runs into the next step counts then; windows take as many steps as are timed "
        "singly, in each turn at least one window",
        10,
    )
    check_agreement: bool = described("after the timed steps, compare by hash what all ranks hold alike", True)
    keep_trace: str | None = described(
        "folder for the trace of one step, a .json.gz a rank: open them together in Perfetto (ui.perfetto.dev)", None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self, "window_steps", at_least=1)
        if self.keep_trace is not None and self.run.capture != "none":
            raise ValueError(
                "keep_trace: a graph's messages have no names in a trace; leave it out, or take capture none"
            )
