"""Collectives by copies between the ranks of one machine: copy engines move the bytes, multiprocessors stay free to compute.

NCCL moves bytes by kernels, which take multiprocessors and caches from the matmuls beside them. A copy from or into another GPU's
memory needs none. A message is cut into N parts, one for each rank, and parts into chunks that fit into a box, of which each rank
has some in memory that all others can address:

    reduce-scatter   each rank copies what belongs to rank p into p's inbox; all meet; rank p averages it with its own
    all-gather       each rank copies its own part into its outbox; all meet; each copies the others' out of their outboxes
    all-reduce       each chunk reduce-scattered, then gathered one round later

Ranks meet on the GPU (`PeerMemory.meet`), in the order of a stream: what comes behind a meeting begins when all ranks have done
what comes before it. So a box is written again only when every rank is done with it:

    copying   meet | copy 0 in | meet | copy 1 in           | meet | copy 0 out, copy 2 in | meet | ...
    beside                            | average 0, into out |      | average 1, into out   |

The next copies are enqueued before the average, because a graph seems to give a node's stream to the first node that follows it.
That alone gained nothing that could be measured (docs/decisions/0036-copies-in-step.md).

There are two boxes of each kind, and chunks alternate: a rank copies chunk 2 in only after a meeting to which all came with chunk 0
averaged. What a rank does alone runs on a second stream, beside the copies of the next chunk. Each message begins with a meeting,
so launches of a CUDA graph and eager messages may follow each other in any order, if each was waited for before the next begins.
Ranks begin a chunk together, each copying from or to another one, so that links seldom carry the bytes of two. Messages of a kind
follow each other, because two copies at a time would share an engine and links.

A message may be several tensors (pieces.py), which are read and written where they are, each by copies of its own. Nobody reads or
writes a tensor of another rank, only boxes, so tensors may come and go, and a message ends as a collective does: when its
results are on this rank.

For n bytes each rank sends n (N-1)/N in reduce-scatter and in all-gather, as in a ring. Besides, reduce-scatter reads what arrived
once more, n (N-1)/N, and all-gather copies the rank's own n/N, twice if the shard is no part of the tensor.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

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
_ALIGNMENT_ELEMENTS = 64
"""Parts of an all-reduce are multiples of so many elements, so that copies begin at multiples of 128 bytes, in 16 bits, or more."""


Fragments = Sequence[tuple[int, Tensor]]
"""The fragments of tensors in one rank's part of a chunk: (first element in that part, view of the tensor)."""


@dataclass(frozen=True, kw_only=True)
class CopyEngines:
    """Messages of ranks of one machine are copied between their memories. Pass it as `transport` to a parallel strategy.

    `inbox_bytes`: memory of each rank for all its boxes, inboxes and outboxes; torch's allocator does not count it. `least_bytes`:
    smaller messages go through the library (NCCL or gloo), as do maxima and broadcasts.
    """

    inbox_bytes: int = 256 * 2**20
    least_bytes: int = 2**20


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A message that has been started; keep it until you have waited for it: it holds the tensors alive. `end`: None on a CPU."""

    end: torch.cuda.Event | None
    tensors: Sequence[Tensor]

    def wait(self) -> None:
        """Let the current stream wait for the message."""
        if self.end is not None:
            torch.cuda.current_stream().wait_event(self.end)


class Lane:
    """The way of messages of one kind, which travel one after the other. `channel`: the one that its meetings use.

    `inboxes`, `outboxes`: the first byte of each, in every rank's memory.
    """

    def __init__(
        self, memory: PeerMemory, device: torch.device, *, channel: int, inboxes: Sequence[int], outboxes: Sequence[int]
    ) -> None:
        self._memory, self._channel = memory, channel
        self._inboxes, self._outboxes = inboxes, outboxes
        on_gpu = device.type == "cuda"
        self._copying = torch.cuda.Stream(device, priority=-1) if on_gpu else None
        self._beside = torch.cuda.Stream(device, priority=-1) if on_gpu else None
        self._has_unjoined_work = False
        """Whether the second stream has work that the copies have not waited for."""

    def inbox(self, number: int) -> int:
        """The first byte of the inboxes' box for chunk `number`."""
        return self._inboxes[number % 2]

    def outbox(self, number: int) -> int:
        """The first byte of the outboxes' box for chunk `number`."""
        return self._outboxes[number % 2]

    @contextmanager
    def message(self) -> Iterator[None]:
        """Inside, a message's copies are enqueued, behind the work that the current stream has."""
        if self._copying is not None:
            self._copying.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copying):  # None: a CPU, where this does nothing
            self.meet()
            yield

    def sent(self, *tensors: Tensor) -> Sent:
        """The message that was enqueued last."""
        return Sent(end=self.mark(), tensors=tensors)

    @contextmanager
    def beside(self, mark: torch.cuda.Event | None) -> Iterator[None]:
        """Inside, work is enqueued that runs beside the copies from a mark on until the next meeting, or `join`."""
        if self._beside is not None and mark is not None:
            self._beside.wait_event(mark)
        with torch.cuda.stream(self._beside):
            yield
            self._has_unjoined_work = True

    def join(self) -> None:
        """Let the copies that follow wait for the work beside them."""
        if self._copying is not None and self._beside is not None and self._has_unjoined_work:
            self._copying.wait_stream(self._beside)
        self._has_unjoined_work = False

    def meet(self) -> None:
        """Work that is enqueued after this begins when all ranks have come here, with their copies and the work beside."""
        self.join()
        self._memory.meet(self._channel)

    def mark(self) -> torch.cuda.Event | None:
        """The place that the copies have reached; None on a CPU."""
        return None if self._copying is None else self._copying.record_event()


