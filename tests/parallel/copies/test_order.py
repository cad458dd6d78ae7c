"""No box is written while a rank may still read it, in whatever order the ranks' streams run. Only boxes are looked at here:
test_messages.py sees whether a message's own tensors are right.

Each rank's messages are given to streams that only note what comes behind what; a meeting comes behind what every rank did before
its own. Two accesses to the same bytes, one of them a write, must then be ordered, or a GPU could run them at once.
"""

import graphlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainstep.parallel.copies import messages
from trainstep.parallel.copies.memory import PeerMemory
from trainstep.parallel.copies.messages import CopyEngines, PeerCopies
from trainstep.parallel.copies.pieces import Pieces
from trainstep.parallel.ranks import Ranks

BYTES_A_RANK = 3 * 256
"""The fewest that CopyEngines takes: 256 bytes for each sender, 64 fp32 elements a chunk."""
Step = tuple[str, int] | str
"""An operation and the elements of a rank's part, or `wait`: the current stream waits for all messages so far."""


@dataclass(eq=False)  # nodes are keys by identity
class Node:
    """Something on a rank's stream. `accesses`: (owner of the box, first byte, end byte, whether it writes)."""

    rank: int
    before: list["Node"]
    accesses: list[tuple[int, int, int, bool]] = field(default_factory=list)


class Stream:
    """Notes what comes behind what. `heads`: what the next node comes behind; `nodes`: of all streams."""

    def __init__(self, rank: int, nodes: list[Node]) -> None:
        self.rank, self.nodes = rank, nodes
        self.heads: list[Node] = []

    def node(self) -> Node:
        node = Node(self.rank, self.heads)
        self.nodes.append(node)
        self.heads = [node]
        return node

    def wait_stream(self, other: "Stream") -> None:
        self.heads = [*self.heads, *other.heads]

    def record_event(self) -> list[Node]:
        return list(self.heads)

    def wait_event(self, event: Sequence[Node]) -> None:
        self.heads = [*self.heads, *event]


class Streams:
    """The current stream of one rank, in place of torch.cuda's."""

    def __init__(self, rank: int, nodes: list[Node]) -> None:
        self.main = self.current = Stream(rank, nodes)

    def current_stream(self) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class Memory(PeerMemory):
    """Every rank's boxes in one process. `meetings`: (channel, number) -> each rank's node."""

    def __init__(self, streams: Streams, blocks: Sequence[Tensor], meetings: dict[tuple[int, int], list[Node]]) -> None:
        self._streams, self._blocks, self._meetings = streams, blocks, meetings
        self._met = [0, 0]

    def of(self, rank: int) -> Tensor:
        return self._blocks[rank]

    def meet(self, channel: int) -> None:
        arrived = self._streams.current.node()
        self._meetings.setdefault((channel, self._met[channel]), []).append(arrived)
        self._met[channel] += 1


class Accesses(TorchDispatchMode):
    """Notes which bytes of boxes each operator reads and writes, as a node of the current stream."""

    def __init__(self, streams: Streams, blocks: Sequence[Tensor]) -> None:
        super().__init__()
        self._streams, self._owners = streams, {block.untyped_storage().data_ptr(): r for r, block in enumerate(blocks)}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        # Operators that are not listed count as reads of all they are given: too strict, never too lax
        is_view = function in (torch.ops.aten.view.default, torch.ops.aten.slice.Tensor, torch.ops.aten.view.dtype)
        accesses = [
            self._access(value, writes=place == 0 and function is torch.ops.aten.copy_.default)
            for place, value in enumerate(arguments)
            if isinstance(value, Tensor) and value.untyped_storage().data_ptr() in self._owners
        ]
        if accesses and not is_view:
            self._streams.current.node().accesses += accesses
        return function(*arguments, **(options or {}))

    def _access(self, tensor: Tensor, *, writes: bool) -> tuple[int, int, int, bool]:
        first = tensor.storage_offset() * tensor.itemsize
        return (
            self._owners[tensor.untyped_storage().data_ptr()],
            first,
            first + tensor.numel() * tensor.itemsize,
            writes,
        )


