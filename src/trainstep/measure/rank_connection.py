"""A cell of several ranks: as many processes of `trainstep.measure.cell`, asked together and answering as one.

They start with torchrun's variables, so that the workload's `start_ranks` finds the others. Every request goes to all at the same
time. As soon as one is lost or answers with a failure the others are ended, who would wait for it in a collective: its failure is
the cell's, and names the rank. How answers become one: rank_findings.py.

They meet on this machine's loopback address and prove to each other that they know a token that only they and their driver have
(parallel/process_group.py), so nobody else finds them. GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME are left as the user has set them.

[Note: who failed first]
Where a rank dies, the others' collectives fail within milliseconds, and may be heard of first. So the others get a moment, and of
several failures a death comes before an error, and an error before a process that its watch ended because of another, as its
exit code says. Where the watch ended all of them, its sentence is the failure. Where all were ended for their time, all are named
with the stage they were in, and with what the watch had said of who waits for whom.
"""

import dataclasses
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from trainstep.config.cell import Cell
from trainstep.config.instruments import INSTRUMENTS
from trainstep.measure.connection import Answer, CellConnection, CellLost, Connection, Tell, tell_nobody
from trainstep.measure.host import cores
from trainstep.measure.rank_findings import merged_findings
from trainstep.parallel.desk import SAYS
from trainstep.parallel.listening import LOOPBACK, loopback_interface
from trainstep.parallel.standstill import rank_words
from trainstep.parallel.watch import LEFT
from trainstep.records.record import Failure

_MOMENT_S = 2.0
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def ranks_of(cell: Cell) -> int:
    """Processes that the cell takes."""
    return int(cell.config.get("ranks", 1))


def connect(cell: Cell, tell: Tell, *, forks: bool = True) -> Connection:
    """A fresh process for the cell, or one for each of its ranks.

    `forks`: it may be forked from one that has imported torch, if it is of ours: nobody knows what a workload of one's own does
    before it imports torch. Nor may a cell be that is to compile anew: where its cache lies is said before Triton is imported.
    """
    ranks = ranks_of(cell)
    may_be = forks and cell.workload in INSTRUMENTS and not cell.config.get("cold_compile")
    forked_for = cell.workload if may_be else ""
    return (
        RankConnection(tell, ranks, forked_for=forked_for) if ranks > 1 else CellConnection(tell, forked_for=forked_for)
    )


class RankConnection:
    """A CellConnection for each rank. Stages are told as rank 0 reaches them. On a CPU they share cores and memory limit."""

    def __init__(self, tell: Tell, ranks: int, *, forked_for: str = "") -> None:
        common = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": str(max(cores() // ranks, 1)),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TRAINSTEP_TOKEN": secrets.token_hex(16),
        }
        interface = loopback_interface()
        if interface is not None:
            common |= {name: interface for name in _INTERFACES if name not in os.environ}
        self._ranks: list[CellConnection] = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._ranks.append(CellConnection(tell if rank == 0 else tell_nobody, common | own, forked_for=forked_for))
        self._threads = ThreadPoolExecutor(max_workers=ranks, thread_name_prefix="rank")

    @property
    def alive(self) -> bool:
        """Whether all can still be asked."""
        return all(one.alive for one in self._ranks)

    def begin(self) -> None:
        """Another cell's turn."""
        for one in self._ranks:
            one.begin()

    def empty_compile_cache(self) -> str:
        """A new folder; each rank takes a part of its own, else the second would find what the first compiled."""
        return self._ranks[0].empty_compile_cache()

    def ask(self, cell: Cell, request: Mapping[str, Any], *, timeout_s: float, limit_s: float) -> Answer:
        """Send to all, wait for all, and make one answer. CellLost, all of them ended, if a rank was lost."""
        futures = [
            self._threads.submit(
                one.ask, cell, _of_rank(rank, request, len(self._ranks)), timeout_s=timeout_s, limit_s=limit_s
            )
            for rank, one in enumerate(self._ranks)
        ]
        ends = _until_all_ended(futures)
        failed = [end for end in ends if end.failed]
        if not failed:
            return _merged(ends)
        again = len(failed) == len(self._ranks) and all(end.answer and end.answer["again"] for end in failed)
        if again:  # all were asked for what cannot be
            return failed[0].told(failed[0].message)
        self.kill()
        wait(futures)
        return _worst(failed, len(self._ranks))

    def close(self) -> None:
        """Let them leave."""
        for one in self._ranks:
            one.close()
        self._threads.shutdown()

    def kill(self) -> None:
        """End them all, now."""
        for one in self._ranks:
            one.kill()


