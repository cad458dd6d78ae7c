"""Activation checkpointing: keep each block's input alone, and run its forward again when backward needs the rest.

It trades one more forward for memory: what a block would keep lives only while its own backward runs.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from trainstep.spans import span
from trainstep.training.user_model import blocks_of


def recompute_blocks(module: nn.Module) -> None:
    """Every repeated block's forward becomes a checkpoint, in a span `recompute I`. ValueError for a model without blocks."""
    for index, block in enumerate(blocks_of(module, field="recompute", instead="none")):
        block.forward = _checkpointed(block.forward, f"recompute {index}")


def _checkpointed(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    def named(*inputs: Any, **named_inputs: Any) -> Any:
        with span(name):
            return forward(*inputs, **named_inputs)

    def checkpointed(*inputs: Any, **named_inputs: Any) -> Any:
        return checkpoint(named, *inputs, use_reentrant=False, **named_inputs)

    return checkpointed
