"""The matmuls of a step that torch's ops launch: those of fp32 tensors, and the FLOPs of those in 16 bits."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from trainstep.traces.kineto import Range
from trainstep.traces.patterns.pattern import PRECISION, Pattern
from trainstep.traces.patterns.step_ops import StepOps, tensors

BATCHED = ("aten::bmm", "aten::baddbmm")
_PLAIN = ("aten::mm", "aten::addmm")
_MATMULS = (*BATCHED, *_PLAIN)
SIXTEEN_BITS = ("c10::BFloat16", "c10::Half")
"""As traces write dtypes."""


class MatmulWork(NamedTuple):
    """A step's FLOPs, 2 m n k of each product, and the device's seconds for them; both 0 without such matmuls."""

    flops: float
    time_s: float

    def numbers(self) -> dict[str, float]:
        """The facts of a record; none without matmuls."""
        return {"matmul_flops": self.flops, "matmul_flops_s": self.time_s} if self.flops else {}


NO_MATMULS = MatmulWork(flops=0.0, time_s=0.0)


def in_fp32(ops: StepOps) -> Iterator[Pattern]:
    """Matmuls of fp32 tensors on a GPU. What they take in 16 bits depends on torch's precision (explain/script_evidence.py)."""
    matmuls = [opened for opened in ops.all if opened.name in _MATMULS and opened.dtypes[:2] == ("float", "float")]
    if ops.on_device and matmuls:
        costs = ops.costs(matmuls)
        yield Pattern(name=PRECISION, calls=len(matmuls), costs=costs, least_ns=0.0, what="matmuls of fp32 tensors")


def sixteen_bit_work(ops: StepOps, *, batched: bool = True) -> MatmulWork:
    """The work of 16-bit matmuls on a GPU, also of `batched` ones. Kernels that a compiler wrote in their place have no op."""
    names = _MATMULS if batched else _PLAIN
    matmuls = [op for op in ops.all if op.name in names and any(dtype in SIXTEEN_BITS for dtype in op.dtypes[:1])]
    known = [opened for opened in matmuls if _flops(opened)]
    time_ns = sum(cost.time_ns for cost in ops.costs(known).values())
    flops = sum(map(_flops, known))
    if not (ops.on_device and time_ns):
        return NO_MATMULS
    return MatmulWork(flops=flops / ops.steps, time_s=time_ns / 1e9 / ops.steps)


def _flops(opened: Range) -> float:
    """2 m n k, of each product of a batch; 0 where the shapes do not say, since a trace may hold anything."""
    factors = tensors(opened)
    # The first tensor of these is what the product is added to, which may have no dimension and then no shape
    factors = factors[-2:] if opened.name in ("aten::addmm", "aten::baddbmm") else factors[:2]
    if len(factors) < 2 or not len(factors[0]) == len(factors[1]) >= 2 or factors[0][-1] != factors[1][-2]:
        return 0.0
    return 2.0 * math.prod(factors[0]) * factors[1][-1]
