"""Reads what the ranks sent each other in a step, and when, from one trace per rank on their machine's clock.

    communication   time in which at least one message is under way on this rank
    waiting         the part of it in which every message under way still lacks a rank: this rank waits for the last rank
    transfer        the rest: communication = waiting + transfer
    exposed         the part of communication in which nothing computes on this rank; hidden is the rest

A collective moves no data before its last rank has joined. That moment is known because a trace says where its zero lies on the
host's clock, which all ranks of a machine share: when the last rank starts a message, every rank's waiting for it ends. (A tiny
collective before each message would measure the waiting too, but would also change it.)
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
from trainstep.traces.kineto import read_trace
from trainstep.traces.nesting import union_s
from trainstep.traces.work import read_work

_TIMES = ("communication_s", "waiting_s", "transfer_s", "exposed_s", "tail_s")
_BY_CLOCK = ("waiting_s", "transfer_s")
"""The times that compare the clocks of ranks."""


def communication_of(
    path: Path,
    expected: Sequence[Message],
    collectives: Collectives,
    shard_ranks: int | None = None,
    *,
    one_clock: bool = True,
) -> tuple[dict[str, Fact], dict[str, Mapping[str, Sequence[Any]]]]:
    """Facts of this rank and tables of the first step in the trace. Every rank must call this.

    Tables: `buckets`, this rank's messages with times since the step began; `communication`, a row a rank. A trace that cannot be
    read costs no timed step: the fact `trace_failed` says why, on all ranks.

    Without `one_clock`, on several nodes, nothing tells when the last rank joined a message, and nothing is said of waiting.
    """
    step, error = _read_first_step(path, expected)
    errors = collectives.gather_texts(error)
    if step is None or any(errors):
        return facts_of(trace_failed=next(filter(None, errors))), {}
    messages = step.messages
    waits_s = _waits(step, collectives, shard_ranks) if one_clock else None
    times = _times(step, waits_s)
    all_times = [json.loads(text) for text in collectives.gather_texts(json.dumps(times))]
    tables: dict[str, Mapping[str, Sequence[Any]]] = {
        "buckets": {
            "name": [message.label for message in messages],
            "phase": [message.phase for message in messages],
            "bytes": [message.payload_bytes for message in messages],
            "launched_s": [message.launched_s - step.began_s for message in messages],
            "started_s": [message.started_s - step.began_s for message in messages],
            "finished_s": [message.finished_s - step.began_s for message in messages],
            "waiting_s": waits_s or [None] * len(messages),
            "hidden_s": [message.hidden_s for message in messages],
            "exposed_s": [message.exposed_s for message in messages],
        },
        "communication": {
            "rank": list(range(len(all_times))),
            **{
                name: [rank_times[name] if one_clock or name not in _BY_CLOCK else None for rank_times in all_times]
                for name in _TIMES
            },
        },
    }
    known = {name: value for name, value in times.items() if one_clock or name not in _BY_CLOCK}
    return facts_of(**known), tables if messages else {}


@dataclass(frozen=True, kw_only=True)
class _TracedStep:
    """One step of this rank's trace."""

    messages: Sequence[MessageTime]
    """In order of launch, which is the same on all ranks."""
    totals: StepCommunication | None
    began_s: float
    zero_s: float
    """The trace's zero on the host's clock."""


def _read_first_step(path: Path, expected: Sequence[Message]) -> tuple[_TracedStep | None, str]:
    """The first step in the trace, or None and the error that stopped the reading."""
    try:
        trace = read_trace(path)
        work = read_work(trace)
        communication = read_communication(work, _sizes_by_span(expected))
    except Exception as error:  # noqa: BLE001  (a profiler may write anything, and the other ranks wait for an answer)
        return None, f"{type(error).__name__}: {error}"
    first = work.steps[0]
    step = _TracedStep(
        messages=[message for message in communication.messages if message.step == first.number],
        totals=next((totals for totals in communication.steps if totals.step == first.number), None),
        began_s=first.start_ns / 1e9,
        zero_s=trace.zero_ns / 1e9,
    )
    return step, ""


def _sizes_by_span(expected: Sequence[Message]) -> dict[str, int]:
    """Span -> bytes, for spans whose messages all have one size."""
    sizes: dict[str, set[int]] = {}
    for message in expected:
        sizes.setdefault(message.span, set()).add(message.payload_bytes)
    return {span: span_sizes.pop() for span, span_sizes in sizes.items() if len(span_sizes) == 1}


def _waits(step: _TracedStep, collectives: Collectives, shard_ranks: int | None) -> Sequence[float] | None:
    """Seconds from this rank's start of each message to the last rank's; None if the ranks' messages do not match."""
    starts = [(message.label, message.started_s + step.zero_s) for message in step.messages]
    all_starts = [
        [(label, start_s) for label, start_s in json.loads(text)]
        for text in collectives.gather_texts(json.dumps(starts))
    ]
    try:
        return waiting_s(all_starts, shard_ranks)[collectives.ranks.rank]
    except ValueError:
        return None


def _times(step: _TracedStep, waits_s: Sequence[float] | None) -> dict[str, float]:
    """The step's times on this rank. Without waits, `transfer_s` is all of `communication_s`."""
    totals = step.totals
    if totals is None:
        return dict.fromkeys(_TIMES, 0.0)
    transfer_s = totals.communication_s
    if waits_s is not None:
        transfers = [
            (round((message.started_s + wait_s) * 1e9), round(message.finished_s * 1e9))  # a trace has ns
            for message, wait_s in zip(step.messages, waits_s, strict=True)
        ]
        transfer_s = min(union_s(transfers), transfer_s)
    return {
        "communication_s": totals.communication_s,
        "exposed_s": totals.exposed_s,
        "tail_s": totals.tail_s,
        "transfer_s": transfer_s,
        "waiting_s": round(totals.communication_s - transfer_s, 9),
    }
