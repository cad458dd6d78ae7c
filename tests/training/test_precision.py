"""Each precision has its dtypes of weights, matmuls, loss and optimizer state; losses of fp16 are scaled."""

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainstep.config.model import size
from trainstep.config.run import OPS, PRECISIONS, RunConfig
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
    outputs: dict[str, torch.dtype] = {}
    for name in ("head", "norm", "blocks.0.mlp.down", "blocks.0.attention.qkv", "embedding"):
        hook = lambda _module, _inputs, output, name=name: outputs.update({name: output.dtype})  # noqa: E731
        assembly.module.get_submodule(name).register_forward_hook(hook)
    loss = assembly.step(assembly.micro_batches(0))
    weights = torch.bfloat16 if precision in ("bf16", "bf16_master") else torch.float32
    products = {"bf16_autocast": torch.bfloat16, "fp16_autocast": torch.float16}.get(precision, weights)
    assert {parameter.dtype for parameter in assembly.module.parameters()} == {weights}
    assert {outputs[name] for name in ("head", "blocks.0.mlp.down", "blocks.0.attention.qkv")} == {products}
    assert {outputs["norm"], outputs["embedding"]} == {weights}
    assert loss.dtype == torch.float32
    assert assembly.module.cos.dtype == torch.float32, "rotation tables stay in fp32 for any weights"
    states = assembly.step.optimizer.state.values()
    assert {s[name].dtype for s in states for name in ("exp_avg", "exp_avg_sq")} == {
        torch.float32 if precision == "bf16_master" else weights
    }
    assert torch.get_float32_matmul_precision() == ("high" if precision == "tf32" else "highest")


@pytest.mark.parametrize("precision", ON_CPU)
def test_each_precision_has_its_dtypes(precision: str):
    check_dtypes(precision, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_each_precision_has_its_dtypes_on_a_gpu(precision: str):
    check_dtypes(precision, "cuda")
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("precision", ON_CPU)
def test_every_precision_learns_a_batch(precision: str):
    assembly = assembled(precision, learning_rate=1e-2)
    batch = assembly.micro_batches(0)
    losses = [assembly.step(batch).item() for _ in range(15)]
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("mode", ["forward", "forward_no_grad", "forward_backward"])
def test_without_an_optimizer_nothing_is_scaled(mode: str):
    assert assembled("fp16_autocast", mode=mode).step.scaler is None
    assert assembled("fp16_autocast").step.scaler is not None


class CastsOfWeights(TorchDispatchMode):
    """Counts, by number of dimensions, the casts of parameters to another dtype."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        self.casts: Counter[int] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        if function is torch.ops.aten._to_copy.default:
            self.casts[arguments[0].dim()] += arguments[0].untyped_storage().data_ptr() in self._weights
        return result


def casts_of_weights(precision: str, ops: str, device: str) -> Counter[int]:
    assembly = assembled(precision, device, ops=ops, adamw="trainstep")
    assembly.step(assembly.micro_batches(0))
    with CastsOfWeights(assembly.module) as counted:
        assembly.step.compute(assembly.micro_batches(1))
    return counted.casts


@pytest.mark.parametrize("ops", OPS)
def test_master_weights_leave_no_matrix_to_cast(ops: str):
    """Autocast casts every matrix in every forward; AdamW has written bf16 already."""
    assert casts_of_weights("bf16_autocast", ops, "cpu")[2] >= 5
    assert casts_of_weights("bf16_master", ops, "cpu")[2] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("ops", OPS)
def test_master_weights_leave_nothing_to_cast_on_a_gpu(ops: str):
    """Fused norms take their vectors as they are; the plain norm computes with them in fp32."""
    casts = casts_of_weights("bf16_master", ops, "cuda")
    assert casts[2] == 0
    assert casts.total() == (0 if ops == "fused" else casts[1])


class Times(nn.Module):
    """A module with loss = weight x factor, so the weight's gradient is the factor."""

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
    gradients: list[Tensor] = []
    step.module.weight.register_post_accumulate_grad_hook(lambda weight: gradients.append(weight.grad.clone()))
    loss = step([{"factor": torch.full((3,), 0.5)}])
    assert gradients[0].tolist() == [512.0] * 3
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
