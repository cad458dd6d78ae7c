"""Captures any training step as one CUDA graph, so that no Python runs between its kernels.

    from trainstep.capture import CapturedStep

    def train(batch):                                    # the whole step: forward, backward, optimizer; returns the loss
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = CapturedStep(train, optimizer=optimizer, module=model)
    for batch in batches:
        loss = step(batch)                               # returns without waiting for the GPU

The package uses none of trainstep's other packages and can be copied out of it. Its names, and torch with them, are
loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainstep.capture.captured_step import CapturedStep
    from trainstep.capture.waits import NotCapturable, Wait

__all__ = ["CapturedStep", "NotCapturable", "Wait"]

_MODULE_OF = {"CapturedStep": "captured_step", "NotCapturable": "waits", "Wait": "waits"}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    attribute = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return attribute


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
