"""Grades predicted step times against the steps of records.

    grades, refusals = grade_times(records, calibration)
    grades[0].error, grades[0].is_inside

A record's time is the median of its windows where it has some, because steps run into each other there as in training, else of its
steps. Each different cell is graded once, by its latest record. Records from which the calibration has a point are not graded.

Grades form groups by what limits the step according to its prediction: a graph, the device, or perhaps the host, if a host at the
slow end of its range would take longer than the device.
"""

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from trainstep.plan.cell_config import ranks_config
from trainstep.plan.time.calibration import Calibration
from trainstep.plan.time.power import BURST_S
from trainstep.plan.time.step_time import StepTime, step_time
from trainstep.records.record import Record

CAPTURED, DEVICE, HOST = "captured", "device-bound eager", "host may limit"
GROUPS = (CAPTURED, DEVICE, HOST)
_USED = "the calibration has points of it, so that it grades nothing"


@dataclass(frozen=True, kw_only=True)
class TimeGrade:
    """A cell with its predicted and its measured time of a step."""

    record: Record
    predicted: StepTime
    measured_s: float

    @property
    def error(self) -> float:
        return self.predicted.step.time_s / self.measured_s - 1

    @property
    def is_inside(self) -> bool:
        return self.predicted.step.low_s <= self.measured_s <= self.predicted.step.high_s

    @property
    def phase_errors(self) -> dict[str, float]:
        """The errors of the device's time by phase, where a lone rank's record has them and the device limits the step."""
        if self.group != DEVICE or self.predicted.config.ranks > 1:
            return {}
        measured = {phase: self.record.samples.get(phase) for phase in self.predicted.device}
        return {
            phase: self.predicted.device[phase].time_s / statistics.median(samples.values) - 1
            for phase, samples in measured.items()
            if samples is not None and samples.values
        }

    @property
    def group(self) -> str:
        if self.predicted.is_captured:
            return CAPTURED
        return HOST if self.predicted.host_may_limit else DEVICE


def grade_times(records: Iterable[Record], calibration: Calibration) -> tuple[list[TimeGrade], dict[str, int]]:
    """The grades in the records' order, and the reasons why there is none -> number of cells."""
    latest = {record.key: record for record in records if is_timed(record)}
    grades, refusals = list[TimeGrade](), Counter[str]()
    for record in latest.values():
        if record.key in calibration.used:
            refusals[_USED] += 1
            continue
        try:
            predicted = step_time(ranks_config(record), calibration, sustained=_is_sustained(record))
        except ValueError as error:
            refusals[str(error)] += 1
            continue
        grades.append(TimeGrade(record=record, predicted=predicted, measured_s=measured_time_s(record)))
    return grades, dict(refusals)


def is_timed(record: Record) -> bool:
    """Whether the record has the time of a step; one of 0 s is none."""
    times = record.samples.get("step")
    return (
        record.failure is None
        and times is not None
        and min(times.values, default=0.0) > 0
        and "device" in record.config
    )


def _is_sustained(record: Record) -> bool:
    """Whether the steps took long enough for the power limit to act."""
    steps = record.samples["step"]
    return sum((*steps.values, *steps.warmups)) >= BURST_S


def measured_time_s(record: Record) -> float:
    """The median of its windows, or else of its steps."""
    windows = record.samples.get("window_step")
    samples = windows if windows is not None and windows.values else record.samples["step"]
    return statistics.median(samples.values)
