"""trainstep measures, explains and speeds up the training step of a Transformer language model.

Importing this package loads no torch, opens no CUDA and reads no environment. The exported names, and torch with them, are loaded
when they are first used. Start at docs/tour.md.
"""

from importlib import import_module

# Type checkers take it as true; importing it from typing would take longer than everything else here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainstep.ops.flash_attention.function import flash_attention, flash_attention_backward

__all__ = ["flash_attention", "flash_attention_backward"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Load an exported function at its first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # The functions' own module: trainstep.ops.flash_attention is a package.
    function = globals()[name] = getattr(import_module("trainstep.ops.flash_attention.function"), name)
    return function


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
