"""Is b faster than a? A ratio with its interval, and a verdict that may be 'cannot tell'.

The verdict: b differs when the 99 % interval of the ratio leaves 1 out and the ratio is at least the minimum effect away
from 1. Why so:
- Pairs. What two variants share while they take turns (drift, clocks, neighbours, slow and fast modes of the machine) is in
  both halves of a pair and leaves their ratio. Logarithms, so that a against b mirrors b against a.
- The median of the pairs. A few steps hit by something else do not move it, where they would drag a mean.
- 99 %, widened as Student's interval is wider than the normal one (times sqrt(n / (n - 1)): a resample spreads too little).
  Percentile bootstraps of a median are too narrow on few values: at 95 % and unwidened, 8 % of A/A comparisons of 20 pairs with
  10 % noise, and 24 % of those of 3 pairs, were called different. Widened, 5 pairs and more give about 99 %. Fewer than 5 give a
  ratio and no interval: three pairs do not say how far the next is off.
- A minimum effect. Taking turns leaves the position in the turn: under drift the second of a pair is always later, and an
  interval of many pairs gets narrow enough to see it. Differences that small also change with the next build or the next day.
In 500 simulations of each noise (2 %, 10 %, Student's t2, 5 % outliers of three times, shared drift of 10 to 20 %, shared or
independent modes 15 to 30 % apart), 20 pairs: A/A is called different in at most 2 %, 5 % is found under 2 % noise in over 98 %.
What turns cannot see is a bias that lasts as long as a process (where its memory happened to lie: 2 % a process, say): all of a's
turns have a's and all of b's turns have b's. So variants are run by several pairs of processes (measure/interleave.py), and where
records say how long a process is, the pair of processes is the unit: its log ratio is the median of its turns', and the interval
is Student's of the pairs' mean. Older records, and workloads whose processes measure many cells, have one pair of processes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from trainstep.records.record import Record, Samples
from trainstep.records.summary import Floats, bootstrap_medians

VERDICTS = ("faster", "slower", "cannot tell")
MINIMUM_PAIRS = 5
_LEVEL = 0.99
_SAME_ENVIRONMENT = ("gpu", "driver", "torch", "triton", "cuda", "cpu")
_STUDENT_OF_FOUR = 4.604
"""The two-sided 1 % point of Student's t with 4 degrees of freedom, the fewest here, where the series for it is poor."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """b against a in one quantity of time. `ratio` is b / a, `low` to `high` its 99 % interval; None where there is none: of the
    interval below MINIMUM_PAIRS."""

    verdict: str
    """One of VERDICTS, of b."""
    reason: str
    """One sentence."""
    quantity: str = ""
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    each: tuple[float, ...] = ()
    """The pairs' ratios, where they are too few for an interval."""
    n: int = 0
    """Pairs; where nothing pairs them, the values of the side that has fewer."""
    paired: bool = False
    interleaving: str = "none"
    """How they took turns: `none`, `live` (processes side by side) or `rounds` (whole processes)."""


@dataclass(frozen=True, kw_only=True)
class Matches:
    """Records of two stores brought together by key."""

    pairs: tuple[tuple[Record, Record], ...]
    only_a: tuple[Record, ...]
    only_b: tuple[Record, ...]


def match_records(a: Sequence[Record], b: Sequence[Record]) -> Matches:
    """Pair the last record of each key in a with the last of that key in b, in a's order."""
    of_a, of_b = ({record.key: record for record in records} for records in (a, b))
    return Matches(
        pairs=tuple((record, of_b[key]) for key, record in of_a.items() if key in of_b),
        only_a=tuple(record for key, record in of_a.items() if key not in of_b),
        only_b=tuple(record for key, record in of_b.items() if key not in of_a),
    )


