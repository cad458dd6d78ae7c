"""The backward kernel for Hopper: algorithm.backward in one pass over the keys. See [Note: the pipeline of a Hopper kernel].

`hopper_gradients_kernel`: dk and dv, and dq as a sum in fp32 that programs add to in any order: bits may differ from run to run.
What goes before and comes behind it is in hopper_rows.py.

[Note: one pass backward]
A program keeps 128 keys, 64 a warpgroup, and runs over the queries that see them, and over the query heads that share the key
head. Scores and the gradient of probabilities are computed transposed, (keys, queries), so that p and ds are in the registers
that the products for dv and dk read. dq needs the ds of both warpgroups: each writes its half to shared memory, and each
multiplies one half of dq's columns (or rows) and adds it to global memory by TMA.

    matrix units    dp(n)        | dv(n)   | dk(n)  dq(n-1) | scores(n+1)
    a warpgroup     p from scores| ds(n)   |                | dq(n-1) to shared memory; one fence for it and ds(n)

dq runs a step behind: by then the other warpgroup's ds has long been there, and nobody waits. So the two may be half a step apart,
and while one takes exponentials the matrix units work for the other. Two buffers of ds take turns. A warpgroup says that its ds(n)
is there behind its dq(n-1), and writes ds(n+1) only once the other has said that of ds(n): nobody reads ds(n-1) any more then. The
dq of the step before the first goes nowhere.

dq is summed in pieces of 64 queries, each in the order in which a warpgroup's registers hold it: a thread writes 16 bytes at a
time, its neighbours the next 16, so that no two meet in a bank of shared memory, whose traffic is what the loop waits for; and what
TMA adds is contiguous.

In bf16, ds = p (dp - delta) is the product of two bf16 numbers: p as dv takes it, and the rounded difference. That is half the
instructions and registers of fp32, on the way that the loop waits for; the rounding is that of ds itself, twice more.

Queries beyond the end read as 0 with a log-sum-exp of +inf, so that p is 0 there; a query that sees no key is written so too.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from trainstep.ops.flash_attention.hopper_parts import (
    PRODUCER_REGISTERS,
    ROWS,
    SIZES,
    ZERO,
    accumulator_layout,
    add_out,
    bf16_product,
    copy_in,
    copy_out,
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
"""More rows than any sum of dq has: TMA drops what is added behind them."""
ALL_READ: gl.constexpr = gl.constexpr(13)
"""The barrier at which nobody reads k and v any more."""
CONSUMER_THREADS: gl.constexpr = gl.constexpr(256)


# Which work -------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _keys_and_head(tiles, batch_key_heads, heads_together):
    """(first key, batch and key head) of this program. Under a causal mask the first keys are seen by the most queries."""
    tile, batch_key_head = tile_and_head(gl.program_id(0), tiles, batch_key_heads, heads_together)
    return tile * BLOCK_K, batch_key_head


@gluon.jit
def _steps(first_k, queries, keys, offset, BLOCK_Q: gl.constexpr, CAUSAL: gl.constexpr):
    """(first, first without a mask, end) of the query tiles that see any of these keys. The last keys' tile may be ragged."""
    end = (queries + BLOCK_Q - 1) // BLOCK_Q
    begin = 0
    begin_full = 0
    if CAUSAL:
        begin = gl.minimum(gl.maximum(first_k - offset, 0) // BLOCK_Q, end)
        begin_full = (gl.maximum(first_k + BLOCK_K - 1 - offset, 0) + BLOCK_Q - 1) // BLOCK_Q
        begin_full = gl.minimum(begin_full, end)
    # 1 if keys end within the tile: then no step goes without a mask
    ragged = gl.minimum(gl.maximum(first_k + BLOCK_K - keys, 0), 1)
    return begin, begin_full + ragged * (end - begin_full), end


# The producer warp ------------------------------------------------------------------------------------------------------------


@gluon.jit
def _start_copies(copied, BLOCK_Q: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    """k and v once, then every tile of q and do with its rows of log-sum-exp and delta, in the consumers' order."""
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, kept_tiles, q_ring, do_ring, work = copied
    k_tile, v_tile, kv_full = kept_tiles
    q_tiles, lse_rows, q_full, q_empty = q_ring
    do_tiles, delta_rows, do_full, do_empty = do_ring
    tiles, batch_key_heads, heads_together, key_heads, heads_per_key_head, queries, padded_queries, keys, offset = work
    first_k, batch_key_head = _keys_and_head(tiles, batch_key_heads, heads_together)
    begin, _, end = _steps(first_k, queries, keys, offset, BLOCK_Q, CAUSAL)
    batch = batch_key_head // key_heads
    key_head = batch_key_head % key_heads
    mbarrier.expect(kv_full.index(0), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    copy_in(k_desc, [batch, key_head, first_k, 0], kv_full.index(0), k_tile)
    copy_in(v_desc, [batch, key_head, first_k, 0], kv_full.index(0), v_tile)
    started = 0
    for member in range(heads_per_key_head):
        head = key_head * heads_per_key_head + member
        first_row = (batch * key_heads * heads_per_key_head + head) * padded_queries
        for step in range(begin, end):
            stage = started % STAGES
            parity = (started // STAGES) & 1
            mbarrier.wait(q_empty.index(stage), parity ^ 1)
            mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes + lse_desc.block_type.nbytes)
            copy_in(q_desc, [batch, head, step * BLOCK_Q, 0], q_full.index(stage), q_tiles.index(stage))
            copy_in(lse_desc, [first_row + step * BLOCK_Q], q_full.index(stage), lse_rows.index(stage))
            mbarrier.wait(do_empty.index(stage), parity ^ 1)
            mbarrier.expect(do_full.index(stage), do_desc.block_type.nbytes + delta_desc.block_type.nbytes)
            copy_in(do_desc, [batch, head, step * BLOCK_Q, 0], do_full.index(stage), do_tiles.index(stage))
            copy_in(delta_desc, [first_row + step * BLOCK_Q], do_full.index(stage), delta_rows.index(stage))
            started += 1


# A consumer warpgroup ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _in_registers(dq):
    """A result of wgmma, (64, columns), in the order of a warpgroup's registers: 4 numbers of a thread, then the next thread's.

    Nothing moves: row and column are numbered anew by (warp, half, lane // 4) and (eighth, lane % 4, neighbour).
    """
    COLUMNS: gl.constexpr = dq.shape[1]
    numbered = gl.permute(gl.reshape(dq, [4, 2, 8, COLUMNS // 8, 4, 2]), [3, 0, 2, 4, 1, 5])
    return gl.reshape(numbered, [COLUMNS // 4, 256])


@gluon.jit
def _ds_written(warpgroup: gl.constexpr, step):
    """The barrier for a warpgroup's ds of its step-th step."""
    return DS_WRITTEN + 2 * warpgroup + (step & 1)


@gluon.jit
def _start_scores(kept_tiles, q_ring, used, WARPGROUP: gl.constexpr, BLOCK_Q: gl.constexpr, STAGES: gl.constexpr):
    """wgmma of this warpgroup's keys with the ring's used-th tile of queries."""
    k_tile, _, _ = kept_tiles
    q_tiles, _, _, _ = q_ring
    BLOCK_D: gl.constexpr = k_tile.shape[3]
    zeros = gl.zeros([ROWS, BLOCK_Q], gl.float32, accumulator_layout(BLOCK_Q))
    k = k_tile.reshape([BLOCK_K, BLOCK_D]).slice(WARPGROUP * ROWS, ROWS)
    q = q_tiles.index(used % STAGES).reshape([BLOCK_Q, BLOCK_D])
    return warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_dq(kept_tiles, ds_tiles, step, WARPGROUP: gl.constexpr, SPLIT_ROWS: gl.constexpr):
    """wgmma of the step-th step's ds with all keys: this warpgroup's rows or columns."""
    k_tile, _, _ = kept_tiles
    BLOCK_D: gl.constexpr = k_tile.shape[3]
    all_keys = k_tile.reshape([BLOCK_K, BLOCK_D])
    ds = ds_tiles.index(step & 1).permute((1, 0))
    DQ_COLUMNS: gl.constexpr = BLOCK_D if SPLIT_ROWS else BLOCK_D // CONSUMERS
    zeros = gl.zeros([ROWS, DQ_COLUMNS], gl.float32, accumulator_layout(DQ_COLUMNS))
    if SPLIT_ROWS:
        started = warpgroup_mma(ds.slice(WARPGROUP * ROWS, ROWS), all_keys, zeros, use_acc=False, is_async=True)
    else:
        columns = all_keys.slice(WARPGROUP * DQ_COLUMNS, DQ_COLUMNS, 1)
        started = warpgroup_mma(ds, columns, zeros, use_acc=False, is_async=True)
    return started


@gluon.jit
def _probabilities(
    scores, lse_row, step, place, begin_full, scale_log2,
    WARPGROUP: gl.constexpr, BLOCK_Q: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """p of this warpgroup's keys and the step's queries; steps from `begin_full` on need no mask."""
    _, first_k, keys, offset = place
    SCORES: gl.constexpr = accumulator_layout(BLOCK_Q)  # (keys, queries)
    p = gl.exp2(scores * scale_log2 - gl.expand_dims(lse_row.load(gl.SliceLayout(0, SCORES)), 0))
    if MASKED:  # noqa: SIM102  (this one is known when compiling)
        if step < begin_full:
            key_index = first_k + WARPGROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
            query_index = step * BLOCK_Q + gl.arange(0, BLOCK_Q, gl.SliceLayout(0, SCORES))
            last_seen = keys - 1 + query_index * 0
            if CAUSAL:
                last_seen = gl.minimum(last_seen, query_index + offset)
            p = where_seen(p, gl.expand_dims(key_index, 1), gl.expand_dims(last_seen, 0), ZERO)
    return p


@gluon.jit
def _gradient_of_scores(p, difference, dtype: gl.constexpr):
    """p (dp - delta), rounded. A difference over 65504, where p may well be next to 0, must not become infinite in fp16."""
    return bf16_product(p.to(dtype), difference.to(dtype)) if dtype == gl.bfloat16 else (p * difference).to(dtype)


@gluon.jit
def _add_gradients(
    dk, dv, scores, used, due, dq_desc, memory, place, span, scale_log2,
    WARPGROUP: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_Q: gl.constexpr, STAGES: gl.constexpr,
    SPLIT_ROWS: gl.constexpr, MASKED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """The query tiles of one head. `used`: steps of this program so far. `scores`: those of the first step, and they come back as
    those of the step behind the last. `due`: where the dq of the step before goes."""
    kept_tiles, q_ring, do_ring, ds_tiles, dq_tile = memory
    first_piece, _, _, _ = place
    begin, begin_full, end, steps = span
    k_tile, v_tile, _ = kept_tiles
    q_tiles, lse_rows, q_full, q_empty = q_ring
    do_tiles, delta_rows, do_full, do_empty = do_ring
    SCORES: gl.constexpr = accumulator_layout(BLOCK_Q)  # (keys, queries)
    OPERAND: gl.constexpr = operand_layout(BLOCK_D)
    dtype: gl.constexpr = k_tile.dtype
    zeros = gl.zeros([ROWS, BLOCK_Q], gl.float32, SCORES)
    v = v_tile.reshape([BLOCK_K, BLOCK_D]).slice(WARPGROUP * ROWS, ROWS)
    for step in range(begin, end):
        stage = used % STAGES
        q = q_tiles.index(stage).reshape([BLOCK_Q, BLOCK_D])
        do = do_tiles.index(stage).reshape([BLOCK_Q, BLOCK_D])
        mbarrier.wait(do_full.index(stage), (used // STAGES) & 1)
        started_dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
        p = _probabilities(
            scores, lse_rows.index(stage), step, place, begin_full, scale_log2, WARPGROUP, BLOCK_Q, MASKED, CAUSAL
        )
        p_operand = gl.convert_layout(p.to(dtype), OPERAND)
        # Only the next scores need their tile of q; waited for here, it keeps ptxas from moving the wait for dp before the
        # exponentials, which are to run beside that wgmma
        mbarrier.wait(q_full.index((used + 1) % STAGES), ((used + 1) // STAGES) & 1, pred=used + 1 < steps)
        dp = warpgroup_mma_wait(0, deps=(started_dp,))
        started_dv = warpgroup_mma(p_operand, do, dv, is_async=True)
        delta = delta_rows.index(stage).load(gl.SliceLayout(0, SCORES))
        ds = _gradient_of_scores(p, dp - gl.expand_dims(delta, 0), dtype)
        meet(_ds_written(1 - WARPGROUP, used - 1), CONSUMER_THREADS)
        ds_tiles.index(used & 1).slice(WARPGROUP * ROWS, ROWS).store(ds)
        started_dk = warpgroup_mma(gl.convert_layout(ds, OPERAND), q, dk, is_async=True)
        started_dq = _start_dq(kept_tiles, ds_tiles, used - 1, WARPGROUP, SPLIT_ROWS)
        dv = warpgroup_mma_wait(2, deps=(started_dv,))
        mbarrier.arrive(do_empty.index(stage), count=1)
        dk = warpgroup_mma_wait(1, deps=(started_dk,))
        mbarrier.arrive(q_empty.index(stage), count=1)
        # Behind the last step of whatever lies in the buffer: nobody uses them
        started_scores = _start_scores(kept_tiles, q_ring, used + 1, WARPGROUP, BLOCK_Q, STAGES)
        dq = warpgroup_mma_wait(1, deps=(started_dq,))
        tma.store_wait(0)  # what was in the buffer has left it
        dq_tile.store(_in_registers(dq))
        fence_async_shared()
        pass_by(_ds_written(WARPGROUP, used), CONSUMER_THREADS)
        add_out(dq_desc, [due, 0], dq_tile)
        due = (first_piece + step * CONSUMERS + WARPGROUP) * dq_desc.block_type.shape[0]
        scores = warpgroup_mma_wait(0, deps=(started_scores,))
        used += 1
    return dk, dv, scores, used, due


@gluon.jit
def _gradients_of_keys(
    kept, WARPGROUP: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_Q: gl.constexpr, STAGES: gl.constexpr,
    SPLIT_ROWS: gl.constexpr, CAUSAL: gl.constexpr, RAGGED_K: gl.constexpr,
):  # fmt: skip
    """dk and dv of 64 keys, and this warpgroup's part of dq."""
    dk_desc, dv_desc, dq_desc, ds_tiles, dq_tiles, kept_tiles, q_ring, do_ring, work, scale, scale_log2 = kept
    k_tile, v_tile, kv_full = kept_tiles
    _, _, q_full, _ = q_ring
    tiles, batch_key_heads, heads_together, key_heads, heads_per_key_head, queries, padded_queries, keys, offset = work
    GRADIENT: gl.constexpr = accumulator_layout(BLOCK_D)
    dtype: gl.constexpr = k_tile.dtype
    first_k, batch_key_head = _keys_and_head(tiles, batch_key_heads, heads_together)
    begin, begin_full, end = _steps(first_k, queries, keys, offset, BLOCK_Q, CAUSAL)
    steps = (end - begin) * heads_per_key_head
    batch = batch_key_head // key_heads
    key_head = batch_key_head % key_heads
    dq_tile = dq_tiles.index(WARPGROUP)
    memory = (kept_tiles, q_ring, do_ring, ds_tiles, dq_tile)
    dk = gl.zeros([ROWS, BLOCK_D], gl.float32, GRADIENT)
    dv = gl.zeros([ROWS, BLOCK_D], gl.float32, GRADIENT)
    no_ds = gl.zeros([ROWS, BLOCK_Q], dtype, accumulator_layout(BLOCK_Q))  # of the step before the first
    ds_tiles.index(1).slice(WARPGROUP * ROWS, ROWS).store(no_ds)
    fence_async_shared()
    pass_by(_ds_written(WARPGROUP, 1), CONSUMER_THREADS)
    mbarrier.wait(kv_full.index(0), 0)
    mbarrier.wait(q_full.index(0), 0, pred=steps > 0)
    used = 0
    started_scores = _start_scores(kept_tiles, q_ring, 0, WARPGROUP, BLOCK_Q, STAGES)
    scores = warpgroup_mma_wait(0, deps=(started_scores,))
    pieces = padded_queries // BLOCK_Q * CONSUMERS
    # Not NOWHERE alone: of a constant ptxas makes a loop that runs 6 % slower
    due = NOWHERE + batch_key_head * heads_per_key_head * pieces * dq_desc.block_type.shape[0]
    for member in range(heads_per_key_head):
        place = ((batch_key_head * heads_per_key_head + member) * pieces, first_k, keys, offset)
        dk, dv, scores, used, due = _add_gradients(
            dk, dv, scores, used, due, dq_desc, memory, place, (begin, begin_full, end, steps), scale_log2,
            WARPGROUP, BLOCK_D, BLOCK_Q, STAGES, SPLIT_ROWS, CAUSAL or RAGGED_K, CAUSAL,
        )  # fmt: skip
    meet(_ds_written(1 - WARPGROUP, used - 1), CONSUMER_THREADS)
    dq = warpgroup_mma_wait(0, deps=(_start_dq(kept_tiles, ds_tiles, used - 1, WARPGROUP, SPLIT_ROWS),))
    tma.store_wait(0)
    dq_tile.store(_in_registers(dq))
    fence_async_shared()
    add_out(dq_desc, [due, 0], dq_tile)
    meet(ALL_READ, CONSUMER_THREADS)  # dk and dv leave through the memory of k and v
    k_rows = k_tile.reshape([BLOCK_K, BLOCK_D]).slice(WARPGROUP * ROWS, ROWS)
    v_rows = v_tile.reshape([BLOCK_K, BLOCK_D]).slice(WARPGROUP * ROWS, ROWS)
    v_rows.store(dv.to(dtype))
    k_rows.store((dk * scale).to(dtype))
    fence_async_shared()
    where = [batch, key_head, first_k + WARPGROUP * ROWS, 0]
    copy_out(dv_desc, where, v_tile.slice(WARPGROUP * ROWS, ROWS, 2))
    copy_out(dk_desc, where, k_tile.slice(WARPGROUP * ROWS, ROWS, 2))
    tma.store_wait(0)


# The kernel -------------------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=SIZES)
def hopper_gradients_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, dk_desc, dv_desc, dq_desc,
    tiles, batch_key_heads, heads_together, key_heads, heads_per_key_head, queries, padded_queries, keys, offset,
    scale, scale_log2,
    BLOCK_D: gl.constexpr, BLOCK_Q: gl.constexpr, STAGES: gl.constexpr, SPLIT_ROWS: gl.constexpr,
    CAUSAL: gl.constexpr, RAGGED_K: gl.constexpr,
):  # fmt: skip
    """Descriptors are of (batch, head, position, column), those of lse and delta of rows padded to `padded_queries` a head."""
    dtype: gl.constexpr = q_desc.dtype
    DQ_COLUMNS: gl.constexpr = BLOCK_D if SPLIT_ROWS else BLOCK_D // CONSUMERS
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_Q], dtype)
    kept_tiles = (
        gl.allocate_shared_memory(dtype, [1, 1, BLOCK_K, BLOCK_D], k_desc.layout),
        gl.allocate_shared_memory(dtype, [1, 1, BLOCK_K, BLOCK_D], v_desc.layout),
        new_barriers(1, 1),
    )
    q_ring = (
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_Q, BLOCK_D], q_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], lse_desc.layout),
        new_barriers(STAGES, 1),
        new_barriers(STAGES, CONSUMERS),
    )
    do_ring = (
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_Q, BLOCK_D], do_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], delta_desc.layout),
        new_barriers(STAGES, 1),
        new_barriers(STAGES, CONSUMERS),
    )
    ds_tiles = gl.allocate_shared_memory(dtype, [2, BLOCK_K, BLOCK_Q], DS)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [CONSUMERS, ROWS * DQ_COLUMNS // 256, 256], dq_desc.layout)
    work = (
        tiles,
        batch_key_heads,
        heads_together,
        key_heads,
        heads_per_key_head,
        queries,
        padded_queries,
        keys,
        offset,
    )
    copied = (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, kept_tiles, q_ring, do_ring, work)
    kept = (dk_desc, dv_desc, dq_desc, ds_tiles, dq_tiles, kept_tiles, q_ring, do_ring, work, scale, scale_log2)
    gl.warp_specialize(
        [
            (_gradients_of_keys, (kept, 0, BLOCK_D, BLOCK_Q, STAGES, SPLIT_ROWS, CAUSAL, RAGGED_K)),
            (_gradients_of_keys, (kept, 1, BLOCK_D, BLOCK_Q, STAGES, SPLIT_ROWS, CAUSAL, RAGGED_K)),
            (_start_copies, (copied, BLOCK_Q, STAGES, CAUSAL)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
