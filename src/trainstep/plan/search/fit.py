"""The largest batch, context or number of layers with which a step fits on a GPU, by formula.

    fit = largest_fit(config, "batch_size", gpu_memory_bytes=...)
    fit.surely.value, fit.probably.value, fit.bound

What a step needs grows with each of these fields, so the value doubles until it does not fit, and the gap is halved. Two values are
searched: the largest at which the upper end of the interval fits, and the largest at which its middle fits. A step between them may
fit.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from trainstep.config.memory import LARGEST_TRIED
from trainstep.config.model import ModelConfig
from trainstep.config.parallel import RanksConfig
from trainstep.plan.prediction import Prediction, predict

BOUNDS = {**LARGEST_TRIED, "layers": 1024}
"""Field -> the value at which the search ends; the answer then says `at least`."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A value with the prediction of its step."""

    value: int
    prediction: Prediction


@dataclass(frozen=True, kw_only=True)
class LargestFit:
    """The result. `surely`, `probably`: the largest value at which the interval's upper end, or its middle, fits; None: not even 1.

    `above`: the first value that probably does not fit; None at the bound.
    """

    field: str
    bound: int
    surely: Fit | None
    probably: Fit | None
    above: Fit | None
    tried: int


def largest_fit(config: RanksConfig, field: str, *, gpu_memory_bytes: int) -> LargestFit:
    """Search one of the fields of BOUNDS. ValueError for what has no formulas."""
    known: dict[int, Prediction] = {}

    def at(value: int) -> Prediction:
        if value not in known:
            known[value] = predict(with_value(config, field, value), gpu_memory_bytes=gpu_memory_bytes)
        return known[value]

    bound = BOUNDS[field]
    probably = _largest(bound, lambda value: at(value).spare_bytes >= 0 and at(value).fits is True)
    surely = _largest(probably, lambda value: not at(value).is_tight)
    above = probably + 1
    return LargestFit(
        field=field,
        bound=bound,
        surely=Fit(value=surely, prediction=at(surely)) if surely else None,
        probably=Fit(value=probably, prediction=at(probably)) if probably else None,
        above=Fit(value=above, prediction=at(above)) if above <= bound else None,
        tried=len(known),
    )


def with_value(config: RanksConfig, field: str, value: int) -> RanksConfig:
    """The step with another value. ValueError as configs raise."""
    run = config.run
    if field != "layers":
        changes: dict[str, Any] = {field: value}
        return replace(config, run=replace(run, **changes))
    assert isinstance(run.model, ModelConfig)
    return replace(config, run=replace(run, model=replace(run.model, layers=value)))


def _largest(bound: int, fits: Callable[[int], bool]) -> int:
    """The largest value up to the bound that fits, 0 if none does. Above a value that does not fit, none may fit again."""
    low, high = 0, min(1, bound)
    while low < high <= bound and fits(high):
        low, high = high, min(2 * high, bound)
    if low == high:
        return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
