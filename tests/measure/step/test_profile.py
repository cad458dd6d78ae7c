"""The workload `profile`: timed steps beside profiled ones, tables of the profiled steps, and findings that can be stored."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from trainstep.config.parsing import build_config, from_plain, to_plain
from trainstep.config.profile import ProfileConfig
from trainstep.config.run import PRECISIONS
from trainstep.measure.harness.workload import Findings, load_workload
from trainstep.measure.step import profile
from trainstep.measure.step.profile import WORKLOAD
from trainstep.plan.memory_terms import weight_bytes
from trainstep.traces.kineto import read_trace
from trainstep.traces.verdict import COMPUTE, LAUNCH, MEMORY, NEAR_THE_LINE
from trainstep.traces.work import read_work

SMALL = {"model": "tiny", "d_model": 32, "d_ff": 64, "heads": 2, "context": 8, "batch_size": 2, "attention": "plain"}


def measured(**values: Any) -> Findings:
    config = build_config("profile", {**SMALL, "steps": 2, "warmups": 1, **values})
    assert from_plain(ProfileConfig, to_plain(config)) == config
    measurement = WORKLOAD.prepare(to_plain(config), lambda stage: None)
    measurement.take(2)
    return measurement.finish()


def facts_of(findings: Findings) -> dict[str, Any]:
    return {name: fact.value for name, fact in findings.facts.items()}


def test_the_workload_profile_is_found_by_name():
    assert load_workload("profile") is WORKLOAD


def test_a_step_has_samples_tables_and_a_verdict():
    findings = measured()
    assert len(findings.samples["step"].values) == 2
    assert len(findings.samples["busy"].values) == len(findings.samples["profiled_step"].values) == 3
    facts = facts_of(findings)
    # A tiny step may fall within a tenth of a threshold: which kind it is depends on the machine.
    assert facts["verdict"] in (LAUNCH, MEMORY, COMPUTE, NEAR_THE_LINE)
    assert findings.tables["verdict"]["kind"] == [facts["verdict"]]
    assert findings.tables["verdict"]["on_device"] == [False]
    assert facts["assigned_share"] == 1
    assert facts["fallback_share"] == 0
    assert facts["profiler_slowdown"] > 0
    assert {"kernels", "classes", "spans", "layers", "attention"} <= set(findings.tables)
    assert {"forward", "backward", "optimizer"} <= set(findings.tables["classes"]["phase"])
    assert sum(findings.tables["kernels"]["time_s"]) == pytest.approx(facts["kernels_s"])
    assert facts["kernels_s"] == pytest.approx(sum(findings.samples["profiled_step"].values) / 3)
    json.dumps({name: dict(columns) for name, columns in findings.tables.items()}, allow_nan=False)
    assert "attention_split" not in facts


@pytest.mark.parametrize(
    ("mode", "phases"), [("forward_no_grad", {"forward"}), ("forward_backward", {"forward", "backward"})]
)
def test_each_mode_has_its_phases(mode: str, phases: set[str]):
    findings = measured(mode=mode, profiled_steps=1)
    assert set(findings.tables["spans"]["phase"]) - {"outside phases"} == phases
    assert len(findings.samples["busy"].values) == 1


def test_a_captured_step_is_profiled_by_the_order_of_an_eager_one():
    findings = measured(capture="step", adamw="trainstep", profiled_steps=1)
    facts = facts_of(findings)
    assert facts["captured"] == "step"
    assert 0 < facts["replayed_share"] <= 1, "a tape has more copies than the eager step, and time between ops"
    table = findings.tables["replay"]
    assert {"forward", "backward", "optimizer"} <= set(table["phase"])
    assert {"forward", "backward", "optimizer"} <= set(findings.tables["classes"]["phase"])
    assert sum(table["replayed_s"]) == pytest.approx(facts["kernels_s"])


def test_attention_that_is_not_written_out_has_no_split():
    facts = facts_of(measured(attention="sdpa"))
    assert facts["attention_split"].startswith("Attention sdpa: the profile has no softmax")


@pytest.mark.slow
def test_attention_flops_follow_from_the_shapes():
    table = measured(accumulation=2).tables["attention"]
    index = list(zip(table["phase"], table["part"], strict=True)).index(("forward", "matmuls"))
    assert table["flops"][index] == 2 * 2 * (2 * 2 * 2 * 2) * 8 * 8 * 16, (
        "2 matmuls, 2 FLOPs, of each head of 2 layers twice"
    )


def test_a_kept_trace_is_one_step(tmp_path: Path):
    facts = facts_of(measured(keep_trace=str(tmp_path / "traces")))
    [file] = (tmp_path / "traces").iterdir()
    assert facts["trace_file"] == str(file)
    assert file.name.startswith("tiny-8-step-")
    work = read_work(read_trace(file))
    assert [step.number for step in work.steps] == [0]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="keep_trace: no file can be made in"):
        measured(keep_trace=str(tmp_path / "file"))


@pytest.mark.gpu
def test_kernels_and_idle_time_on_a_gpu_are_the_step():
    """The step is large enough that the profiler does not make it longer."""
    large = {"d_model": 1024, "d_ff": 4096, "heads": 16, "context": 512, "batch_size": 8, "device": "cuda", "steps": 5}
    findings = measured(**large, warmups=3)
    facts = facts_of(findings)
    step_s = statistics.median(findings.samples["step"].values)
    assert facts["kernels_s"] + facts["idle_s"] == pytest.approx(step_s, rel=0.2)
    assert facts["fallback_share"] == 0
    assert facts["verdict"] == "compute-bound"
    assert {"matmul", "softmax", "element-wise", "optimizer", "idle"} <= set(findings.tables["classes"]["class"])
    assert sum(findings.tables["host"]["launches"]) == pytest.approx(facts["launches"], rel=0.05)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_compiled_step_on_a_gpu_has_compiled_spans():
    findings = measured(device="cuda", compile="block", precision="bf16_autocast", warmups=3)
    assert "compiled" in findings.tables["spans"]["span"]
    assert "only in eager mode" in facts_of(findings)["attention_split"]


def test_every_precision_has_its_bytes_per_element():
    assert set(profile._ELEMENT_BYTES) == set(PRECISIONS)
    assert all(weight_bytes(name) in (2, 4) for name in PRECISIONS)
