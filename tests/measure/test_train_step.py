"""The workload train_step from end to end in this process, on a CPU at a tiny size; memory running out is pretended."""

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
from trainstep.measure.failures import CellFailed
from trainstep.measure.train_step import WORKLOAD
from trainstep.measure.workload import load_workload
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


def test_it_is_the_workload_train_step():
    assert load_workload("train_step") is WORKLOAD
    assert not WORKLOAD.shares_worker


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("sync", "step_values"), [("step", 4), ("phase", 4), (2, 2), (4, 1)])
def test_samples(mode: str, sync: str | int, step_values: int):
    found = measured(mode=mode, sync=sync)
    assert lengths(found) == {"step": (step_values, 2), **dict.fromkeys(PHASES[mode], (4, 2))}
    for samples in found.samples.values():
        assert samples.unit == "s"
        assert all(value > 0 for value in (*samples.values, *samples.warmups))
    phases = sum(sum(found.samples[name].values) for name in PHASES[mode])
    assert phases <= 4 / step_values * sum(found.samples["step"].values), "phases are parts of the step"


def test_turns_add_up():
    assert lengths(measured(turns=(1, 3, 2)))["step"] == (6, 2)
    assert lengths(measured(turns=(4, 2), sync=2)) == {
        "step": (3, 2),
        **dict.fromkeys(["forward", "backward", "optimizer"], (6, 2)),
    }


def test_no_warmups():
    assert lengths(measured(warmups=0))["forward"] == (4, 0)


def test_accumulation_is_one_sample_a_phase():
    found = measured(accumulation=3)
    assert lengths(found)["forward"] == (4, 2)
    assert values_of(found)["tokens"] == 3 * 2 * 8


@pytest.mark.parametrize("mode", MODES)
def test_facts(mode: str):
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
def test_precisions(precision: str):
    facts = values_of(measured(precision=precision))
    assert facts["flops_dtype"] == precision.removesuffix("_autocast")
    assert math.isfinite(facts["loss"])


def test_stages_are_told():
    stages: list[str] = []
    measured(stages=stages)
    assert [stage for stage in stages if " " not in stage] == ["build", "warmup", "steps", "afterwards"]


def test_forward_backward_does_not_add_gradients_up(users: str):
    """Its steps see what a first step sees: no gradient from before."""
    measurement = prepare(mode="forward_backward")
    seen = []
    parameter = next(measurement.assembly.module.parameters())
    parameter.register_hook(lambda _: seen.append(parameter.grad))
    measurement.take(2)
    assert seen == [None, None]


def test_a_model_of_ones_own(users: str):
    found = measured(model=UserModel(function=f"{users}:good"), accumulation=2)
    asked = sys.modules[users].ASKED
    assert asked[: 2 * (2 + 4)] == list(range(12)), "each step its own batches, warm-ups first"
    assert lengths(found)["forward"] == (4, 2)
    facts = values_of(found)
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
    held = {holder.name: holder.bytes for holder in failed.holders}
    assert held == {"parameters": 16, "optimizer state": 2 * 16 + 2 * 4}


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
def test_what_fails_afterwards_loses_nothing(monkeypatch: pytest.MonkeyPatch, mode: str):
    measurement = prepare(mode=mode)
    measurement.take(4)

    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("trainstep.measure.train_step.device_busy_s", refuse)
    monkeypatch.setattr("trainstep.measure.train_step.flops_facts", refuse)
    on_gpu = replace(measurement.built.opened, device=torch.device("cuda"))
    monkeypatch.setattr(measurement, "built", replace(measurement.built, opened=on_gpu))
    found = measurement.finish()
    assert lengths(found)["step"] == (4, 2)
    facts = values_of(found)
    assert facts["tokens"] == 16
    why = "ran out of memory in afterwards"
    assert facts["afterwards_failed"] == f"device-busy time and a reallocated step: {why}; model FLOPs: {why}"


def test_a_user_need_not_have_more_batches_than_steps(users: str):
    found = measured(model=UserModel(function=f"{users}:just_enough"))
    assert lengths(found)["step"] == (4, 2)
    assert values_of(found)["model_flops"] == 2 * (2 * 4 * 3)
    assert "afterwards_failed" not in found.facts


def test_a_model_that_fails_once_the_steps_are_done(users: str):
    found = measured(model=UserModel(function=f"{users}:crashes_afterwards"))
    assert lengths(found)["step"] == (4, 2)
    assert values_of(found)["afterwards_failed"] == "model FLOPs: RuntimeError: a shape is wrong"


def test_settling_is_one_step_that_is_not_timed(users: str):
    measurement = prepare(model=UserModel(function=f"{users}:good"))
    asked = sys.modules[users].ASKED
    calls = []
    for _ in range(2):
        before = measurement.assembly.module.calls
        measurement.settle()
        calls.append(measurement.assembly.module.calls - before)
        measurement.take(2)
    assert calls == [1, 1]
    assert asked == list(range(6)), "of the last step's batches"
    assert lengths(measurement.finish())["step"] == (4, 2)


def test_nothing_to_settle_before_a_first_step():
    measurement = prepare(warmups=0)
    measurement.settle()
    measurement.take(4)
    assert lengths(measurement.finish())["step"] == (4, 0)


def test_other_errors_stay_what_they_are(users: str):
    with pytest.raises(RuntimeError, match="a shape is wrong"):
        measured(model=UserModel(function=f"{users}:crashes"))
    with pytest.raises(ImportError):
        measured(model=UserModel(function=f"{users}:absent"))


def test_a_loss_that_is_no_number_is_told_in_words(users: str):
    found = measured(model=UserModel(function=f"{users}:not_a_number"))
    assert values_of(found)["loss"] == "nan"
    record = a_record(facts=found.facts, samples=found.samples, tables=found.tables)
    assert record_from_plain(record_to_plain(record)) == record, "and such a record is read"


@pytest.mark.slow
@pytest.mark.parametrize("compile", ["block", "model"])
def test_compiled(compile: str):
    forget_compilations()
    found = measured(compile=compile)
    facts = values_of(found)
    assert facts["compile_s"] > 0
    assert facts["compile_cache"] in ("cold", "warm")
    assert lengths(found)["step"] == (4, 2)
    assert found.samples["step"].warmups[0] > max(found.samples["step"].values), "the first step compiled"


@pytest.mark.parametrize(("adamw", "captured"), [("trainstep", "step"), ("foreach", "forward and backward")])
def test_a_captured_step(adamw: str, captured: str):
    stages: list[str] = []
    found = measured(capture="auto", adamw=adamw, stages=stages)
    facts = values_of(found)
    assert facts["captured"] == captured
    assert ("capture_left_out" in facts) is (adamw == "foreach")
    assert facts["capture_s"] > 0
    assert facts["flops_source"] == "shapes"
    assert lengths(found)["step"] == lengths(found)["backward"] == (4, 2)
    assert [stage for stage in stages if " " not in stage] == ["build", "capture", "warmup", "steps", "afterwards"]


def test_a_step_that_cannot_be_captured_is_a_cell_that_says_so():
    with pytest.raises(CellFailed, match=r"^the step cannot be captured; .*adamw\.py:\d+") as failed:
        measured(capture="step", adamw="trainstep", precision="fp16_autocast")
    assert failed.value.failure.kind == "unsupported"
