"""Compare two records: a ratio of times with its interval, and a verdict that may be 'cannot tell'.

    compare_records(before, after).verdict   # "faster", "slower" or "cannot tell", of the second record

b differs from a when the 99 % interval of the ratio excludes 1 and the ratio differs from 1 by at least the minimum effect.
The reasons for this rule:

- Pairs of turns. A turn is the steps that one variant runs before the other variant runs. What both halves of a pair share
  (drift, clocks, neighbours, slow and fast modes of the machine) cancels in their ratio. We use logarithms, so that a against b
  mirrors b against a.
- The median of the pairs. A few disturbed steps do not move it; they would move a mean.
- A widened 99 % interval. A percentile bootstrap of a median is too narrow for few values: at 95 % and unwidened, it called 8 % of
  A/A comparisons different (20 pairs, 10 % noise), and 24 % of those with 3 pairs. We widen it by Student's quantile over the
  normal one, and by sqrt(n / (n - 1)), because resamples spread less than the data. From 5 pairs on it then covers about 99 %.
  Fewer than 5 pairs give a ratio without an interval: three pairs do not say how far off the next pair is.
- A minimum effect. Under drift the second half of a pair is always later, and an interval of many pairs is narrow enough to see
  that. Differences so small also change with the next build or the next day.

In 500 simulations with 20 pairs for each kind of noise (2 %, 10 %, Student's t2, 5 % outliers of three times, shared drift of 10 to
20 %, shared or independent modes 15 to 30 % apart), at most 2 % of A/A comparisons are called different, and a difference of 5 % is
found under 2 % noise in over 98 %.

Pairs of turns cannot see a bias that lasts as long as a process, such as where its memory happens to lie (2 % a process, say): all
turns of one variant share it. So variants are run by several pairs of processes (measure/harness/interleave.py), and where the
records say how long each process ran, the pair of processes is the unit: its log ratio is the median over its pairs of turns, and
the interval is Student's interval of the mean. Older records, and workloads that measure many cells in a process, have one pair of
processes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np

from trainstep.config.parsing import CONFIGS, config_hash, flat_form
from trainstep.records.record import Record, Samples, record_to_plain
from trainstep.records.summary import Floats, bootstrap_medians

VERDICTS = ("faster", "slower", "cannot tell")
MINIMUM_PAIRS = 5
_LEVEL = 0.99
_SAME_ENVIRONMENT = ("gpu", "driver", "torch", "triton", "cuda", "cpu")
NOT_INTERLEAVED = "; not interleaved, so what changed between the runs counts too"
_MANY = 1000
"""Degrees of freedom from which on an expansion around the normal distribution gives Student's points to seven digits."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """b against a in one quantity of time. `ratio` is b / a, and `low` to `high` is its 99 % interval; None where unknown."""

    verdict: str
    """One of VERDICTS, for b."""
    reason: str
    """One sentence."""
    quantity: str = ""
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    each: tuple[float, ...] = ()
    """The ratio of each pair, where there are too few pairs for an interval."""
    n: int = 0
    """Number of pairs; without pairs, the number of values on the side that has fewer."""
    paired: bool = False
    interleaving: str = "none"
    """How the two were interleaved: `none`, `live` (both processes alive) or `rounds` (one whole process after the other)."""
    within: float | None = None
    """The minimum effect, where the whole interval lies within it: it shows that there is no difference worth a verdict."""
    is_cut_off: bool = False
    """Whether a budget ended the comparison after the pairs of `each`; it may then be continued."""

    @property
    def word(self) -> str:
        """The verdict as tables and answers write it: `faster`, `slower`, `under 2 %` (a difference, if any) or `cannot tell`."""
        return self.verdict if self.within is None else f"under {self.within * 100:.3g} %"


@dataclass(frozen=True, kw_only=True)
class Matches:
    """Records of two stores, matched by key."""

    pairs: tuple[tuple[Record, Record], ...]
    only_a: tuple[Record, ...]
    only_b: tuple[Record, ...]


def match_records(a: Sequence[Record], b: Sequence[Record]) -> Matches:
    """Pair the last record of each key in a with the last record of that key in b, in a's order.

    A record's key is of the fields that its code had. Where the keys have nothing in common, fields that came later count as their
    defaults, which are what the code before did.
    """
    records_a, records_b = ({record.key: record for record in records} for records in (a, b))
    if not records_a.keys() & records_b.keys():
        records_a, records_b = ({_whole_key(record): record for record in records} for records in (a, b))
    return Matches(
        pairs=tuple((record, records_b[key]) for key, record in records_a.items() if key in records_b),
        only_a=tuple(record for key, record in records_a.items() if key not in records_b),
        only_b=tuple(record for key, record in records_b.items() if key not in records_a),
    )


