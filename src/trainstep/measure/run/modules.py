"""Finds a script's outermost modules: `outermost(parameters)`; and what to follow if nobody calls these: `inside(modules)`.

They are found among all objects that Python's garbage collector knows, once the optimizer has shown which parameters are trained.
So no hook is needed in every module, and no module's forward is slower before they are known.
"""

import gc
from collections.abc import Iterable, Sequence

import torch
from torch.nn.parameter import is_lazy

_MOST = 24
"""The most modules that are followed: hooks cost ten microseconds each time that their module is called."""


def outermost(trained: Iterable[torch.Tensor]) -> list[torch.nn.Module]:
    """The modules with parameters that are in no other module; those with most trained parameters first, at most 24.

    Modules without trained parameters are among them, because evaluation may run an averaged copy, and a teacher is a model too.
    """
    kinds: dict[type, bool] = {}
    modules: list[torch.nn.Module] = []
    for thing in gc.get_objects():
        kind = type(thing)  # not isinstance, which asks proxies for a class that they may not have
        if kind not in kinds:
            kinds[kind] = issubclass(kind, torch.nn.Module)
        if kinds[kind] and "_modules" in vars(thing):
            modules.append(thing)
    inner = {id(child) for module in modules for child in module._modules.values()}
    roots = [module for module in modules if id(module) not in inner]
    return _ranked(roots, {id(parameter) for parameter in trained})


def inside(modules: Sequence[torch.nn.Module], trained: Iterable[torch.Tensor]) -> list[torch.nn.Module]:
    """The modules one level further in: a LightningModule's forward is not what Lightning calls, but its model's is."""
    children = [child for module in modules for child in module._modules.values() if child is not None]
    return _ranked(children, {id(parameter) for parameter in trained})


def _ranked(modules: Sequence[torch.nn.Module], trained: set[int]) -> list[torch.nn.Module]:
    def counts(module: torch.nn.Module) -> tuple[int, int]:
        parameters = [p for p in module.parameters() if not is_lazy(p)]  # a lazy one has no size yet
        return sum(p.numel() for p in parameters if id(p) in trained), sum(p.numel() for p in parameters)

    hooked = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]  # which take no hooks
    sized = [(counts(module), module) for module in {id(module): module for module in hooked}.values()]
    sized = [pair for pair in sized if pair[0][1]]
    return [module for _, module in sorted(sized, key=lambda pair: pair[0], reverse=True)[:_MOST]]
