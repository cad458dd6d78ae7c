"""Statistics of raw samples, computed when read: spread, quantiles, an interval of the median, and reasons to doubt them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from trainstep.records.record import Record, Samples

Floats = NDArray[np.float64]

FEW_SAMPLES = 5
UNSTABLE_SPREAD = 0.05
DRIFT_SHARE = 0.02
OUTLIER_SAMPLES = 8
OUTLIER_FACTOR = 2.0
"""Standard deviations of so many interquartile ranges are no noise: a normal one is 0.74 of it, and of 8 values one set in fifty
goes that far; of fewer the range itself is too unsure."""
OUTLIER_SHARE = 0.02
"""A share of the median, below which nobody minds."""
_DRIFT_Z = 2.58
"""Two-sided 1 % point of the normal distribution: one steady run in a hundred would look like drift by its order alone."""
_RESAMPLES = 2000
_BUSY = {"cores": ("cpu_busy_before", 0.25), "GPU": ("gpu_busy_before", 0.05)}
"""Facts, and shares above which others at work are a doubt: of two cores' 20 ticks in that moment, the system takes some."""
_HARMLESS_THROTTLING = ("application clocks",)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One quantity in its samples' unit. `low`, `high`: 95 % bootstrap interval of the median."""

    n: int
    mean: float
    std: float
    """Of the sample (divisor n - 1); 0 for a single value."""
    median: float
    p05: float
    p25: float
    p75: float
    p95: float
    low: float
    high: float

    @property
    def half_range(self) -> float:
        """Half the interquartile range, (p75 - p25) / 2: what stands behind ± of a median."""
        return (self.p75 - self.p25) / 2

    @property
    def spread(self) -> float:
        """(p75 - p25) / median: unmoved by a few outliers, unlike std / mean."""
        return (self.p75 - self.p25) / self.median if self.median else 0.0


def summarize(samples: Samples) -> Summary:
    """The statistics of the values, warm-ups left out. ValueError when there is no value."""
    if not samples.values:
        raise ValueError("there are no samples to summarise")
    values = np.asarray(samples.values, dtype=np.float64)
    p05, p25, median, p75, p95 = np.quantile(values, (0.05, 0.25, 0.5, 0.75, 0.95)).tolist()
    low, high = np.quantile(bootstrap_medians(values), (0.025, 0.975)).tolist()
    return Summary(
        n=len(values),
        mean=float(values.mean()),
        std=float(values.std(ddof=1)) if len(values) > 1 else 0.0,
        median=median,
        p05=p05,
        p25=p25,
        p75=p75,
        p95=p95,
        low=low,
        high=high,
    )


def bootstrap_medians(values: Floats, *, stream: int = 0) -> Floats:
    """Medians of 2000 resamples with replacement; always the same draws for one n and `stream`."""
    ordered = np.sort(values)
    lower, upper = _middle_ranks(len(ordered), stream)
    medians: Floats = (ordered[lower] + ordered[upper]) / 2
    return medians


@lru_cache(maxsize=64)
def _middle_ranks(n: int, stream: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each resample, the ranks in the sorted sample of its two middle values (the same one where n is odd).

    Drawing n values with replacement is drawing n uniforms and taking floor(n u) as ranks, so the middle of a resample comes
    from the k-th smallest uniform, Beta(k, n - k + 1); the next one is the least of n - k uniforms above it. Two draws
    a resample replace n draws and a sort. Half the resamples mirror the others (as likely), so that turning the values
    round turns the interval round.
    """
    draws = np.random.default_rng((20261, stream))
    k, half = (n + 1) // 2, _RESAMPLES // 2
    middle = draws.beta(k, n - k + 1, half)
    following = middle if n % 2 else middle + (1 - middle) * draws.beta(1, n - k, half)
    lower, upper = (np.minimum((n * position).astype(np.int64), n - 1) for position in (middle, following))
    lower, upper = np.concatenate((lower, n - 1 - upper)), np.concatenate((upper, n - 1 - lower))
    lower.flags.writeable = upper.flags.writeable = False
    return lower, upper


def doubts(record: Record) -> tuple[str, ...]:
    """Short phrases on what makes the record's step time (or the first quantity it has) doubtful; empty when nothing does."""
    samples = record.samples.get("step") or next(iter(record.samples.values()), None)
    found = _doubts_of_times(samples) if samples is not None and samples.values else []
    reasons = [word.strip() for word in str(record.fact("throttle_reasons") or "").split(",")]
    harmful = [word for word in reasons if word and word not in _HARMLESS_THROTTLING]
    if harmful:
        found.append(f"throttled ({', '.join(harmful)})")
    ranks = record.config.get("ranks")
    if record.config.get("device") == "cpu" and isinstance(ranks, int) and ranks > record.environment.cores:
        found.append("more ranks than cores")
    found += _doubts_of_others(record)
    if record.fact("capture_left_out"):
        found.append(f"captured: {record.fact('captured')}")
    if record.fact("launch_bound"):
        found.append("launch-bound")
    return tuple(found)


def _doubts_of_times(samples: Samples) -> list[str]:
    doubted = {
        "few samples": len(samples.values) < FEW_SAMPLES,
        "unstable": summarize(samples).spread > UNSTABLE_SPREAD,
        "outliers": _has_outliers(samples),
        "drifting": _drifts(samples.values),
    }
    return [name for name, holds in doubted.items() if holds]


def _doubts_of_others(record: Record) -> list[str]:
    """What others did on the machine just before the cell, and on its GPU."""
    shares = {what: (record.fact(name) or 0.0, least) for what, (name, least) in _BUSY.items()}
    found = [
        f"others kept {share:.0%} of the {what} busy before it"
        for what, (share, least) in shares.items()
        if share > least
    ]
    return [*found, "others on the GPU"] if record.fact("gpu_other_processes") else found


def _has_outliers(samples: Samples) -> bool:
    """Whether a few values far off carry the standard deviation, which the quartiles do not see."""
    found = summarize(samples)
    far = max(OUTLIER_FACTOR * (found.p75 - found.p25), OUTLIER_SHARE * abs(found.median))
    return found.n >= OUTLIER_SAMPLES and found.std > far


def _drifts(values: Sequence[float]) -> bool:
    """Whether the last third's median is over 2 % away from the first third's and values follow their order in time.

    Order: Spearman's rank correlation with time, whose standard deviation is 1 / sqrt(n - 1) where there is no trend.
    Asking for both keeps out a trend too small to matter and a noise that happens to end high.
    """
    n = len(values)
    if n < FEW_SAMPLES:
        return False
    series = np.asarray(values, dtype=np.float64)
    first, last = np.median(series[: n // 3]), np.median(series[-(n // 3) :])
    if abs(last - first) <= DRIFT_SHARE * abs(first):
        return False
    ranks = np.unique(series, return_inverse=True)[1].reshape(n)
    return bool(abs(np.corrcoef(np.arange(n), ranks)[0, 1]) * np.sqrt(n - 1) > _DRIFT_Z)
