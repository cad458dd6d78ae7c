"""The only caller of torch.distributed's collectives: it counts each message and names it for profilers.

The bytes counted are those of the tensor that is reduced, gathered or broadcast, not those on the wire; costs/collectives.py
computes the latter from the former.

[Note: groups]
With groups of ranks gradients and parameters are sharded inside a group, and shards are averaged across groups (ShardGroups):

    reduce-scatter    in groups        each rank has 1/N of a message's elements, averaged over its group of N ranks
    all-reduce        across groups    of that 1/N, over the ranks with the same place in their groups
    all-gather        in groups        where the message is to be whole again

So between groups, usually nodes, a rank sends 2 S/N (G-1)/G bytes for a message of S bytes and G groups, and what is inside a group
stays on its fast links (costs/rank_groups.py has who belongs together). A group of all ranks is the usual case, with one message.

[Note: stages]
Each of these messages begins when the one before has ended. On a GPU all of them are given to streams at once, and the host waits
for none. gloo's messages are waited for by the host, so the next stage begins where the next message has begun: all ranks do so
at the same place, since messages of a group pair up by order.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.costs.rank_groups import Level, at_level, check_shard_ranks, members
from trainstep.parallel.copies.messages import CopyEngines, PeerCopies
from trainstep.parallel.copies.pieces import Pieces
from trainstep.parallel.liveness.standstill import Progress
from trainstep.parallel.ranks import Ranks
from trainstep.spans import span

_REDUCTIONS = {"average": dist.ReduceOp.AVG, "sum": dist.ReduceOp.SUM, "maximum": dist.ReduceOp.MAX}


class Pending(Protocol):
    """A collective that has been started."""

    def wait(self) -> Any:
        """Wait until the result may be used: the host waits on gloo, the current stream on NCCL."""


class _Done:
    def wait(self) -> None:
        """Nothing to wait for."""


DONE = _Done()


@dataclass(kw_only=True)
class Traffic:
    """Messages and bytes sent since the last `clear`, by operation."""

    messages: Counter[str] = field(default_factory=Counter)
    payload_bytes: Counter[str] = field(default_factory=Counter)

    def add(self, operation: str, message: Tensor | Pieces) -> None:
        self.messages[operation] += 1
        self.payload_bytes[operation] += message.nbytes

    def clear(self) -> None:
        """Count from zero."""
        self.messages.clear()
        self.payload_bytes.clear()


class Collectives:
    """Collectives of one group. Each starts at once and returns a `Pending` to wait for; tensors are used in place.

    Every rank must call the same collectives in the same order with tensors of the same sizes and dtypes. `label` names the
    message's span: `all_reduce bucket 3`. A single process sends nothing and counts nothing.
    `beside`: the collectives of all ranks, if these are a group's at a level (ShardGroups); messages are then counted there,
    under the names that costs/rank_groups.py gives them: `all_reduce across groups`.
    """

    def __init__(self, ranks: Ranks, *, beside: "Collectives | None" = None, level: Level = Level.ALL) -> None:
        self.ranks = ranks
        self.traffic: Traffic = Traffic() if beside is None else beside.traffic
        self._level = level
        self.recorded = False
        """Whether a step is being captured: the host cannot read the results of its messages."""
        # The watch compares the calls of all ranks, so it is not told those of a subgroup, unless every rank calls them in its own.
        watch = ranks.watch if ranks.group is dist.group.WORLD else None
        own_progress = Progress() if watch is None else watch.progress
        self._progress: Progress = own_progress if beside is None else beside._progress
        self._copies: PeerCopies | None = None

    def send_by(self, transport: CopyEngines | None) -> None:
        """From now on, send large messages by copies (copies/messages.py); None: by NCCL or gloo. Every rank must call this."""
        several = self.ranks.group is not None and self.ranks.world_size > 1
        self._copies = PeerCopies(self.ranks, transport, self.gather_texts) if transport and several else None

    @property
    def sends_by_copies(self) -> bool:
        """Whether large messages go by copies."""
        return self._copies is not None

    def all_reduce(self, tensor: Tensor, *, reduction: str = "sum", label: str = "") -> Pending:
        """Every rank's tensor becomes the `sum`, `average` or `maximum` of all ranks' tensors."""
        if self.ranks.group is None:
            return DONE
        with self._counted("all_reduce", tensor, label):
            if (copies := self._copies_for(tensor, reduction)) is not None:
                return copies.all_reduce(Pieces.of([tensor.view(-1)]), reduction)
            return _ALL_REDUCE(tensor, _REDUCTIONS[reduction], group=self.ranks.group, async_op=True)

    def all_reduce_pieces(self, pieces: Pieces, *, reduction: str = "sum", label: str = "") -> Pending:
        """Like `all_reduce` of tensors that are one message, each of them where it is: the library is given them as a group."""
        if self.ranks.group is None:
            return DONE
        with self._counted("all_reduce", pieces, label):
            if (copies := self._copies_for(pieces, reduction)) is not None:
                return copies.all_reduce(pieces, reduction)
            options: Any = dist.AllreduceCoalescedOptions()
            options.reduceOp = _REDUCTIONS[reduction]
            options.asyncOp = True
            return self.ranks.group.allreduce_coalesced([*pieces.tensors], options)

    def reduce_scatter(self, shard: Tensor, tensor: Tensor, *, reduction: str = "sum", label: str = "") -> Pending:
        """`shard` becomes this rank's part of the reduced `tensor`, which has world_size times as many elements.

        `shard` may be that part of `tensor` itself.
        """
        if self.ranks.group is None:
            _copy_unless_same(shard, tensor)
            return DONE
        with self._counted("reduce_scatter", tensor, label):
            if (copies := self._copies_for(tensor, reduction)) is not None:
                return copies.reduce_scatter(shard, Pieces.of([tensor.view(-1)]), reduction)
            return _REDUCE_SCATTER(shard, tensor, _REDUCTIONS[reduction], group=self.ranks.group, async_op=True)

    def takes_pieces(self, pieces: Pieces, reduction: str) -> bool:
        """Whether `reduce_scatter_pieces` can send this message: copies can, the library takes one tensor."""
        return self.ranks.group is not None and self._copies_for(pieces, reduction) is not None

    def reduce_scatter_pieces(
        self, shard: Tensor, pieces: Pieces, *, reduction: str = "sum", label: str = ""
    ) -> Pending:
        """Like `reduce_scatter` of pieces that `takes_pieces`, each read where it is; zeros come between them in the shard."""
        with self._counted("reduce_scatter", pieces, label):
            copies = self._copies_for(pieces, reduction)
            assert copies is not None
            return copies.reduce_scatter(shard, pieces, reduction)

    def all_gather(self, tensor: Tensor, shard: Tensor, *, label: str = "") -> Pending:
        """`tensor` becomes every rank's `shard`, one after the other. `shard` may be this rank's part of `tensor` itself."""
        if self.ranks.group is None:
            _copy_unless_same(tensor, shard)
            return DONE
        with self._counted("all_gather", tensor, label):
            if (copies := self._copies_for(tensor)) is not None:
                return copies.all_gather(tensor, shard)
            return _ALL_GATHER(tensor, shard, group=self.ranks.group, async_op=True)

    def broadcast(self, tensor: Tensor, *, source: int = 0, label: str = "") -> Pending:
        """Every rank's tensor becomes that of rank `source`."""
        if self.ranks.group is None:
            return DONE
        with self._counted("broadcast", tensor, label):
            return _BROADCAST(tensor, group=self.ranks.group, group_src=source, async_op=True)

    def there_and_back(self, tensor: Tensor, first: int, second: int) -> None:
        """Rank `first` sends the tensor to rank `second`, which sends it back; waits. Others return at once. Not counted."""
        group, rank = self.ranks.group, self.ranks.rank
        if group is None or rank not in (first, second):
            return
        if dist.get_backend(group) == "gloo":
            tensor = tensor.cpu()  # gloo's other operations copy a GPU's tensors to the host themselves
        if rank == first:
            dist.send(tensor, group=group, group_dst=second)
            dist.recv(tensor, group=group, group_src=second)
        else:
            dist.recv(tensor, group=group, group_src=first)
            dist.send(tensor, group=group, group_dst=first)

    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text, in the order of ranks. Waits; for messages to people, not for speed."""
        if self.ranks.group is None:
            return [text]
        content = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.ranks.device)
        longest = torch.tensor(len(content), device=self.ranks.device)
        self.all_reduce(longest, reduction="maximum", label="length").wait()
        padded = torch.zeros(int(longest) or 1, dtype=torch.uint8, device=self.ranks.device)
        padded[: len(content)] = content
        gathered = padded.new_empty(len(padded) * self.ranks.world_size)
        self.all_gather(gathered, padded, label="text").wait()
        return [bytes(row).rstrip(b"\0").decode() for row in gathered.view(self.ranks.world_size, -1).tolist()]

    def barrier(self) -> None:
        """Wait until every rank is here. Not counted."""
        if self.ranks.group is not None:
            self._progress.called("barrier")
            dist.barrier(group=self.ranks.group)

    def count_step(self) -> None:
        """Count a step whose gradients are synchronised, so that the watch can say in which step a rank is."""
        self._progress.steps += 1

    def _copies_for(self, message: Tensor | Pieces, reduction: str = "sum") -> PeerCopies | None:
        """What copies this message; None if the library sends it. A CPU's tape holds the library's messages only."""
        if self._copies is None or (self.recorded and self.ranks.device.type == "cpu"):
            return None
        return self._copies if self._copies.takes(message, reduction) else None

    def _counted(self, operation: str, message: Tensor | Pieces, label: str) -> AbstractContextManager[Any]:
        """Count the message; returns the span to start it in."""
        operation = at_level(operation, self._level)
        name = f"{operation} {label}" if label else operation
        self.traffic.add(operation, message)
        self._progress.called(name, in_group=self.ranks.group is not dist.group.WORLD)
        return span(name)


def _copy_unless_same(to: Tensor, from_: Tensor) -> None:
    if to.data_ptr() != from_.data_ptr():
        to.copy_(from_)


# Cast: some releases of torch annotate these with an optional result, which is None only outside a group or when not asynchronous.
# The last two were renamed in torch 2.13, where the older names warn.
_Start = Callable[..., Pending]
_ALL_REDUCE = cast(_Start, dist.all_reduce)
_BROADCAST = cast(_Start, dist.broadcast)
_REDUCE_SCATTER = cast(_Start, getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)
_ALL_GATHER = cast(_Start, getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)

# Messages through groups of ranks. [Note: groups]


class ShardGroups:
    """The groups of a wrapper's ranks. `shard_ranks`: ranks in a group; None: all ranks are one group.

    Every rank must make it at the same place. ValueError where the ranks do not divide into groups.
    """

    def __init__(self, everyone: Collectives, shard_ranks: int | None = None) -> None:
        ranks = everyone.ranks
        size = ranks.world_size if shard_ranks is None else shard_ranks
        check_shard_ranks(ranks.world_size, size)
        self.everyone = everyone
        self.shards = everyone
        """The ranks of this rank's group, which together hold every shard once."""
        self.replicas: Collectives | None = None
        """The ranks that hold the same shard; None where there is one group."""
        self._stream: torch.cuda.Stream | None = None
        self._under_way: list[_Stages] = []
        if size < ranks.world_size:
            inside, across = (_group_of(ranks, level, size) for level in (Level.IN_GROUPS, Level.ACROSS_GROUPS))
            self.shards = Collectives(inside, beside=everyone, level=Level.IN_GROUPS)
            self.replicas = Collectives(across, beside=everyone, level=Level.ACROSS_GROUPS)
            self._stream = torch.cuda.Stream(ranks.device) if ranks.device.type == "cuda" else None

    @property
    def levels(self) -> list[Collectives]:
        """All collectives of the wrapper."""
        return [self.everyone] if self.replicas is None else [self.everyone, self.shards, self.replicas]

    @property
    def parts(self) -> int:
        """The number of equal parts into which a tensor must divide for `all_reduce`."""
        return 1 if self.replicas is None else self.shards.ranks.world_size

    @property
    def is_first_group(self) -> bool:
        """Whether this rank's shards are those that are written to a checkpoint."""
        return self.replicas is None or self.replicas.ranks.is_first

    def all_reduce(self, tensor: Tensor, *, label: str) -> Pending:
        """`tensor` becomes the average over all ranks; its elements must divide into `parts`."""
        replicas = self.replicas
        if replicas is None or self.parts == 1:  # a last stage that sends nothing could not be waited for on a GPU
            return (replicas or self.everyone).all_reduce(tensor, reduction="average", label=label)
        flat = tensor.view(-1)
        ranks = self.shards.ranks
        shard = flat.view(ranks.world_size, -1)[ranks.rank]
        return self._start(
            lambda: self.shards.reduce_scatter(shard, flat, reduction="average", label=label),
            lambda: replicas.all_reduce(shard, reduction="average", label=label),
            lambda: self.shards.all_gather(flat, shard, label=label),
        )

    def reduce_scatter(self, shard: Tensor, tensor: Tensor, *, label: str) -> Pending:
        """`shard` becomes this rank's part, by its place in its group, of the average over all ranks."""
        return self._then_across(
            shard, lambda: self.shards.reduce_scatter(shard, tensor, reduction="average", label=label), label
        )

    def takes_pieces(self, pieces: Pieces) -> bool:
        """Whether `reduce_scatter_pieces` can send this message."""
        return self.shards.takes_pieces(pieces, "average")

    def reduce_scatter_pieces(self, shard: Tensor, pieces: Pieces, *, label: str) -> Pending:
        """Like `reduce_scatter` of pieces that `takes_pieces`."""
        return self._then_across(
            shard, lambda: self.shards.reduce_scatter_pieces(shard, pieces, reduction="average", label=label), label
        )

    def _then_across(self, shard: Tensor, reduce: Callable[[], Pending], label: str) -> Pending:
        replicas = self.replicas
        if replicas is None:
            return reduce()
        return self._start(reduce, lambda: replicas.all_reduce(shard, reduction="average", label=label))

    def _start(self, *stages: Callable[[], Pending]) -> Pending:
        """Start the first stage, then the next stage of each message that is under way. [Note: stages]"""
        message = _Stages(stages)
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                message.start_all()
            return message
        for earlier in self._under_way:
            earlier.advance()
        self._under_way = [*(earlier for earlier in self._under_way if earlier.has_more), message]
        return message


