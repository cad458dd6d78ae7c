"""Which parameters a module had when it was wrapped, and whether it still has just those.

A parameter that came later has no hook: it would train on each rank by itself, silently. Looked at once a step, so it must cost
microseconds: what modules' own dictionaries hold is compared by map and all, in C, and not walked by name.
"""

from collections.abc import Iterator
from itertools import chain
from operator import is_
from typing import Any

from torch import nn


class Membership:
    """A module's parameters, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._owners: list[dict[str, Any]] = []
        """Each module's parameters and its children."""
        for owner in module.modules():
            self._owners += [owner._parameters, owner._modules]
        self._counts = list(map(len, self._owners))
        self._filled = [held for held in self._owners if held]
        self._known = list(self._held())
        parameters = list(module.parameters())
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._frozen = [parameter for parameter in parameters if not parameter.requires_grad]

    def check(self) -> None:
        """ValueError naming a parameter that was added, replaced or unfrozen since."""
        same = list(map(len, self._owners)) == self._counts and all(map(is_, self._held(), self._known))
        if not same or any(parameter.requires_grad for parameter in self._frozen):
            self._complain()

    def _held(self) -> Iterator[nn.Parameter | nn.Module | None]:
        return chain.from_iterable(map(dict.values, self._filled))

    def _complain(self) -> None:
        trained, frozen = set(map(id, self._trained)), set(map(id, self._frozen))
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and id(parameter) not in trained:
                what = "unfrozen" if id(parameter) in frozen else "added or replaced"
                raise ValueError(
                    f"{name}: was {what} after the module was wrapped, so its gradient would not be averaged; "
                    "wrap the module once it is complete"
                )
