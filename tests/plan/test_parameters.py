"""The built-in model's parameters from its shape are those of the module."""

import pytest
import torch

from trainstep.config.model import ModelConfig
from trainstep.config.run import PRECISIONS
from trainstep.parallel.units import parameter_sizes
from trainstep.plan.parameters import transformer_parameters
from trainstep.training.attention import attention_named
from trainstep.training.precision import precision_named
from trainstep.training.transformer import Transformer


@pytest.mark.parametrize("precision", PRECISIONS)
def test_name_by_name(precision: str):
    config = ModelConfig(d_model=8, d_ff=24, layers=3, heads=2, vocab_size=30)
    model = Transformer(config, attention=attention_named("sdpa", 4, torch.device("cpu")), context=4)
    model.to(precision_named(precision).weights)
    found = transformer_parameters(config, precision)
    assert list(found) == parameter_sizes(model)
    assert sum(one.numel for one in found) == config.parameters