class _Stages:
    """Messages of which each begins when the one before has ended."""

    def __init__(self, stages: Sequence[Callable[[], Pending]]) -> None:
        self._next = deque(stages)
        self._pending: Pending = self._next.popleft()()
        if self._pending is DONE:  # a group of one rank, which copied on the current stream
            self.advance()

    @property
    def has_more(self) -> bool:
        return bool(self._next)

    def advance(self) -> None:
        """Wait for the stage that is under way and start the next, if there is one."""
        if self._next:
            self._pending.wait()
            self._pending = self._next.popleft()()

    def start_all(self) -> None:
        while self._next:
            self.advance()

    def wait(self) -> None:
        self.start_all()
        self._pending.wait()
        self._pending = DONE  # the message held its tensors


def _group_of(ranks: Ranks, level: Level, shard_ranks: int) -> Ranks:
    """This rank among those of its group at a level. Every rank makes every group, in the same order, as torch wants it.

    Processes outside of `ranks` need not take part.
    """
    assert ranks.group is not None
    own = members(level, ranks.rank, ranks.world_size, shard_ranks)
    place = own.index(ranks.rank)
    if len(own) == 1:
        return replace(ranks, rank=0, world_size=1, group=None)
    if len(own) == ranks.world_size:
        return ranks
    numbers = dist.get_process_group_ranks(ranks.group)
    options: dict[str, Any] = {}
    if ranks.group is not dist.group.WORLD:
        options = {"backend": dist.get_backend(ranks.group), "use_local_synchronization": True}
    groups: dict[range, Any] = {  # for groups without this rank, torch's NON_GROUP_MEMBER
        group: dist.new_group([numbers[member] for member in group], **options)
        for group in dict.fromkeys(
            members(level, rank, ranks.world_size, shard_ranks) for rank in range(ranks.world_size)
        )
    }
    return replace(ranks, rank=place, world_size=len(own), group=groups[own])
