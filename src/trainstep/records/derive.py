"""Rates derived from a record: tokens and FLOPs per second, share of the GPU's peak, and a collective's bandwidth.

`tokens_per_s`, `model_flops_per_s` and `mfu` take the record of a training step. `bandwidth` takes the record of a collective, and
`fit_latency` the sizes and times of several.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from trainstep.config.machine import machine_spec
from trainstep.records.record import Record
from trainstep.records.summary import summarize

LEAST_SIZES = 3
"""Fewest sizes for a fit of latency and bandwidth: two points always lie on a line."""


@dataclass(frozen=True, kw_only=True)
class Mfu:
    """Model FLOPs utilisation: `share` (0 to 1) of `peak_flops` (FLOP/s in `dtype`), with everything needed to check it."""

    share: float
    convention: str
    """Which FLOPs count."""
    peak_flops: float
    peak_source: str
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """Bandwidth of a collective, by the slowest rank's median call.

    `algorithm_bytes_per_s`: payload over time. `bus_bytes_per_s`: bytes that a ring's busiest rank sends over time
    (costs/collectives.py); `link_share`: its share of the link's rate in the data sheet, None where that is unknown.
    """

    algorithm_bytes_per_s: float
    bus_bytes_per_s: float
    link_share: float | None
    link_source: str | None


@dataclass(frozen=True, kw_only=True)
class LatencyFit:
    """A fit of time = alpha + bytes / beta over the sizes of a run.

    `alpha_s`: time of a call whatever its size. `beta_bytes_per_s`: further payload bytes per second. `r_squared`: of the relative
    residuals that the fit minimises; 1 where the line explains every time. `worst`: the largest relative residual.
    """

    alpha_s: float
    beta_bytes_per_s: float
    r_squared: float
    worst: float
    sizes: int


def step_s(record: Record) -> float | None:
    """Median time of a step, or None where the cell failed or timed no steps."""
    samples = record.samples.get("step")
    if record.failure is not None or samples is None or not samples.values:
        return None
    return summarize(samples).median


def tokens_per_s(record: Record) -> float | None:
    """Tokens of a step over its median time; None where either is unknown."""
    return _per_step_second(record, "tokens")


def model_flops_per_s(record: Record) -> float | None:
    """Model FLOPs of a step over its median time; None where either is unknown."""
    return _per_step_second(record, "model_flops")


def mfu(record: Record) -> Mfu | None:
    """`model_flops_per_s` over the data sheet's peak of the GPU that the cell ran on (one GPU: the FLOPs must be that GPU's).

    None on a CPU, on unknown hardware, for a dtype without a peak. ValueError for a share over 1, which is impossible.
    """
    rate = model_flops_per_s(record)
    spec = None if record.config.get("device") == "cpu" else machine_spec(record.environment.gpu)
    dtype = str(record.fact("flops_dtype", ""))
    if rate is None or spec is None or dtype not in spec.peak_flops:
        return None
    share = rate / spec.peak_flops[dtype]
    if share > 1:
        raise ValueError(
            f"MFU of {share:.2f} is impossible: {record.fact('model_flops'):.4g} FLOPs in {step_s(record):.4g} s is more than "
            f"the {spec.peak_flops[dtype]:.4g} FLOP/s of {spec.name} in {dtype}; the FLOP count is too high, its dtype "
            "wrong, or the step was timed without synchronising"
        )
    return Mfu(
        share=share,
        convention=str(record.fact("flops_convention", "")),
        peak_flops=spec.peak_flops[dtype],
        peak_source=spec.source,
        dtype=dtype,
    )


def _per_step_second(record: Record, fact: str) -> float | None:
    amount, seconds = record.fact(fact), step_s(record)
    return None if amount is None or not seconds else float(amount) / seconds


def bandwidth(record: Record) -> Bandwidth | None:
    """The bandwidths of a collective's record; None where the cell failed, or where it ran on a single rank."""
    samples = record.samples.get("time")
    ring_bytes, payload_bytes = record.fact("ring_bytes"), record.fact("payload_bytes")
    if record.failure is not None or samples is None or not samples.values or not ring_bytes:
        return None
    time_s = median(samples.values)
    if not time_s:
        return None
    between_nodes = bool(record.fact("node_bytes"))  # a GPU's data sheet has no links between nodes
    on_link = record.config.get("backend") == "nccl" and not between_nodes
    spec = machine_spec(record.environment.gpu) if on_link else None
    link = spec.link_bytes_per_s if spec else None
    return Bandwidth(
        algorithm_bytes_per_s=payload_bytes / time_s,
        bus_bytes_per_s=ring_bytes / time_s,
        link_share=ring_bytes / time_s / link if link else None,
        link_source=spec.source if spec and link else None,
    )


def fit_latency(payload_bytes: Sequence[int], times_s: Sequence[float]) -> LatencyFit | None:
    """Fit latency and bandwidth by least squares of the relative residuals, (alpha + bytes / beta) / t - 1.

    None for fewer than LEAST_SIZES sizes, or if the time does not grow with the size.
    """
    # The residuals are relative because the largest sizes take a thousand times as long as the smallest: absolute residuals of the
    # large sizes alone would decide the fit.
    if len(set(payload_bytes)) < LEAST_SIZES or min(times_s) <= 0:
        return None
    sizes, times = np.asarray(payload_bytes, dtype=np.float64), np.asarray(times_s, dtype=np.float64)
    design = np.stack([1 / times, sizes / times], axis=1)
    scale = design.max(axis=0)  # seconds and bytes are many powers of ten apart
    ones = np.ones(len(times))
    alpha_s, s_per_byte = (np.linalg.lstsq(design / scale, ones, rcond=None)[0] / scale).tolist()
    if s_per_byte <= 0:
        return None
    residuals = design @ np.array([alpha_s, s_per_byte]) - ones
    weights = 1 / times
    centre = float((weights**2 * times).sum() / (weights**2).sum())
    total = float((((times - centre) * weights) ** 2).sum())
    return LatencyFit(
        alpha_s=alpha_s,
        beta_bytes_per_s=1 / s_per_byte,
        r_squared=1 - float((residuals**2).sum()) / total if total else 1.0,
        worst=float(np.abs(residuals).max()),
        sizes=len(set(payload_bytes)),
    )
