"""Reads a calibration that `trainstep doctor --measure` wrote."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trainstep.plan.time.calibration import WORKLOAD, Calibration, calibration_of
from trainstep.records.record import Record
from trainstep.records.store import Store


def read_calibration(path: Path) -> Calibration:
    """The last calibration in a file of records. ValueError if there is none."""
    records = Store(path).read()
    calibrations = [record for record in records if record.workload == WORKLOAD and record.failure is None]
    if not calibrations:
        raise ValueError(
            f"calibration: {path} holds no calibration; write one with trainstep doctor --measure --out {path}"
        )
    measured = _with_messages(calibrations[-1], records)
    machine = measured.environment.gpu or measured.environment.cpu
    return calibration_of(measured, origin=f"measured on {machine}, {path}")


def _with_messages(calibration: Record, records: Sequence[Record]) -> Record:
    """The calibration with the messages between the same machine's GPUs, where the file has some and it has none."""
    rows = [
        {
            "operation": record.config["operation"],
            "ranks": record.config["ranks"],
            "bytes": float(record.fact("payload_bytes")),
            "time_s": statistics.median(record.samples["time"].values),
        }
        for record in records
        if record.workload == "collective"
        and record.failure is None
        and record.config["backend"] == "nccl"
        and record.config.get("transport", "library") == "library"
        and record.environment.hostname == calibration.environment.hostname
        and record.samples["time"].values
    ]
    if not rows or calibration.tables.get("collectives"):
        return calibration
    collectives = {column: [row[column] for row in rows] for column in rows[0]}
    return replace(calibration, tables={**calibration.tables, "collectives": collectives})
