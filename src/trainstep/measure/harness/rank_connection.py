"""Runs a cell of several ranks: one process per rank, asked together, with their answers merged into one.

The processes start with torchrun's variables, so that the workload's `start_ranks` finds the other ranks. Every request
goes to all ranks at the same time. As soon as one rank is lost or answers with a failure, the other ranks are ended,
because they would wait for that rank in a collective; its failure is the cell's, and names the rank.

The ranks of a cell on several nodes are started there by the nodes' agents (nodes.py), in equal numbers and in the nodes' order.

Ranks of one machine meet on its loopback address and prove to each other that they know a token that only they and their
driver have (parallel/process_group.py), so no other process can join them. GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME keep
the values that the user has set.

[Note: who failed first]
When a rank dies, the collectives of the other ranks fail within milliseconds, and their failures may arrive first. So the
other ranks get a moment. Of several failures the loss of a node counts first, also one that is noticed later, since its ranks
die with it; then a death, then an error, and last a process that its watch ended because of another rank: its exit code is
LEFT. If the watch ended all ranks, its sentence is the failure.
If all ranks were ended at the time limit, the failure names each rank with its stage, and repeats what the watch had said
about which rank waits for which.
"""

import dataclasses
import os
import secrets
import socket
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from statistics import median
from typing import Any

from trainstep.config.grid import Cell
from trainstep.config.instruments import INSTRUMENTS
from trainstep.measure.harness.connection import Answer, CellConnection, CellLost, Connection, Tell, tell_nobody
from trainstep.measure.harness.nodes import Node, NodeCell, Nodes, check_one_model
from trainstep.measure.machine.environment import cores
from trainstep.parallel.liveness.desk import SAYS
from trainstep.parallel.liveness.link import LOOPBACK, loopback_interface
from trainstep.parallel.liveness.standstill import rank_words
from trainstep.parallel.liveness.watch import LEFT
from trainstep.records.ranks import SLOWEST
from trainstep.records.record import Failure
from trainstep.records.tables import RANK_FACTS, RANKS

_MOMENT_S = 2.0
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_RANKS_COLUMNS = ("rank", "quantity", "unit", "values")
_NODE = "node"
"""The further column of a cell on several nodes."""

Plain = Mapping[str, Any]


def ranks_of(cell: Cell) -> int:
    """The number of processes that the cell takes."""
    return int(cell.config.get("ranks", 1))


def nodes_of(cell: Cell) -> int:
    """The number of nodes over which the cell's ranks are spread."""
    return int(cell.config.get("nodes", 1))


def connect(cell: Cell, tell: Tell, *, forks: bool = True, nodes: Nodes | None = None) -> Connection:
    """Start a fresh process for the cell, or one for each of its ranks.

    `forks`: a process of our own workloads may be forked from a server that has imported torch. `nodes`: those of this launch.

    NodeLost if a node that the cell needs is gone; ValueError if the launch has too few.
    """
    ranks = ranks_of(cell)
    # A user's workload may have to do something before torch is imported, and a cell that compiles with an empty cache
    # must name its cache before Triton is imported: both start as new processes.
    may_fork = forks and cell.workload in INSTRUMENTS and not cell.config.get("cold_compile")
    forked_for = cell.workload if may_fork else ""
    if ranks == 1:
        return CellConnection(tell, forked_for=forked_for)
    count, there = nodes_of(cell), 1 if nodes is None else len(nodes)
    if count == 1:
        return RankConnection(tell, ranks, forked_for=forked_for)
    if count > there:
        raise ValueError(f"nodes: the cell needs {count} and the launch has {there}")
    return RankConnection(tell, ranks, forked_for=forked_for, nodes=nodes, node_count=count)


