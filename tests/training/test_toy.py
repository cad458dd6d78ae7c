"""The toy and its batches."""

import pytest
import torch

from trainstep.config.numerics import NumericsConfig, ToyModel
from trainstep.training.toy import Toy, build


def test_it_is_the_textbooks():
    names = [name for name, _ in Toy().named_parameters()]
    assert names == ["fc1.weight", "norm.weight", "fc2.weight"]
    assert [type(child).__name__ for child in Toy().children()] == ["Linear", "ReLU", "LayerNorm", "Linear"]


@pytest.mark.parametrize(("precision", "dtype"), [("fp16_autocast", torch.float32), ("bf16", torch.bfloat16)])
def test_batches_are_a_function_of_the_step(precision: str, dtype: torch.dtype):
    run = NumericsConfig(model=ToyModel(), precision=precision, batch_size=2, context=3).run()
    toy, next_batch = build(run, torch.device("cpu"))
    first, again, second = next_batch(0), next_batch(0), next_batch(1)
    assert first["x_BSC"].shape == (2, 3, 20)
    assert first["x_BSC"].dtype == dtype
    assert torch.equal(first["x_BSC"], again["x_BSC"])
    assert not torch.equal(first["x_BSC"], second["x_BSC"])
    assert toy.to(dtype)(**first).dim() == 0
