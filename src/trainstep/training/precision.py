"""Maps a precision's name to the dtypes of weights and compute, loss scaling, and the mode of fp32 matmuls."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The names of dtypes in configs."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """How a step computes.

    `weights`: dtype of parameters and optimizer state. `autocast`: dtype to which matmuls are cast, or None. `matmul`:
    torch's float32 matmul precision, 'highest' (IEEE) or 'high' (TF32). `scales_loss`: the loss is scaled by a
    GradScaler, for fp16's range. `masters`: the optimizer keeps fp32 weights, and the model their rounding.
    """

    weights: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    matmul: str = "highest"
    scales_loss: bool = False
    masters: bool = False


_PRECISIONS = {
    "fp32": Precision(),
    "tf32": Precision(matmul="high"),
    "bf16_autocast": Precision(autocast=torch.bfloat16),
    "fp16_autocast": Precision(autocast=torch.float16, scales_loss=True),
    "bf16": Precision(weights=torch.bfloat16),
    "bf16_master": Precision(weights=torch.bfloat16, masters=True),
}


def precision_named(name: str) -> Precision:
    """The precision with this name (RunConfig.precision)."""
    return _PRECISIONS[name]


@contextmanager
def float32_matmuls(precision: str) -> Iterator[None]:
    """Set the mode of fp32 matmuls, 'highest' (IEEE) or 'high' (TF32), and restore it for the process's next cell."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
