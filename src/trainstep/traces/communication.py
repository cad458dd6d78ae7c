"""When messages between ranks were on their way, and how much of that computing hid: `read_communication(read_work(trace))`.

    launched    the host asked for it
    started     its kernel began on the device, or a thread of gloo took it up
    finished    its kernel, or gloo's thread, was done
    exposed     time from start to finish during which nothing was computed; hidden is the rest

Computing is any work on the device that is no message; where there is none, ops of the main thread: between them it waits, or runs
Python. Messages that overlap count once in a step's totals. A message's time holds the wait for the last rank: `waiting_s` tells
it from the transfer, given all ranks' starts.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from trainstep.config.phases import Phase
from trainstep.traces.gloo import gloo_messages, main_thread_ops
from trainstep.traces.intervals import Cover
from trainstep.traces.kernel_classes import COMMUNICATION
from trainstep.traces.kineto import Thread
from trainstep.traces.tables import Columns, columns_of
from trainstep.traces.work import TraceWork, Work

_MESSAGE = re.compile(r"(?:all_reduce|reduce_scatter|all_gather|broadcast)(?: |$)")
"""Spans of parallel/collectives.py."""
_OF_GRADIENTS = (str(Phase.BACKWARD), str(Phase.GRAD_SYNC))


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageTime:
    """`label`: its span, `all_reduce bucket 3`; without one, its kernel's or operation's name. Seconds from the trace's zero.

    `phase`: where it was launched. `payload_bytes`: None where nobody said.
    """

    label: str
    payload_bytes: int | None
    step: int | None
    phase: str
    launched_s: float
    started_s: float
    finished_s: float
    hidden_s: float
    exposed_s: float

    @property
    def duration_s(self) -> float:
        """From start to finish; exact, where the difference of two large numbers is not."""
        return self.hidden_s + self.exposed_s


@dataclass(frozen=True, kw_only=True)
class StepCommunication:
    """Of one step. `communication_s`: with at least one message on its way. `tail_s`: from the end of computing in backward to the
    end of the last message that backward or gradient sync launched; 0 where there is none."""

    step: int | None
    communication_s: float
    exposed_s: float
    tail_s: float


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Messages in order of launch, and each step."""

    messages: tuple[MessageTime, ...]
    steps: tuple[StepCommunication, ...]

    def columns(self) -> Columns:
        """A table with a row a message."""
        return columns_of([asdict(one) for one in self.messages])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Message:
    """As found in the trace, in nanoseconds."""

    label: str
    step: int | None
    phase: str
    launched_ns: int
    started_ns: int
    finished_ns: int


def read_communication(work: TraceWork, payload_bytes: Mapping[str, int] | None = None) -> Communication:
    """Every message whose start and end the trace holds. `payload_bytes`: by label, as costs/gradient_sync.py says them."""
    sizes = payload_bytes or {}
    first = work.steps[0].number if work.steps else None
    found = sorted(_on_device(work) if work.on_device else _on_host(work), key=lambda one: one.launched_ns)
    computing = _computing(work)
    messages = tuple(_timed(one, computing, sizes.get(one.label)) for one in found)
    by_step: dict[int | None, list[_Message]] = {step.number: [] for step in work.steps}
    for one in found:
        by_step.setdefault(first if one.step is None else one.step, []).append(one)
    ends = _backward_ends_ns(work)
    return Communication(
        messages=messages,
        steps=tuple(_of_step(number, mine, computing, ends.get(number)) for number, mine in by_step.items()),
    )


def waiting_s(starts: Sequence[Sequence[tuple[str, float]]]) -> list[list[float]]:
    """For each rank, how long each of its messages waited for the last rank to start it too: last start - own start.

    `starts`: by rank, (label, start on a clock that all share) in order of launch: `Trace.zero_ns` plus a start, on one machine.
    ValueError if ranks did not start the same messages.
    """
    for rank, mine in enumerate(starts):
        if [label for label, _ in mine] != [label for label, _ in starts[0]]:
            raise ValueError(
                f"starts: rank {rank} has not the messages of rank 0, in their order; record the same steps of both"
            )
    lasts = [max(start_s for _, start_s in together) for together in zip(*starts, strict=True)]
    return [[last - start_s for last, (_, start_s) in zip(lasts, mine, strict=True)] for mine in starts]


