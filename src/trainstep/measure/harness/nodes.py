"""The driver's side of a launch over several nodes: one connection to the agent of each other node (node_agent.py).

    nodes = meet_nodes(find_launch(os.environ))    # node_meeting.py, in the first task of torchrun or srun
    connect(cell, tell, nodes=nodes)               # ranks of the cell on every node (rank_connection.py)
    nodes.end(0)                                   # every agent leaves with this exit code

The driver runs on the first node and owns cells, records and time limits. An agent starts its node's ranks as the driver would,
and passes requests and answers on, as JSON lines:

    driver -> agent   start NUMBER variables forked_for | begin | ask request | kill | close    to one process of a rank
                      sees path                                                   -> whether that file is there
                      end code                                                    -> the agent leaves
    agent -> driver   stage | answer | lost | closed                              of one process

No clock of a node is compared with another's: each node times its own part, and the driver its own waiting.

[Note: the end of a node]
A connection that ends without `end` is the end of its node: the kernel closes it when the agent dies, and its probes notice a
host that is cut off after 25 s. The cell that runs then fails with the node's name; later cells that need it are not begun
(NodeLost). An agent whose driver is gone kills its ranks and leaves.
"""

import ipaddress
import json
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainstep.config.grid import Cell
from trainstep.measure.harness.connection import Answer, CellLost
from trainstep.parallel.liveness.link import notice_cut_off
from trainstep.records.record import Environment, Failure

_MARGIN_S = 15.0
"""How much longer than the agent the driver waits for an answer that the agent gives up at its time limit."""


_HELLO_BYTES = 2**16


class NodeLost(ValueError):
    """A node that a cell needs is gone."""


class Lines:
    """A connection that carries JSON objects, one a line. Several threads may send."""

    def __init__(self, peer: socket.socket) -> None:
        notice_cut_off(peer)
        self._peer = peer
        self._file = peer.makefile("r", encoding="utf-8")
        self._lock = threading.Lock()

    def send(self, **fields: Any) -> None:
        """Send one object. If the other side is gone, nothing happens; reading shows that."""
        with suppress(OSError), self._lock:
            self._peer.sendall((json.dumps(fields) + "\n").encode())

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """The next object; None at the end, or after `timeout_s`, from which on nothing can be received."""
        self._peer.settimeout(timeout_s)
        try:
            message = json.loads(self._file.readline() or "null")
        except (OSError, ValueError):
            return None
        return message if isinstance(message, dict) else None

    def receive_hello(self, timeout_s: float) -> dict[str, Any] | None:
        """The first object of a peer that nobody knows yet; None unless it comes whole in time, and is of a hello's size."""
        deadline_s, line = time.monotonic() + timeout_s, b""
        try:
            while not line.endswith(b"\n"):
                self._peer.settimeout(max(deadline_s - time.monotonic(), 0.001))  # for each part of the line
                part = self._peer.recv(_HELLO_BYTES)
                line += part
                if not part or len(line) > _HELLO_BYTES or time.monotonic() > deadline_s:
                    return None
            message = json.loads(line)
        except (OSError, ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (line := self.receive()) is not None:
            yield line

    def end_writing(self) -> None:
        """Send nothing more; the other side sees the end after all that was sent."""
        with suppress(OSError):
            self._peer.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        with suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)  # the file keeps the socket open
        self._peer.close()


