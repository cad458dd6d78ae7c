"""The workload `calibration` on a CPU with few points, its record as plan reads it, and on a GPU whole."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from record_maker import a_record
from trainstep.config.model import size
from trainstep.config.run import RunConfig
from trainstep.measure.step import calibration as workload
from trainstep.measure.step import calibration_kernels as kernels
from trainstep.plan.step_memory import alone
from trainstep.plan.time.calibration import Calibration, calibration_of
from trainstep.plan.time.kernels import Kind
from trainstep.plan.time.step_time import step_time

CPU = torch.device("cpu")


def measured(device: str, stages: list[str]) -> Calibration:
    measurement = workload.WORKLOAD.prepare({"device": device, "calls": 1, "seed": 0}, stages.append)
    measurement.take(1)
    findings = measurement.finish()
    record = replace(a_record(), workload="calibration", facts=findings.facts, tables=findings.tables)
    return calibration_of(record)


def test_a_cpu_is_measured_and_planned_with(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workload, "_LEAST_S", 0.0)
    monkeypatch.setattr(kernels, "_CPU_MATMULS", ((16, 16, 16), (256, 256, 256)))  # apart, whatever else runs
    monkeypatch.setattr(kernels, "_CPU_ROWS", (2, 8))
    monkeypatch.setattr(kernels, "_CPU_ATTENTION", ((1, 8, 32), (1, 16, 32)))
    stages: list[str] = []
    calibration = measured("cpu", stages)
    assert stages[-5:] == ["matmuls", "traffic", "attention", "optimizers", "host"]
    assert calibration.units == 1
    assert set(calibration.matmuls) == {"fp32", "bf16"}
    assert Kind.CONTIGUOUS in calibration.traffic
    assert not calibration.host
    run = RunConfig(model=size("tiny"), batch_size=2, context=32)
    predicted = step_time(alone(run), calibration)
    assert 0 < predicted.step.low_s < predicted.step.time_s < predicted.step.high_s
    assert not predicted.guesses, "all kinds of kernels of a plain step were measured"


@pytest.mark.parametrize(
    ("kind", "count"),
    [("contiguous", 3), ("strided", 1), ("widened", 1.5), ("softmax", 2), ("loss backward", 4)],
)
def test_bytes_are_those_of_the_tensors(kind: str, count: float):
    """Tensors of fp32 that a call reads and writes, of 2 x 512 elements, as formulas count them."""
    points: list[dict[str, Any]] = [point.row for point in kernels.traffic_points(CPU, 0) if point.row["kind"] == kind]
    assert points[0]["bytes"] == 4 * 2 * 512 * count


@pytest.mark.gpu
def test_a_gpu_is_measured_whole():
    calibration = measured("cuda", [])
    assert calibration.units > 1
    assert {"fp32", "tf32", "bf16", "fp16"} <= set(calibration.matmuls)
    assert {Kind.COMPILED, Kind.FUSED} <= set(calibration.traffic)
    assert {"forward launch", "backward launch", "optimizer tensor", "compiled block forward"} <= set(calibration.host)
    assert ("trainstep", "bf16", "backward", 64) in calibration.attention
    run = RunConfig(model=size("small"), device="cuda", precision="bf16_autocast", compile="block")
    assert step_time(alone(run), calibration).step.time_s > 0


def test_a_call_that_another_process_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch):
    """Calls of 1 ms; the first and one of five batches were stopped for 40 ms."""
    stopped = {1, 10}
    clock_s, calls = [0.0], [0]

    def call() -> None:
        calls[0] += 1
        clock_s[0] += 0.041 if calls[0] in stopped else 0.001

    monkeypatch.setattr(workload.time, "perf_counter", lambda: clock_s[0])
    monkeypatch.setattr(workload, "_LEAST_S", 0.004)
    assert workload.seconds(call, "cpu", calls=5) == pytest.approx(0.001)
    assert calls[0] == 1 + workload._FIRST_CALLS + 5 * 4