def _on_device(work: TraceWork) -> Iterator[_Message]:
    for one in work.pieces:
        if one.kind == COMMUNICATION:
            yield _Message(
                label=_label(work, one),
                step=one.place.step,
                phase=one.place.phase,
                launched_ns=one.call.start_ns if one.call is not None else one.start_ns,
                started_ns=one.start_ns,
                finished_ns=one.start_ns + one.duration_ns,
            )


def _label(work: TraceWork, piece: Work) -> str:
    found = _span(work, piece.call.thread, piece.call.start_ns) if piece.call is not None else None
    return found or piece.name


def _on_host(work: TraceWork) -> Iterator[_Message]:
    for launch, run in gloo_messages(work.attribution.trace):
        place = work.attribution.place(launch.thread, launch.start_ns)
        yield _Message(
            label=_span(work, launch.thread, launch.start_ns) or run.name,
            step=place.step,
            phase=place.phase,
            launched_ns=launch.start_ns,
            started_ns=run.start_ns,
            finished_ns=run.end_ns,
        )


def _span(work: TraceWork, thread: Thread, time_ns: int) -> str | None:
    """The innermost span of a message that is open then."""
    around = work.attribution.nestings[thread].around(time_ns) if thread in work.attribution.nestings else ()
    return next((one.name for one in around if one.annotation and _MESSAGE.match(one.name)), None)


def _computing(work: TraceWork) -> Cover:
    if not work.on_device:
        return Cover(main_thread_ops(work.attribution))
    return Cover((one.start_ns, one.start_ns + one.duration_ns) for one in work.pieces if one.kind != COMMUNICATION)


def _backward_ends_ns(work: TraceWork) -> dict[int | None, int]:
    """Step -> when backward's last computing ended: on the device, or with its span on the host."""
    ends: dict[int | None, int] = {}
    if work.on_device:
        mine = [one for one in work.pieces if one.place.phase == Phase.BACKWARD and one.kind != COMMUNICATION]
        edges = [(one.place.step, one.start_ns + one.duration_ns) for one in mine]
    else:
        attribution = work.attribution
        edges = [
            (attribution.place(one.thread, one.start_ns).step, one.end_ns)
            for one in attribution.trace.ranges
            if one.annotation and one.name == Phase.BACKWARD and one.thread == attribution.main
        ]
    for step, end_ns in edges:
        number = work.steps[0].number if step is None else step
        ends[number] = max(end_ns, ends.get(number, end_ns))
    return ends


def _timed(one: _Message, computing: Cover, payload_bytes: int | None) -> MessageTime:
    hidden_ns = computing.within_ns(one.started_ns, one.finished_ns)
    return MessageTime(
        label=one.label,
        payload_bytes=payload_bytes,
        step=one.step,
        phase=one.phase,
        launched_s=one.launched_ns / 1e9,
        started_s=one.started_ns / 1e9,
        finished_s=one.finished_ns / 1e9,
        hidden_s=hidden_ns / 1e9,
        exposed_s=(one.finished_ns - one.started_ns - hidden_ns) / 1e9,
    )


def _of_step(
    number: int | None, messages: Sequence[_Message], computing: Cover, backward_end_ns: int | None
) -> StepCommunication:
    on_the_way = Cover((one.started_ns, one.finished_ns) for one in messages).merged
    communication_ns = sum(end - start for start, end in on_the_way)
    hidden_ns = sum(computing.within_ns(start, end) for start, end in on_the_way)
    of_gradients = [one.finished_ns for one in messages if one.phase in _OF_GRADIENTS]
    tail_ns = max(0, max(of_gradients) - backward_end_ns) if of_gradients and backward_end_ns is not None else 0
    return StepCommunication(
        step=number,
        communication_s=communication_ns / 1e9,
        exposed_s=(communication_ns - hidden_ns) / 1e9,
        tail_s=tail_ns / 1e9,
    )
