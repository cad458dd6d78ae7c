"""What a change gains, with an interval."""

import math

from trainstep.plan.time.interval import Interval
from trainstep.plan.time.step_time import StepTime

_EXPECTED = 0.5
"""Share of an excess that a change gains if nobody can predict it: the middle between nothing and all."""
_KNOWN = frozenset(
    ("data", "recompiles", "garbage_collector", "allocator", "another_process", "accumulation_sync", "synchronisations")
)
"""Waits, of which a change leaves nothing: batches come in time, nothing is compiled again, and so on."""
_BUCKET_BYTES = 25 * 2**20
_MANY_PER_BUCKET = 2
"""From so many messages in place of one bucket on, buckets are what is missing."""


def expected_share(cause: str, *, measured_against_other: bool) -> float:
    """The share of a cause's excess that its change should gain where plan does not predict it: all of a wait, and all of an excess
    over what another way of computing takes; else half."""
    return 1.0 if cause in _KNOWN or measured_against_other else _EXPECTED


def merged_share(messages: int, nbytes: float, fixed_s: float, exposed_s: float) -> float:
    """The share of exposed messages' time that the same bytes in buckets should gain; `_EXPECTED` if they are few or large already.

    Beside their bytes, n messages take n f, f the fixed time of one, and k buckets k f: (n - k) f is gained, at most all.
    """
    buckets = max(1, math.ceil(nbytes / _BUCKET_BYTES))
    if messages < _MANY_PER_BUCKET * buckets or not exposed_s:
        return _EXPECTED
    return min(1.0, (messages - buckets) * fixed_s / exposed_s)


def gain_of(
    excess_s: float,
    measured_s: float,
    now: StepTime | None,
    after: StepTime | None,
    *,
    is_taken: bool = False,
    expected: float = _EXPECTED,
) -> Interval:
    """The gain of a change whose step plan predicts, else of one of which nothing but the excess is known.

    Predicted: `predicted_gain`, at least nothing. Else: the share `expected` of the excess, from nothing to all of it; nothing
    where the known change is taken already.
    """
    if is_taken:
        return Interval(time_s=0.0, low_s=0.0, high_s=excess_s)
    gain = predicted_gain(measured_s, now, after)
    if gain is None:
        return Interval(time_s=expected * excess_s, low_s=0.0, high_s=excess_s)
    return Interval(time_s=max(0.0, gain.time_s), low_s=max(0.0, gain.low_s), high_s=max(0.0, gain.high_s))


def predicted_gain(
    measured_s: float, now: StepTime | None, after: StepTime | None, *, work: float = 1.0
) -> Interval | None:
    """measured x (1 - after / now), below 0 for a slower step; None where plan does not predict both.

    Errors of both are alike, and those of the ratio are taken as the wider one's half width. `work`: tokens of the changed step
    over those of this one; the gain is then of the time that the same tokens take.
    """
    if now is None or after is None or not now.step.time_s:
        return None
    ratio = after.step.time_s / now.step.time_s / work
    half = ratio * max(now.step.half_width, after.step.half_width)

    def gain_s(share: float) -> float:
        return min(measured_s, measured_s * (1 - share))

    return Interval(time_s=gain_s(ratio), low_s=gain_s(ratio + half), high_s=gain_s(ratio - half))
