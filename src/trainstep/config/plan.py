"""The config of `trainstep plan`: a training step on a GPU, alone or on several ranks, of which nothing runs."""

from dataclasses import dataclass

from trainstep.config.fields import described, part
from trainstep.config.parallel import RanksConfig, SyncConfig
from trainstep.config.run import DEVICES, RunConfig
from trainstep.costs.strategies import YARDSTICK


@dataclass(frozen=True, kw_only=True)
class PlannedRunConfig(RunConfig):
    """The step of one rank."""

    has_messages = True

    batch_size: int = described("sequences in a rank's (micro-)batch", 1)
    device: str = described("device to run on", "cuda", DEVICES)


@dataclass(frozen=True, kw_only=True)
class PlanConfig(RanksConfig):
    """The step that is planned. ValueError names the field and the remedy."""

    ranks: int = described("processes, each with a GPU of its own", 1)
    sync: SyncConfig = part(SyncConfig(name=YARDSTICK))
    run: PlannedRunConfig = part(
        without=(
            *("learning_rate", "data", "seed", "device", "warmups", "steps", "sync", "cold_compile", "nvtx"),
            "recompute_budget_gib",
        )
    )
