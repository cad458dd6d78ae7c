"""The answer for a calibration: the rates that the machine reaches, and how to plan with them."""

from collections.abc import Sequence

from trainstep.plan.time.calibration import calibration_of
from trainstep.plan.time.kernels import Kind
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.forms import byte_words, listed, rate_words
from trainstep.report.kit.rows import Row

_LARGE_BYTES = 2**28
"""Size of the copy whose rate is given as bandwidth."""


def calibration_answer(rows: Sequence[Row]) -> Answer | None:
    """The rates of the last calibration."""
    for row in reversed(rows):
        try:
            calibration = calibration_of(row.record)
        except ValueError:
            continue  # this record has no tables of a calibration
        parts = [
            f"{rate_words(speed.flops_per_s, 'flop/s')} in {dtype} matmuls"
            for dtype, speed in calibration.matmuls.items()
        ]
        if Kind.CONTIGUOUS in calibration.traffic:
            nbytes = min(_LARGE_BYTES, _largest_bytes(row))
            rate = rate_words(nbytes / calibration.traffic[Kind.CONTIGUOUS][0].seconds(nbytes), "bytes/s")
            parts.append(f"{rate} of memory" if nbytes == _LARGE_BYTES else f"{rate} in copies of {byte_words(nbytes)}")
        return Answer(
            workload="calibration",
            verdict=f"Calibrated: {listed(parts)}.",
            suggestion=f"`trainstep plan --calibration {row.file or 'FILE'}` predicts step times with it.",
        )
    return None


def _largest_bytes(row: Row) -> int:
    """The most bytes of a measured contiguous kernel; the bandwidth of larger ones is unknown."""
    table = row.record.tables["traffic"]
    sizes = [size for kind, size in zip(table["kind"], table["bytes"], strict=True) if kind == Kind.CONTIGUOUS]
    return int(max(sizes))
