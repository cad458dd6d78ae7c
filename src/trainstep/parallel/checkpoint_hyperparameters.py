"""Hyperparameters of an optimizer as JSON: a list with an object for each parameter group, checked before any of it is taken."""

import json
import reprlib
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

_NOT_OPTIONS = ("params", "param_names")
_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")
"""What torch's schedulers write into groups: a scheduler may be made before or after the checkpoint is loaded."""


def write_hyperparameters(optimizer: Optimizer) -> str:
    """JSON of what each group has but its parameters. A tensor with one element is written as a number."""
    return json.dumps(
        [
            {
                name: _plain(value)
                for name, value in group.items()
                if name not in _NOT_OPTIONS and _is_plain(_plain(value))
            }
            for group in optimizer.param_groups
        ]
    )


def read_hyperparameters(path: Path, content: bytes, optimizer: Optimizer) -> list[dict[str, Any]]:
    """What `write_hyperparameters` wrote, for set_hyperparameters; ValueError naming what does not fit the optimizer."""
    try:
        saved = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError(f"{path}: is not JSON; load another checkpoint, or the module alone") from None
    if not isinstance(saved, list) or not all(isinstance(options, dict) for options in saved):
        raise ValueError(f"{path}: must be a list with an object for each parameter group; load another checkpoint")
    groups = optimizer.param_groups
    if len(saved) != len(groups):
        raise ValueError(f"{path}: has {len(saved)} parameter groups, and the optimizer {len(groups)}")
    for number, (group, options) in enumerate(zip(groups, saved, strict=True)):
        problem = _problem(group, options)
        if problem:
            raise ValueError(
                f"{path}: group {number} {problem} ({type(optimizer).__name__}); make the optimizer as it was"
            )
    return [{name: value for name, value in options.items() if name not in _NOT_OPTIONS} for options in saved]


def set_hyperparameters(optimizer: Optimizer, saved: list[dict[str, Any]]) -> None:
    """Give each group its options."""
    for group, options in zip(optimizer.param_groups, saved, strict=True):
        for name, value in options.items():
            current = group.get(name)
            if isinstance(current, Tensor):
                current.fill_(value)
            else:
                group[name] = tuple(value) if isinstance(current, tuple) else value


def _problem(group: dict[str, Any], options: dict[str, Any]) -> str | None:
    for name, value in options.items():
        if name == "param_names":  # earlier versions wrote it
            continue
        if name == "params" or (name not in group and name not in _OF_SCHEDULERS):
            return f"has {name!r}, which is no option of the optimizer"
        if not _fits(value, group.get(name, 0.0)):
            return f"has {reprlib.repr(value)} for {name}, where the optimizer has {reprlib.repr(group.get(name, 0.0))}"
    for name, value in group.items():
        needed = _is_number(value) or isinstance(value, (list, tuple))
        if needed and name not in options and name not in (*_NOT_OPTIONS, *_OF_SCHEDULERS):
            return f"lacks {name}, which the optimizer has"
    return None


def _fits(saved: Any, current: Any) -> bool:
    """Whether a saved value is of the kind that the optimizer has there."""
    if isinstance(current, Tensor) or _is_number(current):
        return _is_number(saved)
    if isinstance(current, (list, tuple)):
        same = isinstance(saved, list) and len(saved) == len(current)
        return same and all(_fits(one, other) for one, other in zip(saved, current, strict=True))
    if isinstance(current, str):
        return isinstance(saved, str)
    return saved is None or isinstance(saved, (bool, int, float, str))  # of an option that is off, or a switch


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return [_plain(member) for member in value] if isinstance(value, (list, tuple)) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str, type(None)))
