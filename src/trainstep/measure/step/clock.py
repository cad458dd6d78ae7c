"""Times training steps and single calls, by CUDA events and by the host's clock, and says where each synchronises.

[Note: what a window is]
A window is the steps between two synchronisations: one step (`sync=step`, `sync=phase`) or k steps. The host clock runs
from just after the device is idle to just after it is idle again; `enqueue_s` is the part of this time in which the host
issued work. CUDA events at the edges of phases tell when the device got there. Nothing synchronises inside a window,
except that `sync=phase` synchronises at each edge, as published tables do; then the host clock times the phases.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol, TypeVar

import torch

from trainstep.config.run import Phase
from trainstep.measure.step.built_step import BuiltStep
from trainstep.parallel.collectives import Collectives
from trainstep.spans import nvtx_spans
from trainstep.training.batches import Batch
from trainstep.training.captured import EventMark, unmarked

MOST_BEFORE_CAPTURE = 16
"""The most steps before a graph is captured: a few warm-ups, and the steps that torch.compile may take."""

Edge = TypeVar("Edge", float, torch.cuda.Event)
Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Window:
    """The times of a window. `phases`: for each of its steps, phase -> seconds, summed over micro-batches."""

    step_s: float
    """Host seconds per step: those of the window divided by its number of steps."""
    enqueue_s: float | None
    """Host seconds per step until the last work was issued; None where HostClock timed the window: on a CPU,
    where work runs as it is issued, or with sync=phase."""
    phases: tuple[dict[Phase, float], ...]


class Clock(Protocol):
    """Times one window at a time.

    Call `start_window`; for each step `start_step`, then `mark(phase)` at the end of each phase; then `stop_window`. An
    `event` that was recorded at the phase's end stands for an event that would be recorded now. `mark(None, event)` moves the
    step's beginning here: a graph's work begins later than the host's part of its launch.
    """

    def start_window(self) -> None: ...
    def start_step(self) -> None: ...
    def mark(self, phase: Phase | None, event: torch.cuda.Event | None = None, /) -> None: ...
    def stop_window(self) -> Window: ...


class HostClock:
    """Times phases by the host's clock and calls `synchronize` at each edge; a CPU needs no synchronisation."""

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

    def mark(self, phase: Phase | None, event: torch.cuda.Event | None = None, /) -> None:
        self._synchronize()
        _begin_anew(self._edges, phase)
        self._edges.append((phase, time.perf_counter()))

    def stop_window(self) -> Window:
        self._synchronize()
        stop_s = time.perf_counter()
        phases = tuple(_phase_times(self._edges, lambda start, end: end - start))
        return Window(step_s=(stop_s - self._start_s) / max(len(phases), 1), enqueue_s=None, phases=phases)


class EventClock:
    """Times phases by CUDA events on the current stream, and synchronises only at a window's two ends."""

    def __init__(self) -> None:
        self._pool: list[torch.cuda.Event] = []
        self._recorded: list[torch.cuda.Event] = []
        """The events that this clock recorded in this window; a graph's events are not among them."""
        self._edges: list[tuple[Phase | None, torch.cuda.Event]] = []
        self._start_s = 0.0

    def start_window(self) -> None:
        self._pool += self._recorded
        self._recorded, self._edges = [], []
        torch.cuda.synchronize()
        self._start_s = time.perf_counter()

    def start_step(self) -> None:
        self._record(None)

    def mark(self, phase: Phase | None, event: torch.cuda.Event | None = None, /) -> None:
        _begin_anew(self._edges, phase)
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
        self._recorded.append(event)
        self._edges.append((phase, event))


def clock_for(device: torch.device, sync: str | int) -> Clock:
    """The clock for a device and a value of `sync`."""
    if device.type == "cpu":
        return HostClock()
    return HostClock(torch.cuda.synchronize) if sync == "phase" else EventClock()


def _begin_anew(edges: list[tuple[Phase | None, Edge]], phase: Phase | None) -> None:
    """Take back the step's first beginning, if this mark is its second."""
    if phase is None and edges and edges[-1][0] is None:
        edges.pop()


def _phase_times(
    edges: list[tuple[Phase | None, Edge]], seconds: Callable[[Edge, Edge], float]
) -> Iterator[dict[Phase, float]]:
    """For each step, phase -> the sum of the times between the phase's edges. An edge without a phase starts a step."""
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


class ReadWindow(NamedTuple):
    """A window with what was read after it: the SM clock, and the calls of cudaMalloc inside the window."""

    times: Window
    sm_clock_hz: float | None
    device_allocations: int


