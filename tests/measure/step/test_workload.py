"""The workload train_step from end to end in this process, on a CPU with a tiny model; out-of-memory errors are pretended."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from measured_step import PHASES, TINY, forget_compilations, lengths, measured, prepare, values_of
from record_maker import a_record
from trainstep.config.model import UserModel
from trainstep.config.run import MODES, RunConfig
from trainstep.costs.transformer import step_flops
from trainstep.measure.harness.failures import CellFailed
from trainstep.measure.harness.workload import load_workload
from trainstep.measure.step.workload import WORKLOAD
from trainstep.records.record import Failure, record_from_plain, record_to_plain
from trainstep.training.build import build_step

SOURCE = """
import torch
from torch import nn

ASKED = []
CPU_OUT = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 123 bytes. Error code 12 (Cannot allocate memory)"
)

class Fails(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise RuntimeError(CPU_OUT)

class Model(nn.Module):
    def __init__(self, where=None, at=0, words=CPU_OUT):
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.where, self.at, self.words, self.calls = where, at, words, 0

    def forward(self, x):
        self.calls += 1
        due = self.calls > self.at
        if self.where == "forward" and due:
            raise RuntimeError(self.words)
        y = self.linear(x).square().mean()
        if self.where == "nan":
            y = y * float("nan")
        return Fails.apply(y) if self.where == "backward" and due else y

def next_batch(step):
    ASKED.append(step)
    return {"x": torch.full((4, 3), float(step))}

def good(run, device):
    return Model(), next_batch

def out_in_build(run, device):
    raise RuntimeError(CPU_OUT)

def out_in_forward(run, device):
    return Model("forward"), next_batch

def out_in_backward_later(run, device):
    return Model("backward", at=4), next_batch

def crashes(run, device):
    return Model("forward", words="a shape is wrong"), next_batch

def just_enough(run, device):
    return Model(), [next_batch(step) for step in range(run.warmups + run.steps)].__getitem__

def crashes_afterwards(run, device):
    return Model("forward", at=run.warmups + run.steps, words="a shape is wrong"), next_batch

def not_a_number(run, device):
    return Model("nan"), next_batch
"""


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    package = tmp_path / "someones_own"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "model.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("someones_own", "someones_own.model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "someones_own.model"


def failure(function: str, steps: int = 4, **fields: Any) -> Failure:
    with pytest.raises(CellFailed) as caught:
        measured((steps,), model=UserModel(function=function), **fields)
    return caught.value.failure


def test_the_workload_train_step_is_found_by_name():
    assert load_workload("train_step") is WORKLOAD
    assert not WORKLOAD.shares_worker


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("sync", "step_values"), [("step", 4), ("phase", 4), (2, 2), (4, 1)])
def test_steps_and_phases_have_their_samples(mode: str, sync: str | int, step_values: int):
    findings = measured(mode=mode, sync=sync)
    assert lengths(findings) == {"step": (step_values, 2), **dict.fromkeys(PHASES[mode], (4, 2))}
    for samples in findings.samples.values():
        assert samples.unit == "s"
        assert all(value > 0 for value in (*samples.values, *samples.warmups))
    phases = sum(sum(findings.samples[name].values) for name in PHASES[mode])
    assert phases <= 4 / step_values * sum(findings.samples["step"].values), "phases are parts of the step"


def test_samples_of_several_turns_add_up():
    assert lengths(measured(turns=(1, 3, 2)))["step"] == (6, 2)
    assert lengths(measured(turns=(4, 2), sync=2)) == {
        "step": (3, 2),
        **dict.fromkeys(["forward", "backward", "optimizer"], (6, 2)),
    }


def test_no_warmups_give_no_warmup_samples():
    assert lengths(measured(warmups=0))["forward"] == (4, 0)


def test_accumulation_gives_one_sample_per_phase():
    findings = measured(accumulation=3)
    assert lengths(findings)["forward"] == (4, 2)
    assert values_of(findings)["tokens"] == 3 * 2 * 8


@pytest.mark.parametrize("mode", MODES)
def test_facts_of_a_step_follow_from_the_config(mode: str):
    facts = measured(mode=mode).facts
    assert (facts["tokens"].value, facts["tokens"].unit) == (16, "count")
    assert (facts["parameters"].value, facts["parameters"].unit) == (TINY.parameters, "count")
    shape = {"layers": 1, "d_model": 16, "d_ff": 32, "vocab_size": 256, "batch_size": 2, "context": 8}
    assert (facts["model_flops"].value, facts["model_flops"].unit) == (step_flops(mode, **shape), "flops")
    assert {facts[name].value for name in ("flops_source", "flops_dtype", "timing")} == {"shapes", "fp32", "host_clock"}
    assert facts["peak_rss_bytes"].unit == "bytes"
    assert facts["build_s"].value > 0
    assert facts["loss"].value == pytest.approx(math.log(256), rel=0.1)
    assert not {"compile_s", "device_busy_s", "context_s", "peak_allocated_bytes"} & set(facts)


def test_the_loss_is_that_of_the_last_step():
    run = RunConfig(model=TINY, batch_size=2, context=8, learning_rate=1e-2)
    assembly = build_step(run)
    losses = [assembly.step(assembly.micro_batches(step)).item() for step in range(6)]
    assert values_of(measured(learning_rate=1e-2))["loss"] == losses[-1]


@pytest.mark.parametrize("precision", ["bf16_autocast", "fp16_autocast", "bf16"])
def test_every_precision_has_its_flops_dtype(precision: str):
    facts = values_of(measured(precision=precision))
    assert facts["flops_dtype"] == precision.removesuffix("_autocast")
    assert math.isfinite(facts["loss"])


def test_stages_are_reported():
    stages: list[str] = []
    measured(stages=stages)
    assert [stage for stage in stages if " " not in stage] == ["build", "warmup", "steps", "afterwards"]


def test_forward_backward_starts_each_step_without_gradients(users: str):
    """Each step starts without gradients, as the first one does."""
    measurement = prepare(mode="forward_backward")
    gradients_before = []
    parameter = next(measurement.assembly.module.parameters())
    parameter.register_hook(lambda _: gradients_before.append(parameter.grad))
    measurement.take(2)
    assert gradients_before == [None, None]


def test_a_users_model_gets_its_own_batches(users: str):
    findings = measured(model=UserModel(function=f"{users}:good"), accumulation=2)
    requested = sys.modules[users].ASKED
    assert requested[: 2 * (2 + 4)] == list(range(12)), "each step its own batches, warm-ups first"
    assert lengths(findings)["forward"] == (4, 2)
    facts = values_of(findings)
    assert (facts["parameters"], facts["flops_source"]) == (4, "torch.utils.flop_counter")
    assert facts["model_flops"] == 2 * (2 * (2 * 4 * 3))


def test_out_of_memory_in_forward(users: str):
    failed = failure(f"{users}:out_in_forward")
    assert (failed.kind, failed.phase, failed.asked_bytes) == ("out_of_memory", "forward", 123)
    assert failed.message == "ran out of memory in forward asking for 123 bytes"
    assert [(holder.name, holder.bytes) for holder in failed.holders] == [("parameters", 16)]
    assert 0 < failed.allocated_bytes <= failed.capacity_bytes


def test_out_of_memory_in_a_later_backward(users: str):
    failed = failure(f"{users}:out_in_backward_later")
    assert (failed.kind, failed.phase, failed.asked_bytes) == ("out_of_memory", "backward", 123)
    holders = {holder.name: holder.bytes for holder in failed.holders}
    assert holders == {"parameters": 16, "optimizer state": 2 * 16 + 2 * 4}


def test_out_of_memory_in_the_optimizer(users: str, monkeypatch: pytest.MonkeyPatch):
    measurement = prepare(model=UserModel(function=f"{users}:good"))

    def refuse(*_: object) -> None:
        raise RuntimeError(sys.modules[users].CPU_OUT)

    monkeypatch.setattr(measurement.assembly.step.optimizer, "step", refuse)
    with pytest.raises(CellFailed) as caught:
        measurement.take(1)
    assert caught.value.failure.phase == "optimizer"
    assert {holder.name: holder.bytes for holder in caught.value.failure.holders}["gradients"] == 16


def test_out_of_memory_in_build(users: str):
    failed = failure(f"{users}:out_in_build")
    assert (failed.kind, failed.phase, failed.asked_bytes, failed.holders) == ("out_of_memory", "build", 123, ())


@pytest.mark.parametrize("mode", MODES)
def test_a_failure_afterwards_loses_no_sample(monkeypatch: pytest.MonkeyPatch, mode: str):
    measurement = prepare(mode=mode)
    measurement.take(4)

    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("trainstep.measure.step.workload.device_busy_s", refuse)
    monkeypatch.setattr("trainstep.measure.step.workload.flops_facts", refuse)
    on_gpu = replace(measurement.built.opened, device=torch.device("cuda"))
    monkeypatch.setattr(measurement, "built", replace(measurement.built, opened=on_gpu))
    findings = measurement.finish()
    assert lengths(findings)["step"] == (4, 2)
    facts = values_of(findings)
    assert facts["tokens"] == 16
    reason = "ran out of memory in afterwards"
    assert facts["afterwards_failed"] == f"device-busy time and a reallocated step: {reason}; model FLOPs: {reason}"


def test_a_user_need_not_have_more_batches_than_steps(users: str):
    findings = measured(model=UserModel(function=f"{users}:just_enough"))
    assert lengths(findings)["step"] == (4, 2)
    assert values_of(findings)["model_flops"] == 2 * (2 * 4 * 3)
    assert "afterwards_failed" not in findings.facts


def test_a_model_that_fails_after_the_steps_loses_no_sample(users: str):
    findings = measured(model=UserModel(function=f"{users}:crashes_afterwards"))
    assert lengths(findings)["step"] == (4, 2)
    assert values_of(findings)["afterwards_failed"] == "model FLOPs: RuntimeError: a shape is wrong"


def test_settling_is_one_step_that_is_not_timed(users: str):
    measurement = prepare(model=UserModel(function=f"{users}:good"))
    requested = sys.modules[users].ASKED
    calls = []
    for _ in range(2):
        before = measurement.assembly.module.calls
        measurement.settle()
        calls.append(measurement.assembly.module.calls - before)
        measurement.take(2)
    assert calls == [1, 1]
    assert requested == list(range(6)), "settling takes the last step's batches again"
    assert lengths(measurement.finish())["step"] == (4, 2)


def test_settling_before_the_first_step_does_nothing():
    measurement = prepare(warmups=0)
    measurement.settle()
    measurement.take(4)
    assert lengths(measurement.finish())["step"] == (4, 0)


def test_other_errors_are_raised_unchanged(users: str):
    with pytest.raises(RuntimeError, match="a shape is wrong"):
        measured(model=UserModel(function=f"{users}:crashes"))
    with pytest.raises(ImportError):
        measured(model=UserModel(function=f"{users}:absent"))


def test_a_loss_that_is_nan_is_stored_as_text(users: str):
    findings = measured(model=UserModel(function=f"{users}:not_a_number"))
    assert values_of(findings)["loss"] == "nan"
    record = a_record(facts=findings.facts, samples=findings.samples, tables=findings.tables)
    assert record_from_plain(record_to_plain(record)) == record, "a record with such a loss can be read back"


@pytest.mark.slow
@pytest.mark.parametrize("compile", ["block", "model"])
def test_the_first_step_compiles(compile: str):
    forget_compilations()
    findings = measured(compile=compile)
    facts = values_of(findings)
    assert facts["compile_s"] > 0
    assert facts["compile_cache"] in ("cold", "warm")
    assert lengths(findings)["step"] == (4, 2)
    assert findings.samples["step"].warmups[0] > max(findings.samples["step"].values), "the first step compiled"


@pytest.mark.parametrize(("adamw", "captured"), [("trainstep", "step"), ("foreach", "forward and backward")])
def test_a_captured_step_says_what_was_captured(adamw: str, captured: str):
    stages: list[str] = []
    findings = measured(capture="auto", adamw=adamw, stages=stages)
    facts = values_of(findings)
    assert facts["captured"] == captured
    assert ("capture_left_out" in facts) is (adamw == "foreach")
    assert facts["capture_s"] > 0
    assert facts["flops_source"] == "shapes"
    assert lengths(findings)["step"] == lengths(findings)["backward"] == (4, 2)
    assert [stage for stage in stages if " " not in stage] == ["build", "capture", "warmup", "steps", "afterwards"]


def test_a_step_that_cannot_be_captured_is_unsupported():
    with pytest.raises(CellFailed, match=r"^the step cannot be captured; .*adamw\.py:\d+") as failed:
        measured(capture="step", adamw="trainstep", precision="fp16_autocast")
    assert failed.value.failure.kind == "unsupported"
