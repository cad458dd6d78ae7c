"""The model of fused ops is the built-in model: same weights under a seed, same loss and gradients.

test_fused_model_in_the_interpreter runs this file with the kernels in Triton's interpreter.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from interpreter import in_the_interpreter
from numerics import assert_as_accurate_as
from op_check import DEVICES, INTERPRETED, interpret
from trainstep.config.model import ModelConfig
from trainstep.config.run import RunConfig
from trainstep.ops import linear_cross_entropy, rms_norm, rotary, swiglu
from trainstep.training.attention import attention_named
from trainstep.training.build import build_step
from trainstep.training.fused_transformer import FusedTransformer
from trainstep.training.transformer import Transformer

CONFIG = ModelConfig(d_model=48, d_ff=80, layers=3, heads=3, vocab_size=61)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, linear_cross_entropy, rms_norm, rotary, swiglu)


def built(model_cls: type[nn.Module], device: str = "cpu", context: int = 17) -> nn.Module:
    torch.manual_seed(3)
    with torch.device(device):
        return model_cls(CONFIG, attention=attention_named("plain", context, torch.device(device)), context=context)


def both_with_large_weights(device: str) -> tuple[nn.Module, nn.Module]:
    """Both models with weights far from their initial scale, so that every part contributes to the loss."""
    plain, fused = built(Transformer, device), built(FusedTransformer, device)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_(std=0.2).add_(1.0 if parameter.dim() == 1 else 0.0)
    fused.load_state_dict(plain.state_dict())
    return plain, fused


def tokens(device: str = "cpu") -> tuple[Tensor, Tensor]:
    drawn = torch.randint(61, (2, 18), generator=torch.Generator().manual_seed(2)).to(device)
    return drawn[:, :-1], drawn[:, 1:]


def by_plain_names(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of a joint gate and up, as two."""
    split: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        if "gate_up" in name:
            for part, half in zip(("gate", "up"), gradient.chunk(2), strict=True):
                split[name.replace("gate_up", part)] = half
        else:
            split[name] = gradient
    return split


def loss_and_gradients(model: nn.Module, device: str, autocast: torch.dtype | None = None) -> dict[str, Tensor]:
    model.zero_grad()
    with torch.autocast(device, autocast or torch.bfloat16, enabled=autocast is not None):
        loss = model(*tokens(device))
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return {"loss": loss.detach(), **by_plain_names(gradients)}  # type: ignore[arg-type]


@pytest.mark.parametrize(("options", "sum_dtype"), [({}, torch.float32), ({"loss_sum_dtype": "own"}, None)])
def test_the_loss_sums_in_the_dtype_that_the_run_asks_for(options: dict[str, str], sum_dtype: torch.dtype | None):
    run = RunConfig(model=CONFIG, context=16, ops="fused", **options)  # type: ignore[arg-type]
    assert build_step(run).module.head.options["sum_dtype"] == sum_dtype  # type: ignore[union-attr]


@pytest.mark.parametrize("device", DEVICES)
def test_a_seed_gives_the_same_weights(device: str):
    plain, fused = (dict(built(cls, device).named_parameters()) for cls in (Transformer, FusedTransformer))
    parts = by_plain_names({name: parameter.detach() for name, parameter in fused.items()})
    assert list(parts) == list(plain)
    for name, parameter in plain.items():
        torch.testing.assert_close(parts[name], parameter.detach(), rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_loss_and_gradients_are_as_accurate_as_the_plain_models(autocast: torch.dtype | None, device: str):
    plain, fused = both_with_large_weights(device)
    if INTERPRETED and autocast:
        pytest.skip("the interpreter cuts bf16 off instead of rounding it, and errors add up")
    results = loss_and_gradients(fused, device, autocast)
    same_dtype = loss_and_gradients(plain, device, autocast)
    exact = loss_and_gradients(plain.double(), device)
    assert results.keys() == same_dtype.keys()
    for name, result in results.items():
        assert_as_accurate_as(result, same_dtype[name], exact[name].double(), name)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"compile": "block", "attention": "plain"}, marks=pytest.mark.slow),
        pytest.param({"compile": "model"}, marks=pytest.mark.slow),
        {"recompute": "block"},
        {"capture": "step"},
        {"precision": "bf16_master", "adamw": "trainstep"},
        {"mode": "forward_no_grad"},
    ],
    ids=str,
)
def test_it_trains_with_every_option(options: dict[str, Any]):
    run = {"model": CONFIG, "batch_size": 2, "context": 16, "device": "cpu", "learning_rate": 1e-2, **options}
    losses = {}
    for ops in ("plain", "fused"):
        assembly = build_step(RunConfig(**run, ops=ops))
        losses[ops] = torch.stack([assembly.take(assembly.micro_batches(step % 2)) for step in range(6)])
    torch.testing.assert_close(losses["fused"], losses["plain"], rtol=2e-2 if "precision" in options else 1e-4, atol=0)
    assert options.get("mode") or losses["fused"][-1] < losses["fused"][1], "it learns"


def test_a_model_of_ones_own_has_its_own_ops():
    from trainstep.config.model import UserModel

    with pytest.raises(ValueError, match="ops: a model of your own brings its own ops"):
        RunConfig(model=UserModel(function="mine:build"), ops="fused")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_fused_model_in_the_interpreter():
    assert in_the_interpreter("tests/training/test_fused_transformer.py", "-k", "weights or accurate") >= 2
