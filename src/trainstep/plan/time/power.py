"""How far a GPU's power limit lowers its clock in a long step, and how much longer its kernels then take.

Calibrations are of bursts, which end before the limit acts; training does not. With x the clock as a share of the highest,

    power(x) = idle + x^3 (sum over kernels of watts_i t_i(x)) / (sum of t_i(x)),      t_i(x) = t_i x^-0.71 or t_i

and the clock is the highest at which the power is within the limit. Kernels on tensor cores slow down with the clock, by less
than it falls, since memory does not; other kernels hardly do. `watts` is what a kernel draws above idle at the full clock.

All figures: 2.5 s of the same kernel on an H200 at 700 W, results/h200/power_limit.txt. Mixtures of matmuls and copies, to
which nothing was fitted, ran at 1,590, 1,545 and 1,515 MHz, where the formula says 1,587, 1,537 and 1,523.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainstep.plan.time.kernels import ATTENTION_KINDS, Kernel, Kind

LIMITED = ("H200 SXM", "H100 SXM")
"""Data sheets of the chip that was measured, at the same limit."""
BURST_S = 1.0
"""Seconds of work that the limit does not act on yet: results/h200/predicted.jsonl has steps of 0.5 s at the full clock."""
_IDLE_W = 120.0
_LIMIT_W = 690.0
"""Mean power that the driver keeps, with a limit of 700 W."""
_TIME_EXPONENT = 0.71
"""Tensor cores at a clock of x take x^-0.71 as long: 798 TFLOP/s at the full clock, 660 at 0.765 of it."""
_LOWEST_CLOCK = 0.3
_TENSOR_CORES_W = {"bf16": 1275.0, "fp16": 1275.0, "tf32": 1135.0}
_AT_FLOPS_PER_S = {"bf16": 798e12, "fp16": 798e12, "tf32": 415e12}
"""FLOP/s of the matmuls that draw _TENSOR_CORES_W."""
_WATTS_EXPONENT = 2.3
"""Slower matmuls draw less, by this power of their rate: 2,048 x 4,096 x 1,024 at 636 TFLOP/s drew 756 W."""
_ATTENTION_W = 1203.0
_FP32_W = 553.0
_MEMORY_W = 300.0
"""Power of element-wise kernels; copies at the full bandwidth draw 537 W."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Kernels that take `time_s` in a burst."""

    time_s: float
    watts: float
    slows: bool

    def at(self, clock: float) -> float:
        """Seconds at this share of the highest clock."""
        return self.time_s * clock**-_TIME_EXPONENT if self.slows else self.time_s


def load_of(kernel: Kernel, symbols: Mapping[str, int], *, one_s: float, count: int) -> Load:
    """The load of `count` kernels that take `one_s` each."""
    watts, slows = _MEMORY_W, False
    if kernel.kind in ATTENTION_KINDS and kernel.element_bytes != 4:
        watts, slows = _ATTENTION_W, True
    elif kernel.kind == Kind.MATMUL and kernel.dtype in _TENSOR_CORES_W:
        m, n, k, batch = kernel.matrix(symbols)
        rate = 2 * m * n * k * batch / one_s if one_s else 0.0
        share = min(1.0, rate / _AT_FLOPS_PER_S[kernel.dtype])
        watts, slows = max(_MEMORY_W, _TENSOR_CORES_W[kernel.dtype] * share**_WATTS_EXPONENT), True
    elif kernel.kind == Kind.MATMUL or kernel.kind in ATTENTION_KINDS:
        watts = _FP32_W
    return Load(time_s=count * one_s, watts=watts, slows=slows)


def sustained_clock(loads: Sequence[Load]) -> float:
    """The clock at the power limit as a share of the highest, at most 1; found by halving."""
    if _power_w(loads, 1.0) <= _LIMIT_W:
        return 1.0
    low, high = _LOWEST_CLOCK, 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if _power_w(loads, middle) <= _LIMIT_W else (low, middle)
    return low


def _power_w(loads: Sequence[Load], clock: float) -> float:
    busy_s = sum(load.at(clock) for load in loads)
    drawn = sum(load.watts * load.at(clock) for load in loads)
    return _IDLE_W + clock**3 * drawn / busy_s if busy_s else _IDLE_W
