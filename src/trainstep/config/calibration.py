"""The config of a calibration: how fast this machine runs the kernels of a training step, for `trainstep plan`."""

from dataclasses import dataclass

from trainstep.config.fields import check_choices, check_integer, check_positive, described
from trainstep.config.run import DEVICES


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """What is measured, and how often. ValueError names the field."""

    device: str = described("device to measure", "cpu", DEVICES)
    calls: int = described("calls of each kernel, whose mean counts; on a CPU, as many times 20 ms", 5)
    seed: int = described("seed of the operands", 0)

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, "calls")
        check_integer(self, "seed", at_least=0, at_most=2**63 - 1)