def _whole_key(record: Record) -> str:
    """The key that the record would have if its code had had all of today's fields."""
    kind: Any = CONFIGS.get(record.workload)
    fields = {} if kind is None else {name: field.default for name, (_, field) in flat_form(kind).items()}
    later = {
        name: value
        for name, value in fields.items()
        if name not in record.config and isinstance(value, str | int | float | None)
    }
    return config_hash(record.workload, {**record_to_plain(record)["config"], **later})


def compare_records(
    a: Record, b: Record, *, quantity: str = "step", minimum_effect: float = 0.02, allow_mixed: bool = False
) -> Comparison:
    """Compare one quantity of two records; as pairs where the records were interleaved with each other.

    ValueError for environments that differ (unless `allow_mixed`), a quantity that one record lacks, or units that differ.
    """
    for side, record in (("a", a), ("b", b)):
        if record.failure is not None:
            reason = f"{side} failed: {record.failure.kind} in {record.failure.phase}"
            return Comparison(verdict="cannot tell", reason=reason, quantity=quantity)
    difference = a.environment.difference(b.environment, *_SAME_ENVIRONMENT)
    if difference and not allow_mixed:
        raise ValueError(f"different environments: {difference}; allow mixed ones to compare them anyway")
    for side, record in (("a", a), ("b", b)):
        if quantity not in record.samples:
            known = ", ".join(record.samples) or "no samples at all"
            raise ValueError(f"{quantity}: {side} has no such quantity; it has {known}")
    group = a.fact("interleaving_group")
    interleaving = str(a.fact("interleaving", "none")) if group and group == b.fact("interleaving_group") else "none"
    paired = interleaving != "none"
    processes = _values_per(a, quantity, "process_steps", 0), _values_per(b, quantity, "process_steps", 0)
    comparison = compare_samples(
        a.samples[quantity],
        b.samples[quantity],
        minimum_effect=minimum_effect,
        turn_steps=(_values_per(a, quantity, "turn_steps", 1), _values_per(b, quantity, "turn_steps", 1)),
        process_steps=processes if paired and all(processes) else None,
        paired=paired,
    )
    remark = "" if paired else NOT_INTERLEAVED
    return replace(comparison, quantity=quantity, reason=comparison.reason + remark, interleaving=interleaving)


