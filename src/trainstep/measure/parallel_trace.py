"""What the ranks sent each other in a step, and when: from one trace a rank, brought together by the clock of their machine.

    communication   time in which at least one message is under way on this rank
    waiting         the part of it in which no message under way had been started by every rank: this rank waits for the last one
    transfer        the rest: communication = waiting + transfer
    exposed         the part of communication in which nothing computes on this rank; hidden is the rest

A collective moves nothing before its last rank has joined. That moment is known because a trace says where its zero lies on the
host's clock, which all ranks of a machine share: a message's last start over the ranks ends everybody's waiting for it. (A tiny
collective in front of each would measure the waiting too, and change it.)
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainstep.costs.gradient_sync import Message
from trainstep.parallel.collectives import Collectives
from trainstep.records.facts import Fact, facts_of
from trainstep.traces.communication import MessageTime, StepCommunication, read_communication, waiting_s
from trainstep.traces.intervals import union_s
from trainstep.traces.kineto import read_trace
from trainstep.traces.work import read_work

_TIMES = ("communication_s", "waiting_s", "transfer_s", "exposed_s", "tail_s")


def communication_of(
    path: Path, expected: Sequence[Message], collectives: Collectives
) -> tuple[dict[str, Fact], dict[str, Mapping[str, Sequence[Any]]]]:
    """Facts of this rank and tables of the first step in the trace; all ranks must ask.

    Tables: `buckets`, this rank's messages with times since the step began; `communication`, a row a rank. A trace that cannot be
    read costs no timed step: the fact `trace_failed` says why, on all ranks.
    """
    read, trouble = _read(path, expected)
    troubles = collectives.gather_texts(trouble)
    if read is None or any(troubles):
        return facts_of(trace_failed=next(filter(None, troubles))), {}
    mine, began_s = read.messages, read.began_s
    waited = _waited(mine, read.zero_s, collectives)
    times = _times(read.step, mine, waited)
    everyones = [json.loads(text) for text in collectives.gather_texts(json.dumps(times))]
    tables: dict[str, Mapping[str, Sequence[Any]]] = {
        "buckets": {
            "name": [one.label for one in mine],
            "phase": [one.phase for one in mine],
            "bytes": [one.payload_bytes for one in mine],
            "launched_s": [one.launched_s - began_s for one in mine],
            "started_s": [one.started_s - began_s for one in mine],
            "finished_s": [one.finished_s - began_s for one in mine],
            "waiting_s": waited,
            "hidden_s": [one.hidden_s for one in mine],
            "exposed_s": [one.exposed_s for one in mine],
        },
        "communication": {
            "rank": list(range(len(everyones))),
            **{name: [one[name] for one in everyones] for name in _TIMES},
        },
    }
    facts = facts_of(**times)
    return facts, tables if mine else {}


@dataclass(frozen=True, kw_only=True)
class _Read:
    """One step of this rank's trace. `zero_s`: the trace's zero on the host's clock."""

    messages: Sequence[MessageTime]
    """In order of launch: the same on all ranks."""
    step: StepCommunication | None
    began_s: float
    zero_s: float


def _read(path: Path, expected: Sequence[Message]) -> tuple[_Read | None, str]:
    """The first step, or why it could not be read."""
    try:
        trace = read_trace(path)
        work = read_work(trace)
        read = read_communication(work, _sizes_by_span(expected))
    except Exception as error:  # noqa: BLE001  (whatever a profiler wrote; the other ranks wait for an answer)
        return None, f"{type(error).__name__}: {error}"
    number = work.steps[0].number
    found = _Read(
        messages=[one for one in read.messages if one.step == number],
        step=next((one for one in read.steps if one.step == number), None),
        began_s=work.steps[0].start_ns / 1e9,
        zero_s=trace.zero_ns / 1e9,
    )
    return found, ""


def _sizes_by_span(expected: Sequence[Message]) -> dict[str, int]:
    """Span -> bytes, of spans that stand for messages of one size."""
    sizes: dict[str, set[int]] = {}
    for message in expected:
        sizes.setdefault(message.span, set()).add(message.payload_bytes)
    return {span: size for span, found in sizes.items() if len(found) == 1 for size in found}


def _waited(mine: Sequence[MessageTime], zero_s: float, collectives: Collectives) -> list[float | None]:
    """Seconds of each message until the last rank had started it; None throughout where the ranks' messages do not pair up."""
    starts = [(one.label, one.started_s + zero_s) for one in mine]
    everyones = [
        [(label, start_s) for label, start_s in json.loads(text)]
        for text in collectives.gather_texts(json.dumps(starts))
    ]
    try:
        return list(waiting_s(everyones)[collectives.ranks.rank])
    except ValueError:
        return [None] * len(mine)


def _times(
    step: StepCommunication | None, mine: Sequence[MessageTime], waited: Sequence[float | None]
) -> dict[str, float]:
    """The step's times on this rank, as far as they are known."""
    if step is None:
        return dict.fromkeys(_TIMES, 0.0)
    times = {"communication_s": step.communication_s, "exposed_s": step.exposed_s, "tail_s": step.tail_s}
    moving = [
        (round((one.started_s + wait_s) * 1e9), round(one.finished_s * 1e9))
        for one, wait_s in zip(mine, waited, strict=True)
        if wait_s is not None
    ]
    transfer_s = min(union_s(moving), step.communication_s) if len(moving) == len(mine) else step.communication_s
    return times | {
        "transfer_s": transfer_s,
        "waiting_s": round(step.communication_s - transfer_s, 9),
    }  # a trace has ns
