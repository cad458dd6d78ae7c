"""Which rank the others wait for: compares how far the ranks are, and says so in a sentence.

    rank 0 has waited 60 s, having started all_reduce bucket 3 in step 17; rank 1 is not there: it last started all_reduce bucket 2
    in step 17, 61 s ago

Collectives pair up by order, so a count is enough: the rank that has started fewer than the others is the one they wait for.
Two counts are kept. The process group's own covers every collective, whoever calls it, but on gloo it also counts point-to-point
messages, which not every rank takes part in: it decides what is said, never what is ended. The calls of collectives.py are the
same on every rank of a correct program: where they contradict each other, the ranks can never meet again.
"""

import json
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Self

_REMEMBERED = 32
"""Calls: a rank may start this many before it waits for the first, and still be compared."""


Call = tuple[int, int, str]
"""Its number, counted from 1, the steps finished before it, and its operation with its label."""


class Progress:
    """What this rank has started. Written by whoever calls a collective, read by the watch's thread."""

    def __init__(self) -> None:
        self._calls = 0
        self.steps = 0
        """Gradient synchronisations that are finished (HookedGradients.finish_gradient_synchronization)."""
        self.recent: deque[Call] = deque(maxlen=_REMEMBERED)
        """The last calls. Each has its number, for the reading thread may come at any moment."""

    def called(self, call: str) -> None:
        """Take down one call."""
        self._calls += 1
        self.recent.append((self._calls, self.steps, call))


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far a rank is, as it tells rank 0."""

    messages: int
    """Collectives that the process group has started; -1 before there is a group."""
    steps: int
    recent: tuple[Call, ...]
    """The last calls through collectives.py."""
    has_stopped: bool = False
    """Whether it has called stop_ranks: it starts nothing more."""
    error: str = ""
    """The exception because of which it called stop_ranks, in a `finally` say."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `text`."""
        fields = json.loads(text)
        return cls(**{**fields, "recent": tuple(map(tuple, fields["recent"]))})

    def text(self) -> str:
        """JSON in one line."""
        return json.dumps(asdict(self))

    @property
    def calls(self) -> int:
        """How many there were in all."""
        return self.recent[-1][0] if self.recent else 0

    @property
    def place(self) -> str:
        """`all_reduce bucket 3 in step 17`."""
        if not self.recent:
            return "no collective"
        _, steps, call = self.recent[-1]
        return f"{call} in step {steps + 1}" if self.steps else call


class Standstill:
    """The positions of all ranks, as rank 0 hears them, and since when each has not moved."""

    def __init__(self) -> None:
        self.positions: dict[int, Position] = {}
        self._since_s: dict[int, float] = {}

    def heard(self, rank: int, position: Position, now_s: float) -> None:
        """A rank has told its position."""
        before = self.positions.get(rank)
        if before is None or before.messages != position.messages:
            self._since_s[rank] = now_s
        self.positions[rank] = position

    def idle_s(self, rank: int, now_s: float) -> float:
        """Seconds since the rank last started something."""
        return now_s - self._since_s.get(rank, now_s)

    def contradiction(self) -> str | None:
        """Why these ranks can never meet again: one has stopped and another goes on, or they call different collectives."""
        for rank, position in self.positions.items():
            for other, beyond in self.positions.items():
                if position.has_stopped and not beyond.has_stopped and beyond.calls > position.calls:
                    way_out = "" if position.error else ": give every rank the same number of batches"
                    return f"rank {rank} {_stopped(position)} and rank {other} is in {beyond.place}{way_out}"
        return self._different_calls()

    def _different_calls(self) -> str | None:
        """The first call that rank 0 and another rank remember and that is not the same operation on both."""
        first = self.positions.get(0)
        for rank, position in self.positions.items() if first else ():
            assert first is not None
            calls = {number: (steps, call) for number, steps, call in position.recent}
            for number, steps, call in first.recent:
                other_steps, other = calls.get(number, (steps, call))
                if other.partition(" ")[0] != call.partition(" ")[0]:
                    return (
                        f"rank 0 calls {call} after {_steps(steps)} where rank {rank} calls {other} after "
                        f"{_steps(other_steps)}: give every rank the same number of batches, and call the same "
                        "collectives on every rank"
                    )
        return None

    def who_waits(self, now_s: float, silent: Collection[int] = ()) -> str | None:
        """Which ranks wait for which, or None where none is behind. `silent`: ranks that were asked and did not answer."""
        heard = {rank: position for rank, position in self.positions.items() if rank not in silent}
        most = max((position.messages for position in heard.values()), default=0)
        waiting = [rank for rank, position in heard.items() if position.messages == most]
        missing = [f"rank {rank} is not there: {self._last(rank, now_s)}" for rank in sorted(set(heard) - set(waiting))]
        missing += [
            f"rank {rank} does not answer: it is suspended, or native code keeps its interpreter"
            for rank in sorted(silent)
        ]
        if not missing or not waiting:
            return None
        position = heard[waiting[0]]
        where = "in stop_ranks" if position.has_stopped else f"having started {position.place}"
        seconds = min(self.idle_s(rank, now_s) for rank in waiting)
        return f"{rank_words(waiting)} {'has' if len(waiting) == 1 else 'have'} waited {seconds:.0f} s, {where}; " + (
            "; ".join(missing)
        )

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
    """`has stopped after 10 steps`; without the count where none was counted (no wrapper of ours, or no step)."""
    after = f" after {_steps(position.steps)}" if position.steps else ""
    return f"has stopped{after}{f' because of {position.error}' if position.error else ''}"


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"
