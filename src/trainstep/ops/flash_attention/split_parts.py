"""fp32 tensors as two fp16 parts in memory, made once before the kernels that multiply them: `split_into_parts`.

[Note: Three products of parts split beforehand]
An fp32 number, brought by a power of two below 2^15, is the sum of two fp16 numbers of 11 bits each: x = x1 + x2 up to
|x - x1 - x2| <= max(2^-23 |x|, 2^-25), the second where x2 falls below fp16's normal numbers. A matrix product then is three that
tensor cores do exactly, summed in fp32:

    sum a b = sum a1 b1 + sum (a1 b2 + a2 b1), off by |a2 b2| <= 2^-22 |a b| a term, and 2^-23 |a b| for each of the two splits,

so by at most 2^-21 sum |a b|, beside the sum's own rounding: the error class of three TF32 products, whose parts have 11 bits too,
at twice their rate, since tensor cores take 16-bit operands twice as fast. Ootomo and Yokota 2022, "Recovering single precision
accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance", correct TF32 and fp16 products like this.

- *Beforehand.* A kernel that splits fp32 tiles where it uses them splits each once for every tile it meets, and wgmma wants
  operands in shared memory. Here each element is split once, and tiles come from memory as they are multiplied (by TMA where there
  is one). The parts take as many bytes as the tensor, widths rounded up to a power of two, while the operator runs.
- *Scales.* fp16 ends at 65504 and loses bits below 2^-14. So each tensor is scaled by one power of two for a key head and the query
  heads that share it, its largest finite element going to 2^14..2^15: exact, and found on the device. An element down to 2^-16 of
  the largest keeps the bound above; a smaller one is off by at most 2^-39 of the largest. Query heads that share a key head
  and differ in size by more than that lose bits in the smaller ones.
- *What a kernel makes itself* (probabilities, gradients of scores) it scales and splits in registers.
- *Not finite.* An infinity counts as NaN (its parts are inf and inf - inf) and reaches what NaN reaches in a matrix product, no
  more: scales leave it out.

Measured against fp64 in Triton's interpreter, the largest error of an output or gradient is 0.2 to 3.2 times plain PyTorch's in
fp32 (where scores pass 80, dv's is up to 4 times, and the IEEE kernels' 5: both take probabilities from a rounded log-sum-exp).
Tests hold it to the rule of three TF32 products: 4 times, and eps of the terms that cancel (docs/decisions/0004).

Parts: (2, batch x heads, rows padded to whole tiles, BLOCK_D) fp16, zero beyond the tensor, so that no load needs a mask.
"""

import functools
from enum import IntEnum
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from trainstep.ops.flash_attention.launch import PROBLEMS_KEPT, BoundKernel, strides
from trainstep.ops.flash_attention.tile_access import SIZES, load_tile
from trainstep.ops.flash_attention.tiles import padded

SPLIT_SIZES = (*SIZES, "rows", "padded_rows", "first_peak", "padded_queries", "padded_keys", "groups")
MOST_ROWS, MOST_ELEMENTS = 64, 8192
"""Of a program that splits."""
PART_EXPONENT: tl.constexpr = tl.constexpr(14)
"""Of the largest element of scaled parts."""
LEAST_INFINITY: tl.constexpr = tl.constexpr(0x7F800000)
"""Bits of +inf: those of NaNs are above, those of finite numbers below."""


class Peak(IntEnum):
    """A row of `peaks`, (5, groups) int32: bits of the largest finite |x|; a group is a key head with its query heads."""

    Q = 0
    K = 1
    V = 2
    DO = 3
    DS = 4
    """Of the gradients of the scores, in the units of scaled do and v."""


Q_PEAK: tl.constexpr = tl.constexpr(int(Peak.Q))
K_PEAK: tl.constexpr = tl.constexpr(int(Peak.K))
V_PEAK: tl.constexpr = tl.constexpr(int(Peak.V))
DO_PEAK: tl.constexpr = tl.constexpr(int(Peak.DO))
DS_PEAK: tl.constexpr = tl.constexpr(int(Peak.DS))
"""As kernels read them."""


# Powers of two ---------------------------------------------------------------------------------------------------------------


