"""The prediction that a record keeps."""

from collections.abc import Mapping
from typing import Any

import pytest

from sources import ROOT
from trainstep.plan.time import recorded
from trainstep.plan.time.recorded import recorded_prediction
from trainstep.records.store import Store

GPU = "NVIDIA H200"


def stored(name: str) -> Mapping[str, Any]:
    return Store(ROOT / f"results/h200/{name}.jsonl").read()[-1].config


@pytest.mark.parametrize(("workload", "name"), [("train_step", "fused"), ("parallel", "ddp_xl_shards")])
def test_a_step_on_a_known_gpu_has_both(workload: str, name: str):
    found = recorded_prediction(workload, stored(name), gpu=GPU)
    assert found is not None
    low, high = found["step_interval_s"]
    assert low < found["step_s"] < high
    assert 0 < found["peak_allocated_bytes"] <= found["peak_reserved_bytes"]
    assert "shipped" in found["calibration"]


def test_an_unknown_gpu_has_memory_alone_and_a_cpu_nothing():
    config = stored("fused")
    found = recorded_prediction("train_step", config, gpu="Some GPU")
    assert found is not None
    assert set(found) == {"peak_allocated_bytes", "peak_reserved_bytes"}
    assert recorded_prediction("train_step", {**config, "device": "cpu"}, gpu=GPU) is None
    assert recorded_prediction("train_step", config, gpu=None) is None


def test_what_plan_does_not_know_is_none_and_a_fault_loses_nothing(monkeypatch: pytest.MonkeyPatch):
    assert recorded_prediction("mine:WORKLOAD", {"device": "cuda"}, gpu=GPU) is None
    assert recorded_prediction("train_step", {"device": "cuda", "model": 5}, gpu=GPU) is None
    assert recorded_prediction("attention", {"device": "cuda"}, gpu=GPU) is None

    def fail(*_arguments: object, **_options: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(recorded, "replay", fail)
    found = recorded_prediction("train_step", stored("fused"), gpu=GPU)
    assert found is not None
    assert set(found) == {"step_s", "step_interval_s", "calibration"}
