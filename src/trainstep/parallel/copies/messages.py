"""Collectives by copies between the ranks of one machine: copy engines move the bytes, multiprocessors stay free to compute.

NCCL moves bytes by kernels, which take multiprocessors and caches from the matmuls beside them. A copy into another GPU's memory
needs none. A message is cut into N parts, one for each rank, and parts into chunks as large as an inbox's slot:

    reduce-scatter   each rank copies chunk p into rank p's inbox; rank p averages its own chunk and those in its inbox
    all-gather       each rank copies its chunk into every inbox, and from its own inbox to the tensor
    all-reduce       both, chunk by chunk

    sender:   wait for `free` of the receiver, copy, set `arrived`
    receiver: wait for `arrived` of every sender, read the inbox, set `free`

Every rank takes the same chunks in the same order. A lane is a stream with an inbox of its own; chunks take turns on the lanes, so
one lane's copies run while the other averages. A message may be several tensors (pieces.py), which are read and written where they
are, each by copies of its own. Nothing is written into a tensor of another rank except its inbox, so tensors may
come and go, and a message ends as a collective does: when its results are on this rank. Between messages every inbox is free.

For n bytes each rank sends n (N-1)/N in reduce-scatter and in all-gather, as in a ring, and besides reads and writes its inbox.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainstep.parallel.copies.memory import GatherTexts, PeerMemory, open_peer_memory
from trainstep.parallel.copies.pieces import Pieces
from trainstep.parallel.ranks import Ranks

try:
    from trainstep.parallel.copies.kernel import add_up_on_gpu
except ImportError:  # there is no triton for this platform, and no GPU that it could use
    add_up_on_gpu = None  # type: ignore[assignment]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_REDUCTIONS = ("average", "sum")
_ALIGNMENT_BYTES = 256
_ALIGNMENT = 64
"""Parts of an all-reduce are multiples of this many elements, so that copies begin on 128 bytes."""


Parts = Sequence[tuple[int, Tensor]]
"""Parts of tensors, and where each begins in a chunk."""


@dataclass(frozen=True, kw_only=True)
class CopyEngines:
    """Messages of ranks of one machine are copied into the other ranks' memory. Pass it as `transport` to a parallel strategy.

    `inbox_bytes`: memory for arriving chunks on each rank, which torch's allocator does not count. `least_bytes`: smaller messages
    go through the library (NCCL or gloo), as do maxima and broadcasts. `lanes`: chunks under way at a time, which share the inbox.
    """

    inbox_bytes: int = 256 * 2**20
    least_bytes: int = 2**20
    lanes: int = 4


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Where a chunk is sent. `stream`: None on a CPU; `free` and `arrived`: channels; `first_byte`: of its inbox."""

    stream: torch.cuda.Stream | None
    free: int
    arrived: int
    first_byte: int


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A message that has been started. It keeps the tensors until it was waited for."""

    ends: Sequence[torch.cuda.Event]
    tensors: Sequence[Tensor]

    def wait(self) -> None:
        """Let the current stream wait for the message."""
        for end in self.ends:
            torch.cuda.current_stream().wait_event(end)


class PeerCopies:
    """The collectives of one group by copies. ValueError as open_peer_memory has it. Every rank must make it at the same place."""

    def __init__(self, ranks: Ranks, options: CopyEngines, gather_texts: GatherTexts) -> None:
        if options.lanes < 1:
            raise ValueError(f"lanes: must be at least 1, not {options.lanes}")
        self._rank, self._world_size = ranks.rank, ranks.world_size
        self._least_bytes = options.least_bytes
        others = ranks.world_size - 1
        slot_bytes = options.inbox_bytes // options.lanes // others // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
        if slot_bytes < _ALIGNMENT_BYTES:
            least = _ALIGNMENT_BYTES * options.lanes * others
            raise ValueError(
                f"inbox_bytes: must be at least {least} for {ranks.world_size} ranks, not {options.inbox_bytes}"
            )
        self._slot_bytes = slot_bytes
        lane_bytes = slot_bytes * others
        self._memory: PeerMemory = open_peer_memory(
            ranks, lane_bytes * options.lanes, channels=2 * options.lanes, gather_texts=gather_texts
        )
        on_gpu = ranks.device.type == "cuda"
        self._lanes = [
            Lane(
                stream=torch.cuda.Stream(ranks.device, priority=-1) if on_gpu else None,
                free=2 * number,
                arrived=2 * number + 1,
                first_byte=lane_bytes * number,
            )
            for number in range(options.lanes)
        ]
        self._turn = 0
        self._peers = [(ranks.rank + distance) % ranks.world_size for distance in range(1, ranks.world_size)]
        """The other ranks, each rank beginning with its neighbour, so that all links are busy."""
        for lane in self._lanes:
            self._set_free(lane)

    def takes(self, message: Tensor | Pieces, reduction: str = "sum") -> bool:
        """Whether a message of this tensor, or of these pieces, goes by copies."""
        return (
            message.nbytes >= self._least_bytes
            and message.dtype in _DTYPES
            and reduction in _REDUCTIONS
            and (isinstance(message, Pieces) or message.is_contiguous())
        )

    def all_reduce(self, pieces: Pieces, reduction: str) -> Sent:
        """Every rank's pieces become the average or sum of all ranks' pieces."""
        numel = -(-pieces.numel // self._world_size)
        numel = -(-numel // _ALIGNMENT) * _ALIGNMENT
        message = _Message()
        for chunk in self._chunks(numel, pieces.dtype):
            with self._next_lane(message) as lane:
                parts = self._cut(pieces, numel, chunk)
                own = parts[self._rank]
                self._reduce(lane, parts, [part for _, part in own], reduction)
                self._gather(lane, parts, own)
        return message.end(pieces.tensors)

    def reduce_scatter(self, shard: Tensor, pieces: Pieces, reduction: str) -> Sent:
        """`shard` becomes this rank's part of the reduced pieces, with zeros between them."""
        into = shard.view(-1)
        message = _Message()
        for chunk in self._chunks(into.numel(), into.dtype):
            with self._next_lane(message) as lane:
                parts = self._cut(pieces, into.numel(), chunk)
                own = parts[self._rank]
                places = [slice(chunk.start + place, chunk.start + place + part.numel()) for place, part in own]
                _zero_between(places, into, chunk)
                self._reduce(lane, parts, [into[place] for place in places], reduction)
        return message.end([shard, *pieces.tensors])

    def all_gather(self, tensor: Tensor, shard: Tensor) -> Sent:
        """`tensor` becomes every rank's shard, one after the other."""
        whole, own = Pieces.of([tensor.view(-1)]), shard.view(-1)
        message = _Message()
        for chunk in self._chunks(own.numel(), own.dtype):
            with self._next_lane(message) as lane:
                parts = self._cut(whole, own.numel(), chunk)
                self._gather(lane, parts, [(0, own[chunk])] if own[chunk].numel() else [])
        return message.end([shard, tensor])

    def _cut(self, pieces: Pieces, numel: int, chunk: slice) -> list[Parts]:
        """This chunk of each rank's part of a message; a part has `numel` elements."""
        firsts = [rank * numel for rank in range(self._world_size)]
        return [pieces.cut(first + chunk.start, first + chunk.stop) for first in firsts]

    def _reduce(self, lane: Lane, chunks: Sequence[Parts], into: Sequence[Tensor], reduction: str) -> None:
        """Send `chunks[p]` to rank p, and reduce this rank's chunk and those that arrive."""
        self._send(lane, [chunks[peer] for peer in self._peers])
        scale = 1 / self._world_size if reduction == "average" else 1.0
        for (place, own), to in zip(chunks[self._rank], into, strict=True):
            add_up(own, self._slots(lane, own)[:, place:], to, scale)
        self._set_free(lane)

    def _gather(self, lane: Lane, chunks: Sequence[Parts], own: Parts) -> None:
        """Send this rank's chunk to every rank; `chunks[p]` becomes that of rank p."""
        self._send(lane, [own] * len(self._peers))
        for (_, to), (_, part) in zip(chunks[self._rank], own, strict=True):
            if to.data_ptr() != part.data_ptr():
                to.copy_(part)
        for peer in self._peers:
            for place, to in chunks[peer]:
                to.copy_(self._slot(lane, self._rank, peer, place, to))
        self._set_free(lane)

    def _send(self, lane: Lane, contents: Sequence[Parts]) -> None:
        """Copy parts into each peer's inbox, and wait for theirs."""
        for peer, parts in zip(self._peers, contents, strict=True):
            self._memory.wait_signal(peer, lane.free)
            for place, part in parts:
                self._slot(lane, peer, self._rank, place, part).copy_(part)
            self._memory.put_signal(peer, lane.arrived)
        for peer in self._peers:
            self._memory.wait_signal(peer, lane.arrived)

    def _set_free(self, lane: Lane) -> None:
        for peer in self._peers:
            self._memory.put_signal(peer, lane.free)

    def _slot(self, lane: Lane, owner: int, sender: int, place: int, like: Tensor) -> Tensor:
        """Where in the owner's inbox element `place` of this sender's chunk begins, in the size and dtype of `like`."""
        first = lane.first_byte + self._slot_bytes * (sender if sender < owner else sender - 1) + place * like.itemsize
        return self._memory.of(owner)[first : first + like.nbytes].view(like.dtype)

    def _slots(self, lane: Lane, like: Tensor) -> Tensor:
        """This rank's inbox on the lane, (peers, elements of a slot)."""
        others = len(self._peers)
        own = self._memory.of(self._rank)
        return own[lane.first_byte : lane.first_byte + self._slot_bytes * others].view(like.dtype).view(others, -1)

    def _chunks(self, numel: int, dtype: torch.dtype) -> Iterator[slice]:
        """The places of a part's chunks."""
        size = self._slot_bytes // dtype.itemsize
        for first in range(0, numel, size):
            yield slice(first, min(first + size, numel))

    def _next_lane(self, message: "_Message") -> "_OnLane":
        lane = self._lanes[self._turn]
        self._turn = (self._turn + 1) % len(self._lanes)
        return _OnLane(lane, message)


