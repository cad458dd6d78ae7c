"""The kernel of cross-entropy on a chunk of logits, which it may replace by their gradient."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainstep.ops.direct_launch import PROBLEMS_KEPT, TRITON_STAGES, BoundKernel
from trainstep.ops.operators import on_device

_GROUP = 8
"""Neighbouring logits that a thread reads at once, 16 bytes of 16-bit ones; each group has one maximum and one sum."""
_SCALE_BLOCK = 8192
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _columns(first, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    return first + tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def _exp_of(z, peak):
    """e^(z - peak) by exp2, which spares what `exp` does for subnormal results: they become 0."""
    return tl.exp2((z - peak) * _LOG2_E)


@triton.jit
def _add_block(logits, column, vocabulary, maximum, total, logit_sum, MASKED: tl.constexpr, SMOOTHING: tl.constexpr):
    """Add a block to each group's running maximum, sum of exponentials relative to it, and sum of logits."""
    mask = (column < vocabulary) | (not MASKED)  # where it is always true the compiler removes it
    z = tl.load(logits + column, mask=mask, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
    larger = tl.maximum(maximum, tl.max(z, axis=1))
    total = total * _exp_of(maximum, larger) + tl.sum(_exp_of(z, larger[:, None]), axis=1)
    if SMOOTHING:
        logit_sum += tl.sum(tl.where(mask, z, 0.0), axis=1)
    return larger, total, logit_sum


@triton.jit
def _write_block(logits, column, vocabulary, peak, slope, smoothing_part, MASKED: tl.constexpr):
    """slope e^(z - peak) - smoothing_part in place of z."""
    mask = (column < vocabulary) | (not MASKED)
    z = tl.load(logits + column, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    dz = (slope * _exp_of(z, peak) - smoothing_part).to(logits.dtype.element_ty)
    tl.store(logits + column, dz, mask=mask, eviction_policy="evict_first")


@triton.jit
def cross_entropy_kernel(
    logits_ptr, targets_ptr, loss_ptr, lse_ptr, scale_ptr, vocabulary, row_stride, ignore_index, smoothing, z_loss,
    HAS_LSE: tl.constexpr, GRADIENT: tl.constexpr, SMOOTHING: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One row. loss = lse - (1 - smoothing) z_target - smoothing mean(z) + z_loss lse^2, with lse = log(sum(exp(z))).

    GRADIENT writes `scale` times the loss's gradient over the logits. HAS_LSE reads lse instead of computing it, and
    writes no loss. An ignored row is not read: its logits need not be finite, and its loss, lse and gradient are 0. Where the
    target is out of range, loss and gradient are NaN.
    """
    row = tl.program_id(0)
    logits = logits_ptr + row.to(tl.int64) * row_stride
    target = tl.load(targets_ptr + row)
    # Only what is behind whole blocks has a mask: it keeps the loads of a vocabulary like 50,257 from being vectorized.
    blocks = vocabulary // BLOCK
    whole = blocks * BLOCK
    if target != ignore_index:
        is_valid = (target >= 0) & (target < vocabulary)
        target_logit = logits + tl.where(is_valid, target, 0)
        z_target = tl.load(target_logit).to(tl.float32)
        if HAS_LSE:
            lse = tl.load(lse_ptr + row)
            peak, sum_at_peak = lse, 1.0
        else:
            # Not -inf, which would give inf - inf where a logit is -inf.
            maximum = tl.full([BLOCK // GROUP], -1e30, tl.float32)
            total, logit_sum = tl.zeros([BLOCK // GROUP], tl.float32), tl.zeros([BLOCK // GROUP], tl.float32)
            for first in range(0, whole, BLOCK):
                maximum, total, logit_sum = _add_block(
                    logits, _columns(first, BLOCK, GROUP), vocabulary, maximum, total, logit_sum, False, SMOOTHING
                )
            for first in range(
                whole, vocabulary, BLOCK
            ):  # one block or none; Triton 3.6 fails at an `if` here (sm_100, fp32)
                maximum, total, logit_sum = _add_block(
                    logits, _columns(first, BLOCK, GROUP), vocabulary, maximum, total, logit_sum, True, SMOOTHING
                )
            # exp(z - peak) / sum is a probability to the last digits; exp(z - lse) has the rounding of lse, 1e-6 where it is 20.
            peak = tl.max(maximum, axis=0)
            sum_at_peak = tl.sum(total * _exp_of(maximum, peak), axis=0)
            lse = peak + tl.log(sum_at_peak)
            loss = lse - (1 - smoothing) * z_target + z_loss * lse * lse
            if SMOOTHING:  # else 0 * mean(z), which is NaN where a logit is -inf
                loss -= smoothing * (tl.sum(logit_sum, axis=0) / vocabulary)
            tl.store(loss_ptr + row, tl.where(is_valid, loss, float("nan")))
            tl.store(lse_ptr + row, lse)
        if GRADIENT:
            scale = tl.load(scale_ptr)
            slope, smoothing_part = scale * (1 + 2 * z_loss * lse) / sum_at_peak, scale * (smoothing / vocabulary)
            slope = tl.where(is_valid, slope, float("nan"))
            tl.debug_barrier()  # all threads have read the target's logit
            # From the end, which was read last, and of which the cache has the most.
            if whole < vocabulary:
                _write_block(logits, _columns(whole, BLOCK, GROUP), vocabulary, peak, slope, smoothing_part, True)
            for block in range(blocks):
                column = _columns((blocks - 1 - block) * BLOCK, BLOCK, GROUP)
                _write_block(logits, column, vocabulary, peak, slope, smoothing_part, False)
            tl.debug_barrier()  # the block's store to the target's place comes first
            dz_target = slope * _exp_of(z_target, peak) - smoothing_part - scale * (1 - smoothing)
            tl.store(target_logit, dz_target.to(logits_ptr.dtype.element_ty), mask=is_valid)
    else:
        if not HAS_LSE:
            tl.store(loss_ptr + row, 0.0)
            tl.store(lse_ptr + row, 0.0)
        if GRADIENT:
            zeros = tl.zeros([BLOCK // GROUP, GROUP], logits_ptr.dtype.element_ty)
            for first in range(0, vocabulary, BLOCK):
                column = _columns(first, BLOCK, GROUP)
                tl.store(logits + column, zeros, mask=column < vocabulary)


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
    """Write loss and lse of each row, fp32 (rows,), and with `gradient` replace the logits (rows, V) by `scale` times theirs.

    targets: int64 (rows,); scale: fp32 ().
    """
    if len(logits):
        kernel = _bound(
            logits.shape, logits.stride(0), ignore_index, float(smoothing), float(z_loss), has_lse, gradient,
            logits.dtype, logits.device,
        )  # fmt: skip
        with on_device(logits.device):
            kernel(logits, targets, loss, lse, scale)


@functools.lru_cache(PROBLEMS_KEPT)
def _bound(
    shape: torch.Size,
    row_stride: int,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    has_lse: bool,
    gradient: bool,
    _dtype: torch.dtype,
    _device: torch.device,
) -> BoundKernel:
    rows, vocabulary = shape
    block, warps = _tile(vocabulary)
    arguments = {
        "vocabulary": vocabulary,
        "row_stride": row_stride,
        "ignore_index": ignore_index,
        "smoothing": smoothing,
    }
    arguments |= {"z_loss": z_loss, "HAS_LSE": has_lse, "GRADIENT": gradient, "SMOOTHING": smoothing > 0}
    arguments |= {"BLOCK": block, "GROUP": _GROUP}
    return BoundKernel(cross_entropy_kernel, rows, arguments, num_warps=warps, num_stages=TRITON_STAGES)


def _tile(vocabulary: int) -> tuple[int, int]:
    """Logits of a row that a program takes at once, and its warps.

    The longer the rows, the fewer of them are worked on at once, so that the cache holds them until they are read again
    (results/h200/cross_entropy_variants_again.csv).
    """
    block = 4096 if vocabulary <= 16_384 else 8192 if vocabulary <= 65_536 else 16_384
    block = min(block, max(_GROUP, triton.next_power_of_2(vocabulary)))
    return block, max(1, block // 512)


def launch_scale(x: Tensor, factor: Tensor) -> None:
    """Multiply x, which has no gaps, in place by a factor on its device, fp32 ()."""
    if x.numel():
        kernel = _bound_scale(x.numel(), x.dtype, x.device)
        with on_device(x.device):
            kernel(x, factor)


@functools.lru_cache(PROBLEMS_KEPT)
def _bound_scale(elements: int, _dtype: torch.dtype, _device: torch.device) -> BoundKernel:
    arguments = {"elements": elements, "BLOCK": _SCALE_BLOCK}
    programs = triton.cdiv(elements, _SCALE_BLOCK)
    return BoundKernel(scale_kernel, programs, arguments, num_warps=8, num_stages=TRITON_STAGES)
