"""Device functions of the portable kernels: a program's tile, loads and stores of tiles of any strides.

Pointer arithmetic is in 32 bits within a tile and in 64 bits to a tile, so that tensors of more than 2^31 elements work. HEAD_DIM
is the true width, BLOCK_D the power of two that holds it; columns beyond HEAD_DIM read as 0.

[Note: long sums in fp32]
IEEE products run on multiply-adds, one after the other: a sum of n terms is rounded n times at its full size, where cuBLAS sums
in pieces. So the forward and the query gradient kernel sum each tile separately and then add up the tiles. In the key gradient
kernel that would spill registers (2.1 times the time, 64 wide): it sums ROWS_PER_SUM queries separately. Errors and times before
and after: results/h200/fp32_sums.md.
"""

import triton
import triton.language as tl

SIZES = (
    *("tiles", "batch_heads", "batch_key_heads", "heads_together", "heads", "key_heads", "heads_per_key_head"),
    *("queries", "keys", "offset"),
)
"""Arguments that do not affect the alignment of addresses: Triton compiles no variants for their values."""
ROWS_PER_SUM: tl.constexpr = tl.constexpr(1024)
"""Queries whose key gradients are summed separately in IEEE fp32: a multiple of every tile. [Note: long sums in fp32]"""


@triton.jit
def program_tile(tiles, heads, heads_together):
    """(tile, head) of this program. Programs go tile by tile over `heads_together` heads at a time.

    So the longest tiles of those heads start first, and the last tiles to finish are short.
    """
    program = tl.program_id(0)
    programs_together = tiles * heads_together
    first_head = program // programs_together * heads_together
    width = tl.minimum(heads - first_head, heads_together)
    within = program % programs_together
    return within // width, first_head + within % width


@triton.jit
def load_tile(
    base, stride, first, limit, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHECK: tl.constexpr
):
    """Load rows first..first + BLOCK. CHECK: rows at or beyond `limit` read as 0."""
    rows = tl.arange(0, BLOCK)[:, None]
    columns = tl.arange(0, BLOCK_D)[None, :]
    pointers = base + tl.cast(first, tl.int64) * stride + rows * stride + columns
    if CHECK:
        if HEAD_DIM == BLOCK_D:
            tile = tl.load(pointers, mask=first + rows < limit, other=0.0)
        else:
            tile = tl.load(pointers, mask=(first + rows < limit) & (columns < HEAD_DIM), other=0.0)
    elif HEAD_DIM == BLOCK_D:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=columns < HEAD_DIM, other=0.0)
    return tile


@triton.jit
def store_tile(base, stride, first, limit, tile, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.arange(0, BLOCK)[:, None]
    columns = tl.arange(0, BLOCK_D)[None, :]
    pointers = base + tl.cast(first, tl.int64) * stride + rows * stride + columns
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=(first + rows < limit) & (columns < HEAD_DIM))


@triton.jit
def load_row(base, index, limit, CHECK: tl.constexpr):
    """Load one number per query. CHECK: 0 at or beyond `limit`."""
    return tl.load(base + index, mask=index < limit, other=0.0) if CHECK else tl.load(base + index)


@triton.jit
def add_product(acc, a, b, PRECISION: tl.constexpr):
    """acc + a b. In IEEE fp32 a b is summed separately first. [Note: long sums in fp32]"""
    if a.dtype == tl.float32 and PRECISION == "ieee":
        # An addition, but written as fma, since Triton folds `acc + tl.dot(a, b)` into one running sum.
        return tl.fma(tl.dot(a, b, input_precision=PRECISION), 1.0, acc)
    return tl.dot(a, b, acc, input_precision=PRECISION)
