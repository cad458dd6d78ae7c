"""Where the memory of one training step goes: a cell of the workload `memory`."""

from dataclasses import MISSING, dataclass
from typing import Any

from trainstep.config.fields import check_choices, check_integer, described
from trainstep.config.model import ModelConfig, UserModel
from trainstep.config.run import RunConfig


def _as_in_run(name: str) -> Any:
    """A field of RunConfig that means the same here."""
    field = RunConfig.__dataclass_fields__[name]
    default = None if field.default is MISSING else field.default
    return described(field.metadata["help"], default, field.metadata["choices"])


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """The fields of a run that decide what it holds. Raises ValueError naming the field and the way out."""

    model: ModelConfig | UserModel
    batch_size: int = _as_in_run("batch_size")
    context: int = _as_in_run("context")
    mode: str = _as_in_run("mode")
    precision: str = _as_in_run("precision")
    attention: str = _as_in_run("attention")
    compile: str = _as_in_run("compile")
    recompute: str = _as_in_run("recompute")
    adamw: str = _as_in_run("adamw")
    clip_grad_norm: float | None = _as_in_run("clip_grad_norm")
    accumulation: int = _as_in_run("accumulation")
    data: str = _as_in_run("data")
    seed: int = _as_in_run("seed")
    device: str = _as_in_run("device")
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

    def run(self) -> RunConfig:
        """The step whose memory is looked at; it is not timed."""
        return RunConfig(
            model=self.model,
            batch_size=self.batch_size,
            context=self.context,
            mode=self.mode,
            precision=self.precision,
            attention=self.attention,
            compile=self.compile,
            recompute=self.recompute,
            adamw=self.adamw,
            clip_grad_norm=self.clip_grad_norm,
            accumulation=self.accumulation,
            data=self.data,
            seed=self.seed,
            device=self.device,
            warmups=self.warmups,
        )
