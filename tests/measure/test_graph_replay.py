"""A step replayed as one CUDA graph: what is captured and said, and on a GPU that its kernels take what the replay takes."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from trainstep.config.parsing import build_config, to_plain
from trainstep.config.profile import ProfileConfig
from trainstep.measure.graph_replay import graph_replay_facts, reason_without_optimizer
from trainstep.measure.profile import WORKLOAD
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
def test_what_is_left_out(values: dict[str, Any], words: str):
    found = reason_without_optimizer(config(**values))
    assert words in found
    assert bool(found) is bool(words)


def test_a_cpu_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="graph_replay: a CUDA graph needs a GPU; leave it out on a CPU"):
        config(graph_replay=True)


class FakeCuda:
    """Stands in torch.cuda's place where there is no GPU: notes what is asked of it, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: TrainStep) -> None:
        self.noted: list[str] = []
        self._step = step
        for name in ("Stream", "Event", "CUDAGraph"):
            monkeypatch.setattr(torch.cuda, name, lambda **options: self)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "graph", self.graph)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.noted.append("synchronize"))

    def graph(self, graph: "FakeCuda") -> nullcontext[None]:
        held = [parameter for parameter in self._step.module.parameters() if parameter.grad is not None]
        self.noted.append(f"capture with {len(held)} gradients")
        return nullcontext()

    def wait_stream(self, other: "FakeCuda") -> None:
        self.noted.append("wait")

    def record(self) -> None:
        self.noted.append("event")

    def replay(self) -> None:
        self.noted.append("replay")

    def elapsed_time(self, end: "FakeCuda") -> float:
        return 6.0


@pytest.mark.parametrize("mode", ["forward_no_grad", "forward_backward", "step"])
def test_the_order_of_a_capture(monkeypatch: pytest.MonkeyPatch, mode: str):
    assembly = build_step(config(mode=mode))
    cuda = FakeCuda(monkeypatch, assembly.step)
    kernels_s = {"forward": 1e-3, "backward": 2e-3, "optimizer": 0.5e-3, "outside phases": 9.0}
    facts = graph_replay_facts(assembly, assembly.micro_batches(0), kernels_s, replays=3)
    assert cuda.noted == [
        *("wait", "wait", "capture with 0 gradients", "replay"),
        *("event", "replay", "replay", "replay", "event", "synchronize"),
    ]
    expected = {"forward_no_grad": 1e-3, "forward_backward": 3e-3, "step": 3.5e-3}[mode]
    values = {name: fact.value for name, fact in facts.items()}
    assert values["graph_replay_s"] == pytest.approx(2e-3)
    assert values["graph_replay_kernels_s"] == pytest.approx(expected)
    if assembly.step.optimizer is not None:
        assert all(group["capturable"] for group in assembly.step.optimizer.param_groups)


def test_what_cannot_be_captured_is_a_sentence(monkeypatch: pytest.MonkeyPatch):
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
    given = config(device="cuda", graph_replay=True, steps=5, warmups=3, **values)
    measurement = WORKLOAD.prepare(to_plain(given), lambda stage: None)
    measurement.take(5)
    found = measurement.finish()
    assert "kernels" in found.tables, "whatever the capture does, the profile is there"
    return {name: fact.value for name, fact in found.facts.items() if name.startswith("graph_replay")}


@pytest.mark.gpu
@pytest.mark.parametrize("compile", ["none", "block"])
def test_kernels_add_up_to_the_replay(compile: str):
    """A step long enough that the few microseconds between a graph's nodes are no part of it."""
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
def test_phases_of_a_replay(values: dict[str, Any], phases: str):
    facts = measured(**values)
    assert "graph_replay_failed" not in facts
    assert facts["graph_replay_phases"] == phases
    assert facts["graph_replay_s"] > 0
    assert ("graph_replay_left_out" in facts) is ("adamw" in values or "precision" in values)
