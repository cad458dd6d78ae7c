"""What the Hopper kernels share: which tile a program works on, layouts of wgmma's operands, and what Gluon leaves out or
renames.

Gluon is Triton's lower level (triton.experimental.gluon, in triton 3.6 and newer): memory copies, barriers, layouts and the
roles of warps are written out, and a kernel runs on the one architecture it was written for.

[Note: the pipeline of a Hopper kernel]
A program is one producer warp and one to three consumer warpgroups of four warps. The producer starts TMA copies from global to
shared memory and computes nothing; consumers multiply with wgmma, which reads shared memory by itself, and start no copies. So
copies run ahead of arithmetic, and while one warpgroup takes exponentials the matrix units work for another.

Tiles that stream (k and v in forward; q, do and their rows in backward) go through rings: STAGES buffers, each with two
barriers in shared memory. `full` completes when the bytes that the producer announced have arrived; `empty` when every consumer
has said that it has read the buffer. The n-th tile of a ring, counted over all of a program's work, lies in buffer n % STAGES,
and completes that buffer's phase n // STAGES. A wait names the parity of the phase it waits for; on a fresh barrier the parity
1 has passed, which is how the producer finds every buffer empty at first.

wgmma runs on by itself. It is told which shared memory to read, and a buffer may be handed back only behind the wait for the
wgmma that reads it. `warpgroup_mma_wait(n, deps)` waits until at most the n newest are still running.

Reads beyond a tensor's end give 0, writes beyond it are dropped: a TMA descriptor knows the tensor's shape and strides, so
ragged ends need no code, and heads before or behind positions in memory are the same kernel. What lies beyond the last key is
hidden by the mask."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)
ROWS: gl.constexpr = gl.constexpr(64)
"""Of a warpgroup: what one wgmma has."""
PRODUCER_REGISTERS: gl.constexpr = gl.constexpr(24)

SIZES = (
    *("tiles", "batch_heads", "batch_key_heads", "heads_together", "heads", "key_heads", "heads_per_key_head"),
    *("queries", "padded_queries", "keys", "offset", "pieces"),
)
"""Arguments that compile no variant for the values they take."""


if hasattr(tma, "async_load"):  # triton's names changed behind 3.6
    copy_in, copy_out = tma.async_load, tma.async_store
else:
    copy_in, copy_out = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

PAIRS_STAY: gl.constexpr = gl.constexpr(hasattr(tma, "async_load"))
"""Whether LLVM keeps 16-bit numbers packed from one loop to the next; that of triton 3.6 takes them apart and packs them again in
each turn. Seen with 3.6 and 3.9; the name tells them apart."""

if hasattr(tma, "async_atomic_add"):
    add_out = tma.async_atomic_add
else:
    from triton._C.libtriton import ir

    @_core.builtin
    def add_out(tensor_desc, coord, src, _semantic=None):
        """What triton 3.6 can compile but has no name for: shared memory added to global, the sum made in the L2 cache."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


# Layouts ----------------------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def accumulator_layout(columns):
    """Of a (64, columns) result of wgmma over a warpgroup's registers."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def operand_layout(columns):
    """Of a 16-bit left operand in registers, for a result `columns` wide: what an accumulator converts to without moving."""
    return gl.DotOperandLayout(0, accumulator_layout(columns), 2)


# Work -------------------------------------------------------------------------------------------------------------------------


@gluon.jit
def tile_and_head(place, tiles, heads, heads_together):
    """The place-th piece of work: tile by tile over `heads_together` heads at a time, whose keys and values share the L2 cache."""
    places_together = tiles * heads_together
    first_head = place // places_together * heads_together
    width = gl.minimum(heads - first_head, heads_together)
    within = place % places_together
    return within // width, first_head + within % width


@gluon.jit
def first_and_turns(order_ptr, TABLE: gl.constexpr):
    """Where this program's pieces of work begin in the table, and how many they are: hopper_work.work_order."""
    first = gl.program_id(0)
    turns = 1
    if TABLE:
        first = gl.load(order_ptr + gl.program_id(0))
        turns = gl.load(order_ptr + gl.program_id(0) + 1) - first
    return first, turns


@gluon.jit
def place_of_turn(order_ptr, first, turn, TABLE: gl.constexpr):
    """This program's turn-th piece of work; without a table its only one, of its own number."""
    place = first
    if TABLE:
        place = gl.load(order_ptr + gl.num_programs(0) + 1 + first + turn)
    return place


# bf16 arithmetic --------------------------------------------------------------------------------------------------------------


@gluon.jit
def bf16_product(x, y):
    """x y in bf16, two numbers an instruction."""
    return gl.inline_asm_elementwise(
        "mul.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.bfloat16, is_pure=True, pack=2
    )


# Masks -------------------------------------------------------------------------------------------------------------------------

MINUS_INFINITY: gl.constexpr = gl.constexpr("0fFF800000")
ZERO: gl.constexpr = gl.constexpr("0f00000000")
"""fp32 numbers as PTX writes them."""


@gluon.constexpr_function
def _selection_text(otherwise):
    return f"{{.reg .pred seen; setp.le.s32 seen, $2, $3; selp.f32 $0, $1, {otherwise}, seen;}}"


@gluon.jit
def where_seen(x, key, last_seen, OTHERWISE: gl.constexpr):
    """x where key <= last_seen, else OTHERWISE.

    gl.where says the same, but LLVM makes vectors of its conditions, and ptxas half a dozen instructions of each.
    """
    return gl.inline_asm_elementwise(
        _selection_text(OTHERWISE), "=f,f,r,r", [x, key, last_seen], dtype=gl.float32, is_pure=True, pack=1
    )


# Rings and barriers -----------------------------------------------------------------------------------------------------------

Ring = namedtuple("Ring", "tiles full empty rows", defaults=(None,))
"""Tiles that stream, and their barriers: see [Note: the pipeline of a Hopper kernel]. `rows`: of numbers that come with them, one
a query."""


@gluon.jit
def new_barriers(number: gl.constexpr, arrivals: gl.constexpr):
    """Each waits for as many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(barriers.index(i), count=arrivals)
    return barriers


@gluon.constexpr_function
def _barrier_text(kind, threads):
    return f"bar.{kind} $1, {threads}; mov.u32 $0, 0;"


@gluon.jit
def meet(name, threads: gl.constexpr):
    """Wait at a barrier until `threads` have come to it. Names 8 to 15 are free: triton takes the lower ones for its own."""
    gl.inline_asm_elementwise(_barrier_text("sync", threads), "=r,r", [name], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_by(name, threads: gl.constexpr):
    """Come to a barrier at which others wait, and go on."""
    gl.inline_asm_elementwise(_barrier_text("arrive", threads), "=r,r", [name], dtype=gl.int32, is_pure=False, pack=1)
