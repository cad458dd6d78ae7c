"""fp32 tensors as two fp16 parts: the kernels that split tensors, and the arithmetic to multiply parts.

[Note: Three products of parts split beforehand]
An fp32 number, scaled by a power of two to below 2^15, is the sum of two fp16 numbers of 11 bits each: x = x1 + x2 up to
|x - x1 - x2| <= max(2^-23 |x|, 2^-25), the second where x2 falls below fp16's normal numbers. A matrix product then is three
products that tensor cores compute exactly, summed in fp32:

    sum a b = sum a1 b1 + sum (a1 b2 + a2 b1), off by |a2 b2| <= 2^-22 |a b| a term, and 2^-23 |a b| for each of the two splits,

so by at most 2^-21 sum |a b|, beside the sum's own rounding: the error class of three TF32 products, whose parts have 11 bits too,
at twice their rate, since tensor cores take 16-bit operands twice as fast. Ootomo and Yokota 2022, "Recovering single precision
accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance", correct TF32 and fp16 products in this way.

- *A new sum for each tile.* Tensor cores multiply exactly but round sums towards zero: each addition cuts off bits with the sum's
  own sign, so the errors of thousands of additions into one sum do not cancel but grow with their number. Measured on an H200 at
  16,384 keys: o is off by 8 times fp32's own error, dk and dv by up to 60. So tensor cores sum within a tile, from zero, and tiles
  are added in fp32 registers, to nearest, as Ootomo and Yokota do: 0.4 to 0.9 times fp32's error. `dot_parts` has no accumulator
  argument, so that no kernel can multiply otherwise. A compiler may turn `acc + dot(a, b)` into `dot(a, b, acc)`: Triton does so
  for a single product, but not for the last of three, as in `dot_parts`. tests/ops/flash_attention/test_compilation.py inspects the
  compiled code; Triton's interpreter adds to nearest and cannot show the difference.
- *Splitting beforehand.* A kernel that splits fp32 tiles where it uses them splits each tile once for every tile it is multiplied
  with, and wgmma needs operands in shared memory. Here each element is split once, and tiles are loaded as they are multiplied (by
  TMA where there is one). While the operator runs, the parts take as many bytes as the tensor, with widths rounded up to a power of
  two.
- *Scales.* fp16 ends at 65504 and loses bits below 2^-14. So each tensor is scaled by one power of two per key head and its query
  heads, which brings the largest finite element to 2^14..2^15: this is exact, and done on the device. An element down to 2^-16 of
  the largest keeps the bound above; a smaller element is off by at most 2^-39 of the largest. Where query heads of one key head
  differ in size by more than that, the smaller heads lose bits.
- *Tiles that a kernel computes* (probabilities, gradients of scores) are scaled and split in registers.
- *Infinities.* An infinity counts as NaN (its parts are inf and inf - inf) and affects the results that NaN affects in a matrix
  product, no more: scales leave it out.

Against fp64 in Triton's interpreter the largest error of an output or gradient is 0.2 to 3.2 times that of plain PyTorch in fp32
(where scores exceed 80, dv's is up to 4 times, and the IEEE kernels' 5: both compute probabilities from a rounded log-sum-exp).
Tests apply the rule for three TF32 products: 4 times, and eps of the terms that cancel (docs/decisions/0004).

Parts are stored for two tensors together, (tensors, 2, batch x heads, rows padded to whole tiles, BLOCK_D) fp16: those of k and v,
and those of q, in the backward pass with do. They are zero beyond the tensor, so that no load needs a mask.
"""

import math
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from trainstep.ops.direct_launch import BoundKernel
from trainstep.ops.flash_attention.portable.tile_access import SIZES, load_tile
from trainstep.ops.flash_attention.portable.tiles import padded
from trainstep.ops.flash_attention.problem import CallMeta, strides

