import dataclasses

import pytest
import torch
from torch import nn

from trainstep.config.model import ModelConfig
from trainstep.config.run import RunConfig
from trainstep.training.build import Assembly, build_step
from trainstep.training.user_model import recompute_blocks

RUN = RunConfig(
    model=ModelConfig(d_model=16, d_ff=32, layers=3, heads=2, vocab_size=64), batch_size=2, context=8, mode="step"
)


def trained(**fields: object) -> tuple[list[float], Assembly]:
    """Losses of three steps, and the assembly with the gradients of a fourth forward and backward."""
    assembly = build_step(dataclasses.replace(RUN, **fields))
    losses = [assembly.step(assembly.micro_batches(step)).item() for step in range(3)]
    assembly.module(**assembly.micro_batches(3)[0]).backward()
    return losses, assembly


@pytest.mark.parametrize("precision", ["fp32", "bf16_autocast"])
def test_recomputing_changes_no_loss_and_no_gradient(precision: str):
    losses, stored = trained(precision=precision)
    recomputed_losses, recomputed = trained(precision=precision, recompute="block")
    assert recomputed_losses == losses
    pairs = zip(stored.module.named_parameters(), recomputed.module.named_parameters(), strict=True)
    for (name, parameter), (other_name, recomputed_parameter) in pairs:
        assert name == other_name
        assert torch.equal(parameter.grad, recomputed_parameter.grad), name


def saved_bytes(recompute: str) -> int:
    assembly = build_step(dataclasses.replace(RUN, recompute=recompute))
    saved = 0

    def note(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal saved
        saved += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        assembly.module(**assembly.micro_batches(0)[0])
    return saved


def test_recomputing_saves_less_for_backward():
    assert saved_bytes("block") < 0.5 * saved_bytes("none")


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match="ModuleList"):
        recompute_blocks(nn.Linear(2, 2))


@pytest.mark.slow
def test_a_recomputed_model_compiles():
    losses, _ = trained(recompute="block")
    compiled_losses, _ = trained(recompute="block", compile="model")
    assert compiled_losses == pytest.approx(losses, rel=1e-5)
