"""The time of a profile is linear in the number of events, whatever their shape."""

import gc
import time
from collections.abc import Callable, Sequence

import pytest

from trace_maker import AUTOGRAD, call, kernel, launched, op, span, trace
from trainstep.traces.kineto import Activity, Call, Range, Trace
from trainstep.traces.profile import profile_of

Event = Activity | Call | Range
FEW, FACTOR = 500, 8


def nested(count: int) -> list[Event]:
    """Ops each inside the one before, and as many launches in the innermost."""
    ops = [op(f"aten::a{number % 50}", number, 4 * count - number) for number in range(count)]
    launches = [
        event for number in range(count) for event in launched("k", count + number, 5 * count, 6 * count, number)
    ]
    return [*ops, *launches]


def after_nested(count: int) -> list[Event]:
    """Nested ops, and as many launches after all of them have ended."""
    ops = [op("aten::a", number, 2 * count - number) for number in range(count)]
    return [
        *ops,
        *(event for number in range(count) for event in launched("k", 3 * count, 4 * count, 5 * count, number)),
    ]


def one_number(count: int) -> list[Event]:
    """Forward and backward ops that all carry the same sequence number."""
    forward = [op("aten::mm", 2 * number, 2 * number + 1, sequence=7) for number in range(count)]
    later = range(2 * count, 4 * count, 2)
    backward = [op("MmBackward0", at, at + 1, AUTOGRAD, sequence=7, forward_thread=1) for at in later]
    return [*forward, *backward]


def full_queue(count: int) -> list[Event]:
    """Launches of which every third waits for room in the queue."""
    calls = [call("cudaLaunchKernel", 20 * at, 20 * at + (1 if at % 3 else 15), at) for at in range(count)]
    return [*calls, *(kernel("k", 10**6 + 20 * at, 10**6 + 20 * at + 3, at) for at in range(count))]


def odd_steps(count: int) -> list[Event]:
    """Steps of which every second takes longer, each with an optimizer's kernel, and one backward."""
    events: list[Event] = [span("backward", 1, 2)]
    for step in range(count):
        at = 20 * step + 2
        events += [span(f"step {step}", at, at + 15), span("optimizer", at + 1, at + 14)]
        events += launched(f"k{step}", at + 2, at + 6, at + 7 + 5 * (step % 2), step)
    return events


def named(kind: str, count: int) -> list[Event]:
    """A forward pass of as many layers, or as many spans, with a kernel each."""
    events: list[Event] = [span("forward", 0, 20 * count)]
    for number in range(count):
        at = 20 * number + 2
        events += [span(f"{kind}{number}", at, at + 15), *launched("k", at + 2, at + 6, at + 8, number)]
    return events


def many_layers(count: int) -> list[Event]:
    """A layer for each kernel."""
    return named("layer ", count)


def many_spans(count: int) -> list[Event]:
    """A span for each kernel."""
    return named("part", count)


@pytest.mark.parametrize("shape", [nested, after_nested, one_number, full_queue, odd_steps, many_layers, many_spans])
def test_time_is_linear_in_events(shape: Callable[[int], Sequence[Event]]):
    """Eight times as many events take 8 times the processor time if it is linear, up to 64 times if it is quadratic."""
    few, many = (trace(*shape(count)) for count in (FEW, FACTOR * FEW))
    profile_of(few)  # does imports and fills caches
    assert spent_s(many) < 2.5 * FACTOR * spent_s(few)


def spent_s(recorded: Trace) -> float:
    """The shortest of three runs, without the garbage collector, which would scan what other tests have left."""
    gc.collect()
    gc.disable()
    try:
        times_s = []
        for _ in range(3):
            start = time.process_time()
            profile_of(recorded)
            times_s.append(time.process_time() - start)
    finally:
        gc.enable()
    return min(times_s)
