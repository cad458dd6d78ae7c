"""The built-in model's parameters, computed from its shape, are those of the module."""

import pytest
import torch

from trainstep.config.model import ModelConfig
from trainstep.config.run import PRECISIONS
from trainstep.parallel.units import parameter_sizes
from trainstep.plan.memory_terms import transformer_parameters
from trainstep.training.attention import attention_named
from trainstep.training.fused_transformer import FusedTransformer
from trainstep.training.precision import precision_named
from trainstep.training.transformer import Transformer


@pytest.mark.parametrize(("ops", "model_cls"), [("plain", Transformer), ("fused", FusedTransformer)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_parameters_from_the_shape_are_the_modules(precision: str, ops: str, model_cls: type[torch.nn.Module]):
    config = ModelConfig(d_model=8, d_ff=24, layers=3, heads=2, vocab_size=30)
    model = model_cls(config, attention=attention_named("sdpa", 4, torch.device("cpu")), context=4)
    model.to(precision_named(precision).weights)
    parameters = transformer_parameters(config, precision, ops)
    assert list(parameters) == parameter_sizes(model)
    assert sum(parameter.numel for parameter in parameters) == config.parameters
