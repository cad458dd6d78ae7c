"""The time that a change gains, with an interval."""

import math

from trainstep.plan.time.interval import Interval
from trainstep.plan.time.step_time import StepTime

_EXPECTED = 0.5
"""Share of an excess that a change gains if it cannot be predicted: the middle between nothing and all."""
_KNOWN = frozenset(
    ("data", "recompiles", "garbage_collector", "allocator", "another_process", "accumulation_sync", "synchronisations")
)
"""Waits that a change removes entirely: batches come in time, nothing is compiled again, and so on."""
_BUCKET_BYTES = 25 * 2**20
_MANY_PER_BUCKET = 2
"""Number of messages per bucket from which on buckets would help."""


def expected_share(cause: str, *, measured_against_other: bool) -> float:
    """The share of a cause's excess that its change should gain, where plan does not predict it.

    All of a wait, and all of an excess measured against another way of computing; else half. What workers gain of a wait for data
    depends on how many there are (`loaded_share`).
    """
    return 1.0 if cause in _KNOWN or measured_against_other else _EXPECTED


def merged_share(messages: int, nbytes: float, fixed_s: float, exposed_s: float) -> float:
    """The share of exposed messages' time that buckets should gain; `_EXPECTED` if the messages are already few or large.

    With the fixed time f of a message, n messages take n f beside their bytes and k buckets take k f, so (n - k) f is gained, at
    most all.
    """
    buckets = max(1, math.ceil(nbytes / _BUCKET_BYTES))
    if messages < _MANY_PER_BUCKET * buckets or not exposed_s:
        return _EXPECTED
    return min(1.0, (messages - buckets) * fixed_s / exposed_s)


def loaded_share(data_s: float, measured_s: float, *, workers: int, now: int | None) -> float:
    """The share of a step's wait for data that a loader with so many worker processes should gain.

    A loader without workers (`now` 0) makes a batch in the wait L = data_s. One with workers, which the step waits for, makes `now`
    batches in a step, so L = now x measured_s. N workers have a batch ready every L / N, and the rest of the step takes
    r = measured_s - data_s: max(0, L / N - r) is still waited for. All where `now` is unknown (None); `_EXPECTED` where there would
    be no more workers than now, since then a cheaper transform is what is left.
    """
    if now is None or not data_s:
        return 1.0
    if workers <= now:
        return _EXPECTED
    batch_s = now * measured_s if now else data_s
    left_s = max(0.0, batch_s / workers - (measured_s - data_s))
    return max(0.0, 1 - left_s / data_s)


def gain_of(
    excess_s: float,
    measured_s: float,
    now: StepTime | None,
    after: StepTime | None,
    *,
    is_taken: bool = False,
    expected: float = _EXPECTED,
) -> Interval:
    """The gain of a change: predicted by plan if both steps are known, else estimated from the excess.

    Predicted: `predicted_gain`, but not below 0. Estimated: the share `expected` of the excess, with an interval from nothing to
    all of it. A change that is already taken gains nothing.
    """
    if is_taken:
        return Interval(time_s=0.0, low_s=0.0, high_s=excess_s)
    gain = predicted_gain(measured_s, now, after)
    if gain is None:
        return Interval(time_s=expected * excess_s, low_s=0.0, high_s=excess_s)
    return Interval(time_s=max(0.0, gain.time_s), low_s=max(0.0, gain.low_s), high_s=max(0.0, gain.high_s))


def no_gain_words(gain: Interval, after: StepTime | None) -> str:
    """Why the change, by plan, gains nothing, though the cause takes time; empty for a gain and without a prediction."""
    if after is None or gain.time_s > 0:
        return ""
    if after.host_bound:
        return "; then the host is the limit"
    return "; by plan no gain"


def predicted_gain(
    measured_s: float, now: StepTime | None, after: StepTime | None, *, work: float = 1.0
) -> Interval | None:
    """measured x (1 - after / now), below 0 for a slower step; None unless plan predicts both.

    The errors of both predictions are alike, so the ratio gets the wider half width of the two. `work`: tokens of the changed step
    over those of this one; the gain then compares the times for the same tokens.
    """
    if now is None or after is None or not now.step.time_s:
        return None
    ratio = after.step.time_s / now.step.time_s / work
    half = ratio * max(now.step.half_width, after.step.half_width)

    def gain_s(share: float) -> float:
        return min(measured_s, measured_s * (1 - share))

    return Interval(time_s=gain_s(ratio), low_s=gain_s(ratio + half), high_s=gain_s(ratio - half))
