"""The workload `op` on a CPU: its record for every op, its errors, memory, refusals, and failures afterwards."""

from typing import Any

import pytest
import torch

from trainstep.config.op import OPS, OpConfig
from trainstep.config.parsing import to_plain
from trainstep.measure.harness.failures import CellFailed
from trainstep.measure.harness.workload import Findings, load_workload
from trainstep.measure.op import implementations
from trainstep.measure.op import workload as op_workload
from trainstep.measure.op.workload import WORKLOAD

SIZES: dict[str, dict[str, int]] = {
    "rms_norm": {"tokens": 24, "width": 16},
    "add_rms_norm": {"tokens": 24, "width": 16},
    "rotary": {"tokens": 12, "heads": 4, "key_heads": 2, "head_dim": 8},
    "swiglu": {"tokens": 24, "width": 16},
    "linear_cross_entropy": {"tokens": 24, "width": 16, "vocabulary": 40},
    "adamw": {"parameters": 100},
}
GRADIENTS = {
    "rms_norm": {"dx", "dweight"},
    "add_rms_norm": {"dx", "dresidual", "dweight"},
    "rotary": {"dq", "dk"},
    "swiglu": {"dx"},
    "linear_cross_entropy": {"dx", "dweight"},
    "adamw": set(),
}


def measured(stages: list[str] | None = None, *, op: str = "rms_norm", **fields: Any) -> Findings:
    config = to_plain(OpConfig(op=op, **{"warmups": 1, "steps": 3, **SIZES[op], **fields}))
    measurement = WORKLOAD.prepare(config, (stages if stages is not None else []).append)
    measurement.take(2)
    measurement.settle()
    measurement.take(1)
    return measurement.finish()


def values_of(findings: Findings) -> dict[str, Any]:
    return {name: fact.value for name, fact in findings.facts.items()}


def test_the_workload_op_is_found_by_name():
    assert load_workload("op") is WORKLOAD
    assert WORKLOAD.shares_worker


@pytest.mark.parametrize(("sum_dtype", "taken"), [("fp32", torch.float32), ("own", None)])
def test_the_loss_sums_in_the_dtype_that_was_asked_for(
    sum_dtype: str, taken: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
):
    seen: list[torch.dtype | None] = []

    def loss(x: torch.Tensor, *_: torch.Tensor, sum_dtype: torch.dtype | None) -> torch.Tensor:
        seen.append(sum_dtype)
        return x.sum()

    monkeypatch.setattr(implementations, "linear_cross_entropy", loss)
    implementations.function_of(OpConfig(op="linear_cross_entropy", sum_dtype=sum_dtype))(*torch.ones(3, 1).unbind())
    assert seen == [taken]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("implementation", ["trainstep", "eager"])
@pytest.mark.parametrize("op", OPS)
def test_a_record_has_times_errors_and_what_ran(op: str, implementation: str, dtype: str):
    stages: list[str] = []
    findings = measured(stages, op=op, implementation=implementation, dtype=dtype)
    assert stages == ["build", "first pass", "warmup", "both", "afterwards"]
    for name in ("time_s", "host_s"):
        samples = findings.samples[name]
        assert (samples.unit, len(samples.values), len(samples.warmups)) == ("s", 3, 1)
        assert all(value > 0 for value in (*samples.values, *samples.warmups))
    facts = values_of(findings)
    assert "afterwards_failed" not in facts
    assert (facts["has_nan"], facts["deterministic"], facts["timing"]) == (0, 1, "host_clock")
    errors = {name for name in facts if name.startswith("error_d")}
    assert errors == {f"error_{name}" for name in GRADIENTS[op]}
    for name in GRADIENTS[op]:
        assert facts[f"error_{name}"] <= 2 * facts[f"error_same_dtype_{name}"] + torch.finfo(torch.bfloat16).eps
    assert 0 < facts["error_output"] < (1e-5 if dtype == "fp32" else 0.02)
    assert facts["error_output"] <= 2 * facts["error_same_dtype"]
    assert facts["error_checked"] == "all elements against float64"
    assert facts["which_ran"].startswith("reference.py")
    assert ("flops" in facts, "bytes" in facts) == (op == "linear_cross_entropy", op != "linear_cross_entropy")
    assert ("held_bytes" in facts) == (op != "adamw")


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_direction_is_timed_alone(direction: str):
    facts = values_of(measured(op="swiglu", direction=direction))
    assert facts["bytes"] == {"forward": 3, "backward": 5}[direction] * 24 * 16 * 4
    assert ("error_dx" in facts) == (direction == "backward")


@pytest.mark.parametrize("op", ["rms_norm", "adamw"])
def test_torch_has_two_of_the_ops_itself(op: str):
    facts = values_of(measured(op=op, implementation="torch"))
    assert facts["which_ran"] == "torch's own"
    assert 0 < facts["error_output"] < 1e-5


def test_memory_before_backward_is_what_the_pass_keeps():
    facts = values_of(measured(op="linear_cross_entropy", implementation="eager"))
    assert facts["held_bytes"] >= 24 * 40 * 4, "the logits"


def test_the_loss_is_checked_in_chunks_of_tokens(monkeypatch: pytest.MonkeyPatch):
    whole = values_of(measured(op="linear_cross_entropy"))
    monkeypatch.setattr("trainstep.measure.op.checks._LOGITS", {"cpu": 5 * 40})
    chunked = values_of(measured(op="linear_cross_entropy"))
    for name in ("error_output", "error_dx", "error_dweight"):
        assert chunked[name] == pytest.approx(whole[name], rel=1e-3, abs=1e-12)


def test_the_first_elements_of_a_large_update_are_checked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trainstep.measure.op.checks._COMPARED", {"cpu": 10})
    facts = values_of(measured(op="adamw"))
    assert facts["error_checked"] == "the first 10 elements against float64"
    assert facts["error_output"] < 1e-6


def test_a_wrong_result_has_a_large_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(op_workload, "function_of", lambda config: lambda x: (x[:, :16] * x[:, 16:],))
    facts = values_of(measured(op="swiglu"))
    assert facts["error_output"] > 0.1
    assert facts["error_dx"] > 0.1
    assert facts["error_same_dtype"] < 1e-6


def test_a_refusal_keeps_the_bytes():
    with pytest.raises(CellFailed) as caught:
        measured(op="swiglu", implementation="quack")
    assert (caught.value.failure.kind, caught.value.failure.phase) == ("unsupported", "build")
    assert caught.value.failure.message == "implementation: quack has no swiglu"
    assert caught.value.facts["bytes"].value > 0


def test_a_failure_afterwards_loses_no_sample(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> None:
        raise RuntimeError("no reference today")

    monkeypatch.setattr(op_workload, "check_values", fail)
    findings = measured()
    assert findings.facts["afterwards_failed"].value == "values: RuntimeError: no reference today"
    assert len(findings.samples["time_s"].values) == 3


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_a_compiled_reference_is_as_accurate(op: str):
    facts = values_of(measured(op=op, implementation="compile"))
    assert facts["which_ran"] == "reference.py, compiled"
    assert facts["error_output"] < 1e-5
