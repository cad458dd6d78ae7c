"""The matmuls that torch's ops launch in a step: the pattern of fp32 matmuls, and the FLOPs of 16-bit matmuls."""

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
"""The 16-bit dtypes as traces write them."""


class MatmulWork(NamedTuple):
    """FLOPs of a step's matmuls (2 m n k each), and the device's seconds for them; both 0 without such matmuls."""

    flops: float
    time_s: float

    def numbers(self) -> dict[str, float]:
        """The work as facts of a record; empty without matmuls."""
        return {"matmul_flops": self.flops, "matmul_flops_s": self.time_s} if self.flops else {}


NO_MATMULS = MatmulWork(flops=0.0, time_s=0.0)


def in_fp32(ops: StepOps) -> Iterator[Pattern]:
    """The pattern of fp32 matmuls on a GPU. Their time in 16 bits depends on torch's precision (explain/script_evidence.py)."""
    matmuls = [opened for opened in ops.all if opened.name in _MATMULS and opened.dtypes[:2] == ("float", "float")]
    if ops.on_device and matmuls:
        costs = ops.costs(matmuls)
        yield Pattern(name=PRECISION, calls=len(matmuls), costs=costs, least_ns=0.0, what="matmuls of fp32 tensors")


def sixteen_bit_work(ops: StepOps, *, batched: bool = True) -> MatmulWork:
    """The work of 16-bit matmuls on a GPU, with or without `batched` ones; a compiler's own kernels have no op and do not count."""
    names = _MATMULS if batched else _PLAIN
    matmuls = [op for op in ops.all if op.name in names and any(dtype in SIXTEEN_BITS for dtype in op.dtypes[:1])]
    known = [opened for opened in matmuls if _flops(opened)]
    time_ns = sum(cost.time_ns for cost in ops.costs(known).values())
    flops = sum(map(_flops, known))
    if not (ops.on_device and time_ns):
        return NO_MATMULS
    return MatmulWork(flops=flops / ops.steps, time_s=time_ns / 1e9 / ops.steps)


def _flops(opened: Range) -> float:
    """2 m n k, summed over a batch; 0 if the shapes do not fit, since a trace may hold anything."""
    factors = tensors(opened)
    # The first tensor of these ops is added to the product; it may have no dimension and then no shape
    factors = factors[-2:] if opened.name in ("aten::addmm", "aten::baddbmm") else factors[:2]
    if len(factors) < 2 or not len(factors[0]) == len(factors[1]) >= 2 or factors[0][-1] != factors[1][-2]:
        return 0.0
    return 2.0 * math.prod(factors[0]) * factors[1][-1]
