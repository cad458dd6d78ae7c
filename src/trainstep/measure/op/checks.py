"""Checks an op's outputs and gradients against ops/reference.py in fp64, beside the same reference in the cell's own dtype.

The tensors are made anew, because some implementations write over their inputs. The loss's reference goes over chunks of tokens, so
that logits never exist whole; an update is compared on its first elements.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from trainstep.config.op import UPDATES, OpConfig
from trainstep.measure.op.implementations import REFERENCES
from trainstep.measure.op.peers import Function
from trainstep.measure.op.tensors import Tensors, random_tensors
from trainstep.measure.step.lone_pass import relative_error
from trainstep.ops import reference
from trainstep.records.facts import Fact, facts_of
from trainstep.training.precision import DTYPES

Values = Mapping[str, tuple[Tensor, ...]]
"""`output` -> all outputs, and unless the direction is forward `dx`, `dweight`... -> that gradient alone."""
_LOGITS = {"cuda": 2**26, "cpu": 2**20}
"""Device -> logits of a chunk: 512 MiB in fp64 on a GPU, of which five or six matrices are live."""
_COMPARED = {"cuda": 2**24, "cpu": 2**20}
"""Device -> elements of an update that are compared."""


def check_values(config: OpConfig, device: torch.device, function: Function) -> dict[str, Fact]:
    """Facts: errors as max |x - ref| / max |ref|, has_nan (NaN or infinite values), deterministic (two runs are bitwise equal)."""
    values, repeated = (_run(config, random_tensors(config, device), function) for _ in range(2))
    pairs = [pair for name in values for pair in zip(values[name], repeated[name], strict=True)]
    finite = all(bool(torch.isfinite(value).all()) for value, _ in pairs)
    facts = facts_of(has_nan=int(not finite), deterministic=int(all(torch.equal(*pair) for pair in pairs)))
    del repeated, pairs
    tensors, compared = random_tensors(config, device), "all elements"
    most = _COMPARED[config.device]
    if config.op in UPDATES and config.sizes["parameters"] > most:
        compared = f"the first {most:,} elements"
        leaves = {name: x[:most] for name, x in tensors.leaves.items()}
        tensors = Tensors(leaves=leaves, constants=tensors.constants, gradients=())
        values = {name: tuple(x[:most] for x in alike) for name, alike in values.items()}
    exact = reference_values(config, tensors, torch.float64)
    same_dtype = reference_values(config, tensors, DTYPES[config.dtype])
    for name, alike in values.items():
        fact_name = "error_same_dtype" if name == "output" else f"error_same_dtype_{name}"
        facts |= _error_fact(f"error_{name}", alike, exact[name])
        facts |= _error_fact(fact_name, same_dtype[name], exact[name])
    return facts | facts_of(error_checked=f"{compared} against float64")


def reference_values(config: OpConfig, tensors: Tensors, dtype: torch.dtype) -> Values:
    """The outputs and gradients by ops/reference.py in this dtype."""
    leaves = {
        name: x.detach().to(dtype, copy=True).requires_grad_(x.requires_grad) for name, x in tensors.leaves.items()
    }
    cast = Tensors(leaves=leaves, constants=tensors.constants, gradients=tensors.gradients)
    if config.op == "linear_cross_entropy":
        return _loss_values(config, cast, dtype)
    return _run(config, cast, REFERENCES[config.op])


def _run(config: OpConfig, tensors: Tensors, function: Function) -> Values:
    outputs = function(**tensors.arguments)
    values = {"output": tuple(output.detach() for output in outputs)}
    if config.direction == "forward" or not tensors.gradients:
        return values
    gradients = [gradient.to(output.dtype) for gradient, output in zip(tensors.gradients, outputs, strict=True)]
    computed = torch.autograd.grad(outputs, tuple(tensors.leaves.values()), gradients)
    return values | {f"d{name}": (gradient,) for name, gradient in zip(tensors.leaves, computed, strict=True)}


def _loss_values(config: OpConfig, tensors: Tensors, dtype: torch.dtype) -> Values:
    """The mean loss and its gradients over chunks of tokens; sums over chunks are in fp32 or wider."""
    x, weight = tensors.leaves["x"], tensors.leaves["weight"]
    targets, count = tensors.constants["targets"], x.shape[0]
    sum_dtype = torch.promote_types(dtype, torch.float32)
    loss = torch.zeros((), dtype=sum_dtype, device=x.device)
    dx, dweight = torch.zeros_like(x), torch.zeros_like(weight, dtype=sum_dtype)
    rows = max(_LOGITS[config.device] // weight.shape[0], 1)
    for first in range(0, count, rows):
        part = slice(first, first + rows)
        share = reference.linear_cross_entropy(x[part], weight, targets[part], reduction="sum") / count
        loss += share.detach()
        if config.direction != "forward":
            whole_dx, dweight_part = torch.autograd.grad(share, (x, weight))
            dx[part] = whole_dx[part]
            dweight += dweight_part
    gradients = {} if config.direction == "forward" else {"dx": (dx.detach(),), "dweight": (dweight.detach(),)}
    return {"output": (loss,), **gradients}


def _error_fact(name: str, values: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> dict[str, Fact]:
    """The largest relative error of these tensors; empty if one is not finite, which `has_nan` tells."""
    errors = [relative_error(*pair) for pair in zip(values, exact, strict=True)]
    known = [error for error in errors if error is not None]
    return facts_of(**{name: max(known)}) if len(known) == len(errors) else {}
