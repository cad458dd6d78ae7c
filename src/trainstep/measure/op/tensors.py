"""Makes the tensors of an op: random normal inputs in the layout that a model gives them, and the gradients of its outputs."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trainstep.config.op import UPDATES, OpConfig
from trainstep.ops.reference import rotary_tables
from trainstep.training.precision import DTYPES

_THETA = 10_000.0
_UPDATES_BEFORE = 100
"""Updates of adamw before the first that is timed, so that its corrections of the bias are neither 1 nor large."""


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """What an implementation takes by name. `gradients`: one for each output; empty for an update."""

    leaves: Mapping[str, Tensor]
    """Inputs with a gradient; of an update, the tensors that it reads and writes."""
    constants: Mapping[str, Tensor]
    gradients: tuple[Tensor, ...]

    @property
    def arguments(self) -> dict[str, Tensor]:
        """All inputs by name."""
        return {**self.leaves, **self.constants}


def random_tensors(config: OpConfig, device: torch.device) -> Tensors:
    """The same tensors for the same config and device, in new memory."""
    # Constant operands would switch fewer transistors, so the clock would be higher than in real use.
    generator = torch.Generator(device).manual_seed(config.seed)
    sizes = config.sizes

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=DTYPES[config.dtype], device=device, generator=generator)

    if config.op in UPDATES:
        count = sizes["parameters"]
        parameter, gradient, exp_avg = normal(count), normal(count), normal(count).mul_(0.1)
        exp_avg_sq = normal(count).mul_(0.3).square_()
        state = {"parameter": parameter, "gradient": gradient, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        updates = torch.tensor(float(_UPDATES_BEFORE + 1), device=device)
        return Tensors(leaves=state, constants={"step": updates}, gradients=())

    tokens, constants = sizes["tokens"], {}
    if config.op == "rotary":
        # As projections give them: in memory (B, S, heads, D), with one batch.
        heads = {"q": sizes["heads"], "k": sizes["key_heads"]}
        shape = (1, tokens, sizes["head_dim"])
        leaves, gradients = (
            [normal(*shape[:2], count, shape[2]).transpose(1, 2) for count in heads.values()] for _ in range(2)
        )
        named = dict(zip(heads, leaves, strict=True))
        constants = dict(zip(("cos", "sin"), rotary_tables(tokens, shape[2], _THETA, device), strict=True))
    else:
        width = sizes["width"]
        named = {"x": normal(tokens, 2 * width if config.op == "swiglu" else width)}
        if config.op == "add_rms_norm":
            named["residual"] = normal(tokens, width)
        if config.op == "linear_cross_entropy":
            vocabulary = sizes["vocabulary"]
            named["weight"] = normal(vocabulary, width).mul_(width**-0.5)
            constants = {"targets": torch.randint(vocabulary, (tokens,), device=device, generator=generator)}
            gradients = [torch.ones((), device=device)]
        else:
            if config.op != "swiglu":
                named["weight"] = normal(width)
            gradients = [normal(tokens, width) for _ in range(2 if config.op == "add_rms_norm" else 1)]
    leaves_by_name = {name: x.requires_grad_() for name, x in named.items()}
    return Tensors(leaves=leaves_by_name, constants=constants, gradients=tuple(gradients))
