"""What follows from a record: tokens and FLOPs per second, and the share of the machine's peak."""

from dataclasses import dataclass

from trainstep.config.machine import machine_spec
from trainstep.records.record import Record
from trainstep.records.summary import summarize


@dataclass(frozen=True, kw_only=True)
class Mfu:
    """Model FLOPs utilisation: `share` (0 to 1) of `peak_flops` (FLOP/s in `dtype`), with everything one needs to check it."""

    share: float
    convention: str
    """Which FLOPs count."""
    peak_flops: float
    peak_source: str
    dtype: str


def step_s(record: Record) -> float | None:
    """Median time of a step, or None where the cell failed or timed no steps."""
    samples = record.samples.get("step")
    if record.failure is not None or samples is None or not samples.values:
        return None
    return summarize(samples).median


def tokens_per_s(record: Record) -> float | None:
    """Tokens of a step over its median time."""
    return _per_step_second(record, "tokens")


def model_flops_per_s(record: Record) -> float | None:
    """Model FLOPs of a step over its median time."""
    return _per_step_second(record, "model_flops")


def mfu(record: Record) -> Mfu | None:
    """`model_flops_per_s` against the data sheet's peak of the GPU it ran on (one GPU: the FLOPs must be that GPU's).

    None on a CPU, on unknown hardware, for a dtype without a peak. ValueError for a share over 1, which cannot be.
    """
    rate = model_flops_per_s(record)
    spec = None if record.config.get("device") == "cpu" else machine_spec(record.environment.gpu)
    dtype = str(record.fact("flops_dtype", ""))
    if rate is None or spec is None or dtype not in spec.peak_flops:
        return None
    share = rate / spec.peak_flops[dtype]
    if share > 1:
        raise ValueError(
            f"MFU of {share:.2f} cannot be: {record.fact('model_flops'):.4g} FLOPs in {step_s(record):.4g} s is more than "
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
