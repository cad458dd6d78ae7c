"""A training step on several ranks, one way of going parallel: a cell of the workload `parallel`."""

from dataclasses import dataclass

from trainstep.config.fields import as_in, check_choices, check_integer, described, part_of
from trainstep.config.model import ModelConfig, UserModel
from trainstep.config.run import RunConfig
from trainstep.config.sync import SyncConfig
from trainstep.costs.strategies import YARDSTICK, strategy_named

_MOST_RANKS = 1024


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """A run of every rank, and how they are kept together. `batch_size` is a rank's. Raises ValueError naming the field."""

    model: ModelConfig | UserModel
    ranks: int = described("processes; with a GPU each where there are GPUs", 2)
    sync: str = as_in(SyncConfig, "sync")
    bucket_mib: float | None = as_in(SyncConfig, "bucket_mib")
    first_bucket_mib: float | None = as_in(SyncConfig, "first_bucket_mib")
    last_bucket_mib: float | None = as_in(SyncConfig, "last_bucket_mib")
    reduce_dtype: str = as_in(SyncConfig, "reduce_dtype")
    keeps_gradient_dtype: bool = as_in(SyncConfig, "keeps_gradient_dtype")
    compute_dtype: str = as_in(SyncConfig, "compute_dtype")
    reshard_after_forward: bool = as_in(SyncConfig, "reshard_after_forward")
    ahead: int = as_in(SyncConfig, "ahead")
    batch_size: int = described("sequences in a rank's (micro-)batch", 2)
    context: int = as_in(RunConfig, "context")
    precision: str = as_in(RunConfig, "precision")
    attention: str = as_in(RunConfig, "attention")
    compile: str = as_in(RunConfig, "compile")
    recompute: str = as_in(RunConfig, "recompute")
    adamw: str = as_in(RunConfig, "adamw")
    learning_rate: float = as_in(RunConfig, "learning_rate")
    clip_grad_norm: float | None = as_in(RunConfig, "clip_grad_norm")
    accumulation: int = as_in(RunConfig, "accumulation")
    data: str = as_in(RunConfig, "data")
    seed: int = as_in(RunConfig, "seed")
    device: str = as_in(RunConfig, "device")
    warmups: int = as_in(RunConfig, "warmups")
    steps: int = described("timed steps, each synchronised", 10)
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
        check_choices(self)
        check_integer(self, "ranks", at_least=1, at_most=_MOST_RANKS)
        check_integer(self, "window_steps", at_least=1)
        strategy = strategy_named(self.sync)
        if self.compile == "model" and strategy.in_units:
            raise ValueError(
                f"compile: {self.sync} gathers block by block, which a whole compiled model hides; take block"
            )
        if self.ranks == 1 and strategy.counterpart is not None:
            raise ValueError(f"ranks: {self.sync} needs others to talk to; take 2 or more ranks")
        if (self.ranks > 1 or self.sync != YARDSTICK) and self.precision == "bf16_master":
            raise ValueError(
                "precision: bf16_master is for one process; on several ranks take fsdp with compute_dtype bf16: weights stay fp32"
            )
        if not self.keeps_gradient_dtype and self.adamw != "trainstep":
            raise ValueError(f"adamw: {self.adamw} refuses bf16 gradients of fp32 parameters; take trainstep")
        self.run()  # its fields are checked there
        self.sync_config()

    def run(self) -> RunConfig:
        """The step of one rank."""
        return RunConfig(**part_of(self, RunConfig, without="sync"))

    def sync_config(self) -> SyncConfig:
        """How the ranks are kept together."""
        return SyncConfig(**{name: getattr(self, name) for name in SyncConfig.__dataclass_fields__})
