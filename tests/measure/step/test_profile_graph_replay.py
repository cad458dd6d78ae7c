"""A step replayed as one CUDA graph: the phases that are captured, and on a GPU that its kernels add up to the replay."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from trainstep.config.parsing import build_config, to_plain
from trainstep.config.profile import ProfileConfig
from trainstep.measure.step.profile import WORKLOAD, graph_replay_facts, reason_without_optimizer
from trainstep.training.build import build_step
from trainstep.training.step import TrainStep

SMALL = {"model": "tiny", "d_model": 32, "d_ff": 64, "heads": 2, "context": 8, "batch_size": 1}


def config(**values: Any) -> ProfileConfig:
    return build_config("profile", {**SMALL, **values})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, ""),
        ({"clip_grad_norm": 1.0}, ""),
        ({"mode": "forward_backward", "adamw": "loop"}, ""),
        ({"adamw": "foreach"}, "AdamW's foreach runs other kernels in a graph"),
        ({"precision": "fp16_autocast"}, "loss scaling waits for the device"),
    ],
)
def test_an_optimizer_that_cannot_be_captured_is_left_out(values: dict[str, Any], words: str):
    reason = reason_without_optimizer(config(**values))
    assert words in reason
    assert bool(reason) is bool(words)


def test_a_cpu_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="graph_replay: a CUDA graph needs a GPU; leave it out on a CPU"):
        config(graph_replay=True)


class FakeCuda:
    """A stand-in for torch.cuda where there is no GPU, which logs its calls in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: TrainStep) -> None:
        self.calls: list[str] = []
        self._step = step
        for name in ("Stream", "Event", "CUDAGraph"):
            monkeypatch.setattr(torch.cuda, name, lambda **options: self)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "graph", self.graph)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.calls.append("synchronize"))

    def graph(self, graph: "FakeCuda") -> nullcontext[None]:
        with_gradients = [parameter for parameter in self._step.module.parameters() if parameter.grad is not None]
        self.calls.append(f"capture with {len(with_gradients)} gradients")
        return nullcontext()

    def wait_stream(self, other: "FakeCuda") -> None:
        self.calls.append("wait")

    def record(self) -> None:
        self.calls.append("event")

    def replay(self) -> None:
        self.calls.append("replay")

    def elapsed_time(self, end: "FakeCuda") -> float:
        return 6.0


@pytest.mark.parametrize("mode", ["forward_no_grad", "forward_backward", "step"])
def test_a_capture_runs_and_replays_in_order(monkeypatch: pytest.MonkeyPatch, mode: str):
    assembly = build_step(config(mode=mode))
    cuda = FakeCuda(monkeypatch, assembly.step)
    kernels_s = {"forward": 1e-3, "backward": 2e-3, "optimizer": 0.5e-3, "outside phases": 9.0}
    facts = graph_replay_facts(assembly, assembly.micro_batches(0), kernels_s, replays=3)
    assert cuda.calls == [
        *("wait", "wait", "capture with 0 gradients", "replay"),
        *("event", "replay", "replay", "replay", "event", "synchronize"),
    ]
    expected = {"forward_no_grad": 1e-3, "forward_backward": 3e-3, "step": 3.5e-3}[mode]
    values = {name: fact.value for name, fact in facts.items()}
    assert values["graph_replay_s"] == pytest.approx(2e-3)
    assert values["graph_replay_kernels_s"] == pytest.approx(expected)
    if assembly.step.optimizer is not None:
        assert all(group["capturable"] for group in assembly.step.optimizer.param_groups)


def test_a_failed_capture_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    assembly = build_step(config())
    FakeCuda(monkeypatch, assembly.step)

    def refuse(graph: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nand more lines")

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    [(name, fact)] = graph_replay_facts(assembly, assembly.micro_batches(0), {}).items()
    assert name == "graph_replay_failed"
    assert "operation not permitted when stream is capturing" in fact.value
    assert "\n" not in fact.value


def measured(**values: Any) -> dict[str, Any]:
    profile_config = config(device="cuda", graph_replay=True, steps=5, warmups=3, **values)
    measurement = WORKLOAD.prepare(to_plain(profile_config), lambda stage: None)
    measurement.take(5)
    findings = measurement.finish()
    assert "kernels" in findings.tables, "the profile is there whether the capture fails or not"
    return {name: fact.value for name, fact in findings.facts.items() if name.startswith("graph_replay")}


@pytest.mark.gpu
@pytest.mark.parametrize("compile", ["none", "block"])
def test_kernels_add_up_to_the_replay(compile: str):
    """The step is so long that the few microseconds between a graph's nodes do not matter."""
    large = {"d_model": 1024, "d_ff": 4096, "heads": 16, "layers": 4, "context": 512, "batch_size": 8}
    facts = measured(**large, precision="bf16_autocast", compile=compile)
    assert facts["graph_replay_phases"] == "forward, backward, optimizer"
    assert facts["graph_replay_kernels_s"] == pytest.approx(facts["graph_replay_s"], rel=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("values", "phases"),
    [
        ({"mode": "forward_no_grad"}, "forward"),
        ({"mode": "forward_backward", "accumulation": 2}, "forward, backward"),
        ({"adamw": "foreach"}, "forward, backward"),
        ({"precision": "fp16_autocast"}, "forward, backward"),
        ({"clip_grad_norm": 1.0}, "forward, backward, optimizer"),
    ],
)
def test_a_replay_has_the_phases_that_can_be_captured(values: dict[str, Any], phases: str):
    facts = measured(**values)
    assert "graph_replay_failed" not in facts
    assert facts["graph_replay_phases"] == phases
    assert facts["graph_replay_s"] > 0
    assert ("graph_replay_left_out" in facts) is ("adamw" in values or "precision" in values)
