"""fp32 tensors as two fp16 parts in memory, and the arithmetic of the kernels that multiply them.

[Note: Three products of parts split beforehand]
An fp32 number, brought by a power of two below 2^15, is the sum of two fp16 numbers of 11 bits each: x = x1 + x2 up to
|x - x1 - x2| <= max(2^-23 |x|, 2^-25), the second where x2 falls below fp16's normal numbers. A matrix product then is three that
tensor cores do exactly, summed in fp32:

    sum a b = sum a1 b1 + sum (a1 b2 + a2 b1), off by |a2 b2| <= 2^-22 |a b| a term, and 2^-23 |a b| for each of the two splits,

so by at most 2^-21 sum |a b|, beside the sum's own rounding: the error class of three TF32 products, whose parts have 11 bits too,
at twice their rate, since tensor cores take 16-bit operands twice as fast. Ootomo and Yokota 2022, "Recovering single precision
accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance", correct TF32 and fp16 products like this.

- *Sums start anew with each tile.* Tensor cores multiply exactly but add towards zero: what an addition cuts off has the sum's own
  sign, so that errors of a sum carried on through thousands of additions do not cancel but grow with their number. Measured on an
  H200 at 16,384 keys: o off by 8 times fp32's own error, dk and dv by up to 60. So tensor cores sum within a tile, from zero, and
  tiles are added in fp32 registers, to nearest, as Ootomo and Yokota do: 0.4 to 0.9 times fp32's error. `dot_parts` takes no
  accumulator, so there is no other way to multiply here. A compiler may turn `acc + dot(a, b)` into `dot(a, b, acc)`: Triton does
  where a product stands alone, not where it is the last of three, as in `dot_parts`. tests/ops/flash_attention/test_compilation.py
  looks at what is compiled; Triton's interpreter adds to nearest and shows none of this.
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

Against fp64 in Triton's interpreter the largest error of an output or gradient is 0.2 to 3.2 times plain PyTorch's in fp32 (where
scores pass 80, dv's is up to 4 times, and the IEEE kernels' 5: both take probabilities from a rounded log-sum-exp).
Tests hold it to the rule of three TF32 products: 4 times, and eps of the terms that cancel (docs/decisions/0004).

Parts lie by two tensors, (tensors, 2, batch x heads, rows padded to whole tiles, BLOCK_D) fp16: those of k and v, and those of q,
in the backward pass with do. Zero beyond the tensor, so that no load needs a mask.
"""

import math
from enum import IntEnum
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from trainstep.ops.flash_attention.launch import BoundKernel
from trainstep.ops.flash_attention.tile_access import SIZES

SPLIT_SIZES = (*SIZES, "query_tiles", "key_tiles", "padded_queries", "padded_keys")
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
    """Rows from `row` on of both parts, which are `plane` rows apart; the second tensor of two begins 2 planes on."""
    return parts.load([row, 0]), parts.load([row + plane, 0])


@triton.jit
def dot_parts(a1, a2, b1, b2):
    """a b, the small products first. Added up from zero, always: see the note."""
    return tl.dot(a1, b1, tl.dot(a1, b2, tl.dot(a2, b1)))


@triton.jit
def dot_parts_transposed(a1, a2, b1, b2):
    """a b, added up in the order of dot_parts of b^T and a^T, so that tensor cores give the same bits."""
    return tl.dot(a1, b1, tl.dot(a2, b1, tl.dot(a1, b2)))


# Launching -------------------------------------------------------------------------------------------------------------------


def whole_tiles(rows: int, *sides: int) -> int:
    """Rows padded so that tiles of these sides, powers of two, end within them."""
    most = max(sides)
    return -(-rows // most) * most


class PartsKernel(BoundKernel):
    """A bound kernel whose first arguments are parts, each read in tiles of so many rows through a tensor descriptor.

    What a descriptor says of shapes is worked out and checked once; a launch adds the tensor.
    """

    def __init__(self, shapes: tuple[tuple[int, ...], ...], sides: tuple[int, ...], *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._shapes = tuple(_in_tiles(shape, side) for shape, side in zip(shapes, sides, strict=True))

    def __call__(self, *tensors: Tensor) -> None:  # type: ignore[override]  # it makes the descriptors
        read = len(self._shapes)
        super().__call__(*tensors[read:], descriptors=[*map(_described, self._shapes, tensors)])


def _in_tiles(shape: tuple[int, ...], side: int) -> dict[str, Any]:
    """The fields of a descriptor of parts of this shape, without a tensor that it would keep alive."""
    *rows, width = shape
    nowhere = torch.empty(shape, dtype=torch.float16, device="meta")
    fields: dict[str, Any] = vars(TensorDescriptor(nowhere, [math.prod(rows), width], [width, 1], [side, width]))
    return fields


def _described(fields: dict[str, Any], parts: Tensor) -> Any:
    descriptor = object.__new__(TensorDescriptor)
    vars(descriptor).update(fields, base=parts)
    return descriptor
