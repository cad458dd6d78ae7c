"""Compares how far the ranks are and says in a sentence which ranks wait for which.

    rank 0 has waited 60 s, having started all_reduce bucket 3 in step 17; rank 1 is not there: it last started all_reduce bucket 2
    in step 17, 61 s ago

Collectives pair up by order, so a count is enough: the others wait for the rank that has started fewer.
Two counts are kept. The process group's own count covers every collective, also those that the program calls itself, but on gloo
it also counts point-to-point messages, which not every rank takes part in: it only decides what is printed, never whether the job
ends. The calls of collectives.py are the same on every rank of a correct program: where they contradict each other, the ranks can
never meet again.
"""

import json
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Self

_REMEMBERED = 32
"""Number of calls that a rank may start before it waits for the first of them, and still be compared."""

Call = tuple[int, int, str]
"""The number of the call, counted from 1, the steps finished before it, and its operation with its label."""


class Progress:
    """The collectives that this rank has started. Written by the thread that calls them, read by the watch's thread."""

    def __init__(self) -> None:
        self._calls = 0
        self.in_groups = 0
        """Number of collectives that went through groups of some ranks, which the process group of all ranks does not count."""
        self.steps = 0
        """Number of finished gradient synchronisations (HookedGradients.finish_gradient_synchronization)."""
        self.recent: deque[Call] = deque(maxlen=_REMEMBERED)
        """The last calls. Each holds its number, since the other thread may read at any moment."""

    def called(self, call: str, *, in_group: bool = False) -> None:
        self._calls += 1
        self.in_groups += in_group
        self.recent.append((self._calls, self.steps, call))


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far a rank is, as it reports to rank 0."""

    messages: int
    """Number of collectives that the process group, and groups of its ranks, have started; -1 before there is a group."""
    steps: int
    recent: tuple[Call, ...]
    """The last calls through collectives.py."""
    has_stopped: bool = False
    """Whether the rank has called stop_ranks, so that it starts no further collective."""
    error: str = ""
    """The exception that led to stop_ranks, for example in a `finally`; else empty."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `text`."""
        fields = json.loads(text)
        return cls(**{**fields, "recent": tuple(map(tuple, fields["recent"]))})

    def text(self) -> str:
        """The position as JSON in one line."""
        return json.dumps(asdict(self))

    @property
    def calls(self) -> int:
        """Number of calls so far."""
        return self.recent[-1][0] if self.recent else 0

    @property
    def place(self) -> str:
        """The last call: `all_reduce bucket 3 in step 17`."""
        if not self.recent:
            return "no collective"
        _, steps, call = self.recent[-1]
        return f"{call} in step {steps + 1}" if self.steps else call


class Standstill:
    """The positions that the ranks have reported, and how long each rank has not moved."""

    def __init__(self) -> None:
        self.positions: dict[int, Position] = {}
        self._since_s: dict[int, float] = {}

    def heard(self, rank: int, position: Position, now_s: float) -> None:
        """Note the position that a rank has reported."""
        before = self.positions.get(rank)
        if before is None or before.messages != position.messages:
            self._since_s[rank] = now_s
        self.positions[rank] = position

    def idle_s(self, rank: int, now_s: float) -> float:
        """Seconds since the rank last started a collective."""
        return now_s - self._since_s.get(rank, now_s)

    def contradiction(self) -> str | None:
        """Why the ranks can never meet again: one has stopped and another goes on, or their collectives differ; else None."""
        for rank, position in self.positions.items():
            for other_rank, other in self.positions.items():
                if position.has_stopped and not other.has_stopped and other.calls > position.calls:
                    advice = "" if position.error else ": give every rank the same number of batches"
                    return f"rank {rank} {_stopped(position)} and rank {other_rank} is in {other.place}{advice}"
        return self._different_calls()

    def _different_calls(self) -> str | None:
        """A sentence about the first call that is another operation on another rank than on rank 0; else None."""
        if 0 not in self.positions:
            return None
        for rank, position in self.positions.items():
            calls = {number: (steps, call) for number, steps, call in position.recent}
            for number, steps, call in self.positions[0].recent:
                other_steps, other_call = calls.get(number, (steps, call))
                if other_call.partition(" ")[0] != call.partition(" ")[0]:
                    return (
                        f"rank 0 calls {call} after {_steps(steps)} where rank {rank} calls {other_call} after "
                        f"{_steps(other_steps)}: give every rank the same number of batches, and call the same "
                        "collectives on every rank"
                    )
        return None

    def who_waits(self, now_s: float, silent: Collection[int] = ()) -> str | None:
        """A sentence that says which ranks wait for which; None where no rank is behind.

        `silent`: ranks that were asked and did not answer.
        """
        answered = {rank: position for rank, position in self.positions.items() if rank not in silent}
        most = max((position.messages for position in answered.values()), default=0)
        waiting = [rank for rank, position in answered.items() if position.messages == most]
        behind = sorted(set(answered) - set(waiting))
        missing = [f"rank {rank} is not there: {self._last(rank, now_s)}" for rank in behind]
        missing += [
            f"rank {rank} does not answer: it is suspended, or native code keeps its interpreter"
            for rank in sorted(silent)
        ]
        if not missing or not waiting:
            return None
        position = answered[waiting[0]]
        where = "in stop_ranks" if position.has_stopped else f"having started {position.place}"
        seconds = min(self.idle_s(rank, now_s) for rank in waiting)
        have = "has" if len(waiting) == 1 else "have"
        return f"{rank_words(waiting)} {have} waited {seconds:.0f} s, {where}; {'; '.join(missing)}"

    def _last(self, rank: int, now_s: float) -> str:
        position = self.positions[rank]
        if position.has_stopped:
            return f"it {_stopped(position)}"
        return f"it last started {position.place}, {self.idle_s(rank, now_s):.0f} s ago"


def rank_words(ranks: Iterable[int]) -> str:
    """`rank 2`, `ranks 0, 3`."""
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _stopped(position: Position) -> str:
    """`has stopped after 10 steps`; without the number where no step was counted (no wrapper of ours, or no step)."""
    after = f" after {_steps(position.steps)}" if position.steps else ""
    return f"has stopped{after}{f' because of {position.error}' if position.error else ''}"


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"
