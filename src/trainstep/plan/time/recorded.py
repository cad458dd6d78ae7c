"""The prediction that a record keeps: what plan says of its config and GPU, without a look at what was measured.

recorded_prediction("train_step", config, gpu="NVIDIA H200")
# {"peak_allocated_bytes": ..., "peak_reserved_bytes": ..., "step_s": ..., "step_interval_s": [...], "calibration": "..."}
"""

import functools
from collections.abc import Mapping
from typing import Any

from trainstep.config.machine import machine_spec
from trainstep.plan.cell_config import planned_config
from trainstep.plan.step_memory import replay
from trainstep.plan.time.calibration import Calibration, calibration_for
from trainstep.plan.time.power import BURST_S
from trainstep.plan.time.step_time import step_time

_STEPS = 2
"""Replayed steps of an eager run: reserved bytes are a little less exact than with three, in two thirds of the time."""


def recorded_prediction(workload: str, config: Mapping[str, Any], *, gpu: str | None) -> dict[str, Any] | None:
    """Memory, and time where the GPU's data sheet is known; None where there are no formulas, or the step is not on a GPU.

    It never raises: a measurement is worth more than its prediction.
    """
    if gpu is None or config.get("device") != "cuda":
        return None
    prediction: dict[str, Any] = {}
    try:
        planned = planned_config(workload, config)
        prediction |= _time_fields(planned, gpu)
        peak = replay(planned, steps=_STEPS).peak
        prediction |= {"peak_allocated_bytes": peak.allocated_bytes, "peak_reserved_bytes": peak.reserved_bytes}
    except Exception:  # noqa: BLE001  (a config that formulas do not know, or a fault in them)
        return prediction or None
    return prediction


def _time_fields(planned: Any, gpu: str) -> dict[str, Any]:
    calibration = _calibration(gpu)
    if calibration is None:
        return {}
    try:
        predicted = step_time(planned, calibration)
        if predicted.step.time_s * (planned.run.steps + planned.run.warmups) < BURST_S:
            predicted = step_time(planned, calibration, sustained=False)
    except ValueError:
        return {}  # its memory may be known all the same
    return {
        "step_s": predicted.step.time_s,
        "step_interval_s": [predicted.step.low_s, predicted.step.high_s],
        "calibration": calibration.origin,
    }


@functools.lru_cache(maxsize=4)
def _calibration(gpu: str) -> Calibration | None:
    return calibration_for(machine_spec(gpu))
