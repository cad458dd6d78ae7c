"""Bandwidths of a collective's record, and the latency and bandwidth that the sizes of a run fit: t = alpha + bytes / beta."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from trainstep.config.machine import machine_spec
from trainstep.records.record import Record

LEAST_SIZES = 3
"""Two always lie on a line."""


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """Of the slowest rank's median call. `algorithm`: payload over time; `bus`: bytes that a ring's busiest rank sends over time
    (costs/collectives.py), and its share of what the data sheet says of the link, where that is known."""

    algorithm_bytes_per_s: float
    bus_bytes_per_s: float
    link_share: float | None
    link_source: str | None


@dataclass(frozen=True, kw_only=True)
class LatencyFit:
    """`alpha_s`: what a call takes whatever its size; `beta_bytes_per_s`: of the payload, beyond that.

    `r_squared`: 1 where the line says all, of the relative residuals that it was fitted by; `worst`: the largest of these.
    """

    alpha_s: float
    beta_bytes_per_s: float
    r_squared: float
    worst: float
    sizes: int


def bandwidth(record: Record) -> Bandwidth | None:
    """None where the cell failed, or for a rank on its own."""
    samples = record.samples.get("time")
    ring_bytes, payload_bytes = record.fact("ring_bytes"), record.fact("payload_bytes")
    if record.failure is not None or samples is None or not samples.values or not ring_bytes:
        return None
    time_s = median(samples.values)
    if not time_s:
        return None
    spec = machine_spec(record.environment.gpu) if record.config.get("backend") == "nccl" else None
    link = spec.link_bytes_per_s if spec else None
    return Bandwidth(
        algorithm_bytes_per_s=payload_bytes / time_s,
        bus_bytes_per_s=ring_bytes / time_s,
        link_share=ring_bytes / time_s / link if link else None,
        link_source=spec.source if spec and link else None,
    )


def fit_latency(payload_bytes: Sequence[int], times_s: Sequence[float]) -> LatencyFit | None:
    """Least squares of relative residuals, (alpha + bytes / beta) / t - 1: the largest sizes take a thousand times as long as the
    smallest, and would else be all that counts. None for fewer than LEAST_SIZES sizes, or if time does not grow with size.
    """
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