def compare_records(
    a: Record, b: Record, *, quantity: str = "step", minimum_effect: float = 0.02, allow_mixed: bool = False
) -> Comparison:
    """Compare a quantity of two records; those that took turns with each other, as pairs.

    ValueError for unlike environments (unless `allow_mixed`), a quantity that one lacks, or units that differ.
    """
    for side, record in (("a", a), ("b", b)):
        if record.failure is not None:
            reason = f"{side} failed: {record.failure.kind} in {record.failure.phase}"
            return Comparison(verdict="cannot tell", reason=reason, quantity=quantity)
    difference = a.environment.difference(b.environment, *_SAME_ENVIRONMENT)
    if difference and not allow_mixed:
        raise ValueError(f"unlike environments: {difference}; allow mixed ones to compare them all the same")
    for side, record in (("a", a), ("b", b)):
        if quantity not in record.samples:
            known = ", ".join(record.samples) or "no samples at all"
            raise ValueError(f"{quantity}: {side} holds no such quantity; it holds {known}")
    interleaving, turn_steps = _turns(a, b)
    together = interleaving != "none"
    processes = _steps(a, "process_steps"), _steps(b, "process_steps")
    found = compare_samples(
        a.samples[quantity],
        b.samples[quantity],
        minimum_effect=minimum_effect,
        turn_steps=(_values_of(a, quantity, turn_steps[0]), _values_of(b, quantity, turn_steps[1])),
        process_steps=(_values_of(a, quantity, processes[0]), _values_of(b, quantity, processes[1]))
        if together and processes[0] and processes[1]
        else None,
        paired=together,
    )
    aside = "" if together else "; not interleaved, so what changed between the runs counts too"
    return replace(found, quantity=quantity, reason=found.reason + aside, interleaving=interleaving)


