"""The nodes of a launch by torchrun or srun find each other: the first task of all is the driver, those of other nodes are agents.

They meet in the launch's store (torch.distributed), in which the driver leaves its port. In a job that a sweep has submitted, the
driver is the batch script, and srun starts the agents as `python -m trainstep.measure.harness.node_meeting`.

[Note: whom nodes trust]
Driver and agent prove to each other that they know the token of process_group.py before anything is run. As there, the network
between the nodes is the boundary of trust.
"""

import dataclasses
import hmac
import math
import os
import queue
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from trainstep.config.import_path import python_command
from trainstep.measure.harness.node_agent import Agent
from trainstep.measure.harness.nodes import Lines, Node, Nodes, node_name
from trainstep.measure.harness.rank_connection import free_port
from trainstep.measure.machine.environment import environment
from trainstep.parallel.launch import Launch, find_launch, first_host, hosts_of
from trainstep.parallel.liveness.link import listen, proof
from trainstep.parallel.process_group import open_store
from trainstep.records.record import Environment

_MEETING_S = 60.0
"""How long the nodes of a launch wait for each other, unless TRAINSTEP_MEETING_S says so."""
_HELLO_S = 30.0
_END_S = 15.0
"""How long the agents of a job may take to end."""
_KEY = "trainstep nodes"
_MORE_TIME = "TRAINSTEP_MEETING_S, set alike on every node, gives slow ones more time"


def meet_nodes(
    launch: Launch, *, timeout_s: float | None = None, token: str | None = None, words: Sequence[str] | None = None
) -> Nodes:
    """Wait for the agents of a launch's other nodes. ValueError, naming them, for nodes that do not come in time, have another
    trainstep, or run another command.

    `timeout_s`: by default `meeting_s`. `token`: a secret that the agents have in TRAINSTEP_TOKEN; by default this process's own.
    `words`: this node's command.
    """
    timeout_s = meeting_s() if timeout_s is None else timeout_s
    own_token = token or os.environ.get("TRAINSTEP_TOKEN")
    token = own_token or secrets.token_hex(16)
    store = open_store(launch, timeout_s)
    deadline_s = time.monotonic() + timeout_s
    came: dict[int, Node] = {}
    with listen(launch.address) as listener:
        store.set(_store_key(), f"{listener.getsockname()[1]} {'' if own_token else token}")
        door = _Door(token, words)
        threading.Thread(target=door.welcome_all, args=(listener,), daemon=True).start()
        try:
            while len(came) < launch.nodes - 1:
                arrived = door.next_arrival(deadline_s)
                if arrived is None:
                    raise ValueError(_absent(launch, came, timeout_s) + door.refused_words())
                if isinstance(arrived, str):
                    raise ValueError(arrived)
                if 0 < arrived.number < launch.nodes and arrived.number not in came:
                    came[arrived.number] = arrived
        except ValueError:
            for node in came.values():
                node.end(2)
            raise
        finally:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # ends the thread's wait, which closing would not
    others = [came[number] for number in sorted(came)]
    return Nodes(here=node_name(), address=launch.address, others=others, tasks=launch.world_size)


def serve_node(launch: Launch, *, timeout_s: float | None = None, words: Sequence[str] | None = None) -> int:
    """Be this node's agent until the driver ends; returns the driver's exit code. ValueError if the driver is not there.

    `timeout_s`: by default `meeting_s`. `words`: this node's command, which must be the driver's.
    """
    timeout_s = meeting_s() if timeout_s is None else timeout_s
    where = f"the first node, at {launch.address}"
    try:
        port, _, stored_token = open_store(launch, timeout_s).get(_store_key()).decode().partition(" ")
        peer = socket.create_connection((launch.address, int(port)), timeout=timeout_s)
    except (OSError, RuntimeError, ValueError) as error:  # torch's errors are RuntimeErrors
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"nodes: {where}, did not come within {timeout_s:g} s ({reason}); {_MORE_TIME}") from None
    lines = Lines(peer)
    name = _introduce(lines, launch, os.environ.get("TRAINSTEP_TOKEN") or stored_token, words)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver says when it ends
    agent = Agent(lines)
    code = agent.serve()
    if agent.lost_driver:
        print(
            f"trainstep: nodes: the first node, {name}, is lost; start the launch again with all its nodes",
            file=sys.stderr,
        )
    return code


def meeting_s() -> float:
    """How long nodes wait for each other: TRAINSTEP_MEETING_S, else 60 s. ValueError unless it is a positive number."""
    text = os.environ.get("TRAINSTEP_MEETING_S") or str(_MEETING_S)
    with suppress(ValueError):
        if 0 < (seconds := float(text)) < math.inf:
            return seconds
    raise ValueError(f"TRAINSTEP_MEETING_S: must be a positive number of seconds, not {text!r}")


