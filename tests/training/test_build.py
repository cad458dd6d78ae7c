"""A step built from a RunConfig: seeds, batches, users' models, and compilation that changes only the speed."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from numerics import assert_as_accurate_as
from trainstep.config.model import UserModel, size
from trainstep.config.run import COMPILES, MODES, RunConfig
from trainstep.training.build import Assembly, build_step, parameter_count

TINY = dataclasses.replace(size("tiny"), layers=1, d_model=32, d_ff=64)
SOURCE = """
import torch
from torch import nn

class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("places", torch.arange(4.0))

    def forward(self, x):
        return (self.second(self.first(x) + self.places) * self.turns.imag).float().square().mean()

def build(run, device):
    dtype = torch.bfloat16 if run.precision == "bf16" else torch.float32
    return Twice(), lambda step: {"x": torch.full((2, 4), float(step), dtype=dtype, device=device)}

def half_frozen(run, device):
    module, next_batch = build(run, device)
    module.first.bias.requires_grad_(False)
    return module, next_batch
"""


def assembled(**fields: object) -> Assembly:
    return build_step(RunConfig(**{"model": TINY, "batch_size": 2, "context": 16, **fields}))


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UserModel:
    (tmp_path / "twice_linear.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    return UserModel(function="twice_linear:build")


def weights(assembly: Assembly) -> Tensor:
    return torch.cat([parameter.detach().flatten().double() for parameter in assembly.module.parameters()])


def test_the_seed_decides_weights_and_batches():
    first, same_seed, other_seed = assembled(seed=3), assembled(seed=3), assembled(seed=4)
    assert torch.equal(weights(first), weights(same_seed))
    assert not torch.equal(weights(first), weights(other_seed))
    assert [first.step(first.micro_batches(i)) for i in range(3)] == [
        same_seed.step(same_seed.micro_batches(i)) for i in range(3)
    ]


@pytest.mark.parametrize(
    "other",
    [
        {"mode": "forward"},
        {"attention": "plain"},
        {"precision": "bf16"},
        {"precision": "bf16_master"},
        {"adamw": "loop"},
        {"clip_grad_norm": 1.0},
    ],
)
def test_other_options_get_the_same_batches(other: dict[str, object]):
    for step in (0, 5):
        default, changed = (assembly.micro_batches(step) for assembly in (assembled(), assembled(**other)))
        assert all(torch.equal(a[name], b[name]) for a, b in zip(default, changed, strict=True) for name in a)


def test_micro_batches_are_consecutive_batches():
    single, accumulated = assembled(), assembled(accumulation=3)
    expected = [single.micro_batches(step)[0]["tokens"] for step in range(6)]
    tokens = [batch["tokens"] for step in range(2) for batch in accumulated.micro_batches(step)]
    assert all(torch.equal(a, b) for a, b in zip(tokens, expected, strict=True))
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(tokens, 2))


def test_batches_are_from_the_text(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(bytes(range(256)))
    batch = assembled(data=str(tmp_path)).micro_batches(0)[0]
    assert (batch["targets"] - batch["tokens"] == 1).all()
    with pytest.raises(ValueError, match="data: 256 bytes of text are fewer than a sequence of 256 tokens"):
        assembled(data=str(tmp_path), context=256)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_runs(mode: str):
    assembly = assembled(mode=mode)
    assert (assembly.step.optimizer is not None) == (mode == "step")
    assert assembly.module.training == (mode != "forward_no_grad")
    assert assembly.step(assembly.micro_batches(0)).isfinite()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_users_model_runs_with_its_batches(users: UserModel, precision: str):
    assembly = assembled(model=users, precision=precision, accumulation=2)
    assert [batch["x"][0, 0].item() for batch in assembly.micro_batches(3)] == [6.0, 7.0]
    assert assembly.step(assembly.micro_batches(0)).isfinite()
    assert parameter_count(assembly.module) == 4 * 4 + 2 * 4, "a tied weight counts once"
    assert assembly.module.second.weight is assembly.module.first.weight
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    assert {tensor.dtype for tensor in (*assembly.module.parameters(), assembly.module.places)} == {dtype}
    assert assembly.module.turns.dtype == torch.complex64
    assert assembly.module.turns.imag.abs().sum() > 0


def test_compiling_blocks_of_a_model_without_blocks_is_refused(users: UserModel):
    with pytest.raises(ValueError, match="compile: block needs a model"):
        assembled(model=users, compile="block")


def test_frozen_weights_do_not_change(users: UserModel):
    assembly = assembled(model=UserModel(function="twice_linear:half_frozen"))
    before = {name: parameter.clone() for name, parameter in assembly.module.named_parameters()}
    assembly.step(assembly.micro_batches(1))
    changed = {n for n, parameter in assembly.module.named_parameters() if not torch.equal(parameter, before[n])}
    assert changed == {"second.bias", "first.weight"}


@pytest.mark.parametrize("mode", ["forward_backward", "step"])
def test_a_model_that_trains_nothing_has_no_backward(mode: str):
    frozen = UserModel(function="numerics_models:frozen")
    with pytest.raises(ValueError, match="model: none of its parameters is trained"):
        assembled(model=frozen, mode=mode)
    assembly = assembled(model=frozen, mode="forward")
    assert assembly.step(assembly.micro_batches(0)).isfinite()


def check_compiled(compile: str, device: str, layers: int = 1, **fields: object) -> None:
    """Check loss and gradients against eager fp32 by eager fp64, and that there is one graph without breaks."""
    torch._dynamo.reset()
    counters.clear()
    fields = {"mode": "forward_backward", "device": device, "model": dataclasses.replace(TINY, layers=layers), **fields}
    results = []
    for compile_option, dtype in ((compile, torch.float32), ("none", torch.float32), ("none", torch.float64)):
        exact = {"attention": "plain"} if dtype == torch.float64 else {}
        assembly = assembled(**{**fields, "compile": compile_option, **exact})
        for tensor in (*assembly.module.parameters(), *assembly.module.buffers()):
            tensor.data = tensor.data.to(dtype)
        loss = assembly.step(assembly.micro_batches(0))
        scale = 100  # gradients of the mean of many tokens are small beside the loss
        parts = [loss.flatten(), *(scale * parameter.grad.flatten() for parameter in assembly.module.parameters())]
        results.append(torch.cat(parts).cpu())
    assert_as_accurate_as(*results, what=compile)
    assert counters["stats"]["unique_graphs"] == 1, "blocks share one compilation"
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compile", "layers", "attention"),
    [
        ("block", 1, "plain"),
        ("block", 10, "sdpa"),  # more blocks than torch would compile one by one
        ("block", 1, "sdpa_math"),
        ("model", 1, "plain"),
        ("model", 1, "sdpa"),
    ],
)
def test_compiled_code_is_as_accurate_as_eager(compile: str, layers: int, attention: str):
    check_compiled(compile, "cpu", layers, attention=attention)


@pytest.mark.gpu
@pytest.mark.parametrize("compile", ["block", "model"])
@pytest.mark.parametrize("attention", ["plain", "sdpa", "sdpa_efficient"])
def test_compiled_code_on_a_gpu_is_as_accurate_as_eager(compile: str, attention: str):
    check_compiled(compile, "cuda", 3, attention=attention)


@pytest.mark.slow
@pytest.mark.parametrize("compile", COMPILES)
def test_compiled_code_has_no_spans(compile: str):
    torch._dynamo.reset()
    assembly = assembled(compile=compile, mode="forward_no_grad")
    assembly.step(assembly.micro_batches(0))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        assembly.step(assembly.micro_batches(0))
    names = {event.name for event in profiler.events()}
    assert "forward" in names
    assert ("mlp" in names) == (compile == "none")
    assert ("layer 0" in names) == ("embedding" in names) == (compile != "model")
