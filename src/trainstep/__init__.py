"""trainstep measures, explains and speeds up the training step of a Transformer language model.

Importing this package loads no torch, opens no CUDA and reads no environment. The exported names, and torch with them, are loaded
when they are first used. Start at docs/tour.md.
"""

from importlib import import_module

# Type checkers take it as true; importing it from typing would take longer than everything else here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainstep.measure.run.callbacks import hugging_face_callback, lightning_callback
    from trainstep.measure.run.code import watch
    from trainstep.ops.flash_attention.function import flash_attention, flash_attention_backward

__all__ = ["flash_attention", "flash_attention_backward", "hugging_face_callback", "lightning_callback", "watch"]
__version__ = "0.1.0"
# The modules that have them; functions of ops from their own file, because trainstep.ops.flash_attention is a package
_MODULES = {
    "flash_attention": "trainstep.ops.flash_attention.function",
    "flash_attention_backward": "trainstep.ops.flash_attention.function",
    "hugging_face_callback": "trainstep.measure.run.callbacks",
    "lightning_callback": "trainstep.measure.run.callbacks",
    "watch": "trainstep.measure.run.code",
}


def __getattr__(name: str) -> object:
    """Load an exported function at its first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    function = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return function


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
