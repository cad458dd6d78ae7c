"""The workload `profile` on a CPU: timed steps kept apart, profiled ones tabulated, everything storable."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainstep.config.parsing import build_config, from_plain, to_plain
from trainstep.config.profile import ProfileConfig
from trainstep.config.run import PRECISIONS
from trainstep.measure import profile
from trainstep.measure.profile import WORKLOAD
from trainstep.measure.workload import Findings, load_workload
from trainstep.plan.parameters import weight_bytes
from trainstep.traces.kineto import read_trace
from trainstep.traces.work import read_work

SMALL = {"model": "tiny", "d_model": 32, "d_ff": 64, "heads": 2, "context": 8, "batch_size": 2, "attention": "plain"}


def measured(**values: Any) -> Findings:
    config = build_config("profile", {**SMALL, "steps": 2, "warmups": 1, **values})
    assert from_plain(ProfileConfig, to_plain(config)) == config
    measurement = WORKLOAD.prepare(to_plain(config), lambda stage: None)
    measurement.take(2)
    return measurement.finish()


def facts_of(found: Findings) -> dict[str, Any]:
    return {name: fact.value for name, fact in found.facts.items()}


def test_it_is_the_workload_profile():
    assert load_workload("profile") is WORKLOAD


def test_a_step():
    found = measured()
    assert len(found.samples["step"].values) == 2
    assert len(found.samples["busy"].values) == len(found.samples["profiled_step"].values) == 3
    facts = facts_of(found)
    assert facts["verdict"] in ("launch-bound", "memory-bound", "compute-bound")
    assert found.tables["verdict"]["kind"] == [facts["verdict"]]
    assert found.tables["verdict"]["on_device"] == [False]
    assert facts["assigned_share"] == 1
    assert facts["fallback_share"] == 0
    assert facts["profiler_slowdown"] > 0
    assert {"kernels", "classes", "spans", "layers", "attention"} <= set(found.tables)
    assert {"forward", "backward", "optimizer"} <= set(found.tables["classes"]["phase"])
    assert sum(found.tables["kernels"]["time_s"]) == pytest.approx(facts["kernels_s"])
    assert facts["kernels_s"] == pytest.approx(sum(found.samples["profiled_step"].values) / 3)
    json.dumps({name: dict(columns) for name, columns in found.tables.items()}, allow_nan=False)
    assert "attention_split" not in facts


@pytest.mark.parametrize(
    ("mode", "phases"), [("forward_no_grad", {"forward"}), ("forward_backward", {"forward", "backward"})]
)
def test_modes(mode: str, phases: set[str]):
    found = measured(mode=mode, profiled_steps=1)
    assert set(found.tables["spans"]["phase"]) - {"outside phases"} == phases
    assert len(found.samples["busy"].values) == 1


def test_attention_that_is_not_written_out():
    facts = facts_of(measured(attention="sdpa"))
    assert facts["attention_split"].startswith("Attention sdpa is not written out")


@pytest.mark.slow
def test_attention_flops_are_the_shapes():
    table = measured(accumulation=2).tables["attention"]
    index = list(zip(table["phase"], table["part"], strict=True)).index(("forward", "matmuls"))
    assert table["flops"][index] == 2 * 2 * (2 * 2 * 2 * 2) * 8 * 8 * 16, (
        "2 matmuls, 2 FLOPs, of each head of 2 layers twice"
    )


def test_a_kept_trace_is_one_step(tmp_path: Path):
    facts = facts_of(measured(keep_trace=str(tmp_path / "traces")))
    [kept] = (tmp_path / "traces").iterdir()
    assert facts["trace_file"] == str(kept)
    assert kept.name.startswith("tiny-8-step-")
    work = read_work(read_trace(kept))
    assert [step.number for step in work.steps] == [0]


def test_a_folder_that_cannot_be(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="keep_trace: no file can be made in"):
        measured(keep_trace=str(tmp_path / "file"))


@pytest.mark.gpu
def test_on_a_gpu():
    """Device time of a device-bound step is that of the unprofiled step; a launch-bound one's classes repeat."""
    large = {"d_model": 1024, "d_ff": 4096, "heads": 16, "context": 512, "batch_size": 8, "device": "cuda", "steps": 5}
    found = measured(**large, warmups=3)
    facts = facts_of(found)
    step_s = sorted(found.samples["step"].values)[2]
    assert facts["kernels_s"] + facts["idle_s"] == pytest.approx(step_s, rel=0.2)
    assert facts["fallback_share"] == 0
    assert facts["verdict"] == "compute-bound"
    assert {"matmul", "softmax", "element-wise", "optimizer", "idle"} <= set(found.tables["classes"]["class"])
    assert sum(found.tables["host"]["launches"]) == pytest.approx(facts["launches"], rel=0.05)


@pytest.mark.gpu
@pytest.mark.slow
def test_compiled_on_a_gpu():
    found = measured(device="cuda", compile="block", precision="bf16_autocast", warmups=3)
    assert "compiled" in found.tables["spans"]["span"]
    assert "eager mode only" in facts_of(found)["attention_split"]


def test_every_precision_has_its_bytes():
    assert set(profile._ELEMENT_BYTES) == set(PRECISIONS)
    assert all(weight_bytes(name) in (2, 4) for name in PRECISIONS)
