"""Less recomputation is advised only as far as plan says that the step still fits its GPU."""

from dataclasses import replace
from typing import Any

import pytest

from sources import ROOT
from trainstep.config.parsing import build_run
from trainstep.explain.budget import step_budget
from trainstep.explain.evidence import Evidence, evidence_of
from trainstep.explain.room import what_fits
from trainstep.plan.prediction import predict
from trainstep.plan.step_memory import alone
from trainstep.plan.time.calibration import shipped
from trainstep.records.store import Store

NONE = {"recompute": "none"}


def fitting(evidence: Evidence, change: dict[str, Any]) -> tuple[dict[str, Any], str]:
    return what_fits(evidence.config, evidence.gpu_memory_bytes, change)


def a_step(gib: float | None, **run: Any) -> Evidence:
    config = alone(
        build_run({"model": "small", "context": 1024, "device": "cuda", "precision": "bf16_autocast", **run})
    )
    return Evidence(measured_s=1.0, config=config, gpu_memory_bytes=None if gib is None else round(gib * 2**30))


def needed_gib(**run: Any) -> float:
    config = a_step(None, **run).config
    assert config is not None
    return predict(config).needed_bytes / 2**30


def test_the_least_recomputation_that_fits_takes_the_place_of_none():
    sizes = {mode: needed_gib(recompute=mode) for mode in ("none", "selective", "narrow", "block")}
    assert sizes["none"] > sizes["selective"] > sizes["narrow"] > sizes["block"]
    whole = f"without recomputation the step would need {sizes['none']:,.0f} GiB of the GPU's"
    for memory, change in (
        (sizes["none"] + 1, NONE),
        (sizes["selective"], {"recompute": "selective"}),
        (sizes["narrow"], {"recompute": "narrow"}),
        (sizes["block"], {}),
    ):
        assert fitting(a_step(memory, recompute="block"), NONE) == (
            change,
            "" if change == NONE else f"{whole} {memory:,.0f}",
        )


def test_narrow_blocks_are_given_up_if_those_have_room():
    run = {"recompute": "selective", "narrow_blocks": 10}
    memory = needed_gib(recompute="selective")
    assert fitting(a_step(memory, **run), {**NONE, "narrow_blocks": 0})[0] == {"narrow_blocks": 0}


@pytest.mark.parametrize(
    ("evidence", "change"),
    [
        (a_step(None, recompute="block"), NONE),
        (a_step(1.0, recompute="block"), {"compile": "block"}),
        (replace(a_step(1.0), config=None), NONE),
        (a_step(1.0, recompute="block", model="package.module:build"), NONE),
    ],
    ids=["unknown GPU", "another change", "a script", "a model of the user's"],
)
def test_what_plan_does_not_know_is_advised_as_before(evidence: Evidence, change: dict[str, str]):
    assert fitting(evidence, change) == (change, "")


@pytest.mark.parametrize(
    ("recompute", "change"),
    [("selective", {}), ("narrow", {}), ("block", {"recompute": "narrow"})],
)
def test_no_advice_for_a_recorded_8b_step_needs_more_than_its_gpu_has(recompute: str, change: dict[str, str]):
    """At 32,768 tokens none fits without recomputation."""
    records = Store(ROOT / "results/h200/step_8b.jsonl").finished()
    record = next(record for record in records if record.config["recompute"] == recompute)
    budget = step_budget(evidence_of(record), shipped("NVIDIA H200"))
    [finding] = [finding for finding in budget.findings if finding.cause == "recomputation"]
    assert "without recomputation the step would need 1" in finding.evidence
    assert "GiB of the GPU's 140" in finding.evidence
    assert finding.change == change
    assert (finding.gain.time_s > 0) is bool(change)


def test_a_record_without_its_memory_has_the_data_sheets():
    record = Store(ROOT / "results/h200/step_8b.jsonl").finished()[0]
    known = evidence_of(record).gpu_memory_bytes
    unsaid = replace(record, environment=replace(record.environment, gpu_memory_bytes=None))
    assert known == record.environment.gpu_memory_bytes
    assert evidence_of(unsaid).gpu_memory_bytes == 150_754_820_096
