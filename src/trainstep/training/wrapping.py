"""Where a parallel strategy enters a step: a module and an optimizer go in, wrapped ones come out.

Apart from parallelism.py, which knows every wrapper by name, so that a step of one process imports none of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from trainstep.parallel.gradient_sync import GradientSync
from trainstep.parallel.ranks import Ranks

OptimizerClass = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class Wrapped:
    """`module` is what is called: a wrapper of torch's may not be the one that went in."""

    module: nn.Module
    gradient_sync: GradientSync | None
    optimizer: torch.optim.Optimizer | None


class Wrap(Protocol):
    """Makes the optimizer too, where a class is given: some wrappers must come first, some are one with it."""

    def __call__(
        self, module: nn.Module, optimizer_cls: OptimizerClass | None, options: Mapping[str, Any]
    ) -> Wrapped: ...


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """This process is one of these ranks, and its module is wrapped so."""

    ranks: Ranks
    wrap: Wrap


def unwrapped(module: nn.Module, optimizer_cls: OptimizerClass | None, options: Mapping[str, Any]) -> Wrapped:
    """One process: the optimizer over what is trained."""
    return Wrapped(module=module, gradient_sync=None, optimizer=optimizer_over(module, optimizer_cls, options))


def optimizer_over(
    module: nn.Module, optimizer_cls: OptimizerClass | None, options: Mapping[str, Any]
) -> torch.optim.Optimizer | None:
    """The optimizer of a module's trained parameters, where one is asked for."""
    if optimizer_cls is None:
        return None
    return optimizer_cls((parameter for parameter in module.parameters() if parameter.requires_grad), **options)
