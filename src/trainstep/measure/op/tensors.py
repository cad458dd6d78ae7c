"""Makes the tensors of an op: random normal inputs in the layout that a model gives them, and the gradients of its outputs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trainstep.config.op import UPDATES, OpConfig
from trainstep.ops.reference import rotary_tables
from trainstep.training.precision import DTYPES

_THETA = 10_000.0
_UPDATES_BEFORE = 100
"""Number of adamw updates before the first timed one, so that its corrections of the bias are neither 1 nor large."""


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """What an implementation takes by name. `gradients`: one for each output; empty for an update."""

    leaves: Mapping[str, Tensor]
    """Inputs with a gradient; for an update, the tensors that it reads and writes."""
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
        return _update_tensors(sizes["parameters"], normal, device)
    if config.op == "rotary":
        return _rotary_tensors(sizes, normal, device)
    tokens, width = sizes["tokens"], sizes["width"]
    if config.op == "linear_cross_entropy":
        vocabulary = sizes["vocabulary"]
        inputs = {"x": normal(tokens, width), "weight": normal(vocabulary, width).mul_(width**-0.5)}
        targets = torch.randint(vocabulary, (tokens,), device=device, generator=generator)
        return _with_gradients(inputs, {"targets": targets}, torch.ones((), device=device))
    if config.op == "swiglu":
        return _with_gradients({"x": normal(tokens, 2 * width)}, {}, normal(tokens, width))
    inputs = {"x": normal(tokens, width)}
    if config.op == "add_rms_norm":
        inputs["residual"] = normal(tokens, width)
    outputs = len(inputs)  # with a residual also the sum
    inputs["weight"] = normal(width)
    return _with_gradients(inputs, {}, *(normal(tokens, width) for _ in range(outputs)))


def _with_gradients(inputs: Mapping[str, Tensor], constants: Mapping[str, Tensor], *gradients: Tensor) -> Tensors:
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    return Tensors(leaves=leaves, constants=constants, gradients=gradients)


def _rotary_tensors(sizes: Mapping[str, int], normal: Callable[..., Tensor], device: torch.device) -> Tensors:
    """Tensors as projections give them: in memory (B, S, heads, D), with one batch."""
    tokens, head_dim = sizes["tokens"], sizes["head_dim"]
    heads = (sizes["heads"], sizes["key_heads"])
    q, k, dq, dk = (normal(1, tokens, count, head_dim).transpose(1, 2) for count in (*heads, *heads))
    cos, sin = rotary_tables(tokens, head_dim, _THETA, device)
    return _with_gradients({"q": q, "k": k}, {"cos": cos, "sin": sin}, dq, dk)


def _update_tensors(count: int, normal: Callable[..., Tensor], device: torch.device) -> Tensors:
    state = {
        "parameter": normal(count),
        "gradient": normal(count),
        "exp_avg": normal(count).mul_(0.1),
        "exp_avg_sq": normal(count).mul_(0.3).square_(),
    }
    step = torch.tensor(float(_UPDATES_BEFORE + 1), device=device)
    return Tensors(leaves=state, constants={"step": step}, gradients=())
