"""Ranks in groups: gradients and parameters are sharded inside a group, and shards are averaged across groups.

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

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.costs.rank_groups import Level, check_shard_ranks, members
from trainstep.parallel.collectives import DONE, Collectives, Pending
from trainstep.parallel.copies.pieces import Pieces
from trainstep.parallel.ranks import Ranks


class ShardGroups:
    """The groups of a wrapper's ranks. `shard_ranks`: ranks in a group; None: all ranks are one group.

    Every rank makes it at the same place, since torch makes a group with all processes. ValueError where the ranks do not divide
    into groups.
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
    def is_first_group(self) -> bool:
        """Whether this rank's shards are those that are written to a checkpoint."""
        return self.replicas is None or self.replicas.ranks.is_first

    def all_reduce(self, tensor: Tensor, *, label: str) -> Pending:
        """`tensor` becomes the average over all ranks. With groups, its elements must divide into the shards of a group."""
        replicas = self.replicas
        if replicas is None:
            return self.everyone.all_reduce(tensor, reduction="average", label=label)
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
            self._stream.wait_stream(torch.cuda.current_stream())  # a group of one rank copies there instead of sending
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
        if self._pending is DONE:  # a group of one rank
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
        self._pending = DONE  # which held the tensors


def _group_of(ranks: Ranks, level: Level, shard_ranks: int) -> Ranks:
    """This rank among those of its group at a level. Every rank makes every group, in the same order, as torch wants it."""
    assert ranks.group is not None
    own = members(level, ranks.rank, ranks.world_size, shard_ranks)
    place = own.index(ranks.rank)
    if len(own) == 1:
        return replace(ranks, rank=0, world_size=1, group=None)
    if len(own) == ranks.world_size:
        return ranks
    numbers = dist.get_process_group_ranks(ranks.group)
    backend = None if ranks.group is dist.group.WORLD else dist.get_backend(ranks.group)
    groups = {
        group: dist.new_group([numbers[member] for member in group], backend=backend)
        for group in dict.fromkeys(
            members(level, rank, ranks.world_size, shard_ranks) for rank in range(ranks.world_size)
        )
    }
    return replace(ranks, rank=place, world_size=len(own), group=groups[own])