def compare_samples(
    a: Samples,
    b: Samples,
    *,
    minimum_effect: float = 0.02,
    turn_steps: tuple[int, int] = (1, 1),
    process_steps: tuple[int, int] | None = None,
    paired: bool = True,
) -> Comparison:
    """Compare times: as pairs, turn i with turn i (by median; `turn_steps`: values in a turn of a and of b), or apart.

    `process_steps`: values that each process of a and of b gave; those of several processes are compared process by process.
    Turns only one side has are left out of pairs. ValueError for units that differ or are no time.
    """
    if a.unit != b.unit:
        raise ValueError(f"unit: {a.unit!r} against {b.unit!r} cannot be compared")
    if a.unit != "s":
        raise ValueError(f"unit: faster and slower are said of times in s, not of {a.unit!r}")
    if not minimum_effect >= 0:
        raise ValueError(f"minimum_effect: must be a share of at least 0, not {minimum_effect}")
    if min(turn_steps) < 1:
        raise ValueError(f"turn_steps: must be at least 1, not {turn_steps}")
    values = [np.asarray(samples.values, dtype=np.float64) for samples in (a, b)]
    if not all(np.all(np.isfinite(times) & (times > 0)) for times in values):
        return Comparison(verdict="cannot tell", reason="some times are not positive, so there is no ratio")
    lengths = turn_steps if paired else (1, 1)
    logs_a, logs_b = (_log_turns(times, length) for times, length in zip(values, lengths, strict=True))
    if (
        paired
        and process_steps
        and min(len(times) // steps for times, steps in zip(values, process_steps, strict=True)) > 1
    ):
        return _compare_processes(values, lengths, process_steps, minimum_effect)
    n = min(len(logs_a), len(logs_b))
    few = f"too few {'pairs' if paired else 'values'}: {n}, and at least {MINIMUM_PAIRS} are needed"
    if not n:
        return Comparison(verdict="cannot tell", reason=few, paired=paired)
    middle, resampled = _paired(logs_a[:n], logs_b[:n]) if paired else _apart(logs_a, logs_b)
    ratio = float(np.exp(middle))
    if n < MINIMUM_PAIRS:
        each = tuple(np.exp(logs_b[:n] - logs_a[:n]).tolist()) if paired else ()
        return Comparison(verdict="cannot tell", reason=few, ratio=ratio, each=each, n=n, paired=paired)
    low, high = _interval(middle, resampled, n)
    verdict, reason = _judge(ratio, low, high, minimum_effect)
    return Comparison(verdict=verdict, reason=reason, ratio=ratio, low=low, high=high, n=n, paired=paired)


def _compare_processes(
    values: Sequence[Floats], turn_steps: Sequence[int], process_steps: Sequence[int], minimum_effect: float
) -> Comparison:
    """A log ratio for each pair of processes, and Student's interval of their mean."""
    logs = []
    for a, b in zip(*(_split(times, steps) for times, steps in zip(values, process_steps, strict=True)), strict=False):
        turns_a, turns_b = _log_turns(a, turn_steps[0]), _log_turns(b, turn_steps[1])
        turns = min(len(turns_a), len(turns_b))
        logs.append(np.median(turns_b[:turns] - turns_a[:turns]))
    n, middle = len(logs), float(np.mean(logs))
    ratio = float(np.exp(middle))
    if n < MINIMUM_PAIRS:
        few = f"too few pairs of processes: {n}, and at least {MINIMUM_PAIRS} are needed"
        return Comparison(verdict="cannot tell", reason=few, ratio=ratio, n=n, paired=True)
    reach = student_point(n - 1) * float(np.std(logs, ddof=1)) / n**0.5
    low, high = float(np.exp(middle - reach)), float(np.exp(middle + reach))
    verdict, reason = _judge(ratio, low, high, minimum_effect)
    reason += f", over {n} pairs of processes"
    return Comparison(verdict=verdict, reason=reason, ratio=ratio, low=low, high=high, n=n, paired=True)


def _split(values: Floats, length: int) -> list[Floats]:
    """Runs of so many values; a shorter rest is left out."""
    return [values[start : start + length] for start in range(0, len(values) - length + 1, length)]


def _turns(a: Record, b: Record) -> tuple[str, tuple[int, int]]:
    """How two records took turns with each other, and values of `step` in a turn of each; `none` where they did not.

    A turn is the same steps on both sides, but a window of k steps is one value.
    """
    group = a.fact("interleaving_group")
    if not group or group != b.fact("interleaving_group"):
        return "none", (1, 1)
    return str(a.fact("interleaving", "none")), (_steps(a, "turn_steps") or 1, _steps(b, "turn_steps") or 1)


def _steps(record: Record, fact: str) -> int:
    """Values of `step` in a turn or a process; 0 where the record does not say."""
    steps = record.fact(fact, 0)
    if not isinstance(steps, int):
        raise ValueError(f"{fact}: must be a whole number, not {steps!r}")
    return steps


def _values_of(record: Record, quantity: str, turn_steps: int) -> int:
    """A window of k steps has one `step` but k of each phase, so a turn holds k times as many of those; and a turn of several
    steps may end with one value of another quantity."""
    steps = len(record.samples["step"].values) if "step" in record.samples else 0
    values = len(record.samples[quantity].values)
    return max(round(values * turn_steps / steps), 1) if steps else turn_steps


def _paired(logs_a: Floats, logs_b: Floats) -> tuple[float, Floats]:
    """Median of the pairs' log ratios, and of their resamples."""
    logs = logs_b - logs_a
    return float(np.median(logs)), bootstrap_medians(logs)


def _apart(logs_a: Floats, logs_b: Floats) -> tuple[float, Floats]:
    """Log ratio of the medians, and of medians of each side resampled on its own."""
    resampled = bootstrap_medians(logs_b, stream=1) - bootstrap_medians(logs_a, stream=2)
    return float(np.median(logs_b) - np.median(logs_a)), resampled


def _log_turns(values: Floats, turn_steps: int) -> Floats:
    """The logarithm of each turn's median."""
    if turn_steps == 1:
        return np.log(values)
    starts = range(0, len(values), turn_steps)
    return np.log([np.median(values[start : start + turn_steps]) for start in starts])


def _interval(middle: float, resampled: Floats, n: int) -> tuple[float, float]:
    """The widened percentile interval, as ratios."""
    normal = NormalDist().inv_cdf((1 + _LEVEL) / 2)
    widening = student_point(n - 1) / normal * (n / (n - 1)) ** 0.5
    low, high = np.quantile(resampled, ((1 - _LEVEL) / 2, (1 + _LEVEL) / 2))
    return float(np.exp(middle - (middle - low) * widening)), float(np.exp(middle + (high - middle) * widening))


def student_point(freedom: int) -> float:
    """Two-sided 1 % point of Student's t, by its expansion in 1 / freedom around the normal one."""
    if freedom == MINIMUM_PAIRS - 1:
        return _STUDENT_OF_FOUR
    z = NormalDist().inv_cdf((1 + _LEVEL) / 2)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def _judge(ratio: float, low: float, high: float, minimum_effect: float) -> tuple[str, str]:
    """The verdict and why."""
    most, least = 1 + minimum_effect, 1 / (1 + minimum_effect)
    seen = f"ratio {ratio:.3f}, 99 % interval {low:.3f} to {high:.3f}"
    excludes_one = low > 1 or high < 1
    if excludes_one and not least < ratio < most:
        return "faster" if ratio < 1 else "slower", f"b's time over a's: {seen}"
    if excludes_one or (least <= low and high <= most):
        return "cannot tell", f"difference below the minimum effect of {minimum_effect:.1%}: {seen}"
    return "cannot tell", f"interval too wide, with 1 inside it: {seen}"
