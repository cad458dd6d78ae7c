"""FLOPs and the least bytes of one AdamW update.

A parameter costs 14 operations: decay (1), the first moment (3), the second (4), bias correction, root and epsilon (3), the
step (3). Read: parameter, gradient, both moments; written: parameter and both moments. Clipping is not counted.
"""

_OPERATIONS = 14
_READ_AND_WRITTEN = 3 + 3
"""Parameter and moments; the gradient is read only."""


def adamw_flops(parameters: int) -> int:
    """Of one update of all parameters."""
    return _OPERATIONS * parameters


def adamw_bytes(parameters: int, element_bytes: int, gradient_bytes: int | None = None) -> int:
    """The least bytes of one update in one pass; `element_bytes`: of a parameter and a moment, and of a gradient unless
    `gradient_bytes` says otherwise."""
    return parameters * (
        _READ_AND_WRITTEN * element_bytes + (element_bytes if gradient_bytes is None else gradient_bytes)
    )
