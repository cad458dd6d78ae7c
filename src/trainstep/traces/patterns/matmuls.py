"""The matmuls that torch's ops launch in a step: those in fp32, 16-bit ones of odd sizes, and the FLOPs of 16-bit ones.

[Note: odd sizes] Where a size of a 16-bit matmul is no multiple of 8, cuBLAS has only slow kernels: with GPT-2's 50,257 words, not
50,304, the three matmuls of the head take an H200 7, 5 and 1.4 times as long (results/h200/odd_vocabulary.csv). An odd number of
tokens may be harmless, and small or narrow matmuls are slow for other reasons. So a matmul counts only if all its sizes are over
64 and it has less than half the rate of the step's others with at most twice its FLOPs: larger ones should be no slower. The least
time is that of its FLOPs at that rate.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from trainstep.traces.kineto import Range
from trainstep.traces.patterns.pattern import ODD_SIZES, PRECISION, Pattern
from trainstep.traces.patterns.step_ops import Shape, StepOps, tensors

BATCHED = ("aten::bmm", "aten::baddbmm")
_PLAIN = ("aten::mm", "aten::addmm", "aten::addmm_")
_ADDED = ("aten::addmm", "aten::addmm_", "aten::baddbmm")
_MATMULS = (*BATCHED, *_PLAIN)
SIXTEEN_BITS = ("c10::BFloat16", "c10::Half")
"""The 16-bit dtypes as traces write them."""
_MULTIPLE, _SMALL = 8, 64
"""Sizes that are multiples of the first have fast kernels, others are called odd here; sizes up to the second are narrow."""
_ALIKE, _SLOW = 2.0, 0.5
"""A matmul is compared with those of at most so many times its FLOPs, and is slow below this share of their rate."""
_LARGEST = 2**40
"""A foreign trace may hold anything; no tensor has a larger size."""


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


class _Matmul(NamedTuple):
    """A matmul of the step: its sizes m, k and n, its FLOPs, and its kernels' time."""

    op: Range
    sizes: tuple[int, int, int]
    flops: float
    time_ns: int

    @property
    def odd_sizes(self) -> list[int]:
        return [size for size in self.sizes if size % _MULTIPLE]


def of_odd_sizes(ops: StepOps) -> Iterator[Pattern]:
    """The pattern of 16-bit matmuls that a size which is no multiple of 8 makes slow, on a GPU. [Note: odd sizes]"""
    wide = [each for each in _in_16_bits(ops, _PLAIN) if min(each.sizes) > _SMALL]
    others = [each for each in wide if not each.odd_sizes]
    slow: list[Range] = []
    time_ns, least_ns = 0, 0.0
    time_by_size: dict[int, int] = {}
    for each in wide if ops.on_device else ():
        alike = [other for other in others if other.flops <= _ALIKE * each.flops]
        if not each.odd_sizes or not alike:
            continue
        least = each.flops * sum(other.time_ns for other in alike) / sum(other.flops for other in alike)
        if least < _SLOW * each.time_ns:
            slow.append(each.op)
            time_ns, least_ns = time_ns + each.time_ns, least_ns + least
            for size in each.odd_sizes:
                time_by_size[size] = time_by_size.get(size, 0) + each.time_ns
    if slow:
        size = max(time_by_size, key=lambda size: time_by_size[size])
        what = f"16-bit matmuls with a size of {size:,}, no multiple of 8, take {time_ns / least_ns:.1f} times as long as others"
        # The device's idle time before them is not theirs: other sizes would be launched as late
        costs = {phase: replace(cost, gap_ns=0) for phase, cost in ops.costs(slow).items()}
        yield Pattern(name=ODD_SIZES, calls=len(slow), costs=costs, least_ns=least_ns, what=what)


def sixteen_bit_work(ops: StepOps, *, batched: bool = True) -> MatmulWork:
    """The work of 16-bit matmuls on a GPU, with or without `batched` ones; a compiler's own kernels have no op and do not count."""
    known = _in_16_bits(ops, _MATMULS if batched else _PLAIN)
    if not (ops.on_device and known):
        return NO_MATMULS
    flops, time_ns = sum(each.flops for each in known), sum(each.time_ns for each in known)
    return MatmulWork(flops=flops / ops.steps, time_s=time_ns / 1e9 / ops.steps)


def _in_16_bits(ops: StepOps, names: Sequence[str]) -> list[_Matmul]:
    """The matmuls of these names whose first tensor is in 16 bits. What a compiler traces has no kernels and is none."""
    found = []
    for op in ops.all:
        if op.name not in names or not any(dtype in SIXTEEN_BITS for dtype in op.dtypes[:1]):
            continue
        factors, time_ns = _factors(op), sum(cost.time_ns for cost in ops.costs([op]).values())
        if factors and time_ns > 0:
            one, other = factors
            sizes = one[-2], one[-1], other[-1]
            found.append(_Matmul(op, sizes, 2.0 * math.prod(one) * other[-1], time_ns))
    return found


def _factors(opened: Range) -> tuple[Shape, Shape] | None:
    """The shapes of the two factors, (..., m, k) and (..., k, n); None if no two tensors fit, since a trace may hold anything.

    Of addmm and baddbmm the first tensor is added to the product; it may have no dimension, and then no shape. A tensor behind the
    factors is that of `out=`.
    """
    shapes = tensors(opened)
    for place in (1, 0) if opened.name in _ADDED else (0,):
        one, other = [*shapes[place : place + 2], (), ()][:2]
        if len(one) == len(other) >= 2 and one[-1] == other[-2] and all(0 < size < _LARGEST for size in (*one, *other)):
            return one, other
    return None
