"""The toy model has the textbook's modules, and its batches depend only on the step."""

import pytest
import torch

from trainstep.config.numerics import NumericsConfig, ToyModel
from trainstep.training.toy import Toy, build


def test_the_toy_has_the_textbooks_modules():
    names = [name for name, _ in Toy().named_parameters()]
    assert names == ["fc1.weight", "norm.weight", "fc2.weight"]
    assert [type(child).__name__ for child in Toy().children()] == ["Linear", "ReLU", "LayerNorm", "Linear"]


@pytest.mark.parametrize(("precision", "dtype"), [("fp16_autocast", torch.float32), ("bf16", torch.bfloat16)])
def test_batches_depend_only_on_the_step(precision: str, dtype: torch.dtype):
    run = NumericsConfig(model=ToyModel(), precision=precision, batch_size=2, context=3).run()
    toy, next_batch = build(run, torch.device("cpu"))
    first, repeated, second = next_batch(0), next_batch(0), next_batch(1)
    assert first["x_BSC"].shape == (2, 3, 20)
    assert first["x_BSC"].dtype == dtype
    assert torch.equal(first["x_BSC"], repeated["x_BSC"])
    assert not torch.equal(first["x_BSC"], second["x_BSC"])
    assert toy.to(dtype)(**first).dim() == 0
