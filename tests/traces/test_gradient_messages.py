"""All-reduces of a step are counted with their elements, from a trace that says nothing but what torch writes."""

import json
from typing import Any

import pytest

from trainstep.traces.gradient_messages import gradient_messages
from trainstep.traces.kineto import parse_trace
from trainstep.traces.work import read_work


def a_trace(sizes: list[int]) -> Any:
    """A step whose backward sends messages of these elements, each 10 us on gloo's thread, in backward."""

    def event(name: str, start: float, length: float, *, kind: str = "cpu_op", thread: int = 1, **more: Any) -> Any:
        place = {"ph": "X", "cat": kind, "name": name, "pid": 1, "tid": thread, "ts": start, "dur": length}
        return {**place, "args": more}

    events = [
        event("step 1", 0, 1000, kind="user_annotation"),
        event("forward", 0, 100, kind="user_annotation"),
        event("aten::mm", 10, 80),
        event("c10d::allreduce_", 50, 1, **{"Input Dims": [[[7]]]}),
        event("backward", 100, 900, kind="user_annotation"),
    ]
    for index, size in enumerate(sizes):
        start = 110 + 20 * index
        events.append(event("c10d::allreduce_", start, 2, **{"Input Dims": [[[size]], []]}))
        events.append(event("gloo:all_reduce", start + 3, 10, kind="user_annotation", thread=2))
    return read_work(parse_trace(json.dumps({"traceEvents": events}), "trace.json"))


def test_messages_of_backward_are_counted_and_those_of_forward_are_not():
    facts = gradient_messages(a_trace([100, 200, 50]))
    counts = {"gradient_messages": 3.0, "gradient_message_elements": 350.0}
    assert facts == counts | {"gradient_messages_asked_s": pytest.approx(3 * 2e-6)}


def test_of_many_messages_the_time_of_a_small_one_is_told():
    facts = gradient_messages(a_trace([100] * 10))
    assert facts["gradient_message_fixed_s"] == pytest.approx(1e-5)


def test_without_messages_there_is_nothing():
    assert gradient_messages(a_trace([])) == {}
