"""Which program of the Hopper forward kernel does which tiles, in which order, and which schedule would be done first.

A tile's cost is the blocks of keys that it visits, and one more for what it costs besides. Under a causal mask tiles differ by up
to the number of blocks, and on a grid of few tiles it matters more how many multiprocessors a schedule keeps busy than how fast
it goes there: 192 queries a tile are fastest where there are many tiles, 64 where there are few.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from trainstep.ops.flash_attention.hopper_schedules import ForwardSchedule

CACHE_BYTES = 32 * 2**20
"""What heads worked on together may read again and again: most of the L2 cache's 50 MB."""
_MANY = 64
"""Tiles a program of forward: with more, whichever is last no longer matters."""
_FEW = 8
"""Programs of backward a multiprocessor: with more, the last are short beside all. An estimate."""


@dataclass(frozen=True, kw_only=True)
class ForwardWork:
    """All tiles of a call. `together`: heads whose tiles go side by side; `offset`: query i sees keys 0..i + offset."""

    heads: int
    together: int
    queries: int
    keys: int
    causal: bool
    offset: int

    def tiles(self, schedule: ForwardSchedule) -> int:
        """Of a head."""
        return -(-self.queries // schedule.block_q)

    def costs_of_head(self, schedule: ForwardSchedule) -> tuple[int, ...]:
        """Of a head's tiles, longest first."""
        costs = []
        for tile in reversed(range(self.tiles(schedule))):
            seen = min(max((tile + 1) * schedule.block_q + self.offset, 0), self.keys) if self.causal else self.keys
            costs.append(1 + max(1, -(-seen // schedule.block_k)))
        return tuple(costs)


def in_order(costs_of_head: Sequence[int], heads: int, together: int) -> list[int]:
    """Costs of all heads' tiles in the kernel's order: over `together` heads at a time (see hopper_parts.tile_and_head)."""
    groups = [min(together, heads - first) for first in range(0, heads, together)]
    return [cost for group in groups for cost in costs_of_head for _ in range(group)]


def heads_together(heads_per_key_head: int, keys: int, head_dim: int, batch_heads: int) -> int:
    """Query heads whose keys and values fit into the cache at once, at least those of one key head."""
    key_heads = max(1, CACHE_BYTES // (4 * keys * head_dim))
    return min(batch_heads, key_heads * heads_per_key_head)


def key_heads_together(programs: int, multiprocessors: int, queries: int, head_dim: int, batch_key_heads: int) -> int:
    """Of backward: key heads that go side by side, so that q, do and dq of `queries` rows a key head fit into the cache.

    All of them where there are few `programs`, since a long one that starts last is left alone at the end (simulated, 8 query heads
    a key head, 256 programs: 1.5 times the mean).
    """
    if programs <= _FEW * multiprocessors:
        return batch_key_heads
    return heads_together(1, 2 * queries, head_dim, batch_key_heads)  # dq, in fp32, takes as much as q and do


def fastest(schedules: Sequence[ForwardSchedule], work: ForwardWork, multiprocessors: int) -> ForwardSchedule:
    """The one whose last program is done first, if a multiprocessor is as fast as in `tflops` and shared evenly."""

    def time(schedule: ForwardSchedule) -> float:
        programs = multiprocessors * schedule.programs_per_multiprocessor
        costs = in_order(work.costs_of_head(schedule), work.heads, work.together)
        blocks = _longest(costs, programs) * schedule.programs_per_multiprocessor
        assert schedule.tflops is not None, "one of several schedules has to be weighed"
        return blocks * schedule.block_q * schedule.block_k / schedule.tflops

    return min(schedules, key=time) if len(schedules) > 1 else schedules[0]


def _longest(costs: Sequence[int], programs: int) -> float:
    """What the busiest program has to do."""
    if len(costs) > _MANY * programs:
        return sum(costs) / programs
    return max(sum(costs[piece] for piece in mine) for mine in _shared_out(costs, programs))


def work_order(costs: Sequence[int], programs: int) -> list[int]:
    """Which program does which pieces of work: `programs` + 1 numbers, where each one's begin, then the pieces of all programs."""
    shares = _shared_out(costs, programs)
    begins = accumulate(map(len, shares), initial=0)
    return [*begins, *chain.from_iterable(shares)]


def _shared_out(costs: Sequence[int], programs: int) -> list[list[int]]:
    """Each program's pieces of work: in the given order each goes to who has the least so far, as multiprocessors would take them.

    With a causal mask, tile sizes from 1 to 32 blocks and heads in groups, going round instead leaves one program with up to 1.6
    times the mean.
    """
    loads = [(0, program) for program in range(programs)]
    shares: list[list[int]] = [[] for _ in range(programs)]
    for piece, cost in enumerate(costs):
        load, program = loads[0]
        shares[program].append(piece)
        heapq.heapreplace(loads, (load + cost, program))
    return shares
