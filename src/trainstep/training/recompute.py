"""Activation checkpointing: keep each block's input alone, and run its forward again when backward needs the rest.

It trades one more forward for memory: what a block would keep lives only while its own backward runs.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from trainstep.spans import span
from trainstep.training.user_model import blocks_of


def recompute_blocks(module: nn.Module, *, draws_random_numbers: bool = True) -> None:
    """Every repeated block's forward becomes a checkpoint, in a span `recompute I`. ValueError for a model without blocks.

    Where blocks draw random numbers (dropout), the state of the generators is kept for the second forward: that costs the host
    time, and no CUDA graph can hold it.
    """
    for index, block in enumerate(blocks_of(module, field="recompute", instead="none")):
        block.forward = _checkpointed(block.forward, f"recompute {index}", draws_random_numbers)


def _checkpointed(forward: Callable[..., Any], name: str, keeps_random_state: bool) -> Callable[..., Any]:
    def named(*inputs: Any, **named_inputs: Any) -> Any:
        with span(name):
            return forward(*inputs, **named_inputs)

    def checkpointed(*inputs: Any, **named_inputs: Any) -> Any:
        return checkpoint(named, *inputs, use_reentrant=False, preserve_rng_state=keeps_random_state, **named_inputs)

    return checkpointed