SPLIT_SIZES = (*SIZES, "query_tiles", "key_tiles", "padded_queries", "padded_keys")
PART_EXPONENT: tl.constexpr = tl.constexpr(14)
"""Exponent of the largest element of scaled parts."""
MOST_ROWS, MOST_ELEMENTS = 64, 4096
"""Limits of a program of the prologue."""
LEAST_INFINITY: tl.constexpr = tl.constexpr(0x7F800000)
"""Bits of +inf: the bits of NaNs are larger, those of finite numbers smaller."""


class Peak(IntEnum):
    """The rows of `peaks`, (5, groups) int32: bits of the largest finite |x|. A group is a key head with its query heads."""

    Q = 0
    K = 1
    V = 2
    DO = 3
    DS = 4
    """For the gradients of the scores, in the units of scaled do and v."""


Q_PEAK: tl.constexpr = tl.constexpr(int(Peak.Q))
K_PEAK: tl.constexpr = tl.constexpr(int(Peak.K))
V_PEAK: tl.constexpr = tl.constexpr(int(Peak.V))
DO_PEAK: tl.constexpr = tl.constexpr(int(Peak.DO))
DS_PEAK: tl.constexpr = tl.constexpr(int(Peak.DS))
"""The rows as constants of kernels."""


# Powers of two ---------------------------------------------------------------------------------------------------------------
@triton.jit
def power_of_two(exponent):
    return ((tl.minimum(tl.maximum(exponent, -126), 127) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponent_of(bits):
    """floor(log2 x) from the bits of a positive normal float x; -127 for smaller floats."""
    return (bits >> 23) - 127


@triton.jit
def bits_of(x):
    """The bits of |x|: integers in the same order as |x|."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def times_power_of_two(x, exponent):
    """x 2^exponent, also where 2^exponent is beyond fp32 but the result is not."""
    half = exponent >> 1
    return x * power_of_two(half) * power_of_two(exponent - half)


@triton.jit
def exponent_at(peaks_ptr, peak, groups, group):
    """The exponent of the largest element of this group's tensor. `peak`: the row."""
    return exponent_of(tl.load(peaks_ptr + peak * groups + group))


@triton.jit
def scores_factor(scale_log2, peaks_ptr, groups, group):
    """The factor from products of q's and k's parts to scores in log2. It is never 0, so that a hidden score stays -inf."""
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
    """Load rows from `row` on of both parts, which are `plane` rows apart; the second tensor of two begins 2 planes later."""
    return parts.load([row, 0]), parts.load([row + plane, 0])


@triton.jit
def dot_parts(a1, a2, b1, b2):
    """a b, the small products first, always summed from zero. [Note: Three products of parts split beforehand]"""
    return tl.dot(a1, b1, tl.dot(a1, b2, tl.dot(a2, b1)))


@triton.jit
def dot_parts_transposed(a1, a2, b1, b2):
    """a b, summed in the order of dot_parts for b^T and a^T, so that tensor cores give the same bits."""
    return tl.dot(a1, b1, tl.dot(a2, b1, tl.dot(a1, b2)))


# Launching -------------------------------------------------------------------------------------------------------------------
def whole_tiles(rows: int, *sides: int) -> int:
    """Rows padded to whole tiles of these sides, which are powers of two."""
    largest = max(sides)
    return -(-rows // largest) * largest


class PartsKernel(BoundKernel):
    """A bound kernel whose first arguments are parts, read through tensor descriptors in tiles of `sides` rows.

    The part of a descriptor that depends on shapes is made and checked once; a launch adds the tensor.
    """

    def __init__(self, shapes: tuple[tuple[int, ...], ...], sides: tuple[int, ...], *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._fields = tuple(_descriptor_fields(shape, side) for shape, side in zip(shapes, sides, strict=True))

    def __call__(self, *tensors: Tensor) -> None:  # type: ignore[override]  # it makes the descriptors
        parts = len(self._fields)
        super().__call__(*tensors[parts:], descriptors=[*map(_descriptor, self._fields, tensors)])


def _descriptor_fields(shape: tuple[int, ...], side: int) -> dict[str, Any]:
    """The fields of a descriptor of parts of this shape, with a meta tensor, since they would keep a tensor alive."""
    *rows, width = shape
    meta = torch.empty(shape, dtype=torch.float16, device="meta")
    fields: dict[str, Any] = vars(TensorDescriptor(meta, [math.prod(rows), width], [width, 1], [side, width]))
    return fields


def _descriptor(fields: dict[str, Any], parts: Tensor) -> Any:
    descriptor = object.__new__(TensorDescriptor)
    vars(descriptor).update(fields, base=parts)
    return descriptor


# The prologue: two launches that make the parts of q, k, v and do.
#
# `split_peaks_kernel` finds the scales, `split_parts_kernel` makes the parts and backward's delta. A program handles one
# tile of one tensor: first those of q, then those of k, v and do.


@triton.jit
def _load(
    x_ptr, stride_b, stride_h, stride_s, program, tiles, heads, rows,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The tile of x that is this program's. `program`: its number among the programs of x."""
    batch_head = program // tiles
    base = x_ptr + (batch_head // heads).to(tl.int64) * stride_b + (batch_head % heads).to(tl.int64) * stride_h
    return load_tile(base, stride_s, program % tiles * BLOCK, rows, BLOCK, HEAD_DIM, BLOCK_D, True)


@triton.jit
def _add_to_peak(x, peak_ptr):
    """Raise the peak to the largest finite |x|. Maxima of integers do not depend on their order, so every run is the same."""
    bits = bits_of(x)
    tl.atomic_max(peak_ptr, tl.max(tl.max(tl.where(bits < LEAST_INFINITY, bits, 0), 1), 0))


@triton.jit
def _scaled(x, peak_ptr):
    return times_power_of_two(x, PART_EXPONENT - exponent_of(tl.load(peak_ptr)))


@triton.jit
def _store_parts(parts_ptr, x, program, tiles, all_heads, padded_rows, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr):
    first = program % tiles * BLOCK
    inside = first + tl.arange(0, BLOCK)[:, None] < padded_rows
    out = parts_ptr + ((program // tiles).to(tl.int64) * padded_rows + first) * BLOCK_D
    out += tl.arange(0, BLOCK)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    x1, x2 = split(x)
    tl.store(out, x1, mask=inside)
    tl.store(out + all_heads.to(tl.int64) * padded_rows * BLOCK_D, x2, mask=inside)


@triton.jit(do_not_specialize=SPLIT_SIZES)
def split_peaks_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, peaks_ptr, stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs, stride_gb, stride_gh, stride_gs,
    query_tiles, key_tiles, batch_heads, batch_key_heads, heads, key_heads, heads_per_key_head, queries, keys,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """peaks[tensor, group] = bits of the largest finite |x|. They must be 0 at the start."""
    program = tl.program_id(0)
    of_q, of_k = query_tiles * batch_heads, key_tiles * batch_key_heads
    if program < of_q:
        x = _load(
            q_ptr, stride_qb, stride_qh, stride_qs, program, query_tiles, heads, queries, HEAD_DIM, BLOCK_D, BLOCK
        )
        _add_to_peak(x, peaks_ptr + Q_PEAK * batch_key_heads + program // query_tiles // heads_per_key_head)
    elif program < of_q + of_k:
        own = program - of_q
        x = _load(k_ptr, stride_kb, stride_kh, stride_ks, own, key_tiles, key_heads, keys, HEAD_DIM, BLOCK_D, BLOCK)
        _add_to_peak(x, peaks_ptr + K_PEAK * batch_key_heads + own // key_tiles)
    elif program < of_q + 2 * of_k:
        own = program - of_q - of_k
        x = _load(v_ptr, stride_vb, stride_vh, stride_vs, own, key_tiles, key_heads, keys, HEAD_DIM, BLOCK_D, BLOCK)
        _add_to_peak(x, peaks_ptr + V_PEAK * batch_key_heads + own // key_tiles)
    elif BACKWARD:
        own = program - of_q - 2 * of_k
        x = _load(do_ptr, stride_gb, stride_gh, stride_gs, own, query_tiles, heads, queries, HEAD_DIM, BLOCK_D, BLOCK)
        _add_to_peak(x, peaks_ptr + DO_PEAK * batch_key_heads + own // query_tiles // heads_per_key_head)


@triton.jit(do_not_specialize=SPLIT_SIZES)
def split_parts_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, o_ptr, peaks_ptr, query_parts_ptr, key_parts_ptr, delta_ptr,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_gb, stride_gh, stride_gs, stride_ob, stride_oh, stride_os,
    query_tiles, key_tiles, batch_heads, batch_key_heads, heads, key_heads, heads_per_key_head, queries, keys,
    padded_queries, padded_keys,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Make the parts; in the backward pass also delta = rowsum(do o), in the units of scaled do and v, so nothing overflows."""
    program = tl.program_id(0)
    of_q, of_k = query_tiles * batch_heads, key_tiles * batch_key_heads
    if program < of_q:
        x = _load(
            q_ptr, stride_qb, stride_qh, stride_qs, program, query_tiles, heads, queries, HEAD_DIM, BLOCK_D, BLOCK
        )
        x = _scaled(x, peaks_ptr + Q_PEAK * batch_key_heads + program // query_tiles // heads_per_key_head)
        _store_parts(query_parts_ptr, x, program, query_tiles, batch_heads, padded_queries, BLOCK_D, BLOCK)
    elif program < of_q + of_k:
        own = program - of_q
        x = _load(k_ptr, stride_kb, stride_kh, stride_ks, own, key_tiles, key_heads, keys, HEAD_DIM, BLOCK_D, BLOCK)
        x = _scaled(x, peaks_ptr + K_PEAK * batch_key_heads + own // key_tiles)
        _store_parts(key_parts_ptr, x, own, key_tiles, batch_key_heads, padded_keys, BLOCK_D, BLOCK)
    elif program < of_q + 2 * of_k:
        own = program - of_q - of_k
        x = _load(v_ptr, stride_vb, stride_vh, stride_vs, own, key_tiles, key_heads, keys, HEAD_DIM, BLOCK_D, BLOCK)
        x = _scaled(x, peaks_ptr + V_PEAK * batch_key_heads + own // key_tiles)
        v_parts_ptr = key_parts_ptr + 2 * batch_key_heads.to(tl.int64) * padded_keys * BLOCK_D
        _store_parts(v_parts_ptr, x, own, key_tiles, batch_key_heads, padded_keys, BLOCK_D, BLOCK)
    elif BACKWARD:
        own = program - of_q - 2 * of_k
        batch_head = own // query_tiles
        group = batch_head // heads_per_key_head
        x = _load(do_ptr, stride_gb, stride_gh, stride_gs, own, query_tiles, heads, queries, HEAD_DIM, BLOCK_D, BLOCK)
        x = _scaled(x, peaks_ptr + DO_PEAK * batch_key_heads + group)
        do_parts_ptr = query_parts_ptr + 2 * batch_heads.to(tl.int64) * padded_queries * BLOCK_D
        _store_parts(do_parts_ptr, x, own, query_tiles, batch_heads, padded_queries, BLOCK_D, BLOCK)
        o = _load(o_ptr, stride_ob, stride_oh, stride_os, own, query_tiles, heads, queries, HEAD_DIM, BLOCK_D, BLOCK)
        delta = tl.sum(x * _scaled(o, peaks_ptr + V_PEAK * batch_key_heads + group), 1)  # |o| <= max |v|
        row = own % query_tiles * BLOCK + tl.arange(0, BLOCK)
        tl.store(delta_ptr + batch_head.to(tl.int64) * queries + row, delta, mask=row < queries)


class Parts(NamedTuple):
    """The tensors that the kernels read in place of a call's tensors."""

    queries: Tensor
    """Parts of q, in the backward pass also of do."""
    keys: Tensor
    """Parts of k and v."""
    peaks: Tensor
    """(5, groups) int32; the kernel of query gradients fills the last row."""
    delta: Tensor
    """(B, H, S) in the backward pass."""


class Prologue:
    """Makes the parts of a call's tensors, whose last stride is 1. `padded_rows`: the rows of q and do, and those of k and v."""

    def __init__(self, meta: CallMeta, padded_rows: tuple[int, int]) -> None:
        batch, heads, queries, head_dim = meta.q_shape
        key_heads, keys = meta.k_shape[1], meta.k_shape[2]
        self.backward = bool(meta.do_stride)
        self.query_shape = (1 + self.backward, 2, batch * heads, padded_rows[0], padded(head_dim))
        self.key_shape = (2, 2, batch * key_heads, padded_rows[1], padded(head_dim))
        for shape, tensor_shape in ((self.query_shape, meta.q_shape), (self.key_shape, meta.k_shape)):
            if math.prod(shape[:-1]) >= 2**31:
                raise ValueError(
                    f"fp32_precision: fp16x3 counts rows of its parts in 32 bits, and {tuple(tensor_shape)} has more: take tf32x3"
                )
        self._peaks_shape = (len(Peak), batch * key_heads)
        self._delta_shape = meta.q_shape[:3] if self.backward else (0,)
        block = min(MOST_ROWS, MOST_ELEMENTS // padded(head_dim))
        query_tiles, key_tiles = (triton.cdiv(rows, block) for rows in padded_rows)
        do, o = (meta.do_stride, meta.o_stride) if self.backward else (meta.q_stride, meta.q_stride)
        arguments: dict[str, Any] = strides(q=meta.q_stride, k=meta.k_stride, v=meta.v_stride, g=do) | {
            "query_tiles": query_tiles,
            "key_tiles": key_tiles,
            "batch_heads": batch * heads,
            "batch_key_heads": batch * key_heads,
            "heads": heads,
            "key_heads": key_heads,
            "heads_per_key_head": heads // key_heads,
            "queries": queries,
            "keys": keys,
            "HEAD_DIM": head_dim,
            "BLOCK_D": padded(head_dim),
            "BLOCK": block,
            "BACKWARD": self.backward,
        }
        programs = query_tiles * batch * heads * (1 + self.backward) + 2 * key_tiles * batch * key_heads
        self._find_peaks = BoundKernel(split_peaks_kernel, programs, arguments, num_warps=4)
        arguments |= strides(o=o) | {"padded_queries": padded_rows[0], "padded_keys": padded_rows[1]}
        self._split = BoundKernel(split_parts_kernel, programs, arguments, num_warps=4)

    def __call__(self, q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, *do_and_o: Tensor) -> Parts:
        """Make the parts of a call's tensors."""
        do, o = do_and_o if self.backward else (q_BHSD, q_BHSD)  # forward's kernels do not read do and o
        device = q_BHSD.device
        parts = Parts(
            torch.empty(self.query_shape, dtype=torch.float16, device=device),
            torch.empty(self.key_shape, dtype=torch.float16, device=device),
            torch.zeros(self._peaks_shape, dtype=torch.int32, device=device),
            torch.empty(self._delta_shape, dtype=torch.float32, device=device),
        )
        self._find_peaks(q_BHSD, k_BGSD, v_BGSD, do, parts.peaks)
        self._split(q_BHSD, k_BGSD, v_BGSD, do, o, parts.peaks, parts.queries, parts.keys, parts.delta)
        return parts
