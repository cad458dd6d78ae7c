"""The only caller of torch.distributed's collectives: it counts each message and names it for profilers.

The bytes counted are those of the tensor that is reduced, gathered or broadcast, not those on the wire; costs/collectives.py
computes the latter from the former.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.costs.rank_groups import Level, at_level
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
    `beside`: the collectives of all ranks, of which these are a group's at a level (shard_groups.py); messages are counted there,
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
