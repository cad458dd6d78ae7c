"""Statistics of raw samples, computed at read time: quantiles, an interval of the median, and reasons to doubt them.

    summarize(record.samples["step"]).median
    doubts(record)   # ("few samples", "drifting")

Records have raw samples only, so that statistics can change without measuring again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from trainstep.records.record import Record, Samples

Floats = NDArray[np.float64]

_FEW_SAMPLES = 5
_UNSTABLE_SPREAD = 0.05
_DRIFT_SHARE = 0.02
_DRIFT_Z = 2.58
"""Two-sided 1 % point of the normal distribution: by its order alone, one steady run in a hundred would look like drift."""
_OUTLIER_SAMPLES = 8
_OUTLIER_FACTOR = 2.0
"""A standard deviation of this many interquartile ranges means outliers: normal noise has 0.74, and one set of 8 values in fifty
goes that far. With fewer values the range itself is too uncertain."""
_OUTLIER_SHARE = 0.02
"""Outliers below this share of the median do not matter."""
_RESAMPLES = 2000
_BUSY = {"cores": ("cpu_busy_before", 0.25), "GPU": ("gpu_busy_before", 0.05)}
"""Facts, and the shares above which other processes are a doubt. The system itself takes some of the 20 ticks that two cores have
while this is measured."""
_HARMLESS_THROTTLING = ("application clocks",)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The statistics of one quantity, in its samples' unit. `low`, `high`: 95 % bootstrap interval of the median."""

    n: int
    mean: float
    std: float
    """Sample standard deviation (divisor n - 1); 0 for a single value."""
    median: float
    p05: float
    p25: float
    p75: float
    p95: float
    low: float
    high: float

    @property
    def half_range(self) -> float:
        """Half the interquartile range, (p75 - p25) / 2: the number after the ± of a median."""
        return (self.p75 - self.p25) / 2

    @property
    def spread(self) -> float:
        """(p75 - p25) / median. A few outliers do not change it, unlike std / mean."""
        return (self.p75 - self.p25) / self.median if self.median else 0.0


def summarize(samples: Samples) -> Summary:
    """The statistics of the values, without the warm-ups. ValueError if there is no value."""
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
    """Medians of 2000 resamples with replacement. The same n and `stream` always give the same draws."""
    ordered = np.sort(values)
    lower, upper = _middle_ranks(len(ordered), stream)
    medians: Floats = (ordered[lower] + ordered[upper]) / 2
    return medians


@lru_cache(maxsize=64)
def _middle_ranks(n: int, stream: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each resample, the ranks of its two middle values in the sorted sample (equal ranks where n is odd).

    Drawing n values with replacement means drawing n uniforms and taking floor(n u) as ranks. So the middle of a resample comes
    from the k-th smallest uniform, which has the distribution Beta(k, n - k + 1), and the next value is the least of n - k uniforms
    above it. Two draws per resample replace n draws and a sort. Half of the resamples mirror the other half (they are equally
    likely), so that reversing the order of the values reverses the interval.
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
    """Short phrases that say why the record's step time (or its first quantity) is doubtful; empty if it is not.

    Whether the host limits the step is decided in report/kit/rows.py, because that rule belongs to a higher layer.
    """
    samples = record.samples.get("step") or next(iter(record.samples.values()), None)
    phrases = _doubts_about_times(samples) if samples is not None and samples.values else []
    reasons = [reason.strip() for reason in str(record.fact("throttle_reasons") or "").split(",")]
    harmful = [reason for reason in reasons if reason and reason not in _HARMLESS_THROTTLING]
    if harmful:
        phrases.append(f"throttled ({', '.join(harmful)})")
    ranks, nodes = record.config.get("ranks"), record.config.get("nodes", 1)
    if record.config.get("device") == "cpu" and isinstance(ranks, int) and ranks // nodes > record.environment.cores:
        phrases.append("more ranks than cores")
    for resource, (fact, limit) in _BUSY.items():
        share = record.fact(fact) or 0.0
        if share > limit:
            phrases.append(f"other processes used {share:.0%} of the {resource} before it")
    if record.fact("gpu_other_processes"):
        phrases.append("other processes on the GPU")
    if record.fact("capture_left_out"):
        phrases.append(f"captured: {record.fact('captured')}")
    return tuple(phrases)


def _doubts_about_times(samples: Samples) -> list[str]:
    summary = summarize(samples)
    interquartile = summary.p75 - summary.p25
    # The quartiles do not see a few values that are far off, but these values dominate the standard deviation.
    far = max(_OUTLIER_FACTOR * interquartile, _OUTLIER_SHARE * abs(summary.median))
    phrases = {
        "few samples": summary.n < _FEW_SAMPLES,
        "unstable": summary.spread > _UNSTABLE_SPREAD,
        "outliers": summary.n >= _OUTLIER_SAMPLES and summary.std > far,
        "drifting": _drifts(samples.values),
    }
    return [phrase for phrase, applies in phrases.items() if applies]


def _drifts(values: Sequence[float]) -> bool:
    """Whether the median of the last third differs by over 2 % from that of the first third, and the values correlate with time.

    The correlation is Spearman's rank correlation; without a trend its standard deviation is 1 / sqrt(n - 1). The two conditions
    together exclude a trend that is too small to matter and noise that happens to end high.
    """
    n = len(values)
    if n < _FEW_SAMPLES:
        return False
    series = np.asarray(values, dtype=np.float64)
    first, last = np.median(series[: n // 3]), np.median(series[-(n // 3) :])
    if abs(last - first) <= _DRIFT_SHARE * abs(first):
        return False
    ranks = np.unique(series, return_inverse=True)[1].reshape(n)
    return bool(abs(np.corrcoef(np.arange(n), ranks)[0, 1]) * np.sqrt(n - 1) > _DRIFT_Z)