@dataclass(frozen=True, kw_only=True)
class _End:
    """What one rank's request came to: an answer, perhaps with a failure in it, or a loss."""

    rank: int
    answer: Answer | None = None
    lost: Failure | None = None
    exit_code: int | None = None

    @property
    def failed(self) -> bool:
        return self.answer is None or self.answer.get("failure") is not None

    @property
    def order(self) -> int:
        """See the note: who failed first. Of the same order, the one heard of first stands."""
        if self.lost is None:
            return 1
        return 2 if self.exit_code == LEFT else 0

    @property
    def sentence(self) -> str:
        """What the rank's watch said last, if anything."""
        lines = self.lost.last_lines if self.lost is not None else ()
        return next((line for line in reversed(lines) if line.startswith(SAYS)), "")

    @property
    def message(self) -> str:
        """How it failed."""
        if self.lost is not None:
            return self.lost.message
        assert self.answer is not None
        return str(self.answer["failure"]["message"])

    def told(self, message: str) -> Answer:
        """The answer with this as its failure's message. Raises CellLost, with that message, for a loss."""
        if self.lost is not None:
            raise CellLost(dataclasses.replace(self.lost, message=message))
        assert self.answer is not None
        again = self.answer["again"] and message == self.message  # else the others were ended
        return {**self.answer, "failure": {**self.answer["failure"], "message": message}, "again": again}


def _worst(failed: Sequence[_End], ranks: int) -> Answer:
    """The failure of several ranks: see the note. Raises CellLost for a loss."""
    first = min(failed, key=lambda end: end.order)
    timed_out = len(failed) == ranks and all(end.lost is not None and end.lost.kind == "timeout" for end in failed)
    if timed_out:
        waits = next((f"; {end.sentence.removeprefix(SAYS)}" for end in failed if end.sentence), "")
        return first.told(_by_message(failed, ranks) + waits)
    if first.order == 2:
        return first.told(first.sentence.removeprefix(SAYS).rpartition("; ")[0] or first.message)
    # Errors that all found out together are not one rank's.
    same = len(failed) == ranks and all(end.lost is None and end.message == first.message for end in failed)
    return first.told(_by_message(failed if same else [first], ranks))


def _by_message(ends: Sequence[_End], ranks: int) -> str:
    """`rank 2: MESSAGE`, `every rank: MESSAGE`, or each message with its ranks."""
    groups: dict[str, list[int]] = {}
    for end in ends:
        groups.setdefault(end.message, []).append(end.rank)
    return "; ".join(
        f"{'every rank' if len(members) == ranks else rank_words(members)}: {message}"
        for message, members in groups.items()
    )


def free_port() -> int:
    """A port of this machine that nobody listens on at this moment."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])


def _until_all_ended(futures: Sequence[Future[Answer]]) -> list[_End]:
    """Answers in the order of their arrival; after the first failure it waits a moment for the rest."""
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


def _merged(ends: Sequence[_End]) -> Answer:
    """One answer of all: rank 0's, with the findings of all ranks in it. All were asked the same, and none failed."""
    answers = [end.answer for end in sorted(ends, key=lambda end: end.rank) if end.answer is not None]
    if "findings" not in answers[0]:
        return answers[0]
    again = all(answer["again"] for answer in answers)
    findings = merged_findings([answer["findings"] for answer in answers])
    return {**answers[0], "findings": findings, "again": again}


def _of_rank(rank: int, request: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """The request with this rank's part of what they share."""
    own = dict(request)
    if own.get("memory_limit_bytes"):
        own["memory_limit_bytes"] //= ranks
    if own.get("compile_cache"):
        own["compile_cache"] = f"{own['compile_cache']}/rank{rank}"
    return own
