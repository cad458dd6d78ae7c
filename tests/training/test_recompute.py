import dataclasses

import pytest
import torch
from torch import nn

from trainstep.config.model import ModelConfig
from trainstep.config.run import RunConfig
from trainstep.training.build import Assembly, build_step
from trainstep.training.recompute import recompute_blocks

RUN = RunConfig(
    model=ModelConfig(d_model=16, d_ff=32, layers=3, heads=2, vocab_size=64), batch_size=2, context=8, mode="step"
)


def trained(**fields: object) -> tuple[list[float], Assembly]:
    """The losses of three steps, and the gradients of a fourth's forward and backward."""
    assembly = build_step(dataclasses.replace(RUN, **fields))
    losses = [assembly.step(assembly.micro_batches(step)).item() for step in range(3)]
    assembly.module(**assembly.micro_batches(3)[0]).backward()
    return losses, assembly


@pytest.mark.parametrize("precision", ["fp32", "bf16_autocast"])
def test_same_losses_and_gradients(precision: str):
    losses, kept = trained(precision=precision)
    again, recomputed = trained(precision=precision, recompute="block")
    assert again == losses
    pairs = zip(kept.module.named_parameters(), recomputed.module.named_parameters(), strict=True)
    for (name, one), (other_name, other) in pairs:
        assert name == other_name
        assert torch.equal(one.grad, other.grad), name


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


def test_keeps_less():
    assert saved_bytes("block") < 0.5 * saved_bytes("none")


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match="ModuleList"):
        recompute_blocks(nn.Linear(2, 2))


@pytest.mark.slow
def test_compiles():
    losses, _ = trained(recompute="block")
    again, _ = trained(recompute="block", compile="model")
    assert again == pytest.approx(losses, rel=1e-5)