@triton.jit
def power_of_two(exponent):
    return ((tl.minimum(tl.maximum(exponent, -126), 127) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponent_of(bits):
    """floor(log2 x) of a positive normal float's bits; -127 for what is smaller."""
    return (bits >> 23) - 127


@triton.jit
def bits_of(x):
    """Of |x|: as integers they order as |x| does."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def times_power_of_two(x, exponent):
    """x 2^exponent for exponents that no fp32 number has, as long as the result is one."""
    half = exponent >> 1
    return x * power_of_two(half) * power_of_two(exponent - half)


@triton.jit
def exponent_at(peaks_ptr, peak, groups, group):
    """Of the largest element of this group's tensor: Peak times `groups` finds the row."""
    return exponent_of(tl.load(peaks_ptr + peak * groups + group))


@triton.jit
def scores_factor(scale_log2, peaks_ptr, groups, group):
    """What turns products of q's and k's parts into scores in log2. Never 0: a hidden score, -inf, has to stay what it is."""
    exponent = exponent_at(peaks_ptr, Q_PEAK, groups, group) + exponent_at(peaks_ptr, K_PEAK, groups, group)
    exponent -= 2 * PART_EXPONENT
    return tl.maximum(times_power_of_two(scale_log2, exponent), power_of_two(-126))


# Products of parts -----------------------------------------------------------------------------------------------------------


@triton.jit
def split(x):
    x1 = x.to(tl.float16)
    return x1, (x - x1.to(tl.float32)).to(tl.float16)


@triton.jit
def load_parts(parts, row, plane):
    """Rows from `row` on of both parts, which are `plane` rows apart."""
    return parts.load([row, 0]), parts.load([row + plane, 0])


@triton.jit
def dot_parts(a1, a2, b1, b2, acc):
    """acc + a b, the small products first."""
    acc = tl.dot(a2, b1, acc)
    acc = tl.dot(a1, b2, acc)
    return tl.dot(a1, b1, acc)


@triton.jit
def dot_parts_transposed(a1, a2, b1, b2, acc):
    """acc + a b, added up in the order of dot_parts of b^T and a^T, so that tensor cores give the same bits."""
    acc = tl.dot(a1, b2, acc)
    acc = tl.dot(a2, b1, acc)
    return tl.dot(a1, b1, acc)


# The kernels that make parts -------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=SPLIT_SIZES)
def peak_kernel(
    x_ptr, peaks_ptr, stride_xb, stride_xh, stride_xs, tiles, heads, heads_per_key_head, rows, first_peak,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """peaks[group] = bits of max |x| over the finite. Maxima of integers do not depend on their order: every run gives the same."""
    batch_head = tl.program_id(0) // tiles
    base = x_ptr + (batch_head // heads).to(tl.int64) * stride_xb + (batch_head % heads).to(tl.int64) * stride_xh
    first = tl.program_id(0) % tiles * BLOCK
    bits = bits_of(load_tile(base, stride_xs, first, rows, BLOCK, HEAD_DIM, BLOCK_D, True))
    most = tl.max(tl.max(tl.where(bits < LEAST_INFINITY, bits, 0), 1), 0)
    tl.atomic_max(peaks_ptr + first_peak + batch_head // heads_per_key_head, most)


@triton.jit(do_not_specialize=SPLIT_SIZES)
def split_kernel(
    x_ptr, o_ptr, peaks_ptr, parts_ptr, delta_ptr, stride_xb, stride_xh, stride_xs, stride_ob, stride_oh, stride_os,
    tiles, batch_heads, heads, heads_per_key_head, groups, rows, padded_rows, first_peak,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Parts of x. DELTA: x is do, and delta = rowsum(do o) too, in the units of scaled do and v, where nothing overflows."""
    batch_head = tl.program_id(0) // tiles
    batch, head = (batch_head // heads).to(tl.int64), (batch_head % heads).to(tl.int64)
    group = batch_head // heads_per_key_head
    first = tl.program_id(0) % tiles * BLOCK
    base = x_ptr + batch * stride_xb + head * stride_xh
    x = load_tile(base, stride_xs, first, rows, BLOCK, HEAD_DIM, BLOCK_D, True)
    x = times_power_of_two(x, PART_EXPONENT - exponent_of(tl.load(peaks_ptr + first_peak + group)))
    row = first + tl.arange(0, BLOCK)
    if DELTA:
        o_base = o_ptr + batch * stride_ob + head * stride_oh
        o = load_tile(o_base, stride_os, first, rows, BLOCK, HEAD_DIM, BLOCK_D, True)
        o = times_power_of_two(o, PART_EXPONENT - exponent_at(peaks_ptr, V_PEAK, groups, group))  # |o| <= max |v|
        tl.store(delta_ptr + batch_head.to(tl.int64) * rows + row, tl.sum(x * o, 1), mask=row < rows)
    x1, x2 = split(x)
    out = parts_ptr + (batch_head.to(tl.int64) * padded_rows + first) * BLOCK_D
    out += tl.arange(0, BLOCK)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    tl.store(out, x1, mask=row[:, None] < padded_rows)
    tl.store(out + batch_heads.to(tl.int64) * padded_rows * BLOCK_D, x2, mask=row[:, None] < padded_rows)


# Launching -------------------------------------------------------------------------------------------------------------------


def zero_peaks(k_BGSD: Tensor) -> Tensor:
    """To be filled by split_into_parts, and by the kernel of query gradients."""
    return torch.zeros((len(Peak), k_BGSD.shape[0] * k_BGSD.shape[1]), dtype=torch.int32, device=k_BGSD.device)


def whole_tiles(rows: int, *sides: int) -> int:
    """Rows padded so that tiles of these sides, powers of two, end within them."""
    most = max(sides)
    return -(-rows // most) * most


def split_into_parts(x_BHSD: Tensor, peaks: Tensor, peak: Peak, key_heads: int, padded_rows: int) -> Tensor:
    """Parts of q, k or v, whose last stride is 1; its largest element goes into `peaks`."""
    return _split(x_BHSD, x_BHSD, peaks, x_BHSD, peak, key_heads, padded_rows)


def split_gradient(
    do_BHSD: Tensor, o_BHSD: Tensor, peaks: Tensor, key_heads: int, padded_rows: int
) -> tuple[Tensor, Tensor]:
    """Parts of do, and delta (B, H, S). After split_into_parts of v, whose scale delta shares."""
    delta = torch.empty(do_BHSD.shape[:3], dtype=torch.float32, device=do_BHSD.device)
    return _split(do_BHSD, o_BHSD, peaks, delta, Peak.DO, key_heads, padded_rows), delta


def _split(x: Tensor, o: Tensor, peaks: Tensor, delta: Tensor, peak: Peak, key_heads: int, padded_rows: int) -> Tensor:
    batch, heads, _, head_dim = x.shape
    if 2 * batch * heads * padded_rows >= 2**31:
        raise ValueError(
            f"fp32_precision: fp16x3 counts rows of its parts in 32 bits, and {tuple(x.shape)} has more: take tf32x3"
        )
    parts = torch.empty((2, batch * heads, padded_rows, padded(head_dim)), dtype=torch.float16, device=x.device)
    find_peak, split_all = _bind(x.shape, x.stride(), o.stride(), x.device, peak, key_heads, padded_rows)
    find_peak(x, peaks)
    split_all(x, o, peaks, parts, delta)
    return parts


@functools.lru_cache(maxsize=4 * PROBLEMS_KEPT)
def _bind(
    shape: torch.Size, stride: tuple[int, ...], o_stride: tuple[int, ...], _device: torch.device, peak: Peak, key_heads: int,
    padded_rows: int,
) -> tuple[BoundKernel, BoundKernel]:  # fmt: skip
    batch, heads, rows, head_dim = shape
    groups = batch * key_heads
    block = min(MOST_ROWS, MOST_ELEMENTS // padded(head_dim))
    both: dict[str, Any] = strides(x=stride) | {
        "heads": heads,
        "heads_per_key_head": heads // key_heads,
        "rows": rows,
        "first_peak": peak * groups,
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded(head_dim),
        "BLOCK": block,
    }
    tiles = triton.cdiv(rows, block)
    find_peak = BoundKernel(peak_kernel, tiles * batch * heads, {**both, "tiles": tiles}, num_warps=4)
    tiles = triton.cdiv(padded_rows, block)
    arguments = both | strides(o=o_stride)
    arguments |= {"tiles": tiles, "batch_heads": batch * heads, "groups": groups, "padded_rows": padded_rows}
    arguments["DELTA"] = peak is Peak.DO
    return find_peak, BoundKernel(split_kernel, tiles * batch * heads, arguments, num_warps=4)


class PartsKernel(BoundKernel):
    """A bound kernel whose first arguments are parts, each read in tiles of so many rows through a tensor descriptor."""

    def __init__(self, sides: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._sides = sides

    def __call__(self, *tensors: Tensor) -> None:
        read = len(self._sides)
        super().__call__(*map(_in_tiles, tensors[:read], self._sides), *tensors[read:])


def _in_tiles(parts: Tensor, side: int) -> Any:
    width = parts.shape[-1]
    return TensorDescriptor(parts, [parts.numel() // width, width], [width, 1], [side, width])
