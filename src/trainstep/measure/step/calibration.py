"""The workload `calibration` measures what `trainstep plan` computes a step's time from, in minutes on a GPU, in seconds on a CPU.

tables   matmuls, traffic, attention, optimizers, host (records/tables.py)
facts    multiprocessors

Kernels on a GPU are timed by the profiler, so that launches are no part of them, after the GPU was heated by matmuls for a moment:
a step that runs for hours has the clock that its power limit allows, not the highest. On a CPU calls are timed by the host's clock,
and the table host has only what Python and autograd add to a call. Messages between GPUs are cells of the workload collective.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainstep.config.calibration import CalibrationConfig
from trainstep.measure.harness.workload import Findings, Stage, Stages
from trainstep.measure.step.calibration_host import cpu_rows, host_rows
from trainstep.measure.step.calibration_kernels import (
    Point,
    attention_points,
    matmul_points,
    optimizer_points,
    traffic_points,
)
from trainstep.measure.step.device_trace import device_busy_s
from trainstep.records.facts import facts_of
from trainstep.records.record import Samples
from trainstep.training.precision import float32_matmuls

_HEATED_S = 3.0
_HEATED_N = 8192
_LEAST_S = 20e-3
"""A CPU's short calls are repeated until they take this long, so that other processes slow them as they slow a step."""
_MOST_REPEATS = 10_000
_FIRST_CALLS = 3
_LONG_S = 0.2
"""A CPU's call that takes longer is not repeated: some have no fast 16-bit matmuls."""


class CalibrationWorkload:
    shares_worker = False  # what it compiled and allocated would be in the way of another cell

    def prepare(self, config: Mapping[str, Any], stage: Stage) -> "CalibrationMeasurement":
        """Check the device and heat it. ValueError if there is no such device."""
        calibration = CalibrationConfig(**config)
        stages = Stages(stage)
        if calibration.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device: torch sees no GPU; take cpu")
        stages.enter("warmup")
        heat(calibration.device)
        return CalibrationMeasurement(calibration, stages)


class CalibrationMeasurement:
    """Measures each group of points in turn; `take` measures all of them, however often it is called."""

    def __init__(self, config: CalibrationConfig, stages: Stages) -> None:
        self._config, self._stages = config, stages
        self._tables: dict[str, list[dict[str, Any]]] = {}

    def take(self, steps: int) -> None:
        """Measure all points."""
        device = torch.device(self._config.device)
        for name, points in {
            "matmuls": matmul_points,
            "traffic": traffic_points,
            "attention": attention_points,
            "optimizers": optimizer_points,
        }.items():
            self._stages.enter(name)
            self._tables[name] = [self._measured(point) for point in points(device, self._config.seed)]
        self._stages.enter("host")
        self._tables["host"] = (host_rows if device.type == "cuda" else cpu_rows)(self._config.calls)

    def finish(self) -> Findings:
        """All points; the sample `matmul` has the largest matmul's times."""
        tables = {
            name: {column: [row[column] for row in rows] for column in rows[0]}
            for name, rows in self._tables.items()
            if rows
        }
        largest = max(self._tables["matmuls"], key=lambda row: row["m"] * row["n"] * row["k"])
        units = torch.cuda.get_device_properties(0).multi_processor_count if self._config.device == "cuda" else 1
        return Findings(
            samples={"matmul": Samples(unit="s", values=(largest["time_s"],))},
            facts=facts_of(multiprocessors=units),
            tables=tables,
        )

    def _measured(self, point: Point) -> dict[str, Any]:
        with float32_matmuls("high" if point.row.get("dtype") == "tf32" else "highest"):
            call = point.make()
            time_s = seconds(call, self._config.device, self._config.calls)
        return {**point.row, "time_s": time_s}


def seconds(call: Callable[[], object], device: str, calls: int) -> float:
    """Seconds of a call: on a GPU of its kernels, the mean of several; on a CPU of the whole call, the median of several batches.

    On a CPU another process can stop this one for longer than a short call takes, so that a mean would be the other's time.
    """
    call()
    if device == "cuda":
        return device_busy_s(lambda: [call() for _ in range(calls)]) / calls
    once_s = min(_batch_s(call, 1) for _ in range(_FIRST_CALLS))
    if once_s > _LONG_S:
        return once_s
    repeats = min(_MOST_REPEATS, max(1, round(_LEAST_S / max(once_s, 1e-9))))
    return statistics.median(_batch_s(call, repeats) for _ in range(calls))


def _batch_s(call: Callable[[], object], repeats: int) -> float:
    """Seconds of one of these calls, in a row."""
    started_s = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - started_s) / repeats


def heat(device: str) -> None:
    """Multiply until a GPU has the clock that it keeps; a CPU is left alone."""
    if device == "cpu":
        return
    left = torch.randn(_HEATED_N, _HEATED_N, device=device, dtype=torch.bfloat16)
    ended_s = time.monotonic() + _HEATED_S
    while time.monotonic() < ended_s:
        for _ in range(20):
            torch.mm(left, left)
        torch.cuda.synchronize()


WORKLOAD = CalibrationWorkload()
