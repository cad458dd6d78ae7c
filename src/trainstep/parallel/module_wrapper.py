"""The base of every parallel strategy: an nn.Module around a module, with that module's parameters, state and names.

    model = BucketedDDP(model)        model(**batch), model.parameters(), model.state_dict(), model.eval(), model.module

A program may also go on calling the module itself: only the strategy's hooks matter then.

[Note: kept, not registered]
nn.Module would register the wrapped module as a child called `module` and put that word before every name. So the module is a plain
attribute instead, and every method that walks through modules continues in it: here, and where the wrapper is a part of another
module.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from torch import Tensor, nn


class ModuleWrapper(nn.Module):
    """Calls `module`. Cannot be copied or pickled, since hooks and connections to other ranks cannot."""

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        vars(self)["module"] = module  # [Note: kept, not registered]
        self.training = module.training

    @property
    def _named(self) -> nn.Module:
        """The module whose names are shown."""
        return self.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, with its hooks."""
        return self.module(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Set the training mode of the module and of the wrapper."""
        self._check_beside()
        self.training = mode
        self.module.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state, with its own names."""
        self._check_beside()
        return self._named.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the module's state."""
        return self._named.load_state_dict(state_dict, strict, assign)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The module itself and its parts, with their names."""
        yield from self._named.named_modules(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The module's children, with their names."""
        return self._named.named_children()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's parameters, with their names."""
        return self._named.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The module's buffers, with their names."""
        return self._named.named_buffers(*args, **kwargs)

    def get_submodule(self, target: str) -> nn.Module:
        """The part of the module with this name."""
        return self._named.get_submodule(target)

    def apply(self, fn: Callable[[nn.Module], Any]) -> Self:
        """Apply `fn` to the module and its parts."""
        self._check_beside()
        self._named.apply(fn)
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        self._check_beside()
        self._named._apply(*args, **kwargs)
        return self

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Called when a module of which this wrapper is a part loads a state dict."""
        part = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        difference = self.load_state_dict(part, False, local_metadata.get("assign_to_params_buffers", False))
        missing_keys += (prefix + name for name in difference.missing_keys)
        unexpected_keys += (prefix + name for name in difference.unexpected_keys)

    def extra_repr(self) -> str:
        """The module's text, so that `print(model)` shows it."""
        return repr(self.module)

    def _check_beside(self) -> None:
        """ValueError where the module contains this wrapper: each would call the other for ever."""
        if any(child is self for part in self.module.modules() for child in part.children()):
            raise ValueError(
                f"{type(self).__name__}: is an attribute of the module that it wraps; keep it beside that module, not in it"
            )

    def __reduce__(self) -> Any:
        """Refuse to be copied or pickled, by ValueError."""
        raise ValueError(
            f"{type(self).__name__}: can be neither copied nor pickled, nor can a module that holds it; copy the module "
            "before it is wrapped, or build it again and load the state dict"
        )
