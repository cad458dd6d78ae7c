"""Kernels of published models that differ from the built-in one's: rotation as a product of complex numbers.

Llama's own code, and torchtitan's, views pairs of fp32 as complex numbers and multiplies once, where ops/reference.py has six
products of half the elements: in a pass two casts and one product for each of queries and keys.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trainstep.config.run import RunConfig
from trainstep.plan.time.kernels import Kernel, Kind, traffic
from trainstep.plan.time.step_kernels import StepKernels, step_kernels

_STRIDED_OF_A_PASS = 12
"""Strided kernels of fp32 in a pass of the reference's rotation (plan/time/block_kernels.py)."""


def complex_rotation(run: RunConfig, **options: Any) -> StepKernels:
    """step_kernels, with this rotation where the run's is plain PyTorch in eager mode."""
    kernels = step_kernels(run, **options)
    if run.ops != "plain" or run.compile != "none":
        return kernels
    return replace(kernels, forward=_rotated(kernels.forward), backward=_rotated(kernels.backward))


def _rotated(kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    strided = sum(
        kernel.count
        for kernel in kernels
        if kernel.op == "rotary" and kernel.kind == Kind.STRIDED and kernel.element_bytes == 4
    )
    passes = strided // _STRIDED_OF_A_PASS
    others = [kernel for kernel in kernels if kernel.op != "rotary"]
    own = [
        traffic("rotary", Kind.CONTIGUOUS, 6, "N d", 4 * passes),
        traffic("rotary", Kind.BROADCAST, 8, "N d", 2 * passes),
    ]
    return (*others, *(own if passes else ()))
