"""Builds a user's model by the function that the config names, and finds its blocks."""

import functools
import hashlib
import importlib
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainstep.config.import_path import check_not_hidden
from trainstep.config.run import RunConfig
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
    source_of(function)  # reads the file now, before anybody changes it
    result = build(run, device)
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module) and callable(result[1]):
        return result
    raise ValueError(f"model: {function} must return (module, next_batch), an nn.Module and a function of the step")


@functools.cache
def source_of(function: str) -> str:
    """The SHA-256 of the one file that defines package.module:function, its first 12 digits; empty where there is no such file.

    The first call in a process reads the file, and later ones repeat the answer: what runs is the file as it was imported.
    """
    module_name, _, name = function.partition(":")
    try:
        defined: Any = getattr(importlib.import_module(module_name), name)
        return hashlib.sha256(Path(inspect.getfile(inspect.unwrap(defined))).read_bytes()).hexdigest()[:12]
    except (ImportError, AttributeError, OSError, TypeError):  # TypeError: an object without a file
        return ""


def blocks_of(module: nn.Module, *, field: str = "compile", instead: str = "compile model or none") -> list[nn.Module]:
    """The repeated blocks of a model: the members of its longest ModuleList.

    Raises ValueError, naming the config's `field`, if the model has none.
    """
    lists = [list(child) for child in module.modules() if isinstance(child, nn.ModuleList)]
    longest = max(lists, key=len, default=[])
    if not longest:
        raise ValueError(f"{field}: block needs a model with its blocks in an nn.ModuleList; use {instead}")
    return longest
