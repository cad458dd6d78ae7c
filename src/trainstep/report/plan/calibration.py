"""The answer about a calibration: what the machine reaches, and how to plan with it."""

from collections.abc import Sequence

from trainstep.plan.time.calibration import calibration_of
from trainstep.plan.time.kernels import Kind
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.forms import listed, rate_words
from trainstep.report.kit.rows import Row

_LARGE_BYTES = 2**28
"""Bandwidth is that of a copy of this size."""


def calibration_answer(rows: Sequence[Row]) -> Answer | None:
    """The rates of the last calibration."""
    for row in reversed(rows):
        try:
            calibration = calibration_of(row.record)
        except ValueError:
            continue  # a record without its tables
        parts = [
            f"{rate_words(speed.flops_per_s, 'flop/s')} in {dtype} matmuls"
            for dtype, speed in calibration.matmuls.items()
        ]
        if Kind.CONTIGUOUS in calibration.traffic:
            seconds = calibration.traffic[Kind.CONTIGUOUS][0].seconds(_LARGE_BYTES)
            parts.append(f"{rate_words(_LARGE_BYTES / seconds, 'bytes/s')} of memory")
        return Answer(
            workload="calibration",
            verdict=f"Calibrated: {listed(parts)}.",
            suggestion=f"`trainstep plan --calibration {row.file or 'FILE'}` predicts step times with it.",
        )
    return None
