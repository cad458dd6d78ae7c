"""A node's agent and its driver over a pair of sockets: ranks on both, a lost node, bad hellos, and nodes that differ."""

import contextlib
import dataclasses
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from cell_maker import importable, silent, wait_until
from ranks import free_port
from record_maker import ENVIRONMENT
from trainstep.config.grid import Cell
from trainstep.measure.harness import node_meeting
from trainstep.measure.harness.node_agent import LOST, Agent
from trainstep.measure.harness.node_meeting import _introduce, _welcomed, meet_nodes
from trainstep.measure.harness.nodes import Lines, Node, NodeLost, Nodes
from trainstep.measure.harness.rank_connection import RankConnection, connect, joined_ranks, merged_findings
from trainstep.measure.harness.runner import CellRun, Limits, run_alone
from trainstep.parallel.launch import Launch, hosts_of
from trainstep.records.ranks import node_of_rank, rank_values

__all__ = ["importable"]
pytestmark = [
    pytest.mark.usefixtures("importable"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Nodes, socket.socket, list[int]]]:
    """Nodes n1 and n2, of which the second's agent is a thread; its end of the connection; the agent's exit code."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    driver_end, agent_end = socket.socketpair()
    codes: list[int] = []
    agent = threading.Thread(target=lambda: codes.append(Agent(Lines(agent_end)).serve()), daemon=True)
    agent.start()
    node = Node(1, "n2", ENVIRONMENT, Lines(driver_end))
    nodes = Nodes(here="n1", address="127.0.0.1", others=[node], tasks=4)
    yield nodes, agent_end, codes
    nodes.end(0)
    agent.join(10)
    assert not agent.is_alive()


def ranked(**config: object) -> Cell:
    return Cell(
        workload="rank_workloads:RANKED",
        config={"device": "cpu", "ranks": 2, "nodes": 2, "steps": 4, **config},
        point={},
    )


def run(cell: Cell, nodes: Nodes, timeout_s: float = 60):
    connection = connect(cell, silent, nodes=nodes)
    try:
        return run_alone(CellRun(cell, Limits(timeout_s=timeout_s, memory_limit_bytes=2**30), connection))[0]
    finally:
        connection.close()


def test_ranks_of_both_nodes_make_one_record(two: tuple[Nodes, socket.socket, list[int]]):
    record = run(ranked(), two[0])
    assert record.failure is None
    assert record.samples["step"].values == (1.0, 1.0, 3.0, 3.0)
    assert rank_values(record, "clock") == {0: (100,), 1: (101,)}
    assert [node_of_rank(record, rank) for rank in (0, 1)] == ["n1", "n2"]
    assert record.fact("memory_limit_bytes") == 2**30, "each node has the whole limit"
    two[0].end(7)
    assert wait_until(lambda: two[2] == [7])


def test_nodes_with_other_files_of_the_model_are_refused(two: tuple[Nodes, socket.socket, list[int]]):
    assert run(ranked(source=["a", "a"]), two[0]).failure is None
    with pytest.raises(
        ValueError, match=r"^model: the file of the model on n2 is not that on n1; put the same on every"
    ):
        run(ranked(source=["a", "b"]), two[0])


@pytest.mark.slow
def test_an_error_names_rank_and_node(two: tuple[Nodes, socket.socket, list[int]]):
    record = run(ranked(act="raise", victim=1, wait=True), two[0])
    assert record.failure is not None
    assert record.failure.message == "rank 1 (n2): RuntimeError: this was planted"


@pytest.mark.slow
def test_a_hang_is_timed_by_each_node(two: tuple[Nodes, socket.socket, list[int]]):
    record = run(ranked(wait=True), two[0], timeout_s=6)
    assert record.failure is not None
    assert record.failure.message == "every rank: killed in steps at its time limit of 6 s"


@pytest.mark.slow
def test_a_lost_node_is_named_and_needed_no_more(two: tuple[Nodes, socket.socket, list[int]]):
    nodes, agent_end, _ = two
    stages: list[str] = []

    def lose(_cell: Cell, stage: str) -> None:
        stages.append(stage)
        if stage == "steps":
            agent_end.shutdown(socket.SHUT_RDWR)

    connection = RankConnection(lose, 2, nodes=nodes, node_count=2)
    try:
        record, _ = run_alone(CellRun(ranked(wait=True), Limits(timeout_s=60), connection))
    finally:
        connection.close()
    assert record.failure is not None
    assert record.failure.kind == "node_lost"
    assert record.failure.message.startswith("rank 1 (n2): node n2 was lost in ")
    with pytest.raises(NodeLost, match=r"^nodes: n2 is lost; start the launch again"):
        connect(ranked(), silent, nodes=nodes)


def test_more_nodes_than_the_launch_has_are_refused(two: tuple[Nodes, socket.socket, list[int]]):
    with pytest.raises(ValueError, match=r"^nodes: the cell needs 3 and the launch has 2$"):
        connect(ranked(ranks=3, nodes=3), silent, nodes=two[0])


def test_nodes_that_differ_are_refused(two: tuple[Nodes, socket.socket, list[int]]):
    two[0].check_alike(ENVIRONMENT, ("torch", "source"))
    here = dataclasses.replace(ENVIRONMENT, torch="9.9")
    with pytest.raises(ValueError, match=r"^nodes: n1 and n2 differ: torch 9.9 against .*--allow-mixed$"):
        two[0].check_alike(here, ("torch",))


def test_a_folder_that_is_not_shared_is_refused(
    two: tuple[Nodes, socket.socket, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    two[0].check_shared("keep_trace", tmp_path)
    monkeypatch.setattr(os, "listdir", lambda _folder: [])  # as the agent's node has it
    with pytest.raises(
        ValueError, match=r"^keep_trace: n2 does not see what n1 writes into .*; name a folder that all"
    ):
        two[0].check_shared("keep_trace", tmp_path)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_nodes_of_one_name_are_told_apart(two: tuple[Nodes, socket.socket, list[int]]):
    assert dataclasses.replace(two[0], here="n2").names == ("n2 (node 0)", "n2 (node 1)")


@pytest.mark.parametrize(("token", "known"), [("secret", True), ("guessed", False)])
def test_both_sides_prove_that_they_know_the_token(token: str, known: bool):
    driver_end, agent_end = map(Lines, socket.socketpair())
    launch = Launch(rank=2, world_size=4, local_rank=0, local_size=2, address="n1", port=1, nodes=2, node=1)
    welcomed: list[Node | str | None] = []
    driver = threading.Thread(target=lambda: welcomed.append(_welcomed(driver_end, "secret")))
    driver.start()
    if known:
        _introduce(agent_end, launch, token)
    else:
        with pytest.raises(ValueError, match=r"^TRAINSTEP_TOKEN: this node.s is not the first node.s"):
            _introduce(agent_end, launch, token)
    driver.join()
    assert [node.number if isinstance(node, Node) else node for node in welcomed] == [1 if known else None]


def met(words: list[str], *, lacks: str | None = None) -> tuple[Node | str | None, list[dict[str, object]]]:
    """What a driver of `bench` makes of a node with these words, whose environment lacks a field; and what the node was told."""
    driver_end, agent_end = map(Lines, socket.socketpair())
    launch = Launch(rank=2, world_size=4, local_rank=0, local_size=2, address="n1", port=1, nodes=2, node=1)
    welcomed: list[Node | str | None] = []
    driver = threading.Thread(target=lambda: welcomed.append(_welcomed(driver_end, "secret", ["bench"])))
    driver.start()
    own = dataclasses.asdict(ENVIRONMENT)
    with patch("dataclasses.asdict", lambda _: {k: v for k, v in own.items() if k != lacks}):
        _introduce(agent_end, launch, "secret", words)
    driver.join()
    driver_end.close()
    return welcomed[0], list(agent_end)


def test_a_node_that_is_not_alike_ends_the_meeting_with_its_name():
    node, _ = met(["bench"])
    assert isinstance(node, Node)
    reason, told = met(["parallel", "--ranks", "4"])
    assert isinstance(reason, str)
    assert "runs another command than" in reason
    assert "`trainstep parallel --ranks 4`; start the same on every node" in reason
    assert told == [{"do": "end", "code": 2}]
    reason, told = met(["bench"], lacks="driver")
    assert isinstance(reason, str)
    assert "has another trainstep than" in reason
    assert told == [{"do": "end", "code": 2}]


def test_a_drivers_code_of_failed_cells_is_no_loss_of_it():
    for code in (0, LOST):
        driver_end, agent_end = map(Lines, socket.socketpair())
        agent = Agent(agent_end)
        driver_end.send(do="end", code=code)
        driver_end.end_writing()
        assert (agent.serve(), agent.lost_driver) == (code, False)
    driver_end, agent_end = map(Lines, socket.socketpair())
    agent = Agent(agent_end)
    driver_end.close()
    assert (agent.serve(), agent.lost_driver) == (LOST, True)


def a_launch(port: int, hosts: tuple[str, ...] = ()) -> Launch:
    return Launch(
        rank=0, world_size=4, local_rank=0, local_size=2, address="127.0.0.1", port=port, nodes=3, node=0, hosts=hosts
    )


def test_nodes_that_never_come_are_named():
    with pytest.raises(ValueError, match=r"^nodes: n2, n3 of 3 nodes did not come within 0.2 s; look there"):
        meet_nodes(a_launch(free_port(), ("n1", "n2", "n3")), timeout_s=0.2)
    with pytest.raises(ValueError, match=r"^nodes: node 1, node 2 of 3 nodes did not come"):
        meet_nodes(a_launch(free_port()), timeout_s=0.2)


def test_the_time_to_meet_can_be_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRAINSTEP_MEETING_S", "0.2")
    with pytest.raises(
        ValueError,
        match=r"did not come within 0.2 s; .* TRAINSTEP_MEETING_S, set alike on every node, gives slow ones more time$",
    ):
        meet_nodes(a_launch(free_port()))
    for text in ("soon", "0", "-1", "inf", "nan"):
        monkeypatch.setenv("TRAINSTEP_MEETING_S", text)
        with pytest.raises(
            ValueError, match=rf"^TRAINSTEP_MEETING_S: must be a positive number of seconds, not '{text}'$"
        ):
            meet_nodes(a_launch(free_port()))


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"^MASTER_PORT: port {port} of 127.0.0.1 is in use"):
            meet_nodes(a_launch(port), timeout_s=1)


def test_a_driver_that_never_comes_is_named():
    launch = dataclasses.replace(a_launch(free_port()), rank=2, node=1)
    with pytest.raises(ValueError, match=r"^nodes: the first node, at 127.0.0.1, did not come within 0.2 s"):
        node_meeting.serve_node(launch, timeout_s=0.2)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ("n1",)),
        ("n[07-09,12],m3", ("n07", "n08", "n09", "n12", "m3")),
        ("r1n[1-2]-ib", ("r1n1-ib", "r1n2-ib")),
        ("", ()),
    ],
)
def test_slurms_list_of_hosts(text: str, hosts: tuple[str, ...]):
    assert hosts_of(text) == hosts


def test_of_ranks_apart_the_slowest_makes_the_record():
    def found(loss: float, *steps: float) -> dict[str, object]:
        values = {"step": {"unit": "s", "values": list(steps), "warmups": [9.0]}}
        return {"samples": values, "facts": {"loss": loss}, "tables": {"losses": {"loss": [loss]}}}

    merged = merged_findings(
        [found(1.0, 1, 5, 1), found(2.0, 2, 2, 2), found(3.0, 2, 1, 2)], ("n1", "n2", "n3"), apart=True
    )
    assert merged["samples"]["step"]["values"] == [2, 2, 2], "of equal medians the first; no value of another rank"
    assert (merged["facts"]["loss"], merged["tables"]["losses"]["loss"]) == (2.0, [2.0])
    assert merged["tables"]["ranks"]["values"] == [[1, 5, 1], [2, 2, 2], [2, 1, 2]]
    assert merged["tables"]["ranks"]["node"] == ["n1", "n2", "n3"]


def test_rounds_keep_the_nodes_of_ranks():
    sample = {"step": {"unit": "s", "values": [1.0], "warmups": []}}
    findings = [{"samples": sample, "facts": {}, "tables": {}}] * 2
    table = merged_findings(findings, ("n1", "n2"))["tables"]["ranks"]
    assert table["node"] == ["n1", "n2"]
    assert joined_ranks([table, table])["node"] == ["n1", "n2"]
    assert joined_ranks([table, table])["values"] == [[1.0, 1.0]] * 2


@pytest.mark.parametrize(
    "hello",
    [b'{"proof": "\\ud800"}\n', b"[" * 60_000 + b"\n", b"\xff\xfe\n", b"[1]\n", b"x" * 100_000, b"", b'{"proof": 1}\n'],
    ids=["surrogate", "deep", "no text", "list", "endless", "nothing", "number"],
)
def test_a_stranger_is_refused_whatever_it_says(hello: bytes):
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(hello)
        theirs.shutdown(socket.SHUT_WR)
        assert _welcomed(Lines(ours), "secret") is None


def test_a_slow_stranger_has_one_time_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trainstep.measure.harness.node_meeting._HELLO_S", 0.2)
    ours, theirs = socket.socketpair()
    ended = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            while not ended.wait(0.05):
                theirs.sendall(b" ")

    thread = threading.Thread(target=trickle)
    thread.start()
    began_s = time.monotonic()
    try:
        assert _welcomed(Lines(ours), "secret") is None
        assert time.monotonic() - began_s < 5
    finally:
        ended.set()
        thread.join()
        theirs.close()
