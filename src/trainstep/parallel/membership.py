"""Which parameters a module had when it was wrapped, and whether it still has just those.

A parameter that came later has no hook: it would train on each rank by itself, silently. Looked at once a step, so it must cost
microseconds: modules' own dictionaries are compared, not walked by name.
"""

from torch import nn


class Membership:
    """A module's parameters, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._modules = list(module.modules())
        self._size = self._count()
        self._known = [
            (owner._parameters, name, parameter, parameter.requires_grad)
            for owner in self._modules
            for name, parameter in owner._parameters.items()
            if parameter is not None
        ]

    def check(self) -> None:
        """ValueError naming a parameter that was added, replaced or unfrozen since."""
        same = self._count() == self._size and all(
            owned.get(name) is parameter and (trained or not parameter.requires_grad)
            for owned, name, parameter, trained in self._known
        )
        if not same:
            self._complain()

    def _count(self) -> int:
        return sum(len(owner._parameters) + len(owner._modules) for owner in self._modules)

    def _complain(self) -> None:
        trained = {id(parameter) for _, _, parameter, trained in self._known if trained}
        frozen = {id(parameter) for _, _, parameter, trained in self._known if not trained}
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and id(parameter) not in trained:
                what = "unfrozen" if id(parameter) in frozen else "added or replaced"
                raise ValueError(
                    f"{name}: was {what} after the module was wrapped, so its gradient would not be averaged; "
                    "wrap the module once it is complete"
                )
