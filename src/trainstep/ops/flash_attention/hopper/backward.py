"""The backward kernel for Hopper: algorithm.backward in one pass over the keys. See [Note: the pipeline of a Hopper kernel].

`hopper_gradients_kernel` computes dk and dv, and dq as a sum in fp32 to which programs add in any order, so that dq's bits may
differ from run to run. The kernels that run before and after it are in hopper/parts.py.

[Note: one pass backward]
A program keeps 128 keys, 64 per warpgroup, and runs over the queries that see them, and over the query heads that share the key
head. Scores and the gradient of probabilities are computed transposed, (keys, queries), so that p and ds are in the registers
that the products for dv and dk read. dq needs the ds of both warpgroups: each writes its half to shared memory, and each
computes one half of dq's columns (or rows; or one part of two, see [Note: columns in parts]) and adds it to global memory by TMA.

    matrix units    dp(n)        | dv(n)   | dk(n)  dq(n-1) | scores(n+1)
    a warpgroup     p from scores| ds(n)   |                | dq(n-1) to shared memory; one fence for it and ds(n)

dq is computed a step later: by then the other warpgroup's ds has long been written, and neither waits. So the two warpgroups may be
half a step apart, and while one computes exponentials the matrix units work for the other. There are two alternating buffers of ds.
A warpgroup signals after its dq(n-1) that its ds(n) is written, and writes ds(n+1) only after the other's signal for ds(n): then
neither reads ds(n-1) any more. The dq of the step before the first is written beyond the tensor, where TMA drops it.

dq is summed in pieces of 64 queries, each in the order of a warpgroup's registers: a thread writes 16 bytes at a time and its
neighbours the next 16, so that no two threads conflict in a bank of shared memory, whose traffic limits the loop; and TMA adds
contiguous memory.

In bf16, ds = p (dp - delta) is the product of two bf16 numbers: p as in the product for dv, and the rounded difference. That takes
half the instructions and registers of fp32 on the loop's critical path; it adds two roundings like that of ds itself.

Queries beyond the end read as 0 with a log-sum-exp of +inf, so that p is 0 there; a query that sees no key gets the same.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from trainstep.ops.flash_attention.hopper.columns import (
    announce,
    box_at,
    copy_in_parts,
    copy_out_parts,
    finished,
    in_parts,
    matrices,
    new_tiles,
    rows_of,
    start_products,
    start_sum,
    store_sums,
    zero_sum,
    zero_sums,
)
from trainstep.ops.flash_attention.hopper.parts import (
    PRODUCER_REGISTERS,
    ROWS,
    SIZES,
    ZERO,
    Ring,
    accumulator_layout,
    add_out,
    bf16_product,
    copy_in,
    meet,
    new_barriers,
    operand_layout,
    pass_by,
    tile_and_head,
    where_seen,
)

CONSUMERS: gl.constexpr = gl.constexpr(2)
BLOCK_K: gl.constexpr = gl.constexpr(128)
CONSUMER_REGISTERS: gl.constexpr = gl.constexpr(240)
DS_WRITTEN: gl.constexpr = gl.constexpr(9)
"""Barriers 9 to 12: a warpgroup's ds of an even or an odd step is in shared memory."""
NOWHERE: gl.constexpr = gl.constexpr(1 << 30)
"""More rows than any sum of dq has: TMA drops what is added beyond the end."""
ALL_READ: gl.constexpr = gl.constexpr(13)
"""The barrier after which no warpgroup reads k and v."""
CONSUMER_THREADS: gl.constexpr = gl.constexpr(256)

_Work = namedtuple(
    "_Work", "tiles batch_key_heads heads_together key_heads heads_per_key_head queries padded_queries keys offset"
)
"""The work, from hopper_gradients_kernel's arguments."""
_Steps = namedtuple("_Steps", "begin begin_full end")
"""The query tiles that see any of a program's keys, begin..end; those from begin_full on need no mask."""
_Keys = namedtuple("_Keys", "k v full")
"""The tiles that a program keeps, and their barrier."""
_Copied = namedtuple("_Copied", "q_descs k_descs v_descs do_descs lse_desc delta_desc keys q_ring do_ring work")
"""The producer's descriptors, rings and work."""
_Kept = namedtuple("_Kept", "dk_descs dv_descs dq_descs ds_tiles dq_tiles keys q_ring do_ring work scale scale_log2")
"""A consumer's descriptors, buffers, rings and work."""


# The work of a program --------------------------------------------------------------------------------------------------------


