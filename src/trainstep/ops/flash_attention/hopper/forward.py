"""The forward kernel for Hopper: algorithm.forward in persistent programs. See [Note: the pipeline of a Hopper kernel].

[Note: blocks from the last to the first]
A warpgroup goes through the key blocks of its 64 queries from the last block that they see to the first, so that the blocks that
the mask cuts (the causal diagonal, the ragged end) come first: the very last block before the loops, other cut blocks in a masked
loop, then all others in a loop without masks. Within a loop the scores of the next block are computed while the previous block's
probabilities are multiplied with its values: both wgmma are started, the scores are waited for, and the softmax runs while the
second wgmma goes on.

Exponentials are base 2 with the scale folded in. The log-sum-exp is stored in natural units. A query that sees no key gives 0, and
-inf as its log-sum-exp.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from trainstep.ops.flash_attention.hopper.columns import (
    announce,
    box_at,
    copy_in_parts,
    copy_out_parts,
    finished,
    in_parts,
    matrices,
    new_tiles,
    rows_times,
    start_products,
    start_sum,
    store_sums,
    zero_sums,
)
from trainstep.ops.flash_attention.hopper.parts import (
    LN_2,
    MINUS_INFINITY,
    PAIRS_STAY,
    PRODUCER_REGISTERS,
    ROWS,
    SIZES,
    Ring,
    accumulator_layout,
    first_and_turns,
    new_barriers,
    operand_layout,
    place_of_turn,
    tile_and_head,
    where_seen,
)

_Work = namedtuple("_Work", "order_ptr tiles batch_heads heads_together heads heads_per_key_head queries keys offset")
"""The work, from hopper_forward_kernel's arguments."""
_Copied = namedtuple("_Copied", "q_descs k_descs v_descs q_ring k_ring v_ring work")
"""The producer's descriptors, rings and work."""
_Kept = namedtuple("_Kept", "o_descs o_tiles lse_ptr q_ring k_ring v_ring work scale_log2")
"""A consumer's descriptors, rings and work."""


@gluon.jit
def _first_query_and_head(place, work, BLOCK_Q: gl.constexpr, CAUSAL: gl.constexpr):
    """(first query, batch and head) of a piece of work. The last tiles under a causal mask are the longest and go first."""
    tile, batch_head = tile_and_head(place, work.tiles, work.batch_heads, work.heads_together)
    if CAUSAL:
        tile = work.tiles - 1 - tile
    return tile * BLOCK_Q, batch_head