class RankConnection:
    """A connection for each rank. Reports the stages of rank 0. On a CPU the ranks of a node share cores and memory limit.

    `nodes`: those of the launch; the ranks are spread over its first `node_count`. None: all ranks are here.
    """

    def __init__(
        self, tell: Tell, ranks: int, *, forked_for: str = "", nodes: Nodes | None = None, node_count: int = 1
    ) -> None:
        members: list[Node | None] = [None] if nodes is None else nodes.first(node_count)
        self._on_each = ranks // len(members)
        self._places = () if nodes is None else tuple(nodes.names[rank // self._on_each] for rank in range(ranks))
        address = LOOPBACK if nodes is None else nodes.address
        common = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(self._on_each),
            "GROUP_WORLD_SIZE": str(len(members)),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(free_port()),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TRAINSTEP_TOKEN": secrets.token_hex(16),
        }
        interface = loopback_interface() if nodes is None or nodes.on_loopback else None
        if interface is not None:
            common |= {name: interface for name in _INTERFACES if name not in os.environ}
        self._ranks: list[CellConnection | NodeCell] = []
        for rank in range(ranks):
            number, local_rank = divmod(rank, self._on_each)
            node = members[number]
            threads = max((cores() if node is None else node.environment.cores) // self._on_each, 1)
            variables = {
                **common,
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "GROUP_RANK": str(number),
                "OMP_NUM_THREADS": str(threads),
            }
            if node is None:
                told = tell if rank == 0 else tell_nobody
                self._ranks.append(CellConnection(told, variables, forked_for=forked_for))
            else:
                self._ranks.append(NodeCell(node, self._places[rank], variables, forked_for=forked_for))
        self._threads = ThreadPoolExecutor(max_workers=ranks, thread_name_prefix="rank")

    @property
    def alive(self) -> bool:
        """Whether all ranks still take requests."""
        return all(connection.alive for connection in self._ranks)

    def begin(self) -> None:
        for connection in self._ranks:
            connection.begin()

    def empty_compile_cache(self) -> str:
        """Make a new folder, in which every rank has a part: else one rank would find what another has compiled."""
        first = self._ranks[0]
        assert isinstance(first, CellConnection)
        return first.empty_compile_cache()

    def ask(self, cell: Cell, request: Mapping[str, Any], *, timeout_s: float, limit_s: float) -> Answer:
        """Send the request to all ranks, wait for all, and merge their answers.

        If a rank fails, all ranks are ended. Raises CellLost if the failing rank sent no answer.
        """
        futures = [
            self._threads.submit(
                connection.ask, cell, _for_rank(rank, request, self._on_each), timeout_s=timeout_s, limit_s=limit_s
            )
            for rank, connection in enumerate(self._ranks)
        ]
        ends = _wait_for_ends(futures)
        failed = [end for end in ends if end.failed]
        if not failed:
            return _merged(ends, self._places, apart=_are_apart(cell))
        if len(failed) == len(self._ranks) and all(end.answer and end.answer["again"] for end in failed):
            # Every rank refused the same unsupported cell, and can measure another one.
            return failed[0].with_message(failed[0].message)
        self.kill()
        wait(futures)
        arrived = {end.rank for end in ends}
        late = [_end(rank, future) for rank, future in enumerate(futures) if rank not in arrived]
        failed += [end for end in late if end.node_lost]
        return _worst(failed, len(self._ranks), self._places)

    def close(self) -> None:
        """Let all ranks end."""
        for connection in self._ranks:
            connection.close()
        self._threads.shutdown()

    def kill(self) -> None:
        """End all ranks now."""
        for connection in self._ranks:
            connection.kill()


@dataclass(frozen=True, kw_only=True)
class _End:
    """How the request to one rank ended: with an answer, which may hold a failure, or with the loss of its process."""

    rank: int
    answer: Answer | None = None
    lost: Failure | None = None
    exit_code: int | None = None

    @property
    def failed(self) -> bool:
        return self.answer is None or self.answer.get("failure") is not None

    @property
    def node_lost(self) -> bool:
        return self.lost is not None and self.lost.kind == "node_lost"

    @property
    def order(self) -> int:
        """The smallest order is the cell's failure, and of equal orders the first to arrive. [Note: who failed first]"""
        if self.node_lost:
            return -1
        if self.lost is None:
            return 1
        return 2 if self.exit_code == LEFT else 0

    @property
    def sentence(self) -> str:
        """The last sentence of the rank's watch; empty if it printed none."""
        lines = self.lost.last_lines if self.lost is not None else ()
        return next((line for line in reversed(lines) if line.startswith(SAYS)), "")

    @property
    def message(self) -> str:
        if self.lost is not None:
            return self.lost.message
        assert self.answer is not None
        return str(self.answer["failure"]["message"])

    def with_message(self, message: str) -> Answer:
        """The answer with this message in its failure. For a lost process, raises CellLost with this message."""
        if self.lost is not None:
            raise CellLost(dataclasses.replace(self.lost, message=message))
        assert self.answer is not None
        again = self.answer["again"] and message == self.message  # another message: the other ranks were ended
        return {**self.answer, "failure": {**self.answer["failure"], "message": message}, "again": again}


def _for_rank(rank: int, request: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """The request with this rank's share of its node's memory limit, and of the compile cache. `ranks`: on its node."""
    rank_request = dict(request)
    if request.get("memory_limit_bytes"):
        rank_request["memory_limit_bytes"] //= ranks
    if request.get("compile_cache"):
        rank_request["compile_cache"] = f"{request['compile_cache']}/rank{rank}"
    return rank_request


def _wait_for_ends(futures: Sequence[Future[Answer]]) -> list[_End]:
    """The ends in the order of their arrival. After the first failure the other ranks get a moment."""
    rank_of = {future: rank for rank, future in enumerate(futures)}
    ends: list[_End] = []
    left = set(futures)
    while left:
        done, left = wait(left, _MOMENT_S if any(end.failed for end in ends) else None, FIRST_COMPLETED)
        if not done:
            break
        ends += sorted((_end(rank_of[future], future) for future in done), key=lambda end: end.rank)
    return ends


def _end(rank: int, future: Future[Answer]) -> _End:
    try:
        return _End(rank=rank, answer=future.result())
    except CellLost as lost:
        return _End(rank=rank, lost=lost.failure, exit_code=lost.exit_code)


def _worst(failed: Sequence[_End], ranks: int, places: Sequence[str] = ()) -> Answer:
    """The failure of the cell. Raises CellLost if a process was lost. `places`: the node of each rank, where there are several.

    [Note: who failed first]
    """
    first = min(failed, key=lambda end: end.order)
    timed_out = len(failed) == ranks and all(end.lost is not None and end.lost.kind == "timeout" for end in failed)
    if timed_out:
        waits = next((f"; {end.sentence.removeprefix(SAYS)}" for end in failed if end.sentence), "")
        return first.with_message(_by_message(failed, ranks, places) + waits)
    if first.order == 2:
        return first.with_message(first.sentence.removeprefix(SAYS).rpartition("; ")[0] or first.message)
    # An error that every rank found together belongs to no single rank.
    same = len(failed) == ranks and all(end.lost is None and end.message == first.message for end in failed)
    return first.with_message(_by_message(failed if same else [first], ranks, places))


def _by_message(ends: Sequence[_End], ranks: int, places: Sequence[str] = ()) -> str:
    """`rank 2: MESSAGE`, `rank 2 (n1): MESSAGE` with its node, `every rank: MESSAGE`, or each message with its ranks."""

    def names(members: Sequence[int]) -> str:
        nodes = dict.fromkeys(places[rank] for rank in members) if places else ()
        return rank_words(members) + (f" ({', '.join(nodes)})" if nodes else "")

    groups: dict[str, list[int]] = {}
    for end in ends:
        groups.setdefault(end.message, []).append(end.rank)
    return "; ".join(
        f"{'every rank' if len(members) == ranks else names(members)}: {message}" for message, members in groups.items()
    )


def free_port() -> int:
    """A port of this machine on which no process listens at this moment."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])


def _are_apart(cell: Cell) -> bool:
    """Whether the cell's ranks send each other nothing."""
    return cell.workload in INSTRUMENTS and INSTRUMENTS[cell.workload].ranks_apart


def _merged(ends: Sequence[_End], places: Sequence[str], *, apart: bool) -> Answer:
    """The answer of rank 0 with the findings of all ranks in it; no rank failed.

    `apart`: as `merged_findings`; the environment is then the slowest rank's too.
    """
    answers = [end.answer for end in sorted(ends, key=lambda end: end.rank) if end.answer is not None]
    if "findings" not in answers[0]:
        return answers[0]
    if places:
        check_one_model([answer["findings"]["facts"] for answer in answers], places)
    again = all(answer["again"] for answer in answers)
    first = answers[slowest_rank([answer["findings"] for answer in answers])] if apart else answers[0]
    findings = merged_findings([answer["findings"] for answer in answers], places, apart=apart)
    return {**first, "findings": findings, "again": again}


def merged_findings(findings: Sequence[Plain], places: Sequence[str] = (), *, apart: bool = False) -> dict[str, Any]:
    """Merge the findings of all ranks, as their processes send them, in the order of ranks. `places`: each rank's node.

    Facts and tables are rank 0's. Each value of the samples in SLOWEST (`step` and the like) is the slowest rank's,
    because a step is over when its last rank is. Of ranks `apart`, which send each other nothing, the record has all that the
    slowest rank found, by its median step. The table `ranks` has every quantity of which all ranks took as many values, rank by
    rank.
    """
    first, by_rank = findings[0], [rank_findings["samples"] for rank_findings in findings]
    common = [name for name in first["samples"] if _alike([samples.get(name) for samples in by_rank])]
    if apart:
        first = findings[slowest_rank(findings)]
        merged = dict(first["samples"])
    else:
        merged = {**first["samples"], **_slowest_values(by_rank, set(common) & set(SLOWEST))}
    rows = [
        (rank, name, samples[name]["unit"], list(samples[name]["values"]))
        for name in common
        for rank, samples in enumerate(by_rank)
    ]
    table = _ranks_table(rows)
    if places:
        table[_NODE] = [places[rank] for rank in table["rank"]]
    tables = {**first["tables"], RANKS: table}
    if places and RANK_FACTS in tables:
        tables[RANK_FACTS] = _with_nodes(tables[RANK_FACTS], places)
    return {**first, "samples": merged, "tables": tables}


def _with_nodes(table: Plain, places: Sequence[str]) -> dict[str, list[Any]]:
    """The table of every rank's facts, with its node as one more fact of each."""
    count = len(places)
    added = {"rank": [*range(count)], "fact": [_NODE] * count, "value": [*places], "unit": [""] * count}
    return {name: [*table[name], *values] for name, values in added.items()}


def slowest_rank(findings: Sequence[Plain]) -> int:
    """The rank whose median step is the longest; 0 where none was timed."""
    steps = [rank_findings["samples"].get("step", {}).get("values", ()) for rank_findings in findings]
    return max(range(len(steps)), key=lambda rank: (median(steps[rank]) if steps[rank] else 0.0, -rank))


def _slowest_values(by_rank: Sequence[Plain], names: Iterable[str]) -> dict[str, Plain]:
    """The samples of these names, each value being that of the slowest rank."""
    slowest: dict[str, Plain] = {}
    for name in names:
        of_ranks = [samples[name] for samples in by_rank]
        values = {
            part: [max(values) for values in zip(*(sample[part] for sample in of_ranks), strict=True)]
            for part in ("values", "warmups")
        }
        slowest[name] = {**of_ranks[0], **values}
    return slowest


def joined_ranks(tables: Sequence[Plain]) -> dict[str, list[Any]]:
    """Join the tables `ranks` of several rounds of one cell: the values of each rank and quantity, end to end."""
    rounds = [list(zip(*(table[name] for name in _RANKS_COLUMNS), strict=True)) for table in tables]
    later = [{(rank, name): values for rank, name, _, values in rows} for rows in rounds[1:]]
    joined = _ranks_table(
        [
            (rank, name, unit, [*values, *(value for table in later for value in table.get((rank, name), ()))])
            for rank, name, unit, values in rounds[0]
        ]
    )
    return {**joined, _NODE: list(tables[0][_NODE])} if _NODE in tables[0] else joined


def _alike(samples: Sequence[Plain | None]) -> bool:
    """Whether every rank took as many values of the same unit."""
    shapes = {
        None if sample is None else (sample["unit"], len(sample["values"]), len(sample["warmups"]))
        for sample in samples
    }
    return len(shapes) == 1 and None not in shapes


def _ranks_table(rows: Sequence[tuple[Any, ...]]) -> dict[str, list[Any]]:
    return {name: [row[place] for row in rows] for place, name in enumerate(_RANKS_COLUMNS)}