class _Message:
    """The lanes that a message uses. They begin after the work that the current stream had when the message began."""

    def __init__(self) -> None:
        self._lanes: dict[int, torch.cuda.Stream] = {}

    def enter(self, lane: Lane) -> None:
        if lane.stream is not None and lane.free not in self._lanes:
            lane.stream.wait_stream(torch.cuda.current_stream())
            self._lanes[lane.free] = lane.stream

    def end(self, tensors: Sequence[Tensor]) -> Sent:
        return Sent(ends=[stream.record_event() for stream in self._lanes.values()], tensors=tensors)


class _OnLane:
    """The context in which a chunk's work is given to its lane."""

    def __init__(self, lane: Lane, message: _Message) -> None:
        message.enter(lane)
        self._lane = lane
        self._context = torch.cuda.stream(lane.stream)

    def __enter__(self) -> Lane:
        self._context.__enter__()
        return self._lane

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)


def _zero_between(places: Sequence[slice], shard: Tensor, chunk: slice) -> None:
    """Zero what these places leave of the chunk: nothing arrives there, and an optimizer may read it."""
    end = chunk.start
    for place in [*places, slice(chunk.stop, chunk.stop)]:
        if place.start > end:
            shard[end : place.start].zero_()
        end = place.stop


def add_up(own: Tensor, slots: Tensor, into: Tensor, scale: float) -> None:
    """into = scale (own + slots[0] + slots[1] + ...), added in fp32 in this order, rounded once.

    `own`, `into`: (n,), may be the same; `slots`: (k, at least n); all of one dtype.
    """
    if own.device.type != "cpu":
        add_up_on_gpu(own, slots, into, scale)
        return
    total = own.float()
    for slot in slots:
        total = total + slot[: own.numel()].float()
    into.copy_(total * scale)