@contextmanager
def nodes_of_job(count: int) -> Iterator[Nodes | None]:
    """The nodes of this Slurm job, whose batch script this is; None for a single node. Leaving it ends the agents.

    ValueError as `meet_nodes`.
    """
    if count == 1:
        yield None
        return
    hosts = os.environ["SLURM_JOB_NODELIST"]
    address, port = os.environ.get("MASTER_ADDR") or first_host(hosts), free_port()
    token = os.environ.get("TRAINSTEP_TOKEN") or secrets.token_hex(16)
    variables = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "TRAINSTEP_TOKEN": token}
    # Else srun would give its tasks a part of the job's cores.
    places = [
        "--nodes",
        str(count),
        "--ntasks",
        str(count),
        "--ntasks-per-node",
        "1",
        "--overlap",
        "--cpu-bind",
        "none",
    ]
    srun = subprocess.Popen(
        ["srun", *places, *python_command("trainstep.measure.harness.node_meeting")],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
    )
    launch = Launch(
        rank=0,
        world_size=count,
        local_rank=0,
        local_size=1,
        address=address,
        port=port,
        nodes=count,
        node=0,
        hosts=hosts_of(hosts),
    )
    nodes = None
    try:
        nodes = meet_nodes(launch, token=token)
        yield nodes
    finally:
        if nodes is not None:
            nodes.end(0)
        try:
            srun.wait(_END_S if nodes is not None else 0)
        except subprocess.TimeoutExpired:
            srun.kill()  # which ends its tasks
            srun.wait()


def _store_key() -> str:
    """The key of the driver's port in the store; each restart by torchrun has its own key."""
    return f"{_KEY} {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


class _Door:
    """Welcomes nodes on the driver's side."""

    def __init__(self, token: str, words: Sequence[str] | None) -> None:
        self._token, self._words = token, None if words is None else list(words)
        self._arrivals: queue.SimpleQueue[Node | str] = queue.SimpleQueue()
        self._refused = 0

    def welcome_all(self, listener: socket.socket) -> None:
        """Welcome whoever comes, each in a thread, so that a stranger holds nobody up; until the listener is closed."""
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._welcome, args=(Lines(peer),), daemon=True).start()

    def next_arrival(self, deadline_s: float) -> Node | str | None:
        """The next node; a sentence where one is not alike, which ends the launch; None if nobody comes before the deadline."""
        try:
            return self._arrivals.get(timeout=max(deadline_s - time.monotonic(), 0.01))
        except queue.Empty:
            return None

    def refused_words(self) -> str:
        """What to add to a sentence about absent nodes."""
        if not self._refused:
            return ""
        return f"; {self._refused} that came did not know the token: set the same TRAINSTEP_TOKEN on every node"

    def _welcome(self, lines: Lines) -> None:
        arrived = _welcomed(lines, self._token, self._words)
        if arrived is None:
            self._refused += 1
        else:
            self._arrivals.put(arrived)


def _welcomed(lines: Lines, token: str, words: Sequence[str] | None = None) -> Node | str | None:
    """The node at the other end; None if it does not prove in time that it knows the token; a sentence if it is not alike."""
    challenge = secrets.token_hex(16)
    lines.send(challenge=challenge)
    hello = lines.receive_hello(_HELLO_S) or {}
    known = isinstance(hello.get("proof"), str) and hmac.compare_digest(
        hello["proof"].encode(errors="replace"), proof(token, challenge, "node").encode()
    )
    if not known:
        lines.send(refused=True)
        lines.close()
        return None
    lines.send(proof=proof(token, str(hello["challenge"]), "driver"), name=node_name())
    number, name, seen, command = int(hello["node"]), str(hello["name"]), hello["environment"], hello.get("words")
    if set(seen) != {field.name for field in dataclasses.fields(Environment)}:
        reason = f"has another trainstep than {node_name()}; install the same on every node"
    elif command is not None and words is not None and command != list(words):
        reason = (
            f"runs another command than {node_name()}, `trainstep {shlex.join(command)}`; start the same on every node"
        )
    else:
        return Node(number, name, Environment(**seen), lines)
    lines.send(do="end", code=2)
    lines.end_writing()
    return f"nodes: {name} {reason}"


def _absent(launch: Launch, came: Mapping[int, Node], timeout_s: float) -> str:
    absent = [number for number in range(1, launch.nodes) if number not in came]
    named = [launch.hosts[number] if number < len(launch.hosts) else f"node {number}" for number in absent]
    return (
        f"nodes: {', '.join(named)} of {launch.nodes} nodes did not come within {timeout_s:g} s; look there for the reason, and "
        "check that every node runs the same command and reaches "
        f"{launch.address}; {_MORE_TIME}"
    )


def _introduce(lines: Lines, launch: Launch, token: str, words: Sequence[str] | None = None) -> str:
    """Prove that this node knows the token, and check that the driver does; returns the name of the driver's node."""
    challenge = secrets.token_hex(16)
    asked = lines.receive(_HELLO_S) or {}
    lines.send(
        node=launch.node,
        name=node_name(),
        environment=dataclasses.asdict(environment(visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"))),
        words=None if words is None else list(words),
        challenge=challenge,
        proof=proof(token, str(asked.get("challenge")), "node"),
    )
    answer = lines.receive(_HELLO_S) or {}
    if answer.get("proof") != proof(token, challenge, "driver"):
        raise ValueError("TRAINSTEP_TOKEN: this node's is not the first node's; set the same one on every node")
    return str(answer.get("name", launch.address))


def main() -> None:
    """Run a task of `nodes_of_job`'s srun: be this node's agent; on the first node, do nothing."""
    launch = find_launch(os.environ)
    try:
        sys.exit(serve_node(launch) if launch.node else 0)
    except ValueError as error:
        sys.exit(f"trainstep: {error}")


if __name__ == "__main__":
    main()
