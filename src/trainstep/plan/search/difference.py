"""How much slower one predicted step is than another, by term, and whether the prediction can tell them apart.

    apart = difference(best.time, other.time)
    apart.time_s, apart.low_s, apart.high_s, apart.terms[0], apart.is_sure

Two steps of one machine share most kernels, and what the prediction has wrong in them it has wrong in both. So the interval of the
difference is not that of the steps: a kernel's error counts by how much its time differs. So do gaps and the machine's drift. The
errors of messages and of the host are shared only if both steps have the same strategy, and both or neither are captured; else both
errors count.
"""

import math
from dataclasses import dataclass

from trainstep.plan.time.step_time import DEVIATIONS, GAPS, MACHINE, StepTime


@dataclass(frozen=True, kw_only=True)
class Difference:
    """`time_s`: the second step's time less the first's; `terms`: its parts, those that contribute most to it first."""

    time_s: float
    half_s: float
    terms: tuple[tuple[str, float], ...]

    @property
    def low_s(self) -> float:
        return self.time_s - self.half_s

    @property
    def high_s(self) -> float:
        return self.time_s + self.half_s

    @property
    def is_sure(self) -> bool:
        """Whether the interval leaves no doubt which is faster."""
        return self.half_s < abs(self.time_s)


def difference(first: StepTime, second: StepTime) -> Difference:
    """How much slower the second is."""
    time_s = second.step.time_s - first.step.time_s
    parts = {name: second.classes[name] - first.classes[name] for name in first.classes}
    sign = 1 if time_s >= 0 else -1
    terms = sorted(parts.items(), key=lambda item: -sign * item[1])
    alike = _errors(first)
    for key, error_s in _errors(second).items():
        alike[key] = alike.get(key, 0.0) - error_s
    deviation_s = (sum(error_s**2 for error_s in alike.values()) + (MACHINE * time_s) ** 2) ** 0.5
    first_s, second_s = _beside_s(first), _beside_s(second)
    shared = first.config.sync.name == second.config.sync.name and first.is_captured == second.is_captured
    beside_s = abs(first_s - second_s) if shared else (first_s**2 + second_s**2) ** 0.5
    half_s = DEVIATIONS * deviation_s + abs(parts[GAPS]) / 2 + beside_s
    return Difference(time_s=time_s, half_s=half_s, terms=tuple(terms))


def _errors(time: StepTime) -> dict[tuple[str, str], float]:
    """The standard error of the kernels of each kind and shape, in seconds."""
    errors_s: dict[tuple[str, str], float] = {}
    for line in time.lines:
        key = line.kind, line.formula
        errors_s[key] = errors_s.get(key, 0.0) + line.spread * line.time_s
    return errors_s


def _beside_s(time: StepTime) -> float:
    """Half the interval of messages, the host and a graph's launch, whose errors are independent of the device's kernels."""
    device = time.device.values()
    low_s = time.step.time_s - time.step.low_s, sum(part.time_s - part.low_s for part in device)
    high_s = time.step.high_s - time.step.time_s, sum(part.high_s - part.time_s for part in device)
    return max(math.sqrt(max(0.0, step_s**2 - device_s**2)) for step_s, device_s in (low_s, high_s))
