"""A captured training step has the losses of the step, and says what is left out and why."""

from typing import Any

import pytest
import torch

from trainstep.capture import NotCapturable
from trainstep.config.parsing import build_run
from trainstep.config.run import RunConfig
from trainstep.training.build import Assembly, build_step

SHAPE = {"layers": 2, "d_model": 16, "d_ff": 32, "heads": 2, "vocab_size": 40, "context": 8, "batch_size": 2}


def run(**values: Any) -> RunConfig:
    return build_run({**SHAPE, "device": "cpu", "adamw": "trainstep", **values})


def losses(assembly: Assembly, steps: int = 8) -> list[float]:
    return [assembly.take(assembly.micro_batches(step)).item() for step in range(steps)]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"adamw": "fused"},
        {"adamw": "loop", "capture": "auto"},
        {"accumulation": 2},
        {"clip_grad_norm": 0.5},
        {"precision": "bf16_autocast"},
        {"precision": "bf16_master"},
        {"recompute": "block"},
        {"update": "in_backward"},
        {"update": "in_backward", "precision": "bf16_master", "recompute": "block", "ops": "fused"},
        {"mode": "forward_no_grad"},
        {"attention": "plain"},
    ],
    ids=str,
)
def test_a_captured_step_has_the_same_losses(values: dict[str, Any]):
    captured = build_step(run(**{"capture": "step", **values}))
    assert losses(captured) == losses(build_step(run(**{**values, "capture": "none"})))
    assert captured.captured is not None
    assert captured.captured.what == ("forward and backward" if values.get("adamw") == "loop" else "step")
    assert captured.captured.is_settled(captured.micro_batches(0))


def test_captured_forward_and_backward_give_the_same_gradients():
    def gradients(capture: str) -> list[torch.Tensor]:
        assembly = build_step(run(mode="forward_backward", capture=capture))
        for step in range(6):
            assembly.take(assembly.micro_batches(step))
            own_gradients = [parameter.grad for parameter in assembly.module.parameters()]
            assert all(gradient is not None for gradient in own_gradients)
            copies = [gradient.clone() for gradient in own_gradients if gradient is not None]
            assembly.step.clear_gradients()
        return copies

    for captured, expected in zip(gradients("step"), gradients("none"), strict=True):
        assert torch.equal(captured, expected)


def test_auto_says_what_is_left_out():
    assembly = build_step(run(adamw="foreach", capture="auto"))
    losses(assembly, 5)
    assert assembly.captured is not None
    assert assembly.captured.what == "forward and backward"
    assert "counts its steps on the host" in (assembly.captured.left_out or "")


def test_a_step_that_waits_is_left_out_or_an_error():
    values = {"precision": "fp16_autocast"}  # on a CPU trainstep's AdamW asks the host whether gradients are finite
    assembly = build_step(run(capture="auto", **values))
    assert losses(assembly) == losses(build_step(run(**values)))
    assert assembly.captured is not None
    assert assembly.captured.what == "nothing"
    assert "found_inf.item()" in (assembly.captured.left_out or "")
    with pytest.raises(NotCapturable, match=r"ops/adamw\.py:\d+"):
        losses(build_step(run(capture="step", **values)))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"sync": "phase"},
            "sync: the host cannot wait for a phase inside a captured step; take sync step, or capture none",
        ),
        ({"compile": "block"}, "capture: on a CPU a step is recorded by its operators, which compile block hides"),
        ({"adamw": "loop"}, "capture: AdamW's loop counts its steps on the host; take adamw fused or trainstep"),
        ({"capture": "all"}, "capture: 'all' is not known; known: none, auto, step"),
    ],
)
def test_impossible_configs_are_refused(values: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        run(**{"capture": "step", **values})


GPU_SHAPE = {"layers": 2, "d_model": 128, "d_ff": 256, "heads": 4, "vocab_size": 500, "context": 64, "batch_size": 2}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"compile": "block"},
        {"compile": "model"},
        {"compile": "block", "precision": "bf16_autocast", "attention": "trainstep"},
        {"precision": "fp16_autocast"},
        {"precision": "bf16_master"},
        {"update": "in_backward", "precision": "bf16_master", "ops": "fused"},
        {"update": "in_backward", "compile": "block"},
        {"adamw": "fused"},
        {"adamw": "loop", "capture": "auto"},
        {"accumulation": 2, "clip_grad_norm": 0.5},
        {"recompute": "block"},
        {"recompute": "block", "compile": "model"},
        {"attention": "flex", "compile": "model"},
    ],
    ids=str,
)
def test_a_step_captured_on_a_gpu_differs_like_eager_runs(values: dict[str, Any]):
    """Over 20 steps the losses are the same to the bit, or within four times what two eager runs differ by."""

    def trained(capture: str) -> tuple[list[float], Assembly]:
        assembly = build_step(
            build_run({**GPU_SHAPE, "device": "cuda", "adamw": "trainstep", **values, "capture": capture})
        )
        return losses(assembly, 20), assembly

    eager, again = trained("none")[0], trained("none")[0]
    captured, assembly = trained(str(values.get("capture", "step")))
    assert assembly.captured is not None
    assert assembly.captured.is_settled(assembly.micro_batches(0))
    assert assembly.captured.what == ("forward and backward" if values.get("adamw") == "loop" else "step")
    spread = max(abs(one - other) for one, other in zip(eager, again, strict=True))
    assert max(abs(one - other) for one, other in zip(captured, eager, strict=True)) <= 4 * spread
