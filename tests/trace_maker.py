"""Traces for tests: the committed ones of our own steps, and small constructed ones with times in microseconds."""

from pathlib import Path

from trainstep.traces.kineto import KERNEL, Activity, Call, Range, Trace

FIXTURES = Path(__file__).parent / "traces" / "fixtures"
EAGER, COMPILED = FIXTURES / "tiny_eager.json.gz", FIXTURES / "tiny_compiled.json.gz"
MAIN, AUTOGRAD = (1, 1), (1, 2)


def span(name: str, start: int, end: int, thread: tuple[int, int] = MAIN) -> Range:
    return Range(name=name, thread=thread, start_ns=start * 1000, duration_ns=(end - start) * 1000, annotation=True)


def op(
    name: str, start: int, end: int, thread: tuple[int, int] = MAIN, *, sequence: int = -1, forward_thread: int = 0
) -> Range:
    return Range(
        name=name,
        thread=thread,
        start_ns=start * 1000,
        duration_ns=(end - start) * 1000,
        sequence=sequence,
        forward_thread=forward_thread,
    )


def call(name: str, start: int, end: int, correlation: int = -1, thread: tuple[int, int] = MAIN) -> Call:
    return Call(
        name=name, thread=thread, start_ns=start * 1000, duration_ns=(end - start) * 1000, correlation=correlation
    )


def kernel(name: str, start: int, end: int, correlation: int = -1, *, kind: str = KERNEL, stream: int = 7) -> Activity:
    return Activity(
        kind=kind,
        name=name,
        device=0,
        stream=stream,
        start_ns=start * 1000,
        duration_ns=(end - start) * 1000,
        correlation=correlation,
    )


def trace(*events: Activity | Call | Range) -> Trace:
    ordered = sorted(events, key=lambda event: event.start_ns)
    return Trace(
        activities=tuple(event for event in ordered if isinstance(event, Activity)),
        calls=tuple(event for event in ordered if isinstance(event, Call)),
        ranges=tuple(event for event in ordered if isinstance(event, Range)),
    )


def launched(
    name: str, at: int, start: int, end: int, number: int, thread: tuple[int, int] = MAIN
) -> list[Activity | Call]:
    """A kernel and the call that launched it."""
    return [call("cudaLaunchKernel", at, at + 4, number, thread), kernel(name, start, end, number)]