def compare_samples(
    a: Samples,
    b: Samples,
    *,
    minimum_effect: float = 0.02,
    turn_steps: tuple[int, int] = (1, 1),
    process_steps: tuple[int, int] | None = None,
    paired: bool = True,
) -> Comparison:
    """Compare times: turn i of a with turn i of b, by the median of each turn; or, if not `paired`, median with median.

    `turn_steps`: number of values in a turn of a and of b. `process_steps`: number of values that each process of a and of b gave;
    where there are several processes, they are compared process by process. Turns that only one side has are left out.
    ValueError for units that differ or are not a unit of time.
    """
    if a.unit != b.unit:
        raise ValueError(f"unit: {a.unit!r} against {b.unit!r} cannot be compared")
    if a.unit != "s":
        raise ValueError(f"unit: only times in s can be faster or slower, not values in {a.unit!r}")
    if not minimum_effect >= 0:
        raise ValueError(f"minimum_effect: must be a share of at least 0, not {minimum_effect}")
    if min(turn_steps) < 1:
        raise ValueError(f"turn_steps: must be at least 1, not {turn_steps}")
    times = [np.asarray(samples.values, dtype=np.float64) for samples in (a, b)]
    if not all(np.all(np.isfinite(values) & (values > 0)) for values in times):
        return Comparison(verdict="cannot tell", reason="some times are not positive, so there is no ratio")
    if paired and process_steps:
        processes = min(len(values) // steps for values, steps in zip(times, process_steps, strict=True))
        if processes > 1:
            return _compare_processes(times, turn_steps, process_steps, minimum_effect)
    if paired:
        logs_a, logs_b = (_log_turns(values, steps) for values, steps in zip(times, turn_steps, strict=True))
    else:
        logs_a, logs_b = (np.log(values) for values in times)
    n = min(len(logs_a), len(logs_b))
    few = f"too few {'pairs' if paired else 'values'}: {n}, and at least {MINIMUM_PAIRS} are needed"
    if not n:
        return Comparison(verdict="cannot tell", reason=few, paired=paired)
    if paired:
        logs = logs_b[:n] - logs_a[:n]
        middle, resampled = float(np.median(logs)), bootstrap_medians(logs)
    else:  # each side is resampled on its own
        middle = float(np.median(logs_b) - np.median(logs_a))
        resampled = bootstrap_medians(logs_b, stream=1) - bootstrap_medians(logs_a, stream=2)
    ratio = float(np.exp(middle))
    if n < MINIMUM_PAIRS:
        each = tuple(np.exp(logs_b[:n] - logs_a[:n]).tolist()) if paired else ()
        return Comparison(verdict="cannot tell", reason=few, ratio=ratio, each=each, n=n, paired=paired)
    low, high = _interval(middle, resampled, n)
    verdict, reason, within = _judge(ratio, low, high, minimum_effect)
    return Comparison(
        verdict=verdict, reason=reason, ratio=ratio, low=low, high=high, n=n, paired=paired, within=within
    )


@cache
def student_point(freedom: int, alpha: float = 1 - _LEVEL) -> float:
    """The t that Student's |t| exceeds with probability `alpha`: the two-sided point, by default of 1 %.

    From Abramowitz and Stegun (1964): by bisection of the probability (26.7.3 and 26.7.4, finite sums for whole degrees of
    freedom), and by the expansion in 1 / freedom (26.7.5) where there are many.
    """
    if freedom >= _MANY:
        z = -NormalDist().inv_cdf(alpha / 2)
        first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
        return z + first / freedom + second / freedom**2
    low, high = 0.0, 2.0
    while _share_within(high, freedom) < 1 - alpha:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _share_within(middle, freedom) < 1 - alpha else (low, middle)
    return high


def _share_within(t: float, freedom: int) -> float:
    """The probability that Student's |t| is at most `t`."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for power in range(
        odd, freedom - 1, 2
    ):  # the power of the cosine: 0, 2, ..., freedom - 2, or 1, 3, ..., freedom - 2
        total += term
        term *= (power + 1) / (power + 2) * math.cos(angle) ** 2
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def _values_per(record: Record, quantity: str, fact: str, default: int) -> int:
    """Number of values of a quantity in a turn or a process; the fact gives the number of values of `step` in it."""
    length = record.fact(fact, default)
    if not isinstance(length, int):
        raise ValueError(f"{fact}: must be a whole number, not {length!r}")
    steps = len(record.samples["step"].values) if "step" in record.samples else 0
    if not length or not steps:
        return length
    # A window of k steps has one value of `step` but k values of each phase, so a turn holds k times as many of those. A turn of
    # several steps may also end with a single value of another quantity.
    return max(round(len(record.samples[quantity].values) * length / steps), 1)


def _compare_processes(
    times: Sequence[Floats], turn_steps: Sequence[int], process_steps: Sequence[int], minimum_effect: float
) -> Comparison:
    """Compare by one log ratio for each pair of processes, with Student's interval of their mean."""
    processes_a, processes_b = (
        [values[start : start + steps] for start in range(0, len(values) - steps + 1, steps)]
        for values, steps in zip(times, process_steps, strict=True)
    )
    logs = []
    for a, b in zip(processes_a, processes_b, strict=False):
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
    verdict, reason, within = _judge(ratio, low, high, minimum_effect)
    reason += f", over {n} pairs of processes"
    return Comparison(verdict=verdict, reason=reason, ratio=ratio, low=low, high=high, n=n, paired=True, within=within)


def _log_turns(values: Floats, turn_steps: int) -> Floats:
    """The logarithm of each turn's median. A last turn that is shorter counts too."""
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


def _judge(ratio: float, low: float, high: float, minimum_effect: float) -> tuple[str, str, float | None]:
    """The verdict, one sentence that gives its reason, and the minimum effect if the whole interval lies within it."""
    numbers = f"ratio {ratio:.3f}, 99 % interval {low:.3f} to {high:.3f}"
    least, most = 1 / (1 + minimum_effect), 1 + minimum_effect
    excludes_1 = low > 1 or high < 1
    within = minimum_effect if least <= low and high <= most else None
    if excludes_1 and not least < ratio < most:
        return "faster" if ratio < 1 else "slower", f"b's time over a's: {numbers}", None
    if excludes_1 or within is not None:
        return "cannot tell", f"difference below the minimum effect of {minimum_effect:.1%}: {numbers}", within
    return "cannot tell", f"interval too wide, with 1 inside it: {numbers}", None
