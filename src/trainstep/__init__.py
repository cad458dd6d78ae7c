"""trainstep measures, explains and speeds up the training step of a Transformer language model.

Importing it does nothing but this: no torch, no CUDA, no environment. Names here are loaded, and torch with them, when they are
first used. Start at docs/tour.md.
"""

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:  # known to type checkers by its name; typing takes longer to import than all else here
    from trainstep.ops.flash_attention.function import flash_attention, flash_attention_backward

__all__ = ["flash_attention", "flash_attention_backward"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """The function: trainstep.ops.flash_attention, unlike it, is a package as well."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module("trainstep.ops.flash_attention.function"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
