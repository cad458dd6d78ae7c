"""What a precision is in numbers: dtypes of weights, of what a matmul returns, of the loss; the loss scaler's flow."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from trainstep.config.presets import size
from trainstep.config.run import PRECISIONS, RunConfig
from trainstep.training.build import Assembly, build_step
from trainstep.training.precision import precision_named
from trainstep.training.step import TrainStep

TINY = dataclasses.replace(size("tiny"), layers=1, d_model=16, d_ff=32)
ON_CPU = [name for name in PRECISIONS if name != "tf32"]


def assembled(precision: str, device: str = "cpu", **fields: object) -> Assembly:
    values = {"batch_size": 2, "context": 8, "attention": "plain", **fields}
    return build_step(RunConfig(model=TINY, precision=precision, device=device, **values))


def test_every_precision_is_known():
    assert all(precision_named(name) for name in PRECISIONS)
    assert [name for name in PRECISIONS if precision_named(name).matmul == "high"] == ["tf32"]
    assert [name for name in PRECISIONS if precision_named(name).scales_loss] == ["fp16_autocast"]


def check_dtypes(precision: str, device: str) -> None:
    assembly = assembled(precision, device)
    seen: dict[str, torch.dtype] = {}
    for name in ("head", "norm", "blocks.0.mlp.down", "blocks.0.attention.qkv", "embedding"):
        hook = lambda _module, _inputs, output, name=name: seen.update({name: output.dtype})  # noqa: E731
        assembly.module.get_submodule(name).register_forward_hook(hook)
    loss = assembly.step(assembly.micro_batches(0))
    weights = torch.bfloat16 if precision in ("bf16", "bf16_master") else torch.float32
    products = {"bf16_autocast": torch.bfloat16, "fp16_autocast": torch.float16}.get(precision, weights)
    assert {parameter.dtype for parameter in assembly.module.parameters()} == {weights}
    assert {seen[name] for name in ("head", "blocks.0.mlp.down", "blocks.0.attention.qkv")} == {products}
    assert {seen["norm"], seen["embedding"]} == {weights}
    assert loss.dtype == torch.float32
    assert assembly.module.cos.dtype == torch.float32, "angles keep their digits whatever the weights"
    states = assembly.step.optimizer.state.values()
    assert {s[name].dtype for s in states for name in ("exp_avg", "exp_avg_sq")} == {
        torch.float32 if precision == "bf16_master" else weights
    }
    assert torch.get_float32_matmul_precision() == ("high" if precision == "tf32" else "highest")


@pytest.mark.parametrize("precision", ON_CPU)
def test_dtypes(precision: str):
    check_dtypes(precision, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_dtypes_on_a_gpu(precision: str):
    check_dtypes(precision, "cuda")
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("precision", ON_CPU)
def test_it_learns_the_batch(precision: str):
    assembly = assembled(precision, learning_rate=1e-2)
    batch = assembly.micro_batches(0)
    losses = [assembly.step(batch).item() for _ in range(15)]
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("mode", ["forward", "forward_no_grad", "forward_backward"])
def test_without_an_optimizer_nothing_is_scaled(mode: str):
    assert assembled("fp16_autocast", mode=mode).step.scaler is None
    assert assembled("fp16_autocast").step.scaler is not None


class Times(nn.Module):
    """loss = weight x factor: its gradient is the factor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, factor: Tensor) -> Tensor:
        return (self.weight * factor).sum()


def scaled_step(clip_grad_norm: float | None = None) -> TrainStep:
    module = Times()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    sgd = torch.optim.SGD(module.parameters(), lr=1.0)
    return TrainStep(module, sgd, scaler=scaler, clip_grad_norm=clip_grad_norm)


def test_the_loss_is_scaled_and_the_gradient_unscaled():
    step = scaled_step()
    arrived: list[Tensor] = []
    step.module.weight.register_post_accumulate_grad_hook(lambda weight: arrived.append(weight.grad.clone()))
    loss = step([{"factor": torch.full((3,), 0.5)}])
    assert arrived[0].tolist() == [512.0] * 3
    assert step.module.weight.tolist() == [0.5] * 3
    assert loss.item() == 1.5, "the loss that is returned is not the scaled one"


def test_clipping_comes_after_unscaling():
    step = scaled_step(clip_grad_norm=1.0)
    step([{"factor": torch.full((3,), 0.5)}])  # of norm 0.87: nothing to clip, unless still scaled
    assert step.module.weight.tolist() == [0.5] * 3


@pytest.mark.parametrize("clip_grad_norm", [None, 1.0])
def test_an_overflow_skips_the_step_and_lowers_the_scale(clip_grad_norm: float | None):
    step = scaled_step(clip_grad_norm)
    step([{"factor": torch.full((3,), 1e38)}])
    assert step.module.weight.tolist() == [1.0] * 3
    assert step.scaler.get_scale() == 512.0
    assert step.module.weight.grad is None
    step([{"factor": torch.full((3,), 0.5)}])
    assert step.module.weight.tolist() == [0.5] * 3
