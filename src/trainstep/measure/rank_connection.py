"""A cell of several ranks: as many processes of `trainstep.measure.cell`, asked together and answering as one.

They start with torchrun's variables, so that the workload's `start_ranks` finds the others. Every request goes to all at the same
time. As soon as one is lost or answers with a failure the others are ended, who would wait for it in a collective: its failure is
the cell's, and names the rank. How answers become one: rank_findings.py.

[Note: who failed first]
Where a rank dies, the others' collectives fail within milliseconds, and may be heard of first. So the others get a moment, and of
several failures a death comes before an error, and an error before a process that its watch ended because another died.
"""

import dataclasses
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from trainstep.config.cell import Cell
from trainstep.measure.connection import Answer, CellConnection, CellLost, Connection, Tell
from trainstep.measure.host import cores
from trainstep.measure.rank_findings import merged_findings
from trainstep.parallel.watch import LEAVES
from trainstep.records.record import Failure

_MOMENT_S = 2.0
_HERE = "127.0.0.1"


def ranks_of(cell: Cell) -> int:
    """Processes that the cell takes."""
    return int(cell.config.get("ranks", 1))


def connect(cell: Cell, tell: Tell) -> Connection:
    """A fresh process for the cell, or one for each of its ranks."""
    ranks = ranks_of(cell)
    return RankConnection(tell, ranks) if ranks > 1 else CellConnection(tell)


class RankConnection:
    """A CellConnection for each rank. Stages are told as rank 0 reaches them. On a CPU they share cores and memory limit."""

    def __init__(self, tell: Tell, ranks: int) -> None:
        common = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": _HERE,
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": str(max(cores() // ranks, 1)),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        self._ranks: list[CellConnection] = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._ranks.append(CellConnection(tell if rank == 0 else _tell_nobody, common | own))
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
            return failed[0].named()
        self.kill()
        wait(futures)
        return min(failed, key=lambda end: end.order).named(self._who(failed))

    def _who(self, failed: Sequence["_End"]) -> str:
        """Whose failure it is: all ranks' where all say the same, as of something that they found out together."""
        said = {end.answer["failure"]["message"] if end.answer else None for end in failed}
        together = len(failed) == len(self._ranks) and len(said) == 1 and None not in said
        return "every rank: " if together else "rank {rank}: "

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

    @property
    def failed(self) -> bool:
        return self.answer is None or self.answer.get("failure") is not None

    @property
    def order(self) -> int:
        """See the note: who failed first. Of the same order, the one heard of first stands."""
        if self.lost is None:
            return 1
        led = any(line.startswith("trainstep: ") and line.endswith(LEAVES) for line in self.lost.last_lines)
        return 2 if led else 0

    def named(self, name: str = "") -> Answer:
        """The answer with its failure under the rank's name. Raises CellLost, so named, for a loss."""
        prefix = name.format(rank=self.rank)
        if self.lost is not None:
            raise CellLost(dataclasses.replace(self.lost, message=prefix + self.lost.message))
        assert self.answer is not None
        failure = self.answer["failure"]
        again = self.answer["again"] and not prefix  # the others were ended
        return {**self.answer, "failure": {**failure, "message": prefix + failure["message"]}, "again": again}


def free_port() -> int:
    """A port of this machine that nobody listens on at this moment."""
    with socket.socket() as listener:
        listener.bind((_HERE, 0))
        return int(listener.getsockname()[1])


def _until_all_ended(futures: Sequence[Future[Answer]]) -> list[_End]:
    """In the order of their coming; after the first failure no longer than a moment."""
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
        return _End(rank=rank, lost=lost.failure)


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


def _tell_nobody(_cell: Cell, _stage: str) -> None:
    pass