@gluon.jit
def _blocks_seen(first_q, count: gl.constexpr, work, BLOCK_K: gl.constexpr, CAUSAL: gl.constexpr):
    """(blocks that any of queries first_q..first_q + count sees, at least 1; blocks that all of them see whole)."""
    seen_by_any = work.keys
    seen_by_all = work.keys
    if CAUSAL:
        seen_by_any = gl.minimum(gl.maximum(gl.minimum(first_q + count, work.queries) + work.offset, 0), work.keys)
        seen_by_all = gl.minimum(gl.maximum(first_q + 1 + work.offset, 0), work.keys)
    blocks = gl.maximum((seen_by_any + BLOCK_K - 1) // BLOCK_K, 1)
    return blocks, seen_by_all // BLOCK_K


# The producer warp ------------------------------------------------------------------------------------------------------------


@gluon.jit
def _start_copies(
    copied,
    WARPGROUPS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    TABLE: gl.constexpr,
):
    """Copy every tile of q, k and v that the consumers will read, in their order, as buffers become empty."""
    work, q, k, v = copied.work, copied.q_ring, copied.k_ring, copied.v_ring
    BLOCK_Q: gl.constexpr = ROWS * WARPGROUPS
    first, turns = first_and_turns(work.order_ptr, TABLE)
    started = 0
    for turn in range(turns):
        place = place_of_turn(work.order_ptr, first, turn, TABLE)
        first_q, batch_head = _first_query_and_head(place, work, BLOCK_Q, CAUSAL)
        blocks, _ = _blocks_seen(first_q, BLOCK_Q, work, BLOCK_K, CAUSAL)
        batch = batch_head // work.heads
        head = batch_head % work.heads
        key_head = head // work.heads_per_key_head
        for warpgroup in gl.static_range(WARPGROUPS):
            mbarrier.wait(q.empty.index(warpgroup), (turn & 1) ^ 1)
            announce(q.full.index(warpgroup), copied.q_descs, 0)
            row = first_q + warpgroup * ROWS
            copy_in_parts(copied.q_descs, batch, head, row, q.full.index(warpgroup), box_at(q.tiles, warpgroup))
        for back in range(blocks):
            stage = started % STAGES
            parity = (started // STAGES) & 1
            row = (blocks - 1 - back) * BLOCK_K
            mbarrier.wait(k.empty.index(stage), parity ^ 1)
            announce(k.full.index(stage), copied.k_descs, 0)
            copy_in_parts(copied.k_descs, batch, key_head, row, k.full.index(stage), box_at(k.tiles, stage))
            mbarrier.wait(v.empty.index(stage), parity ^ 1)
            announce(v.full.index(stage), copied.v_descs, 0)
            copy_in_parts(copied.v_descs, batch, key_head, row, v.full.index(stage), box_at(v.tiles, stage))
            started += 1


# A consumer warpgroup ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _softmax_step(scores, row_max, row_sum, block, last_seen, scale_log2, BLOCK_K: gl.constexpr, MASKED: gl.constexpr):
    """(p, the factor for the sums so far, new row_max, new row_sum). row_max is in the units of the scores."""
    if MASKED:
        LAYOUT: gl.constexpr = accumulator_layout(BLOCK_K)
        columns = block * BLOCK_K + gl.arange(0, BLOCK_K, gl.SliceLayout(0, LAYOUT))
        scores = where_seen(scores, gl.expand_dims(columns, 0), gl.expand_dims(last_seen, 1), MINUS_INFINITY)
    new_max = gl.maximum(row_max, gl.max(scores, 1))
    max_log2 = new_max * scale_log2
    if MASKED:  # a row may have seen no key yet
        max_log2 = gl.where(new_max == float("-inf"), 0.0, max_log2)
    p = gl.exp2(scores * scale_log2 - gl.expand_dims(max_log2, 1))
    shrink = gl.exp2(row_max * scale_log2 - max_log2)
    return p, shrink, new_max, row_sum * shrink + gl.sum(p, 1)


@gluon.jit
def _attend(
    p, acc, row_max, row_sum, used, q, k_ring, v_ring, begin, end, blocks, last_seen, scale_log2,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr, FP32: gl.constexpr,
):  # fmt: skip
    """Attend to blocks `begin`..`end`, counted back from the last. p: that of the block before.

    `used`: the number of tiles of the ring up to that block. Between iterations p is in fp32 if `FP32`, else in 16 bits and an
    operand's layout.
    """
    OPERAND: gl.constexpr = operand_layout(q[0].shape[1])
    dtype: gl.constexpr = q[0].dtype
    zeros = gl.zeros([ROWS, BLOCK_K], gl.float32, accumulator_layout(BLOCK_K))
    for back in range(begin, end):
        p_operand = gl.convert_layout(p.to(dtype), OPERAND) if FP32 else p
        k_stage = (used + 1) % STAGES
        v_stage = used % STAGES
        mbarrier.wait(k_ring.full.index(k_stage), ((used + 1) // STAGES) & 1)
        started_scores = start_sum(q, matrices(box_at(k_ring.tiles, k_stage)), zeros)
        mbarrier.wait(v_ring.full.index(v_stage), (used // STAGES) & 1)
        started_acc = start_products(p_operand, matrices(box_at(v_ring.tiles, v_stage)), acc)
        scores = warpgroup_mma_wait(len(acc), deps=(started_scores,))
        mbarrier.arrive(k_ring.empty.index(k_stage), count=1)
        new_p, shrink, row_max, row_sum = _softmax_step(
            scores, row_max, row_sum, blocks - 1 - back, last_seen, scale_log2, BLOCK_K, MASKED
        )
        acc = finished(started_acc, 0)
        mbarrier.arrive(v_ring.empty.index(v_stage), count=1)
        acc = rows_times(acc, shrink)
        p = new_p if FP32 else gl.convert_layout(new_p.to(dtype), OPERAND)
        used += 1
    return p, acc, row_max, row_sum, used


@gluon.jit
def _skip_blocks(used, count, k_ring, v_ring, STAGES: gl.constexpr):
    """Return the buffers of blocks that other warpgroups of the program see and this warpgroup does not."""
    for _skipped in range(count):
        stage = used % STAGES
        parity = (used // STAGES) & 1
        mbarrier.wait(k_ring.full.index(stage), parity)
        mbarrier.arrive(k_ring.empty.index(stage), count=1)
        mbarrier.wait(v_ring.full.index(stage), parity)
        mbarrier.arrive(v_ring.empty.index(stage), count=1)
        used += 1
    return used


@gluon.jit
def _attend_tiles(
    kept,
    WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, RAGGED_K: gl.constexpr, TABLE: gl.constexpr,
):  # fmt: skip
    """Compute output and log-sum-exp of this warpgroup's 64 queries of each of the program's tiles."""
    work, q_ring, k_ring, v_ring, scale_log2 = kept.work, kept.q_ring, kept.k_ring, kept.v_ring, kept.scale_log2
    BLOCK_Q: gl.constexpr = ROWS * WARPGROUPS
    SCORES: gl.constexpr = accumulator_layout(BLOCK_K)
    zeros = gl.zeros([ROWS, BLOCK_K], gl.float32, SCORES)
    q = matrices(box_at(q_ring.tiles, WARPGROUP))
    o = box_at(kept.o_tiles, WARPGROUP)
    OPERAND: gl.constexpr = operand_layout(q[0].shape[1])
    # The form of p between iterations of the masked loop: 16 bits take half of the registers, but see PAIRS_STAY. With
    # fp32 and acc in two parts ptxas of triton 3.9 spills.
    FP32: gl.constexpr = CAUSAL and (len(q) == 1 or not PAIRS_STAY)
    used = 0
    first, turns = first_and_turns(work.order_ptr, TABLE)
    for turn in range(turns):
        place = place_of_turn(work.order_ptr, first, turn, TABLE)
        tile_q, batch_head = _first_query_and_head(place, work, BLOCK_Q, CAUSAL)
        first_q = tile_q + WARPGROUP * ROWS
        all_blocks, _ = _blocks_seen(tile_q, BLOCK_Q, work, BLOCK_K, CAUSAL)
        blocks, full_blocks = _blocks_seen(first_q, ROWS, work, BLOCK_K, CAUSAL)
        rows = first_q + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        last_seen = work.keys - 1 + rows * 0
        if CAUSAL:
            last_seen = gl.minimum(rows + work.offset, last_seen)
        row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        row_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
        acc = zero_sums(kept.o_descs)
        mbarrier.wait(q_ring.full.index(WARPGROUP), turn & 1)
        used = _skip_blocks(used, all_blocks - blocks, k_ring, v_ring, STAGES)

        # The scores of the last block: no earlier block's values can be multiplied beside them.
        stage = used % STAGES
        mbarrier.wait(k_ring.full.index(stage), (used // STAGES) & 1)
        started = start_sum(q, matrices(box_at(k_ring.tiles, stage)), zeros)
        scores = warpgroup_mma_wait(0, deps=(started,))
        mbarrier.arrive(k_ring.empty.index(stage), count=1)
        p, _, row_max, row_sum = _softmax_step(
            scores, row_max, row_sum, blocks - 1, last_seen, scale_log2, BLOCK_K, CAUSAL or RAGGED_K
        )

        first_full = gl.maximum(blocks - full_blocks, 1)
        if not FP32:
            p = gl.convert_layout(p.to(q[0].dtype), OPERAND)
        if CAUSAL:
            p, acc, row_max, row_sum, used = _attend(
                p, acc, row_max, row_sum, used, q, k_ring, v_ring, 1, first_full, blocks, last_seen, scale_log2,
                BLOCK_K, STAGES, True, FP32,
            )  # fmt: skip
        if FP32:
            p = gl.convert_layout(p.to(q[0].dtype), OPERAND)
        p, acc, row_max, row_sum, used = _attend(
            p, acc, row_max, row_sum, used, q, k_ring, v_ring, first_full, blocks, blocks, last_seen, scale_log2,
            BLOCK_K, STAGES, False, False,
        )  # fmt: skip
        mbarrier.arrive(q_ring.empty.index(WARPGROUP), count=1)

        # The values of the first block: no later block's scores can be computed beside them.
        stage = used % STAGES
        mbarrier.wait(v_ring.full.index(stage), (used // STAGES) & 1)
        started = start_products(p, matrices(box_at(v_ring.tiles, stage)), acc)
        lse = (row_max * scale_log2 + gl.log2(row_sum)) * LN_2
        gl.store(kept.lse_ptr + batch_head * work.queries + rows, lse, mask=rows < work.queries)
        inverse = 1.0 / gl.where(row_sum == 0.0, 1.0, row_sum)
        acc = finished(started, 0)
        mbarrier.arrive(v_ring.empty.index(stage), count=1)
        used += 1

        acc = rows_times(acc, inverse)
        tma.store_wait(0)  # the output of the tile before has left the buffers
        store_sums(matrices(o), acc)
        fence_async_shared()
        copy_out_parts(kept.o_descs, batch_head // work.heads, batch_head % work.heads, first_q, o)
    tma.store_wait(0)


# The kernel -------------------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=SIZES)
def hopper_forward_kernel(
    q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, v_rest_desc, o_desc, o_rest_desc, lse_ptr, order_ptr,
    tiles, batch_heads, heads_together, heads, heads_per_key_head, queries, keys, offset, scale_log2,
    BLOCK_K: gl.constexpr, WARPGROUPS: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, RAGGED_K: gl.constexpr, TABLE: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors are of (batch, head, position, column) tensors; rests are None, or of the columns from 64 on (columns.py).

    REGISTERS: registers of a thread of each consumer beyond the first.
    """
    q_descs = in_parts(q_desc, q_rest_desc)
    k_descs = in_parts(k_desc, k_rest_desc)
    v_descs = in_parts(v_desc, v_rest_desc)
    o_descs = in_parts(o_desc, o_rest_desc)
    q_ring = Ring(new_tiles(q_descs, WARPGROUPS), new_barriers(WARPGROUPS, 1), new_barriers(WARPGROUPS, 1))
    k_ring = Ring(new_tiles(k_descs, STAGES), new_barriers(STAGES, 1), new_barriers(STAGES, WARPGROUPS))
    v_ring = Ring(new_tiles(v_descs, STAGES), new_barriers(STAGES, 1), new_barriers(STAGES, WARPGROUPS))
    o_tiles = new_tiles(o_descs, WARPGROUPS)
    work = _Work(order_ptr, tiles, batch_heads, heads_together, heads, heads_per_key_head, queries, keys, offset)
    copied = _Copied(q_descs, k_descs, v_descs, q_ring, k_ring, v_ring, work)
    kept = _Kept(o_descs, o_tiles, lse_ptr, q_ring, k_ring, v_ring, work, scale_log2)
    if WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (_attend_tiles, (kept, 0, 1, BLOCK_K, STAGES, CAUSAL, RAGGED_K, TABLE)),
                (_start_copies, (copied, 1, BLOCK_K, STAGES, CAUSAL, TABLE)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )
    elif WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_attend_tiles, (kept, 0, 2, BLOCK_K, STAGES, CAUSAL, RAGGED_K, TABLE)),
                (_attend_tiles, (kept, 1, 2, BLOCK_K, STAGES, CAUSAL, RAGGED_K, TABLE)),
                (_start_copies, (copied, 2, BLOCK_K, STAGES, CAUSAL, TABLE)),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_attend_tiles, (kept, 0, 3, BLOCK_K, STAGES, CAUSAL, RAGGED_K, TABLE)),
                (_attend_tiles, (kept, 1, 3, BLOCK_K, STAGES, CAUSAL, RAGGED_K, TABLE)),
                (_attend_tiles, (kept, 2, 3, BLOCK_K, STAGES, CAUSAL, RAGGED_K, TABLE)),
                (_start_copies, (copied, 3, BLOCK_K, STAGES, CAUSAL, TABLE)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )
