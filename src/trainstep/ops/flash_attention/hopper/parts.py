"""Device functions of the Hopper kernels (work, layouts, masks, barriers), and the two small kernels of backward.

Gluon is Triton's lower level (triton.experimental.gluon, in triton 3.6 and newer): memory copies, barriers, layouts and the
roles of warps are written out, and a kernel runs only on the architecture it was written for.

[Note: the pipeline of a Hopper kernel]
A program is one producer warp and one to three consumer warpgroups of four warps. The producer starts TMA copies from global to
shared memory and computes nothing; consumers multiply with wgmma, which reads shared memory by itself, and start no copies. So
copies run ahead of arithmetic, and while one warpgroup computes exponentials the matrix units work for another.

Tiles that stream (k and v in forward; q, do and their rows in backward) go through rings: STAGES buffers, each with two
barriers in shared memory. `full` completes when the bytes that the producer announced have arrived; `empty` when every consumer
has arrived after reading the buffer. The n-th tile of a ring, counted over all of a program's work, is in buffer n % STAGES,
and completes that buffer's phase n // STAGES. A wait names the parity of the phase it waits for; on a new barrier parity 1 counts
as passed, so that the producer finds every buffer empty at first.

wgmma runs asynchronously. It reads shared memory, so a buffer may be returned only after the wait for the wgmma that reads it.
`warpgroup_mma_wait(n, deps)` waits until at most the n newest are still running.

Reads beyond a tensor's end give 0, writes beyond it are dropped: a TMA descriptor knows the tensor's shape and strides, so
ragged ends need no code, and the same kernel serves both orders of heads and positions in memory. The mask hides keys beyond the
last one.
"""

from collections import namedtuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from trainstep.ops.flash_attention.portable.backward import deltas_of_tile
from trainstep.ops.flash_attention.portable.forward import LOG2_E

LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)
ROWS: gl.constexpr = gl.constexpr(64)
"""Rows of a warpgroup: those of one wgmma."""
PRODUCER_REGISTERS: gl.constexpr = gl.constexpr(24)
SIZES = (
    *("tiles", "batch_heads", "batch_key_heads", "heads_together", "heads", "key_heads", "heads_per_key_head"),
    *("queries", "padded_queries", "keys", "offset", "pieces"),
)
"""Arguments for whose values no variants are compiled."""
if hasattr(tma, "async_load"):  # triton changed these names after 3.6
    copy_in, copy_out = tma.async_load, tma.async_store
else:
    copy_in, copy_out = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
PAIRS_STAY: gl.constexpr = gl.constexpr(hasattr(tma, "async_load"))
"""Whether LLVM keeps 16-bit numbers packed from one loop to the next. The LLVM of triton 3.6 unpacks and packs them again in each
iteration, that of 3.9 does not; the name above tells the versions apart."""
if hasattr(tma, "async_atomic_add"):
    add_out = tma.async_atomic_add
else:
    from triton._C.libtriton import ir

    @_core.builtin
    def add_out(tensor_desc, coord, src, _semantic=None):
        """Add shared memory to global memory, in the L2 cache. triton 3.6 can compile it but has no function for it."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


# Layouts ----------------------------------------------------------------------------------------------------------------------
@gluon.constexpr_function
def accumulator_layout(columns):
    """The layout of a (64, columns) result of wgmma in a warpgroup's registers."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def operand_layout(columns):
    """The layout of a 16-bit left operand in registers, for a result `columns` wide; an accumulator converts to it in place."""
    return gl.DotOperandLayout(0, accumulator_layout(columns), 2)


# Work -------------------------------------------------------------------------------------------------------------------------
@gluon.jit
def tile_and_head(place, tiles, heads, heads_together):
    """(tile, head) of the place-th piece of work: tile by tile over `heads_together` heads at a time, which share the L2 cache."""
    places_together = tiles * heads_together
    first_head = place // places_together * heads_together
    width = gl.minimum(heads - first_head, heads_together)
    within = place % places_together
    return within // width, first_head + within % width


@gluon.jit
def first_and_turns(order_ptr, TABLE: gl.constexpr):
    """(where this program's pieces of work begin in the table, their number). schedules.work_order makes the table."""
    first = gl.program_id(0)
    turns = 1
    if TABLE:
        first = gl.load(order_ptr + gl.program_id(0))
        turns = gl.load(order_ptr + gl.program_id(0) + 1) - first
    return first, turns


@gluon.jit
def place_of_turn(order_ptr, first, turn, TABLE: gl.constexpr):
    """This program's turn-th piece of work; without a table the only piece, which has the program's number."""
    place = first
    if TABLE:
        place = gl.load(order_ptr + gl.num_programs(0) + 1 + first + turn)
    return place


# bf16 arithmetic --------------------------------------------------------------------------------------------------------------
@gluon.jit
def bf16_product(x, y):
    """x y in bf16, two numbers per instruction."""
    return gl.inline_asm_elementwise(
        "mul.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.bfloat16, is_pure=True, pack=2
    )


# Masks -------------------------------------------------------------------------------------------------------------------------
MINUS_INFINITY: gl.constexpr = gl.constexpr("0fFF800000")
ZERO: gl.constexpr = gl.constexpr("0f00000000")
"""fp32 numbers in PTX."""


@gluon.constexpr_function
def _selection_text(otherwise):
    return f"{{.reg .pred seen; setp.le.s32 seen, $2, $3; selp.f32 $0, $1, {otherwise}, seen;}}"


@gluon.jit
def where_seen(x, key, last_seen, OTHERWISE: gl.constexpr):
    """x where key <= last_seen, else OTHERWISE."""
    # Not gl.where, since LLVM makes vectors of its conditions, and ptxas half a dozen instructions of each.
    return gl.inline_asm_elementwise(
        _selection_text(OTHERWISE), "=f,f,r,r", [x, key, last_seen], dtype=gl.float32, is_pure=True, pack=1
    )


