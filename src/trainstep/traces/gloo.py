"""Messages of gloo in the trace of a CPU: an op on the thread that asks for one, a range on the thread of gloo that does it.

Gloo's threads take messages up in the order in which they were asked for, whichever is free; a range does not say which it is.
So the first to start is the first that was asked for, and so on. A reduce-scatter is done as an all-reduce.
"""

from collections.abc import Iterator, Sequence

from trainstep.traces.attribution import Attribution
from trainstep.traces.kernel_classes import COMMUNICATION, OVERHEAD, class_of_op
from trainstep.traces.kineto import Range, Trace
from trainstep.traces.nesting import Nesting

_DONE_AS = {
    "c10d::allreduce_": "gloo:all_reduce",
    "c10d::allreduce_coalesced_": "gloo:all_reduce",
    "c10d::_reduce_scatter_base_": "gloo:all_reduce",
    "c10d::reduce_scatter_": "gloo:reduce_scatter",
    "c10d::_allgather_base_": "gloo:all_gather",
    "c10d::allgather_": "gloo:all_gather",
    "c10d::broadcast_": "gloo:broadcast",
}


def gloo_messages(trace: Trace) -> list[tuple[Range, Range]]:
    """(op that asked, range of the thread that did it) of every message of which both are in the trace, in order of asking."""
    waiting: dict[str, list[Range]] = {}
    for one in trace.ranges:  # in order of start
        if one.name in _DONE_AS:
            waiting.setdefault(_DONE_AS[one.name], []).append(one)
    pairs = []
    done: dict[str, int] = {}
    for run in trace.ranges:
        asked = waiting.get(run.name, [])
        number = done.get(run.name, 0)
        if number < len(asked) and asked[number].start_ns <= run.start_ns:  # else it was asked for before the recording
            pairs.append((asked[number], run))
            done[run.name] = number + 1
    return sorted(pairs, key=lambda pair: pair[0].start_ns)


def main_thread_ops(attribution: Attribution) -> Iterator[tuple[int, int]]:
    """When the main thread was inside an op that computes, innermost: not in autograd's engine, from which hooks run that may
    wait, nor in an op that asks for a message."""
    nesting = attribution.nestings.get(attribution.main) if attribution.main else None
    return _own_intervals(nesting) if nesting else iter(())


def _own_intervals(nesting: Nesting) -> Iterator[tuple[int, int]]:
    """Of each range that computes: its time without what runs right inside it."""
    inside: dict[int, list[Range]] = {}
    for index, parent in enumerate(nesting.parents):
        if parent >= 0:
            inside.setdefault(parent, []).append(nesting.ranges[index])
    kinds: dict[str, bool] = {}
    for index, one in enumerate(nesting.ranges):
        if one.annotation or not kinds.setdefault(one.name, class_of_op(one.name) not in (COMMUNICATION, OVERHEAD)):
            continue
        yield from _without(one, inside.get(index, ()))


def _without(one: Range, inside: Sequence[Range]) -> Iterator[tuple[int, int]]:
    reached = one.start_ns
    for inner in inside:
        yield reached, inner.start_ns
        reached = inner.end_ns
    yield reached, one.end_ns
