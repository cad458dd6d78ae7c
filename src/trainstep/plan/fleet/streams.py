"""A discrete-event simulation of one rank's streams: computation, and messages that share links and slow what computes.

    ran = simulate(tasks, slowed=0.2)            # Ran(start_s, end_s) for each task, in the tasks' order

A stream runs its tasks one after another in the given order; a task begins when those of `after` have ended. Messages under way on
one link at the same time share it evenly. While any message is under way, computation goes on at 1 - slowed of its speed, because
NCCL's kernels take multiprocessors and memory bandwidth. An event is the end of a task; between two events all speeds are constant.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_NOTHING_LEFT = 1e-12
"""Seconds of work that rounding may leave."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """`work_s`: how long it takes alone. `link`: of a message; empty for computation. `after`: positions of other tasks."""

    stream: str
    work_s: float
    link: str = ""
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ran:
    """When a task began and ended, in seconds."""

    start_s: float
    end_s: float


def simulate(tasks: Sequence[Task], *, slowed: float = 0.0) -> list[Ran]:
    """When each task runs. `slowed`: share of speed that computation loses beside a message. ValueError for a circular wait."""
    queues: dict[str, list[int]] = {}
    for number, task in enumerate(tasks):
        queues.setdefault(task.stream, []).append(number)
    heads = dict.fromkeys(queues, 0)
    left = [task.work_s for task in tasks]
    starts: list[float | None] = [None] * len(tasks)
    ends: list[float | None] = [None] * len(tasks)
    now_s, unfinished = 0.0, len(tasks)
    while unfinished:
        active = [
            queue[heads[stream]]
            for stream, queue in queues.items()
            if heads[stream] < len(queue)
            and all(ends[other] is not None for other in tasks[queue[heads[stream]]].after)
        ]
        if not active:
            raise ValueError("tasks: some wait for each other in a circle")
        rates = _rates(tasks, active, slowed)
        step_s = min(left[number] / rate for number, rate in zip(active, rates, strict=True))
        for number, rate in zip(active, rates, strict=True):
            if starts[number] is None:
                starts[number] = now_s
            left[number] -= rate * step_s
        now_s += step_s
        for number in active:
            if left[number] <= _NOTHING_LEFT:
                ends[number] = now_s
                heads[tasks[number].stream] += 1
                unfinished -= 1
    return [Ran(start or 0.0, end or 0.0) for start, end in zip(starts, ends, strict=True)]


def _rates(tasks: Sequence[Task], active: Sequence[int], slowed: float) -> list[float]:
    """The speed of each active task, 1 if it had the rank for itself."""
    senders: dict[str, int] = {}
    for number in active:
        if tasks[number].link:
            senders[tasks[number].link] = senders.get(tasks[number].link, 0) + 1
    computes = 1.0 - slowed if senders else 1.0
    return [1 / senders[tasks[number].link] if tasks[number].link else computes for number in active]
