"""Clocks for a step: CUDA events for device time, a host clock for the step, and where each synchronises.

[Note: what a window is]
A window is the steps between two synchronisations: one step (`sync=step`, `sync=phase`) or k of them. The host clock runs
from just after the device is idle to just after it is idle again; `enqueue_s` is how much of that the host spent issuing
work. CUDA events at the edges of phases say when the device got there: no synchronisation inside a window, unless
`sync=phase` asks for one at each edge, as published tables do, and then the host clock times the phases.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from trainstep.config.phases import Phase

Edge = TypeVar("Edge", float, torch.cuda.Event)


@dataclass(frozen=True, kw_only=True)
class Window:
    """What a window saw. `phases`: for each of its steps, seconds a phase (micro-batches added up)."""

    step_s: float
    """Host seconds a step: the window's over its number of steps."""
    enqueue_s: float | None
    """Host seconds a step until the last work was issued; None where work runs as it is issued (a CPU)."""
    phases: tuple[dict[Phase, float], ...]


class Clock(Protocol):
    """`start_window`; for each step `start_step`, then `mark(phase)` as each phase ends; `stop_window`. `event`: recorded where the
    phase ended, in place of one that is recorded now."""

    def start_window(self) -> None: ...
    def start_step(self) -> None: ...
    def mark(self, phase: Phase, event: torch.cuda.Event | None = None, /) -> None: ...
    def stop_window(self) -> Window: ...


class HostClock:
    """Times phases by the host's clock, calling `synchronize` at each edge (on a CPU there is nothing to wait for)."""

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize or (lambda: None)
        self._edges: list[tuple[Phase | None, float]] = []
        self._start_s = 0.0

    def start_window(self) -> None:
        self._edges = []
        self._synchronize()
        self._start_s = time.perf_counter()

    def start_step(self) -> None:
        self._edges.append((None, time.perf_counter()))

    def mark(self, phase: Phase, event: torch.cuda.Event | None = None, /) -> None:
        self._synchronize()
        self._edges.append((phase, time.perf_counter()))

    def stop_window(self) -> Window:
        self._synchronize()
        stop_s = time.perf_counter()
        phases = tuple(_phase_times(self._edges, lambda start, end: end - start))
        return Window(step_s=(stop_s - self._start_s) / max(len(phases), 1), enqueue_s=None, phases=phases)


class EventClock:
    """Times phases by CUDA events on the current stream; the only synchronisation is at a window's two ends."""

    def __init__(self) -> None:
        self._pool: list[torch.cuda.Event] = []
        self._own: list[torch.cuda.Event] = []
        """Those of this window: all but a graph's."""
        self._edges: list[tuple[Phase | None, torch.cuda.Event]] = []
        self._start_s = 0.0

    def start_window(self) -> None:
        self._pool += self._own
        self._own, self._edges = [], []
        torch.cuda.synchronize()
        self._start_s = time.perf_counter()

    def start_step(self) -> None:
        self._record(None)

    def mark(self, phase: Phase, event: torch.cuda.Event | None = None, /) -> None:
        if event is None:
            self._record(phase)
        else:
            self._edges.append((phase, event))

    def stop_window(self) -> Window:
        enqueued_s = time.perf_counter()
        torch.cuda.synchronize()
        stop_s = time.perf_counter()
        phases = tuple(_phase_times(self._edges, lambda start, end: start.elapsed_time(end) / 1e3))
        steps = max(len(phases), 1)
        return Window(
            step_s=(stop_s - self._start_s) / steps, enqueue_s=(enqueued_s - self._start_s) / steps, phases=phases
        )

    def _record(self, phase: Phase | None) -> None:
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record()
        self._own.append(event)
        self._edges.append((phase, event))


def clock_for(device: torch.device, sync: str | int) -> Clock:
    """The clock a device and a way of synchronising call for."""
    if device.type == "cpu":
        return HostClock()
    return HostClock(torch.cuda.synchronize) if sync == "phase" else EventClock()


def _phase_times(
    edges: list[tuple[Phase | None, Edge]], seconds: Callable[[Edge, Edge], float]
) -> Iterator[dict[Phase, float]]:
    """Differences between neighbouring edges, added up by phase, a dict for each step (an edge without a phase starts one)."""
    times: dict[Phase, float] | None = None
    previous: Edge | None = None
    for phase, edge in edges:
        if phase is None:
            if times is not None:
                yield times
            times = {}
        elif times is not None and previous is not None:
            times[phase] = times.get(phase, 0.0) + seconds(previous, edge)
        previous = edge
    if times is not None:
        yield times
