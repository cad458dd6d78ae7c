"""Replays allocations by the rules of torch's caching allocator, to know what it rounds up and what it reserves.

    allocator = Allocator()
    tensor = allocator.take(nbytes); allocator.give_back(tensor)
    allocator.allocated_bytes, allocator.reserved_bytes

The rules (c10/cuda/CUDACachingAllocator.cpp of torch 2.11, default settings): a size is rounded up to 512 bytes; up to 1 MiB it
comes from segments of 2 MiB, below 10 MiB from segments of 20 MiB, else from a segment of its own, rounded up to 2 MiB. The
smallest free block that is large enough is taken, and split if 512 bytes (small) or more than 1 MiB (large) would be left.
Neighbouring free blocks of a segment are joined. Segments stay until the cache is emptied, as torch does before it captures a
graph, whose tensors then come from segments of its own pool.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

_ROUND = 512
_SMALL = 2**20
_SMALL_SEGMENT = 2**21
_LARGE_SEGMENT = 20 * 2**20
_OWN_SEGMENT = 10 * 2**20
_SEGMENT_ROUND = 2**21

_Pool = tuple[str, bool]
"""Name of the pool, and whether its blocks are small."""


@dataclass(eq=False, slots=True)
class Block:
    """A piece of a segment, linked to the pieces before and after it in the order of addresses."""

    address: int
    nbytes: int
    pool: _Pool
    is_free: bool = True
    before: "Block | None" = None
    after: "Block | None" = None


class Allocator:
    """Blocks in use and free, with the bytes of both. `pool`: the name of the pool that new tensors come from."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.most_reserved_bytes = 0
        self.pool = "default"
        self._next_address = 0
        self._free: dict[_Pool, list[tuple[int, int]]] = {}
        """Pool -> (size, address) of free blocks, sorted."""
        self._blocks: dict[int, Block] = {}
        """Address -> free block."""

    def take(self, nbytes: int) -> Block:
        """Allocate a tensor's bytes."""
        size = max(_ROUND, -(-nbytes // _ROUND) * _ROUND)
        pool = self.pool, size <= _SMALL
        free = self._free.setdefault(pool, [])
        place = bisect_left(free, (size, -1))
        block = self._blocks.pop(free.pop(place)[1]) if place < len(free) else self._new_segment(size, pool)
        rest = block.nbytes - size
        _, is_small = pool
        if rest >= _ROUND if is_small else rest > _SMALL:
            remainder = Block(block.address + size, rest, pool, before=block, after=block.after)
            if block.after is not None:
                block.after.before = remainder
            block.after, block.nbytes = remainder, size
            self._add_free(remainder)
        block.is_free = False
        self.allocated_bytes += block.nbytes
        return block

    def give_back(self, block: Block) -> None:
        """Free a tensor's block and join it with free neighbours."""
        self.allocated_bytes -= block.nbytes
        for neighbour in (block.before, block.after):
            if neighbour is None or not neighbour.is_free:
                continue
            self._remove_free(neighbour)
            if neighbour is block.before:
                block.address, block.before = neighbour.address, neighbour.before
                if block.before is not None:
                    block.before.after = block
            else:
                block.after = neighbour.after
                if block.after is not None:
                    block.after.before = block
            block.nbytes += neighbour.nbytes
        self._add_free(block)

    def empty_cache(self) -> None:
        """Return the segments that no tensor is in."""
        for block in [block for block in self._blocks.values() if block.before is None and block.after is None]:
            self._remove_free(block)
            self.reserved_bytes -= block.nbytes

    def _new_segment(self, size: int, pool: _Pool) -> Block:
        _, is_small = pool
        if is_small:
            segment = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            segment = _LARGE_SEGMENT
        else:
            segment = -(-size // _SEGMENT_ROUND) * _SEGMENT_ROUND
        block = Block(self._next_address, segment, pool)
        self._next_address += segment
        self.reserved_bytes += segment
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)
        return block

    def _add_free(self, block: Block) -> None:
        block.is_free = True
        insort(self._free.setdefault(block.pool, []), (block.nbytes, block.address))
        self._blocks[block.address] = block

    def _remove_free(self, block: Block) -> None:
        free = self._free[block.pool]
        del free[bisect_left(free, (block.nbytes, block.address))]
        del self._blocks[block.address]
