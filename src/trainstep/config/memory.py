"""Where the memory of one training step goes: a cell of the workload `memory`."""

from dataclasses import dataclass

from trainstep.config.fields import as_in, check_choices, check_integer, described, part_of
from trainstep.config.model import ModelConfig, UserModel
from trainstep.config.parallel import ParallelConfig
from trainstep.config.run import RunConfig
from trainstep.config.sync import SyncConfig
from trainstep.costs.strategies import YARDSTICK


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """The fields of a run that decide what it holds. Raises ValueError naming the field and the way out.

    With several ranks: what each of them holds, kept together as `sync` and its options say; `batch_size` is a rank's.
    """

    model: ModelConfig | UserModel
    ranks: int = described("processes, with a GPU each where there are GPUs; 1: a step on its own", 1)
    sync: str = as_in(SyncConfig, "sync", default=YARDSTICK)
    bucket_mib: float | None = as_in(SyncConfig, "bucket_mib")
    first_bucket_mib: float | None = as_in(SyncConfig, "first_bucket_mib")
    last_bucket_mib: float | None = as_in(SyncConfig, "last_bucket_mib")
    reduce_dtype: str = as_in(SyncConfig, "reduce_dtype")
    keeps_gradient_dtype: bool = as_in(SyncConfig, "keeps_gradient_dtype")
    compute_dtype: str = as_in(SyncConfig, "compute_dtype")
    reshard_after_forward: bool = as_in(SyncConfig, "reshard_after_forward")
    ahead: int = as_in(SyncConfig, "ahead")
    batch_size: int = as_in(RunConfig, "batch_size")
    context: int = as_in(RunConfig, "context")
    mode: str = as_in(RunConfig, "mode")
    precision: str = as_in(RunConfig, "precision")
    attention: str = as_in(RunConfig, "attention")
    compile: str = as_in(RunConfig, "compile")
    recompute: str = as_in(RunConfig, "recompute")
    adamw: str = as_in(RunConfig, "adamw")
    clip_grad_norm: float | None = as_in(RunConfig, "clip_grad_norm")
    accumulation: int = as_in(RunConfig, "accumulation")
    data: str = as_in(RunConfig, "data")
    seed: int = as_in(RunConfig, "seed")
    device: str = as_in(RunConfig, "device")
    warmups: int = described("steps before the recorded one: the first makes the optimizer's state", 1)
    min_share: float = described("share of the peak under which an allocation is not listed", 0.005)
    keep_snapshot: str | None = described(
        "folder for the snapshot's file: drag it to pytorch.org/memory_viz, or read it with --from", None
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_integer(self, "warmups", at_least=1)
        if not 0 <= self.min_share <= 1:
            raise ValueError(f"min_share: must be a share from 0 to 1, not {self.min_share!r}")
        self.run()  # its fields are checked there
        if self.ranks == 1 and self.sync != YARDSTICK:
            raise ValueError(f"sync: {self.sync} keeps several ranks together; take ranks 2 or more, or sync none")
        self.parallel()
        if self.ranks > 1 and self.mode != "step":
            raise ValueError(f"mode: of several ranks a whole step is looked at, not {self.mode}; leave it at step")

    def run(self) -> RunConfig:
        """The step whose memory is looked at; it is not timed."""
        return RunConfig(**part_of(self, RunConfig, without="sync"))

    def parallel(self) -> ParallelConfig:
        """The same step as `trainstep parallel` has it: where the ways and their options are checked, and formulas look."""
        return ParallelConfig(**part_of(self, ParallelConfig))
