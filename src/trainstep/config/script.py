"""The config of `trainstep run`: a window of consecutive steps of somebody's own training script."""

from dataclasses import dataclass
from enum import StrEnum

from trainstep.config.fields import check_choices, check_integer, described
from trainstep.config.run import DEVICES, Phase


class Part(StrEnum):
    """What the thread that trains does at a moment, as its hooks see it. Together the parts are the whole time of a step."""

    DATA = "data_wait"
    """Inside a DataLoader's iterator, which makes or waits for the next batch."""
    FORWARD = Phase.FORWARD.value
    """The outermost module, and what follows it until backward begins: the loss."""
    BACKWARD = Phase.BACKWARD.value
    """`loss.backward()`, with the messages that wrappers such as DDP send in it."""
    OPTIMIZER = Phase.OPTIMIZER.value
    """`optimizer.step()`, and what stands between it and backward: unscaling, clipping."""
    EVALUATION = "evaluation"
    """Forward passes without gradients: evaluation, generation, a teacher."""
    OTHER = "other"
    """All other code of the script: preparing a batch, logging, saving."""

    __hash__ = str.__hash__  # an enum's own is written in Python, and hooks look parts up in every step


@dataclass(frozen=True, kw_only=True)
class ScriptConfig:
    """One record of a run: the steps from `first_step` on. ValueError names the field.

    A run writes records as it goes on, so that a kill loses seconds and not the run; all of its records have the same `run`.
    """

    script: str = described("path of the script, `-m module`, or the name of code in `trainstep.watch`")
    arguments: str = described("the script's arguments, as a shell would take them", "")
    run: str = described("name that the records of one run share, its ranks too")
    rank: int = described("rank of the process", 0)
    ranks: int = described("number of ranks", 1)
    first_step: int = described("number, from 1, of the first step in this record", 1)
    device: str = described("device of the parameters", "cpu", DEVICES)

    def __post_init__(self) -> None:
        check_choices(self)
        check_integer(self, "ranks", at_least=1)
        check_integer(self, "rank", at_least=0, at_most=self.ranks - 1)
        check_integer(self, "first_step", at_least=1)
        for name in ("script", "run"):
            if not getattr(self, name):
                raise ValueError(f"{name}: must not be empty")