@gluon.jit
def _keys_and_head(work):
    """(first key, batch and key head) of this program. Under a causal mask the first keys are seen by the most queries."""
    tile, batch_key_head = tile_and_head(gl.program_id(0), work.tiles, work.batch_key_heads, work.heads_together)
    return tile * BLOCK_K, batch_key_head


@gluon.jit
def _steps(first_k, work, BLOCK_Q: gl.constexpr, CAUSAL: gl.constexpr):
    """The steps for the keys from first_k on. The tile of the last keys may be ragged."""
    end = (work.queries + BLOCK_Q - 1) // BLOCK_Q
    begin = 0
    begin_full = 0
    if CAUSAL:
        begin = gl.minimum(gl.maximum(first_k - work.offset, 0) // BLOCK_Q, end)
        begin_full = (gl.maximum(first_k + BLOCK_K - 1 - work.offset, 0) + BLOCK_Q - 1) // BLOCK_Q
        begin_full = gl.minimum(begin_full, end)
    # 1 if keys end within the tile: then every step needs a mask
    ragged = gl.minimum(gl.maximum(first_k + BLOCK_K - work.keys, 0), 1)
    return _Steps(begin, begin_full + ragged * (end - begin_full), end)


# The producer warp ------------------------------------------------------------------------------------------------------------


@gluon.jit
def _start_copies(copied, BLOCK_Q: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    """Copy k and v once, then every tile of q and do with its rows of log-sum-exp and delta, in the consumers' order."""
    work, keys, q, do = copied.work, copied.keys, copied.q_ring, copied.do_ring
    first_k, batch_key_head = _keys_and_head(work)
    steps = _steps(first_k, work, BLOCK_Q, CAUSAL)
    batch = batch_key_head // work.key_heads
    key_head = batch_key_head % work.key_heads
    announce(keys.full.index(0), copied.k_descs + copied.v_descs, 0)
    copy_in_parts(copied.k_descs, batch, key_head, first_k, keys.full.index(0), keys.k)
    copy_in_parts(copied.v_descs, batch, key_head, first_k, keys.full.index(0), keys.v)
    started = 0
    for member in range(work.heads_per_key_head):
        head = key_head * work.heads_per_key_head + member
        first_row = (batch * work.key_heads * work.heads_per_key_head + head) * work.padded_queries
        for step in range(steps.begin, steps.end):
            stage = started % STAGES
            parity = (started // STAGES) & 1
            row = step * BLOCK_Q
            mbarrier.wait(q.empty.index(stage), parity ^ 1)
            announce(q.full.index(stage), copied.q_descs, copied.lse_desc.block_type.nbytes)
            copy_in_parts(copied.q_descs, batch, head, row, q.full.index(stage), box_at(q.tiles, stage))
            copy_in(copied.lse_desc, [first_row + row], q.full.index(stage), q.rows.index(stage))
            mbarrier.wait(do.empty.index(stage), parity ^ 1)
            announce(do.full.index(stage), copied.do_descs, copied.delta_desc.block_type.nbytes)
            copy_in_parts(copied.do_descs, batch, head, row, do.full.index(stage), box_at(do.tiles, stage))
            copy_in(copied.delta_desc, [first_row + row], do.full.index(stage), do.rows.index(stage))
            started += 1


# A consumer warpgroup ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _in_registers(dq):
    """A result of wgmma, (64, columns), in the order of a warpgroup's registers: 4 numbers of a thread, then the next thread's.

    No data moves: row and column get new numbers, (warp, half, lane // 4) and (eighth, lane % 4, neighbour).
    """
    COLUMNS: gl.constexpr = dq.shape[1]
    numbered = gl.permute(gl.reshape(dq, [4, 2, 8, COLUMNS // 8, 4, 2]), [3, 0, 2, 4, 1, 5])
    return gl.reshape(numbered, [COLUMNS // 4, 256])


@gluon.jit
def _ds_written(warpgroup: gl.constexpr, step):
    """The barrier for a warpgroup's ds of its step-th step."""
    return DS_WRITTEN + 2 * warpgroup + (step & 1)


@gluon.jit
def _start_scores(kept, used, WARPGROUP: gl.constexpr, BLOCK_Q: gl.constexpr, STAGES: gl.constexpr):
    """Start wgmma of this warpgroup's keys with the ring's used-th tile of queries."""
    zeros = zero_sum(BLOCK_Q)
    k = rows_of(matrices(kept.keys.k), WARPGROUP * ROWS)
    return start_sum(k, matrices(box_at(kept.q_ring.tiles, used % STAGES)), zeros)


@gluon.jit
def _start_dq(kept, step, WARPGROUP: gl.constexpr, SPLIT_ROWS: gl.constexpr):
    """Start wgmma of the step-th step's ds with all keys: this warpgroup's rows, columns or part of dq."""
    keys = matrices(kept.keys.k)
    ds = kept.ds_tiles.index(step & 1).permute((1, 0))
    if SPLIT_ROWS:
        rows = ds.slice(WARPGROUP * ROWS, ROWS)
        started = warpgroup_mma(rows, keys[0], zero_sum(keys[0].shape[1]), use_acc=False, is_async=True)
    elif len(keys) == 2:
        part = keys[WARPGROUP]
        started = warpgroup_mma(ds, part, zero_sum(part.shape[1]), use_acc=False, is_async=True)
    else:
        COLUMNS: gl.constexpr = keys[0].shape[1] // CONSUMERS
        columns = keys[0].slice(WARPGROUP * COLUMNS, COLUMNS, 1)
        started = warpgroup_mma(ds, columns, zero_sum(COLUMNS), use_acc=False, is_async=True)
    return started


@gluon.jit
def _probabilities(
    scores, lse_row, step, first_k, begin_full, kept,
    WARPGROUP: gl.constexpr, BLOCK_Q: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """p for this warpgroup's keys and the step's queries. Steps from `begin_full` on need no mask."""
    SCORES: gl.constexpr = accumulator_layout(BLOCK_Q)  # (keys, queries)
    p = gl.exp2(scores * kept.scale_log2 - gl.expand_dims(lse_row.load(gl.SliceLayout(0, SCORES)), 0))
    if MASKED:  # noqa: SIM102  (this condition is known when compiling)
        if step < begin_full:
            key_index = first_k + WARPGROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
            query_index = step * BLOCK_Q + gl.arange(0, BLOCK_Q, gl.SliceLayout(0, SCORES))
            last_seen = kept.work.keys - 1 + query_index * 0
            if CAUSAL:
                last_seen = gl.minimum(last_seen, query_index + kept.work.offset)
            p = where_seen(p, gl.expand_dims(key_index, 1), gl.expand_dims(last_seen, 0), ZERO)
    return p


@gluon.jit
def _gradient_of_scores(p, difference, dtype: gl.constexpr):
    """p (dp - delta), rounded."""
    # In fp16 the product is made in fp32: a difference over 65504, where p may be nearly 0, must not become infinite.
    return bf16_product(p.to(dtype), difference.to(dtype)) if dtype == gl.bfloat16 else (p * difference).to(dtype)


@gluon.jit
def _row_of_dq(dq_descs, piece, WARPGROUP: gl.constexpr):
    """The row of dq's sum for a warpgroup's piece of a step. `piece`: the step's first piece; a step has CONSUMERS pieces."""
    # The first formula is a special case of the second, and stays: with the second ptxas makes loops 2 to 10 % slower.
    FIRST: gl.constexpr = dq_descs[0].block_type.shape[0]
    LAST: gl.constexpr = dq_descs[1].block_type.shape[0]
    alike: gl.constexpr = FIRST == LAST
    return (piece + WARPGROUP) * FIRST if alike else piece * ((FIRST + LAST) // CONSUMERS) + WARPGROUP * FIRST


@gluon.jit
def _add_gradients(
    dk, dv, scores, used, due, kept, first_k, first_piece, steps, end_used,
    WARPGROUP: gl.constexpr, BLOCK_Q: gl.constexpr, STAGES: gl.constexpr,
    SPLIT_ROWS: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Add the query tiles of one head, whose part of dq's sum begins at `first_piece`.

    `used`: steps of this program so far, of `end_used` in all. `scores`: those of the first step; those of the step after the last
    are returned. `due`: the row for the dq of the step before.
    """
    q_ring, do_ring, dq_tile = kept.q_ring, kept.do_ring, kept.dq_tiles[WARPGROUP]
    SCORES: gl.constexpr = accumulator_layout(BLOCK_Q)  # (keys, queries)
    OPERAND: gl.constexpr = operand_layout(kept.keys.k[0].shape[3])
    PARTS: gl.constexpr = len(kept.keys.k)
    dtype: gl.constexpr = kept.keys.k[0].dtype
    zeros = zero_sum(BLOCK_Q)
    v = rows_of(matrices(kept.keys.v), WARPGROUP * ROWS)
    for step in range(steps.begin, steps.end):
        stage = used % STAGES
        q = matrices(box_at(q_ring.tiles, stage))
        do = matrices(box_at(do_ring.tiles, stage))
        mbarrier.wait(do_ring.full.index(stage), (used // STAGES) & 1)
        started_dp = start_sum(v, do, zeros)
        p = _probabilities(
            scores, q_ring.rows.index(stage), step, first_k, steps.begin_full, kept, WARPGROUP, BLOCK_Q, MASKED, CAUSAL
        )
        p_operand = gl.convert_layout(p.to(dtype), OPERAND)
        # Only the next scores need the next tile of q; this wait is here to keep ptxas from moving the wait for dp
        # before the exponentials, which should run beside that wgmma.
        mbarrier.wait(q_ring.full.index((used + 1) % STAGES), ((used + 1) // STAGES) & 1, pred=used + 1 < end_used)
        dp = warpgroup_mma_wait(0, deps=(started_dp,))
        started_dv = start_products(p_operand, do, dv)
        delta = do_ring.rows.index(stage).load(gl.SliceLayout(0, SCORES))
        ds = _gradient_of_scores(p, dp - gl.expand_dims(delta, 0), dtype)
        meet(_ds_written(1 - WARPGROUP, used - 1), CONSUMER_THREADS)
        kept.ds_tiles.index(used & 1).slice(WARPGROUP * ROWS, ROWS).store(ds)
        started_dk = start_products(gl.convert_layout(ds, OPERAND), q, dk)
        started_dq = _start_dq(kept, used - 1, WARPGROUP, SPLIT_ROWS)
        dv = finished(started_dv, PARTS + 1)
        mbarrier.arrive(do_ring.empty.index(stage), count=1)
        dk = finished(started_dk, 1)
        mbarrier.arrive(q_ring.empty.index(stage), count=1)
        # After the last step these are scores of old data in the buffer, which are not used.
        started_scores = _start_scores(kept, used + 1, WARPGROUP, BLOCK_Q, STAGES)
        dq = warpgroup_mma_wait(PARTS, deps=(started_dq,))
        tma.store_wait(0)  # the previous contents have left the buffer
        dq_tile.store(_in_registers(dq))
        fence_async_shared()
        pass_by(_ds_written(WARPGROUP, used), CONSUMER_THREADS)
        add_out(kept.dq_descs[WARPGROUP], [due, 0], dq_tile)
        due = _row_of_dq(kept.dq_descs, first_piece + step * CONSUMERS, WARPGROUP)
        scores = warpgroup_mma_wait(0, deps=(started_scores,))
        used += 1
    return dk, dv, scores, used, due


@gluon.jit
def _gradients_of_keys(
    kept, WARPGROUP: gl.constexpr, BLOCK_Q: gl.constexpr, STAGES: gl.constexpr,
    SPLIT_ROWS: gl.constexpr, CAUSAL: gl.constexpr, RAGGED_K: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv of this warpgroup's 64 keys, and its part of dq."""
    work, keys, dq_tile = kept.work, kept.keys, kept.dq_tiles[WARPGROUP]
    first_k, batch_key_head = _keys_and_head(work)
    steps = _steps(first_k, work, BLOCK_Q, CAUSAL)
    end_used = (steps.end - steps.begin) * work.heads_per_key_head
    batch = batch_key_head // work.key_heads
    key_head = batch_key_head % work.key_heads
    dk = zero_sums(kept.dk_descs)
    dv = zero_sums(kept.dv_descs)
    no_ds = gl.zeros([ROWS, BLOCK_Q], kept.ds_tiles.dtype, accumulator_layout(BLOCK_Q))  # for the step before the first
    kept.ds_tiles.index(1).slice(WARPGROUP * ROWS, ROWS).store(no_ds)
    fence_async_shared()
    pass_by(_ds_written(WARPGROUP, 1), CONSUMER_THREADS)
    mbarrier.wait(keys.full.index(0), 0)
    mbarrier.wait(kept.q_ring.full.index(0), 0, pred=end_used > 0)
    used = 0
    started_scores = _start_scores(kept, 0, WARPGROUP, BLOCK_Q, STAGES)
    scores = warpgroup_mma_wait(0, deps=(started_scores,))
    pieces = work.padded_queries // BLOCK_Q * CONSUMERS
    # Not NOWHERE alone: with a constant ptxas makes a loop that is 6 % slower
    due = NOWHERE + _row_of_dq(kept.dq_descs, batch_key_head * work.heads_per_key_head * pieces, 0)
    for member in range(work.heads_per_key_head):
        first_piece = (batch_key_head * work.heads_per_key_head + member) * pieces
        dk, dv, scores, used, due = _add_gradients(
            dk, dv, scores, used, due, kept, first_k, first_piece, steps, end_used,
            WARPGROUP, BLOCK_Q, STAGES, SPLIT_ROWS, CAUSAL or RAGGED_K, CAUSAL,
        )  # fmt: skip
    meet(_ds_written(1 - WARPGROUP, used - 1), CONSUMER_THREADS)
    dq = warpgroup_mma_wait(0, deps=(_start_dq(kept, used - 1, WARPGROUP, SPLIT_ROWS),))
    tma.store_wait(0)
    dq_tile.store(_in_registers(dq))
    fence_async_shared()
    add_out(kept.dq_descs[WARPGROUP], [due, 0], dq_tile)
    meet(ALL_READ, CONSUMER_THREADS)  # dk and dv are written through the memory of k and v
    store_sums(rows_of(matrices(keys.v), WARPGROUP * ROWS), dv)
    store_sums(rows_of(matrices(keys.k), WARPGROUP * ROWS), [x * kept.scale for x in dk])
    fence_async_shared()
    row = first_k + WARPGROUP * ROWS
    copy_out_parts(kept.dv_descs, batch, key_head, row, rows_of(keys.v, WARPGROUP * ROWS, 2))
    copy_out_parts(kept.dk_descs, batch, key_head, row, rows_of(keys.k, WARPGROUP * ROWS, 2))
    tma.store_wait(0)


# The kernel -------------------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=SIZES)
def hopper_gradients_kernel(
    q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, v_rest_desc, do_desc, do_rest_desc, lse_desc, delta_desc,
    dk_desc, dk_rest_desc, dv_desc, dv_rest_desc, dq_desc, dq_rest_desc,
    tiles, batch_key_heads, heads_together, key_heads, heads_per_key_head, queries, padded_queries, keys, offset,
    scale, scale_log2,
    BLOCK_Q: gl.constexpr, STAGES: gl.constexpr, SPLIT_ROWS: gl.constexpr,
    CAUSAL: gl.constexpr, RAGGED_K: gl.constexpr,
):  # fmt: skip
    """Descriptors are of (batch, head, position, column) tensors; for lse and delta of rows padded to `padded_queries` per head.

    Rests are None, or of the columns from 64 on (columns.py); for dq those are the second warpgroup's.
    """
    dtype: gl.constexpr = q_desc.dtype
    q_descs = in_parts(q_desc, q_rest_desc)
    k_descs = in_parts(k_desc, k_rest_desc)
    v_descs = in_parts(v_desc, v_rest_desc)
    do_descs = in_parts(do_desc, do_rest_desc)
    dk_descs = in_parts(dk_desc, dk_rest_desc)
    dv_descs = in_parts(dv_desc, dv_rest_desc)
    dq_descs = (dq_desc, dq_desc if dq_rest_desc is None else dq_rest_desc)  # one for each warpgroup
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_Q], dtype)
    kept_keys = _Keys(box_at(new_tiles(k_descs, 1), 0), box_at(new_tiles(v_descs, 1), 0), new_barriers(1, 1))
    q_ring = Ring(
        tiles=new_tiles(q_descs, STAGES),
        rows=gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], lse_desc.layout),
        full=new_barriers(STAGES, 1),
        empty=new_barriers(STAGES, CONSUMERS),
    )
    do_ring = Ring(
        tiles=new_tiles(do_descs, STAGES),
        rows=gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], delta_desc.layout),
        full=new_barriers(STAGES, 1),
        empty=new_barriers(STAGES, CONSUMERS),
    )
    ds_tiles = gl.allocate_shared_memory(dtype, [2, BLOCK_K, BLOCK_Q], DS)
    dq_tiles = [gl.allocate_shared_memory(gl.float32, x.block_type.shape, x.layout) for x in dq_descs]
    work = _Work(
        tiles, batch_key_heads, heads_together, key_heads, heads_per_key_head, queries, padded_queries, keys, offset
    )  # fmt: skip
    copied = _Copied(q_descs, k_descs, v_descs, do_descs, lse_desc, delta_desc, kept_keys, q_ring, do_ring, work)
    kept = _Kept(dk_descs, dv_descs, dq_descs, ds_tiles, dq_tiles, kept_keys, q_ring, do_ring, work, scale, scale_log2)
    gl.warp_specialize(
        [
            (_gradients_of_keys, (kept, 0, BLOCK_Q, STAGES, SPLIT_ROWS, CAUSAL, RAGGED_K)),
            (_gradients_of_keys, (kept, 1, BLOCK_Q, STAGES, SPLIT_ROWS, CAUSAL, RAGGED_K)),
            (_start_copies, (copied, BLOCK_Q, STAGES, CAUSAL)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