class PeerCopies:
    """The collectives of one group by copies. Making it is a collective, which raises ValueError as open_peer_memory does."""

    def __init__(self, ranks: Ranks, options: CopyEngines, gather_texts: GatherTexts) -> None:
        self._rank, self._world_size = ranks.rank, ranks.world_size
        self._least_bytes = options.least_bytes
        # In slots: two inboxes of N - 1 and two outboxes of 1 for reductions, two outboxes of N / 2 for gathers; 3 N in all
        slot_bytes = _rounded_down(options.inbox_bytes // (3 * ranks.world_size))
        if slot_bytes < _ALIGNMENT_BYTES:
            least = 3 * ranks.world_size * _ALIGNMENT_BYTES
            raise ValueError(
                f"inbox_bytes: must be at least {least} for {ranks.world_size} ranks, not {options.inbox_bytes}"
            )
        self._slot_bytes = slot_bytes
        """Bytes of a reduction's chunk: one sender's slot."""
        self._gathered_bytes = gathered_bytes = _rounded_down(slot_bytes * ranks.world_size // 2)
        """Bytes of a gather's chunk."""
        inbox_bytes = slot_bytes * (ranks.world_size - 1)
        sizes = [inbox_bytes, inbox_bytes, slot_bytes, slot_bytes, gathered_bytes, gathered_bytes]
        ends = list(accumulate(sizes, initial=0))
        self._memory: PeerMemory = open_peer_memory(ranks, ends[-1], channels=2, gather_texts=gather_texts)
        self._reducing = Lane(self._memory, ranks.device, channel=0, inboxes=ends[:2], outboxes=ends[2:4])
        self._gathering = Lane(self._memory, ranks.device, channel=1, inboxes=(), outboxes=ends[4:6])
        self._peers = [(ranks.rank + distance) % ranks.world_size for distance in range(1, ranks.world_size)]
        """The other ranks, each rank beginning with its neighbour, so that all links are busy."""

    def takes(self, message: Tensor | Pieces, reduction: str = "sum") -> bool:
        """Whether a message of this tensor, or of these pieces, goes by copies."""
        return (
            message.nbytes >= max(1, self._least_bytes)  # an empty message has no chunk
            and message.dtype in _DTYPES
            and reduction in _REDUCTIONS
            and (isinstance(message, Pieces) or message.is_contiguous())
        )

    def all_reduce(self, pieces: Pieces, reduction: str) -> Sent:
        """Every rank's pieces become the average or sum of all ranks' pieces."""
        numel = -(-pieces.numel // self._world_size)
        numel = -(-numel // _ALIGNMENT_ELEMENTS) * _ALIGNMENT_ELEMENTS
        lane = self._reducing
        chunks = [
            self._cut(pieces, numel, chunk) for chunk in _chunks(numel, self._slot_bytes // pieces.dtype.itemsize)
        ]
        with lane.message():
            self._push(lane.inbox(0), chunks[0])
            for number in range(len(chunks) + 1):
                lane.meet()
                met = lane.mark()
                if number > 0:
                    self._pull(lane.outbox(number - 1), chunks[number - 1])
                if number + 1 < len(chunks):
                    self._push(lane.inbox(number + 1), chunks[number + 1])
                if number < len(chunks):
                    own = chunks[number][self._rank]
                    with lane.beside(met):
                        self._reduce(lane.inbox(number), own, [part for _, part in own], reduction, lane.outbox(number))
        return lane.sent(*pieces.tensors)

    def reduce_scatter(self, shard: Tensor, pieces: Pieces, reduction: str) -> Sent:
        """`shard` becomes this rank's part of the reduced pieces, with zeros between them."""
        into, lane = shard.view(-1), self._reducing
        places_of_chunks = [*_chunks(into.numel(), self._slot_bytes // into.itemsize)]
        chunks = [self._cut(pieces, into.numel(), chunk) for chunk in places_of_chunks]
        with lane.message():
            self._push(lane.inbox(0), chunks[0])
            for number, chunk in enumerate(places_of_chunks):
                lane.meet()
                met = lane.mark()
                if number + 1 < len(chunks):
                    self._push(lane.inbox(number + 1), chunks[number + 1])
                own = chunks[number][self._rank]
                places = [slice(chunk.start + place, chunk.start + place + part.numel()) for place, part in own]
                with lane.beside(met):
                    _zero_between(places, into, chunk)
                    self._reduce(lane.inbox(number), own, [into[place] for place in places], reduction)
            lane.join()  # the last average belongs to the message; in all_reduce the last meeting joins it
        return lane.sent(shard, *pieces.tensors)

    def all_gather(self, tensor: Tensor, shard: Tensor) -> Sent:
        """`tensor` becomes every rank's shard, one after the other."""
        whole, own, lane = Pieces.of([tensor.view(-1)]), shard.view(-1), self._gathering
        # All on one stream: with own parts shown on a second one, a branch of the graph at each chunk, the next forward waited for
        # the last gather (docs/decisions/0036-copies-in-step.md).
        with lane.message():
            for number, chunk in enumerate(_chunks(own.numel(), self._gathered_bytes // own.itemsize)):
                parts = self._cut(whole, own.numel(), chunk)
                ((_, to),) = parts[self._rank]
                self._place(self._rank, lane.outbox(number), 0, to).copy_(own[chunk])
                if to.data_ptr() != own[chunk].data_ptr():  # else the shard is a view of `tensor`
                    to.copy_(own[chunk])
                lane.meet()
                self._pull(lane.outbox(number), parts)
        return lane.sent(shard, tensor)

    def _cut(self, pieces: Pieces, numel: int, chunk: slice) -> list[Fragments]:
        """This chunk of each rank's part of a message; a part has `numel` elements."""
        firsts = [rank * numel for rank in range(self._world_size)]
        return [pieces.cut(first + chunk.start, first + chunk.stop) for first in firsts]

    def _push(self, inbox: int, parts_of: Sequence[Fragments]) -> None:
        """Copy `parts_of[p]` into this rank's slot of rank p's inbox."""
        for peer in self._peers:
            first = inbox + self._slot_bytes * (self._rank if self._rank < peer else self._rank - 1)
            for place, part in parts_of[peer]:
                self._place(peer, first, place, part).copy_(part)

    def _reduce(
        self, inbox: int, own: Fragments, into: Sequence[Tensor], reduction: str, outbox: int | None = None
    ) -> None:
        """Reduce this rank's parts of a chunk and those that have arrived; with an outbox, show the others the results there."""
        scale = 1 / self._world_size if reduction == "average" else 1.0
        arrived = self._memory.of(self._rank)[inbox : inbox + self._slot_bytes * len(self._peers)]
        for (place, part), to in zip(own, into, strict=True):
            also = None if outbox is None else self._place(self._rank, outbox, place, part)
            add_up(part, arrived.view(part.dtype).view(len(self._peers), -1)[:, place:], to, scale, also)

    def _pull(self, outbox: int, parts_of: Sequence[Fragments]) -> None:
        """`parts_of[p]` becomes what rank p shows."""
        for peer in self._peers:
            for place, to in parts_of[peer]:
                to.copy_(self._place(peer, outbox, place, to))

    def _place(self, owner: int, first: int, place: int, like: Tensor) -> Tensor:
        """`place` elements behind byte `first` of the owner's memory, in the size and dtype of `like`."""
        first += place * like.itemsize
        return self._memory.of(owner)[first : first + like.nbytes].view(like.dtype)


def _chunks(numel: int, most: int) -> Iterator[slice]:
    """The slices of a part's chunks, each of at most `most` elements."""
    for first in range(0, numel, most):
        yield slice(first, min(first + most, numel))


def _rounded_down(bytes_: int) -> int:
    return bytes_ // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES


def _zero_between(places: Sequence[slice], shard: Tensor, chunk: slice) -> None:
    """Zero the gaps between these places in the chunk: nothing arrives there, and an optimizer may read it."""
    end = chunk.start
    for place in [*places, slice(chunk.stop, chunk.stop)]:
        if place.start > end:
            shard[end : place.start].zero_()
        end = place.stop


def add_up(own: Tensor, slots: Tensor, into: Tensor, scale: float, also: Tensor | None = None) -> None:
    """into = scale (own + slots[0] + slots[1] + ...), added in fp32 in this order, rounded once. `also`: a second place for it.

    `own`, `into`, `also`: (n,), the first two may be the same; `slots`: (k, at least n); all of one dtype.

    One kernel, not a copy behind a kernel: in a graph the driver turns a copy within a GPU into a kernel of its own, which does not
    get its stream's priority and waits until all blocks of a large kernel of the step have started.
    """
    if own.device.type != "cpu":
        add_up_on_gpu(own, slots, into, scale, also)
        return
    total = own.float()
    for slot in slots:
        total = total + slot[: own.numel()].float()
    into.copy_(total * scale)
    if also is not None:
        also.copy_(into)