# Rings and barriers -----------------------------------------------------------------------------------------------------------
Ring = namedtuple("Ring", "tiles full empty rows", defaults=(None,))
"""Tiles that stream, and their barriers: see [Note: the pipeline of a Hopper kernel]. `rows`: numbers that come with the tiles, one
per query."""


@gluon.jit
def new_barriers(number: gl.constexpr, arrivals: gl.constexpr):
    """`number` barriers, each for `arrivals` arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(barriers.index(i), count=arrivals)
    return barriers


@gluon.constexpr_function
def _barrier_text(kind, threads):
    return f"bar.{kind} $1, {threads}; mov.u32 $0, 0;"


@gluon.jit
def meet(name, threads: gl.constexpr):
    """Wait at a barrier until `threads` threads have arrived. Names 8 to 15 are free: triton uses the lower names itself."""
    gl.inline_asm_elementwise(_barrier_text("sync", threads), "=r,r", [name], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_by(name, threads: gl.constexpr):
    """Arrive at a barrier at which other threads wait, and go on."""
    gl.inline_asm_elementwise(_barrier_text("arrive", threads), "=r,r", [name], dtype=gl.int32, is_pure=False, pack=1)


# The kernels that run before and after hopper/backward.py's, in plain Triton. [Note: one pass backward]


@triton.jit(do_not_specialize=SIZES)
def hopper_rows_kernel(
    o_ptr, do_ptr, lse_ptr, lse_log2_ptr, delta_ptr, dq_sum_ptr,
    stride_ob, stride_oh, stride_os, stride_gb, stride_gh, stride_gs, tiles, heads, queries, padded_queries,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Make rowsum(do o), the log-sum-exp base 2, and zeros for dq's sum.

    Rows are padded to whole tiles: lse_log2 with +inf, delta with 0. dq_sum is (B, H, padded S, FIRST + REST). BLOCK_D, FIRST and
    REST, if it is not 0, are powers of two.
    """
    batch_head, row, delta = deltas_of_tile(
        o_ptr, do_ptr, stride_ob, stride_oh, stride_os, stride_gb, stride_gh, stride_gs, tiles, heads, queries,
        HEAD_DIM, BLOCK_D, BLOCK_Q,
    )  # fmt: skip
    lse = tl.load(lse_ptr + batch_head * queries + row, mask=row < queries, other=float("-inf"))
    padded_row = batch_head * padded_queries + row
    tl.store(lse_log2_ptr + padded_row, tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E))
    tl.store(delta_ptr + padded_row, delta)
    first_q = tl.program_id(0) % tiles * BLOCK_Q
    dq_base = dq_sum_ptr + (batch_head * padded_queries + first_q) * (FIRST + REST)
    tl.store(dq_base + tl.arange(0, BLOCK_Q * FIRST), tl.zeros([BLOCK_Q * FIRST], tl.float32))
    if REST:
        rest_base = dq_base + BLOCK_Q * FIRST
        tl.store(rest_base + tl.arange(0, BLOCK_Q * REST), tl.zeros([BLOCK_Q * REST], tl.float32))


@triton.jit(do_not_specialize=SIZES)
def hopper_cast_kernel(
    dq_sum_ptr, dq_ptr, stride_dqb, stride_dqh, stride_dqs, pieces, heads, queries, scale,
    HEAD_DIM: tl.constexpr, PIECES_ACROSS: tl.constexpr, COLUMNS: tl.constexpr, LAST_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Make dq from its sum: bring a piece of 64 queries x COLUMNS from the order of registers into rows, scaled and cast.

    A head has `pieces` pieces, one or two (PIECES_ACROSS) side by side; the last is LAST_COLUMNS wide.
    """
    piece = tl.program_id(0).to(tl.int64)
    batch_head = piece // pieces
    first_q = piece % pieces // PIECES_ACROSS * ROWS
    first_column = piece % PIECES_ACROSS * COLUMNS
    if first_q < queries:
        WIDTH: tl.constexpr = (PIECES_ACROSS - 1) * COLUMNS + LAST_COLUMNS
        piece_ptr = dq_sum_ptr + (piece // PIECES_ACROSS * WIDTH + first_column) * ROWS
        base = dq_ptr + batch_head // heads * stride_dqb + batch_head % heads * stride_dqh + first_q * stride_dqs
        left = queries - first_q
        if COLUMNS == LAST_COLUMNS:  # noqa: SIM114  (this condition is known when compiling)
            _cast_piece(piece_ptr, base, stride_dqs, left, first_column, scale, HEAD_DIM, COLUMNS)
        elif first_column == 0:
            _cast_piece(piece_ptr, base, stride_dqs, left, first_column, scale, HEAD_DIM, COLUMNS)
        else:
            _cast_piece(piece_ptr, base, stride_dqs, left, first_column, scale, HEAD_DIM, LAST_COLUMNS)


@triton.jit
def _cast_piece(
    piece_ptr, dq_ptr, stride_dqs, rows, first_column, scale, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr
):
    """Bring the numbers at piece_ptr to `rows` rows from dq_ptr on and columns from first_column on."""
    numbers = tl.reshape(tl.load(piece_ptr + tl.arange(0, ROWS * COLUMNS)), [COLUMNS // 8, 4, 8, 4, 2, 2])
    dq = tl.reshape(tl.permute(numbers, [1, 4, 2, 0, 3, 5]), [ROWS, COLUMNS])
    row = tl.arange(0, ROWS)[:, None].to(tl.int64)
    column = first_column + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < HEAD_DIM)
    tl.store(dq_ptr + row * stride_dqs + column, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside)