def behind_what(steps: Sequence[Step], world_size: int, monkeypatch: pytest.MonkeyPatch) -> dict[Node, list[Node]]:
    """Node -> the nodes that it comes directly behind, for all streams of all ranks."""
    meetings: dict[tuple[int, int], list[Node]] = {}
    blocks: list[Tensor] = []
    nodes: list[Node] = []
    for rank in range(world_size):
        streams = Streams(rank, nodes)
        monkeypatch.setattr(torch.cuda, "stream", streams.stream)
        monkeypatch.setattr(torch.cuda, "current_stream", streams.current_stream)

        def open_memory(_ranks: Ranks, bytes_: int, *, streams: Streams = streams, **_: Any) -> Memory:
            blocks.extend(torch.zeros(bytes_, dtype=torch.uint8) for _ in range(world_size - len(blocks)))
            return Memory(streams, blocks, meetings)

        monkeypatch.setattr(messages, "open_peer_memory", open_memory)
        ranks = Ranks(rank=rank, world_size=world_size, device=torch.device("cpu"))
        copies = PeerCopies(
            ranks, CopyEngines(inbox_bytes=BYTES_A_RANK * world_size, least_bytes=1), lambda text: [text]
        )
        for lane in (copies._reducing, copies._gathering):
            lane._copying, lane._beside = Stream(rank, nodes), Stream(rank, nodes)  # type: ignore[assignment]
        with Accesses(streams, blocks):
            run(copies, steps, world_size)
    assert all(len(met) == world_size for met in meetings.values())
    # Behind a meeting of one rank is behind every rank's arrival at it
    meeting_of = {arrived: met for met in meetings.values() for arrived in met}
    return {
        node: [*node.before, *(other for before in node.before for other in meeting_of.get(before, ()))]
        for node in nodes
    }


def run(copies: PeerCopies, steps: Sequence[Step], world_size: int) -> None:
    """Give one rank's messages to its streams."""
    under_way = []
    for step in steps:
        if isinstance(step, str):
            for sent in under_way:
                sent.wait()
            under_way.clear()
            continue
        operation, numel = step
        whole, shard = torch.zeros(numel * world_size), torch.zeros(numel)
        if operation == "all_gather":
            under_way.append(copies.all_gather(whole, shard))
        elif operation == "reduce_scatter":
            under_way.append(copies.reduce_scatter(shard, Pieces.of([whole]), "average"))
        else:
            under_way.append(copies.all_reduce(Pieces.of([whole]), "sum"))


def unordered(steps: Sequence[Step], world_size: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pairs of accesses to the same bytes, one of them a write, that nothing puts in order."""
    behind = behind_what(steps, world_size, monkeypatch)
    order = [*graphlib.TopologicalSorter(behind).static_order()]
    number = {node: place for place, node in enumerate(order)}
    earlier: dict[Node, int] = {}  # for each node all that it comes behind, as bits
    for node in order:
        earlier[node] = 0
        for before in behind[node]:
            earlier[node] |= earlier[before] | 1 << number[before]
    accesses = [(node, access) for node in order for access in node.accesses]
    found = []
    for place, (node, (owner, first, end, writes)) in enumerate(accesses):
        for other, (other_owner, other_first, other_end, other_writes) in accesses[:place]:
            overlap = owner == other_owner and first < other_end and other_first < end
            if overlap and (writes or other_writes) and node is not other and not earlier[node] >> number[other] & 1:
                found.append(f"rank {node.rank} and rank {other.rank} in rank {owner}'s box at byte {first}")
    return found


OPERATIONS = st.tuples(
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]), st.integers(1, 5).map(lambda times: 48 * times)
)


@settings(max_examples=25, deadline=None)
@given(steps=st.lists(OPERATIONS | st.just("wait"), min_size=2, max_size=5), world_size=st.integers(2, 4))
def test_what_shares_a_box_is_in_order(steps: list[Step], world_size: int):
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert unordered(steps, world_size, monkeypatch) == []


MISSING = {
    "the meeting at a message's beginning": "message",
    "the wait for what runs beside": "join",
    "the second inbox": "inbox",
    "the second outbox": "outbox",
    "each chunk's meeting": "meet",
}


@pytest.mark.parametrize("missing", MISSING)
def test_the_check_finds_what_is_missing(missing: str, monkeypatch: pytest.MonkeyPatch):
    @contextmanager
    def message(lane: Any) -> Iterator[None]:
        lane._copying.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(lane._copying):
            yield

    instead = {
        "message": message,
        "join": lambda lane: None,
        "inbox": lambda lane, number: lane._inboxes[0],
        "outbox": lambda lane, number: lane._outboxes[0],
        "meet": lambda lane: lane.join(),
    }
    name = MISSING[missing]
    monkeypatch.setattr(messages.Lane, name, instead[name])
    operations = {"inbox": ["reduce_scatter"], "join": ["reduce_scatter"], "outbox": ["all_gather"]}
    for operation in operations.get(name, ["reduce_scatter", "all_gather"]):
        # Three chunks: an odd number, so that the second message begins in the box in which the first one ended
        steps: list[Step] = [(operation, 192)] * 2
        assert unordered(steps, 3, monkeypatch), operation