class Node:
    """Another node, through its agent."""

    def __init__(self, number: int, name: str, environment: Environment, lines: Lines) -> None:
        self.number, self.name, self.environment = number, name, environment
        self.alive = True
        self._lines = lines
        self._queues: dict[str, queue.SimpleQueue[dict[str, Any] | None]] = {}
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def open(self) -> tuple[str, "queue.SimpleQueue[dict[str, Any] | None]"]:
        """A new name for a request to the agent, and the queue of its answers, in which None means that the node is gone."""
        name = uuid.uuid4().hex
        self._queues[name] = queue.SimpleQueue()
        if not self.alive:
            self._queues[name].put(None)
        return name, self._queues[name]

    def send(self, **fields: Any) -> None:
        self._lines.send(**fields)

    def drop(self, name: str) -> None:
        """Await no more answers under this name."""
        self._queues.pop(name, None)

    def sees(self, path: Path) -> bool:
        """Whether the node has this file."""
        name, answers = self.open()
        self.send(do="sees", id=name, path=str(path))
        with suppress(queue.Empty):
            answer = answers.get(timeout=_MARGIN_S)
            return answer is not None and bool(answer["sees"])
        return False

    def end(self, code: int) -> None:
        """Have the agent leave with this exit code."""
        self.send(do="end", code=code)
        self._lines.end_writing()

    def close(self) -> None:
        """Wait until the agent, told to end, has ended its processes."""
        self._listener.join(_MARGIN_S)
        self._lines.close()

    def _listen(self) -> None:
        for line in self._lines:
            if line.get("id") in self._queues:
                self._queues[line["id"]].put(line)
        self.alive = False
        for answers in list(self._queues.values()):
            answers.put(None)


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of a launch, as its driver sees them. `here`: the name of the driver's node, the first; `tasks`: the launch's."""

    here: str
    address: str
    others: Sequence[Node]
    tasks: int
    told: list[int] = field(default_factory=list)
    """The exit code that the agents were told."""

    def __len__(self) -> int:
        return 1 + len(self.others)

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes' names in the order of their ranks; a name that two nodes have gets their numbers."""
        names = [self.here, *(node.name for node in self.others)]
        return tuple(name if names.count(name) == 1 else f"{name} (node {number})" for number, name in enumerate(names))

    @property
    def on_loopback(self) -> bool:
        """Whether all nodes are this machine, as in tests."""
        with suppress(ValueError, OSError):
            return ipaddress.ip_address(socket.gethostbyname(self.address)).is_loopback
        return False

    def first(self, count: int) -> list[Node | None]:
        """The first `count` nodes, of which the driver's own is None. NodeLost if one of them is gone."""
        for node, name in zip(self.others[: count - 1], self.names[1:], strict=False):
            if not node.alive:
                raise NodeLost(f"nodes: {name} is lost; start the launch again with all its nodes")
        return [None, *self.others[: count - 1]]

    def check_alike(self, here: Environment, fields: Sequence[str]) -> None:
        """ValueError, naming node and difference, unless these fields are equal on all nodes."""
        for node, name in zip(self.others, self.names[1:], strict=True):
            if difference := here.difference(node.environment, *fields):
                raise ValueError(
                    f"nodes: {self.names[0]} and {name} differ: {difference}; make them alike, or measure anyway with "
                    "--allow-mixed"
                )

    def check_shared(self, option: str, folder: Path) -> None:
        """ValueError, naming the node, unless every node sees a file that is written here."""
        probe = folder / f".trainstep-{uuid.uuid4().hex}"
        try:
            probe.touch()
            for node, name in zip(self.others, self.names[1:], strict=True):
                if not node.sees(probe):  # the path as given: each node's ranks resolve a relative folder in their own
                    raise ValueError(
                        f"{option}: {name} does not see what {self.names[0]} writes into {folder}; name a folder that all "
                        "nodes share"
                        + ("" if folder.is_absolute() else ", from its root: nodes may run in different folders")
                    )
        finally:
            probe.unlink(missing_ok=True)

    def end(self, code: int) -> None:
        """Have every agent leave with this exit code."""
        if self.told:
            return
        self.told.append(code)
        for node in self.others:
            node.end(code)
        for node in self.others:
            node.close()


class NodeCell:
    """A process of a rank on another node, with the methods of connection.CellConnection that ranks need."""

    def __init__(self, node: Node, name: str, variables: Mapping[str, str], *, forked_for: str = "") -> None:
        self._node, self._node_name = node, name
        self._stage = "start"
        self._lost = False
        self._id, self._events = node.open()
        node.send(do="start", id=self._id, variables=dict(variables), forked_for=forked_for)

    @property
    def alive(self) -> bool:
        return self._node.alive and not self._lost

    def begin(self) -> None:
        self._stage = "start"
        self._node.send(do="begin", id=self._id)

    def ask(self, cell: Cell, request: Mapping[str, Any], *, timeout_s: float, limit_s: float) -> Answer:
        """Send a request and wait for its answer. Raises CellLost as the process's own connection does, or if the node is gone."""
        self._node.send(
            do="ask",
            id=self._id,
            cell={"workload": cell.workload, "config": dict(cell.config), "point": dict(cell.point)},
            request=dict(request),
            timeout_s=timeout_s,
            limit_s=limit_s,
        )
        deadline_s = time.monotonic() + timeout_s + _MARGIN_S
        while True:
            try:
                event = self._events.get(timeout=max(deadline_s - time.monotonic(), 0))
            except queue.Empty:
                self._lost = True
                message = f"{self._node_name} does not answer, {_MARGIN_S:g} s after the time limit of {limit_s:g} s"
                raise CellLost(Failure(kind="timeout", phase=self._stage, message=message)) from None
            if event is None:
                self._lost = True
                message = f"node {self._node_name} was lost in {self._stage}"
                raise CellLost(Failure(kind="node_lost", phase=self._stage, message=message))
            if "stage" in event:
                self._stage = event["stage"]
            elif "lost" in event:
                self._lost = True
                raise CellLost(Failure(**event["lost"]), event["exit_code"])
            elif "answer" in event:
                answer: Answer = event["answer"]
                return answer

    def kill(self) -> None:
        self._node.send(do="kill", id=self._id)

    def close(self) -> None:
        """Let the process end, and wait until it has."""
        self._node.send(do="close", id=self._id)
        deadline_s = time.monotonic() + (_MARGIN_S if self._node.alive else 0)
        with suppress(queue.Empty):
            while (event := self._events.get(timeout=max(deadline_s - time.monotonic(), 0))) is not None:
                if "closed" in event:
                    break
        self._node.drop(self._id)


def check_one_model(facts_of_ranks: Sequence[Mapping[str, Any]], places: Sequence[str]) -> None:
    """ValueError, naming the nodes, unless all ranks built a user's model from the same file. `places`: the node of each rank."""
    sources = [facts.get("model_source") for facts in facts_of_ranks]
    if others := dict.fromkeys(place for place, source in zip(places, sources, strict=True) if source != sources[0]):
        raise ValueError(
            f"model: the file of the model on {', '.join(others)} is not that on {places[0]}; put the same on every node"
        )


def node_name() -> str:
    """This node's name: Slurm's, else the host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
