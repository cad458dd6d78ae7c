"""Replays allocations by the rules of torch's caching allocator, to know what it rounds up and what it reserves. No torch.

    allocator = Allocator()
    tensor = allocator.take(nbytes); allocator.give_back(tensor)
    allocator.allocated_bytes, allocator.reserved_bytes

The rules (c10/cuda/CUDACachingAllocator.cpp of torch 2.11, default settings): a size is rounded up to 512 bytes; up to 1 MiB it
comes from segments of 2 MiB, below 10 MiB from segments of 20 MiB, else from a segment of its own, rounded up to 2 MiB. The
smallest
free block that is large enough is taken, and split if 512 bytes (small) or more than 1 MiB (large) would be left. Neighbouring free
blocks of a segment are joined. Segments are never returned, as long as the GPU has memory.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

_ROUND, _SMALL, _SMALL_SEGMENT, _LARGE_SEGMENT, _OWN_SEGMENT, _SEGMENT_ROUND = (
    512,
    2**20,
    2**21,
    20 * 2**20,
    10 * 2**20,
    2**21,
)


@dataclass(eq=False)
class Block:
    """A piece of a segment, in the order of addresses."""

    address: int
    nbytes: int
    is_small: bool
    is_free: bool = True
    before: "Block | None" = None
    after: "Block | None" = None


class Allocator:
    """Blocks in use and free, with the bytes of both."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self._next_address = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        """Pool -> (size, address) of free blocks, sorted."""
        self._blocks: dict[int, Block] = {}
        """Address -> free block."""

    def take(self, nbytes: int) -> Block:
        """Allocate a tensor's bytes."""
        size = max(_ROUND, -(-nbytes // _ROUND) * _ROUND)
        is_small = size <= _SMALL
        free = self._free[is_small]
        place = bisect_left(free, (size, -1))
        fits = place < len(free)
        block = self._blocks.pop(free.pop(place)[1]) if fits else self._new_segment(size, is_small)
        rest = block.nbytes - size
        if rest >= _ROUND if is_small else rest > _SMALL:
            remainder = Block(block.address + size, rest, is_small, before=block, after=block.after)
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
            free = self._free[block.is_small]
            del free[bisect_left(free, (neighbour.nbytes, neighbour.address))]
            del self._blocks[neighbour.address]
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

    def _new_segment(self, size: int, is_small: bool) -> Block:
        if is_small:
            segment = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            segment = _LARGE_SEGMENT
        else:
            segment = -(-size // _SEGMENT_ROUND) * _SEGMENT_ROUND
        block = Block(self._next_address, segment, is_small)
        self._next_address += segment
        self.reserved_bytes += segment
        return block

    def _add_free(self, block: Block) -> None:
        block.is_free = True
        insort(self._free[block.is_small], (block.nbytes, block.address))
        self._blocks[block.address] = block
