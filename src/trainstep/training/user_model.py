"""Builds a user's model by the function that the config names, finds its blocks, and checkpoints activations."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainstep.config.import_path import check_not_hidden
from trainstep.config.run import RunConfig
from trainstep.spans import span
from trainstep.training.batches import NextBatch


def build_user_model(function: str, run: RunConfig, device: torch.device) -> tuple[nn.Module, NextBatch]:
    """Call package.module:function as `build(run, device) -> (module, next_batch)`.

    Raises ImportError if it cannot be imported or is no function, and ValueError if it returns anything else.
    """
    module_name, _, name = function.partition(":")
    check_not_hidden("model", module_name)
    build: Any = getattr(importlib.import_module(module_name), name, None)
    if not callable(build):
        raise ImportError(f"model: {module_name} has no function {name!r}")
    result = build(run, device)
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module) and callable(result[1]):
        return result
    raise ValueError(f"model: {function} must return (module, next_batch), an nn.Module and a function of the step")


def blocks_of(module: nn.Module, *, field: str = "compile", instead: str = "compile model or none") -> list[nn.Module]:
    """The repeated blocks of a model: the members of its longest ModuleList.

    Raises ValueError, naming the config's `field`, if the model has none.
    """
    lists = [list(child) for child in module.modules() if isinstance(child, nn.ModuleList)]
    longest = max(lists, key=len, default=[])
    if not longest:
        raise ValueError(f"{field}: block needs a model with its blocks in an nn.ModuleList; use {instead}")
    return longest


def recompute_blocks(module: nn.Module, *, draws_random_numbers: bool = True) -> None:
    """Checkpoint the activations of every repeated block, in a span `recompute I`.

    A block keeps only its input, and its forward runs again when its backward needs the rest: one more forward in exchange
    for memory. `draws_random_numbers`: blocks draw random numbers (dropout), so the state of the generators is kept for
    the second forward; this takes time of the host, and no CUDA graph can hold it. Raises ValueError for a model without
    blocks.
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