class StepTimer:
    """Runs a built step repeatedly and times it in windows, on new batches or again on the last step's.

    `batches`: the last step's batches; empty before the first step. `loss`: the last timed step's loss; NaN before it.
    """

    def __init__(self, built: BuiltStep) -> None:
        self.batches: list[Batch] = []
        self.loss = torch.tensor(math.nan)
        self._built = built
        self._assembly = built.assembly
        self._run = built.assembly.run
        self._clock = clock_for(built.opened.device, self._run.sync)
        self._collectives = Collectives(built.assembly.ranks)
        self._next_step = 0

    def window(self, steps: int) -> ReadWindow:
        """Time a window of this many steps on the next batches."""
        opened = self._built.opened
        batches = self._next_batches(steps)
        allocations_before = opened.memory.device_allocations()
        times = self._timed(batches)
        allocations = opened.memory.device_allocations() - allocations_before
        return ReadWindow(times, None if opened.gpu is None else opened.gpu.sm_clock_hz(), allocations)

    def capture(self) -> list[float]:
        """Run untimed steps on the next batches until it is settled whether the steps that follow are graph launches.

        Returns their losses.
        """
        captured, losses = self._assembly.captured, []
        for _ in range(MOST_BEFORE_CAPTURE):
            batches = self._next_batches(1)
            # Peaks of memory count from the last of these steps. If a graph was captured, it was in this step, and the
            # allocator counts the graph's memory then and never again.
            self._built.opened.memory.start()
            losses.append(self._assembly.take(batches[-1]).item())
            self._drop_gradients()
            if captured is None or captured.is_settled(batches[-1]):
                break
        return losses

    def window_again(self) -> Window:
        """Time the last step again."""
        return self._timed([self.batches])

    def step_again(self) -> None:
        """Run the last step again, untimed; on the same batches, because a user's data may hold no more."""
        self._assembly.take(self.batches)
        self._drop_gradients()

    def eager_step_again(self) -> None:
        """Run the last step again, untimed, and never as a graph."""
        self._assembly.complete()
        self._assembly.step(self.batches)
        self._drop_gradients()

    def _next_batches(self, steps: int) -> list[list[Batch]]:
        self.batches = []  # free these batches before the next are made
        batches = [self._assembly.micro_batches(self._next_step + index) for index in range(steps)]
        self._next_step += steps
        self.batches = batches[-1]
        return batches

    def _timed(self, batches: Sequence[list[Batch]]) -> Window:
        self._collectives.barrier()  # so that all ranks begin together
        self._clock.start_window()
        # A graph's events hold the times of its last launch, so they tell the phases only in a window of one step.
        mark = unmarked if self._assembly.captured is not None and len(batches) > 1 else self._clock.mark
        for micro_batches in batches:
            self._clock.start_step()
            self.loss = self._marked_step(micro_batches, mark)
        return self._clock.stop_window()

    def _marked_step(self, micro_batches: list[Batch], mark: EventMark) -> torch.Tensor:
        with nvtx_spans() if self._run.nvtx else nullcontext():
            loss = self._assembly.take(micro_batches, mark)
        self._drop_gradients()
        return loss

    def _drop_gradients(self) -> None:
        if self._run.mode == "forward_backward":
            self._assembly.step.clear_gradients()


def times_in_a_row_s(calls: Sequence[Call], device: str) -> list[float]:
    """Seconds of each of several calls that are not synchronised: by CUDA events, or on a CPU by the host's clock."""
    return _host_times_s(calls) if device == "cpu" else _event_times_s(calls)


def time_alone_s(call: Call, device: str) -> tuple[float, float]:
    """Seconds of one call on an idle device, and seconds of the host until the call was issued."""
    if device == "cpu":
        (seconds,) = _host_times_s([call])
        return seconds, seconds
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    started_s = time.perf_counter()
    result = call()
    host_s = time.perf_counter() - started_s
    end.record()
    end.synchronize()
    del result  # kept until here, because freeing it is no part of the call
    return start.elapsed_time(end) / 1e3, host_s


def _event_times_s(calls: Sequence[Call]) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    calls[0]()  # an untimed call, so that the GPU is busy when the first timed call is issued
    events[0].record()
    for call, event in zip(calls, events[1:], strict=True):
        call()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairwise(events)]


def _host_times_s(calls: Sequence[Call]) -> list[float]:
    times = []
    for call in calls:
        started_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - started_s)
    return times
