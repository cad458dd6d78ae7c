"""FLOPs from shapes agree with torch's counter, term by term; a user's model has the counter's FLOPs."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trainstep.config.model import UserModel, size
from trainstep.config.run import MODES, RECOMPUTES, RunConfig
from trainstep.costs.transformer import PASSES, forward_flops
from trainstep.measure.step.workload import flops_facts
from trainstep.training.build import Assembly, build_step

TINY = dataclasses.replace(size("tiny"), layers=3, d_model=24, d_ff=40, heads=3, vocab_size=50)
SOURCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 5, bias=False), nn.Linear(5, 7, bias=False)

    def forward(self, x):
        return self.second(self.first(x)).square().mean()

def build(run, device):
    return Model(), lambda step: {"x": torch.ones(11, 3, device=device)}
"""


def assembled(**fields: Any) -> Assembly:
    settings = {"model": TINY, "batch_size": 2, "context": 12, "attention": "plain", **fields}
    return build_step(RunConfig(**settings))


def counted(assembly: Assembly) -> FlopCounterMode:
    with FlopCounterMode(display=False) as counter:
        assembly.step(assembly.micro_batches(0))
    return counter


def by_shape(**changes: int) -> dict[str, int]:
    return forward_flops(layers=3, d_model=24, d_ff=40, vocab_size=50, **{"batch_size": 2, "context": 12, **changes})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_flops_from_shapes_are_the_counters_without_masked_pairs(mode: str, accumulation: int):
    """The counter counts attention's matmuls in full; the causal mask leaves half of their pairs."""
    assembly = assembled(mode=mode, accumulation=accumulation)
    terms = by_shape()
    masked = terms["attention_scores_and_values"]
    from_shapes = flops_facts(assembly.run, lambda: None)["model_flops"]
    assert from_shapes.value == PASSES[mode] * accumulation * sum(terms.values())
    assert counted(assembly).get_total_flops() == from_shapes.value + PASSES[mode] * accumulation * masked


def test_each_term_is_the_counters():
    counts = {
        name: sum(ops.values()) for name, ops in counted(assembled(mode="forward_no_grad")).get_flop_counts().items()
    }

    def of(ending: str) -> int:
        return sum(flops for name, flops in counts.items() if name.endswith(ending))

    terms = by_shape()
    projections = of(".attention.qkv") + of(".attention.out")
    assert projections == terms["attention_projections"]
    assert of(".attention") - projections == 2 * terms["attention_scores_and_values"]
    assert of(".mlp") == terms["mlp"]
    assert of(".head") == terms["head"]


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", "fp32"), ("bf16", "bf16"), ("bf16_autocast", "bf16"), ("fp16_autocast", "fp16")]
)
def test_flops_from_shapes_run_no_step(precision: str, dtype: str):
    def must_not_run() -> None:
        raise AssertionError("shapes need no step")

    facts = flops_facts(RunConfig(model=TINY, precision=precision), must_not_run)
    assert facts["model_flops"].unit == "flops"
    assert isinstance(facts["model_flops"].value, int)
    assert facts["flops_source"].value == "shapes"
    assert "causal attention halved" in facts["flops_convention"].value
    assert facts["flops_dtype"].value == dtype


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UserModel:
    (tmp_path / "two_matmuls.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    return UserModel(function="two_matmuls:build")


def two_matmuls(mode: str) -> int:
    """The first layer's input needs no gradient, so its backward is one matmul and not two."""
    first_flops, second_flops = 2 * 11 * 3 * 5, 2 * 11 * 5 * 7
    forward_only = mode.startswith("forward") and "backward" not in mode
    return first_flops + second_flops if forward_only else 2 * first_flops + 3 * second_flops


@pytest.mark.parametrize("mode", MODES)
def test_a_users_model_has_the_counters_flops(users: UserModel, mode: str):
    assembly = assembled(model=users, mode=mode, accumulation=2)
    facts = flops_facts(assembly.run, lambda: assembly.step(assembly.micro_batches(0)))
    assert facts["model_flops"].value == 2 * two_matmuls(mode)
    assert facts["flops_source"].value == "torch.utils.flop_counter"
    assert "torch's FLOP counter" in facts["flops_convention"].value


@pytest.mark.slow
def test_a_compiled_model_is_counted_too(users: UserModel):
    torch._dynamo.reset()
    assembly = assembled(model=users, compile="model")
    assembly.step(assembly.micro_batches(0))
    facts = flops_facts(assembly.run, lambda: assembly.step(assembly.micro_batches(0)))
    assert facts["model_flops"].value == two_matmuls("step")


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_what_backward_computes_again_does_not_count(recompute: str):
    model = UserModel(function="recomputed_model:build")
    assembly = assembled(model=model, recompute=recompute)
    facts = flops_facts(assembly.run, lambda: assembly.step(assembly.micro_batches(0)), assembly.recomputed)
    whole = assembled(model=model)
    expected = flops_facts(whole.run, lambda: whole.step(whole.micro_batches(0)))
    assert facts["model_flops"].value == expected["model_flops"].value
