"""The kernel of cross-entropy on a chunk of logits, which it may replace by their gradient."""

import triton
import triton.language as tl
from torch import Tensor

from trainstep.ops.operators import on_device

_BLOCK = 8192
"""Logits of a row that a program takes at once: 16 each for 512 threads."""
_WARPS = 16


@triton.jit
def cross_entropy_kernel(
    logits_ptr, targets_ptr, loss_ptr, lse_ptr, scale_ptr, vocabulary, row_stride, ignore_index, smoothing, z_loss,
    HAS_LSE: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row. loss = lse - (1 - smoothing) z_target - smoothing mean(z) + z_loss lse^2, with lse = log(sum(exp(z))).

    GRADIENT writes `scale` times the loss's gradient over the logits. HAS_LSE reads lse instead of computing it, and
    writes no loss. Each lane keeps a maximum and a sum of its own, and they meet once at the end.
    """
    row = tl.program_id(0)
    logits = logits_ptr + row.to(tl.int64) * row_stride
    target = tl.load(targets_ptr + row)
    is_used = target != ignore_index
    is_valid = (target >= 0) & (target < vocabulary)
    # Read before the gradient is written over it: the reductions between are barriers.
    z_target = tl.load(logits + tl.where(is_valid, target, 0)).to(tl.float32)
    if HAS_LSE:
        lse = tl.load(lse_ptr + row)
        peak, sum_at_peak = lse, 1.0
    else:
        maximum = tl.full([BLOCK], -1e30, tl.float32)  # not -inf, which would give inf - inf where a logit is -inf
        total, plain_total = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for first in range(0, vocabulary, BLOCK):
            column = first + tl.arange(0, BLOCK)
            z = tl.load(logits + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
            larger = tl.maximum(maximum, z)
            total = total * tl.exp(maximum - larger) + tl.exp(z - larger)
            maximum = larger
            plain_total += tl.where(column < vocabulary, z, 0.0)
        # exp(z - peak) / sum is a probability to the last digits; exp(z - lse) has the rounding of lse, 1e-6 where lse is 20.
        peak = tl.max(maximum, axis=0)
        sum_at_peak = tl.sum(total * tl.exp(maximum - peak), axis=0)
        lse = peak + tl.log(sum_at_peak)
        loss = lse - (1 - smoothing) * z_target + z_loss * lse * lse
        if smoothing > 0:  # else 0 * mean(z), which is NaN where a logit is -inf
            loss -= smoothing * (tl.sum(plain_total, axis=0) / vocabulary)
        loss = tl.where(is_used, tl.where(is_valid, loss, float("nan")), 0.0)
        tl.store(loss_ptr + row, loss)
        tl.store(lse_ptr + row, lse)
    if GRADIENT:
        scale = tl.where(is_used, tl.load(scale_ptr), 0.0)
        slope = scale * (1 + 2 * z_loss * lse) / sum_at_peak
        for first in range(0, vocabulary, BLOCK):
            column = first + tl.arange(0, BLOCK)
            mask = column < vocabulary
            z = tl.load(logits + column, mask=mask, other=0.0).to(tl.float32)
            dz = slope * tl.exp(z - peak) - scale * (smoothing / vocabulary)
            dz -= tl.where(column == target, scale * (1 - smoothing), 0.0)
            dz = tl.where(is_used, dz, 0.0)  # 0 also where a logit of an ignored row is not finite
            tl.store(logits + column, dz.to(logits_ptr.dtype.element_ty), mask=mask)


@triton.jit
def scale_kernel(x_ptr, factor_ptr, elements, BLOCK: tl.constexpr):
    """x = factor x, in place; nothing is read or written if the factor is 1."""
    factor = tl.load(factor_ptr)
    if factor != 1:
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = place < elements
        x = tl.load(x_ptr + place, mask=mask).to(tl.float32)
        tl.store(x_ptr + place, (factor * x).to(x_ptr.dtype.element_ty), mask=mask)


def launch_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    loss: Tensor,
    lse: Tensor,
    scale: Tensor,
    *,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    has_lse: bool,
    gradient: bool,
) -> None:
    """Write loss and lse of each row, fp32 (rows,), and with `gradient` replace the logits (rows, V) by `scale` times theirs."""
    rows, vocabulary = logits.shape
    block = min(_BLOCK, triton.next_power_of_2(vocabulary))
    if rows:
        with on_device(logits.device):
            cross_entropy_kernel[(rows,)](
                logits, targets, loss, lse, scale, vocabulary, logits.stride(0), ignore_index, float(smoothing), float(z_loss),
                HAS_LSE=has_lse, GRADIENT=gradient, BLOCK=block, num_warps=max(1, min(_WARPS, block // 512)),
            )  # fmt: skip


def launch_scale(x: Tensor, factor: Tensor) -> None:
    """Multiply x, which has no gaps, in place by a factor on its device, fp32 ()."""
    if x.numel():
        with on_device(x.device):
            scale_kernel[(triton.cdiv(x.numel(), _BLOCK),)](x, factor, x.numel(), BLOCK=_BLOCK, num_warps=8)
