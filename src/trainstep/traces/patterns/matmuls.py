"""The matmuls that torch's ops launch in a step: those in fp32, 16-bit ones of odd sizes, and the FLOPs of 16-bit ones.

[Note: odd sizes] Where a size of a 16-bit matmul is no multiple of 8, cuBLAS has only slow kernels: with GPT-2's 50,257 words, not
50,304, the three matmuls of the head take an H200 7, 5 and 1.4 times as long (results/h200/odd_vocabulary.csv). The least time is
that of the same FLOPs at the rate of the step's other 16-bit matmuls.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trainstep.traces.kineto import Range
from trainstep.traces.patterns.pattern import ODD_SIZES, PRECISION, Pattern
from trainstep.traces.patterns.step_ops import Shape, StepOps, tensors

BATCHED = ("aten::bmm", "aten::baddbmm")
_PLAIN = ("aten::mm", "aten::addmm")
_MATMULS = (*BATCHED, *_PLAIN)
SIXTEEN_BITS = ("c10::BFloat16", "c10::Half")
"""The 16-bit dtypes as traces write them."""
_MULTIPLE = 8
"""Sizes that are multiples of this have fast kernels; others are called odd here."""
_SMALL = 64
"""Sizes up to this, such as a number of classes, matter little."""


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


def of_odd_sizes(ops: StepOps) -> Iterator[Pattern]:
    """The pattern of 16-bit matmuls with a size that is no multiple of 8, on a GPU. [Note: odd sizes]"""
    odd: list[Range] = []
    others: list[Range] = []
    flops_by_size: dict[int, float] = {}
    for op in _in_16_bits(ops, _PLAIN):
        flops, odd_sizes = _flops(op), _odd_sizes(op)
        if flops:
            (odd if odd_sizes else others).append(op)
        for odd_size in odd_sizes:
            flops_by_size[odd_size] = flops_by_size.get(odd_size, 0.0) + flops
    odd_ns, others_ns = (sum(cost.time_ns for cost in ops.costs(some).values()) for some in (odd, others))
    if not (ops.on_device and odd_ns and others_ns):
        return
    share = sum(map(_flops, odd)) / odd_ns / (sum(map(_flops, others)) / others_ns)
    if share < 1:
        size = max(flops_by_size, key=lambda odd_size: flops_by_size[odd_size])
        what = f"16-bit matmuls with a size of {size:,}, no multiple of 8, reach {share:.0%} of the rate of the others"
        yield Pattern(name=ODD_SIZES, calls=len(odd), costs=ops.costs(odd), least_ns=share * odd_ns, what=what)


def sixteen_bit_work(ops: StepOps, *, batched: bool = True) -> MatmulWork:
    """The work of 16-bit matmuls on a GPU, with or without `batched` ones; a compiler's own kernels have no op and do not count."""
    known = [opened for opened in _in_16_bits(ops, _MATMULS if batched else _PLAIN) if _flops(opened)]
    time_ns = sum(cost.time_ns for cost in ops.costs(known).values())
    flops = sum(map(_flops, known))
    if not (ops.on_device and time_ns):
        return NO_MATMULS
    return MatmulWork(flops=flops / ops.steps, time_s=time_ns / 1e9 / ops.steps)


def _in_16_bits(ops: StepOps, names: Sequence[str]) -> list[Range]:
    """Ops of these names whose first tensor is in 16 bits."""
    return [op for op in ops.all if op.name in names and any(dtype in SIXTEEN_BITS for dtype in op.dtypes[:1])]


def _flops(opened: Range) -> float:
    """2 m n k, summed over a batch; 0 if the shapes do not fit, since a trace may hold anything."""
    factors = _factors(opened)
    return 2.0 * math.prod(factors[0]) * factors[1][-1] if factors else 0.0


def _odd_sizes(opened: Range) -> set[int]:
    """Those of m, n and k that are no multiple of 8; empty if the shapes do not fit."""
    sizes = {size for factor in _factors(opened) for size in factor[-2:]}
    return {size for size in sizes if size % _MULTIPLE and size > _SMALL}


def _factors(opened: Range) -> tuple[Shape, ...]:
    """The shapes of the two factors, (..., m, k) and (..., k, n); empty if they do not fit."""
    factors = tensors(opened)
    # The first tensor of these ops is added to the product; it may have no dimension and then no shape
    factors = factors[-2:] if opened.name in ("aten::addmm", "aten::baddbmm") else factors[:2]
    if len(factors) < 2 or not len(factors[0]) == len(factors[1]) >= 2 or factors[0][-1] != factors[1][-2]:
        return ()
    return tuple(factors)
