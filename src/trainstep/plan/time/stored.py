"""Reads a calibration that `trainstep doctor --measure` wrote."""

from pathlib import Path

from trainstep.plan.time.calibration import WORKLOAD, Calibration, calibration_of
from trainstep.records.store import Store


def read_calibration(path: Path) -> Calibration:
    """The last calibration in a file of records. ValueError if there is none."""
    found = [record for record in Store(path).read() if record.workload == WORKLOAD and record.failure is None]
    if not found:
        raise ValueError(
            f"calibration: {path} holds no calibration; write one with trainstep doctor --measure --out {path}"
        )
    return calibration_of(found[-1], origin=f"measured, {path}")
