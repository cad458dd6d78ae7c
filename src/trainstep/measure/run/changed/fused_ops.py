"""Gives the modules of a script trainstep's fused ops, from outside: norms, SwiGLU, and all of a Hugging Face Llama, loss included.

    with_our_ops(applied, module)      # every part that computes what one of our ops computes runs that op from now on
    fusable_parts(module)              # how many parts that would be; nothing is changed

`applied` notes what was done and what was left (applied.py). Weights and their names stay.

[Note: what a module computes] Names say little: Mistral's and Qwen's norms are Llama's under another name, and Gemma's has another
formula under a like one. So a module is an RMSNorm if it has one weight of one dimension and an epsilon, and gives what rms_norm
gives for a few random rows. An MLP is SwiGLU if it has the three projections of Llama's, SiLU between them, and gives what these
give. The rows are few and drawn by a generator of their own: the script's random numbers stay as they are.
"""

import sys
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainstep.measure.run.changed.attention import Notes
from trainstep.ops import hugging_face_llama
from trainstep.ops.rms_norm import rms_norm
from trainstep.ops.swiglu import swiglu

_LLAMA = "transformers.models.llama.modeling_llama"
_EPSILONS = ("eps", "variance_epsilon")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_SILU = ("SiLU", "SiLUActivation")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROWS = 4
_MOST_OFF = 1 / 64
"""Of the largest value, how far a module may be from our op: roundings of bf16 are within it, other formulas are not."""


class _Part(NamedTuple):
    """A module, and what its forward becomes."""

    module: nn.Module
    forward: Callable[..., Tensor]
    width: int
    """Of the rows that it takes."""


def with_our_ops(applied: Notes, module: nn.Module) -> None:
    """Give the parts of the module our ops, and let what is compiled be compiled anew. Called when no forward is under way."""
    llamas = list(_llamas(module))
    for llama in llamas:
        try:
            hugging_face_llama.patch(llama)
        except ValueError as error:
            applied.left("ops", str(error))
        else:
            applied.did("ops")
    for part in list(_parts(module)):
        part.module.forward = MethodType(part.forward, part.module)
        applied.did("ops")
    # Compiled code has the old forwards in it, and nothing that it looks at says so
    torch.compiler.reset()


def fusable_parts(module: nn.Module) -> int:
    """The number of parts that `with_our_ops` would change."""
    return sum(1 for _ in _llamas(module)) + sum(1 for _ in _parts(module))


def _llamas(module: nn.Module) -> Iterator[nn.Module]:
    """The Llamas of Transformers in the module. Who has not imported theirs has none."""
    kind = getattr(sys.modules.get(_LLAMA), "LlamaForCausalLM", None)
    return (part for part in module.modules() if kind is not None and type(part) is kind)


def _parts(module: nn.Module) -> Iterator[_Part]:
    """Norms and MLPs that have their own forward still, but no Llama's, which are changed with it."""
    of_llamas = {part for llama in _llamas(module) for part in llama.modules()}
    for part in module.modules():
        if part in of_llamas or "forward" in vars(part) or not _is_plain(part):
            continue
        for candidate in (_as_norm(part), _as_mlp(part)):
            if candidate is not None and _is_the_same(candidate):
                yield candidate


def _is_plain(part: nn.Module) -> bool:
    """Whether its parameters are its own and on one device: neither in shards nor not made yet."""
    return all(type(weight) is nn.Parameter and weight.device.type != "meta" for weight in part.parameters())


def _as_norm(module: Any) -> _Part | None:
    """What has one weight of one dimension, no modules inside and an epsilon may be an RMSNorm."""
    names = [name for name, _ in module.named_parameters()]
    eps = next((value for name in _EPSILONS if (value := getattr(module, name, None)) is not None), None)
    if names != ["weight"] or module.weight.dim() != 1 or [*module.children()] or not isinstance(eps, float):
        return None  # torch.nn.RMSNorm without an epsilon takes one by x's dtype, which is not known here

    def forward(self: Any, x: Tensor) -> Tensor:
        y: Tensor = rms_norm(x, self.weight, eps)
        return y

    return _Part(module, forward, module.weight.shape[0])


def _as_mlp(module: Any) -> _Part | None:
    """What has Llama's three projections and SiLU may be SwiGLU."""
    children = dict(module.named_children())
    projections = [children.pop(name, None) for name in _PROJECTIONS]
    activation = [type(child).__name__ for child in children.values()]
    if any(type(child) is not nn.Linear for child in projections) or len(activation) != 1 or activation[0] not in _SILU:
        return None
    return _Part(module, _mlp, module.gate_proj.in_features)


def _mlp(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
    return y


def _is_the_same(part: _Part) -> bool:
    """Whether the module gives what ours gives. [Note: what a module computes]"""
    weight = next(part.module.parameters())
    if weight.dtype not in _DTYPES:
        return False
    rows = torch.randn(_ROWS, part.width, generator=torch.Generator().manual_seed(0))
    x = (1.0 + rows).to(weight.device, weight.dtype)  # LayerNorm would take the mean away
    try:
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            theirs: Any = type(part.module).forward(part.module, x)
            if not isinstance(theirs, Tensor) or theirs.shape != x.shape:
                return False
            off = (part.forward(part.module, x).float() - theirs.float()).abs().max()
            return bool(off <= _MOST_OFF * theirs.float().abs().max())
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError):  # it takes something else: it is neither
        return False
