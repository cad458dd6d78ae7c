"""Reads when messages between ranks were under way, and how much of that time computing hid.

    communication = read_communication(read_work(trace))

    launched    the host asked for the message
    started     its kernel or first copy began on the device, or a thread of gloo began to send it
    finished    its kernel or last copy ended, or the thread of gloo did
    exposed     time from start to finish during which nothing was computed; hidden is the rest

A message sent by copies (parallel/copies/messages.py) consists of all work issued in its span; on a CPU it is the span itself.
Without spans, as in the launch of a graph, only a library's kernels are single messages; other work of messages counts only in a
step's totals.

Computing is any work on the device except messages. Without a device it is ops of the main thread outside of messages' spans;
between them the thread waits or runs Python. Messages that overlap count once in a step's totals. A message's time includes the
wait for the last rank; `waiting_s` separates the wait from the transfer, given all ranks' starts.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from trainstep.config.run import Phase
from trainstep.costs.rank_groups import level_of, members
from trainstep.traces.attribution import Attribution
from trainstep.traces.kernel_classes import COMMUNICATION, OVERHEAD, class_of_op
from trainstep.traces.kineto import Range, Thread, Trace
from trainstep.traces.nesting import Cover, Nesting
from trainstep.traces.tables import Columns, columns_of
from trainstep.traces.work import TraceWork, Work, is_message, message_span

_GRADIENT_PHASES = (str(Phase.BACKWARD), str(Phase.GRAD_SYNC))
_GLOO_RANGES = {
    "c10d::allreduce_": "gloo:all_reduce",
    "c10d::allreduce_coalesced_": "gloo:all_reduce",
    "c10d::_reduce_scatter_base_": "gloo:all_reduce",  # gloo reduces the whole tensor
    "c10d::reduce_scatter_": "gloo:reduce_scatter",
    "c10d::_allgather_base_": "gloo:all_gather",
    "c10d::allgather_": "gloo:all_gather",
    "c10d::broadcast_": "gloo:broadcast",
}
"""Op that asks for a message -> name of the range in which a thread of gloo sends it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageTime:
    """One message, with times in seconds from the trace's zero.

    `label`: its span, such as `all_reduce bucket 3`; without a span, the name of its kernel or operation. `phase`: that of its
    launch. `payload_bytes`: None if `read_communication` was not given it.
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
        """Seconds from start to finish."""
        return self.hidden_s + self.exposed_s  # exact, unlike the difference of two large numbers


@dataclass(frozen=True, kw_only=True)
class StepCommunication:
    """Totals of one step.

    `communication_s`: time with at least one message under way. `tail_s`: from the end of computing in backward to the end of the
    last message that backward or gradient sync launched; 0 if there is no such message.
    """

    step: int | None
    communication_s: float
    exposed_s: float
    tail_s: float


@dataclass(frozen=True, kw_only=True)
class Communication:
    """All messages in order of launch, and the totals of each step."""

    messages: tuple[MessageTime, ...]
    steps: tuple[StepCommunication, ...]

    def columns(self) -> Columns:
        """A table with one row per message."""
        return columns_of([asdict(message) for message in self.messages])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Message:
    """A message as the trace has it."""

    label: str
    step: int | None
    phase: str
    launched_ns: int
    started_ns: int
    finished_ns: int


def read_communication(work: TraceWork, payload_bytes: Mapping[str, int] | None = None) -> Communication:
    """Every message with its start and end in the trace. `payload_bytes`: bytes by label, from costs/gradient_sync.py."""
    sizes = payload_bytes or {}
    named = _pieces_of_messages(work) if work.on_device else []
    sent = {id(piece) for _, pieces in named for piece in pieces}
    rest = [piece for piece in work.pieces if id(piece) not in sent]
    computes = [piece for piece in rest if piece.kind != COMMUNICATION] if work.on_device else []
    # Work of messages without a span, such as copies in the launch of a graph, counts only in a step's totals
    unnamed = (
        [_message_of([piece], piece.name) for piece in rest if piece.kind == COMMUNICATION] if work.on_device else []
    )
    messages = sorted(_on_device(named) if work.on_device else _on_host(work), key=lambda message: message.launched_ns)
    computing = Cover(
        ((piece.start_ns, piece.end_ns) for piece in computes) if work.on_device else _main_thread_ops(work.attribution)
    )
    by_step: dict[int | None, list[_Message]] = {step.number: [] for step in work.steps}
    first_step = work.steps[0].number if work.steps else None
    for message in (*messages, *unnamed):
        by_step.setdefault(first_step if message.step is None else message.step, []).append(message)
    ends_ns = _backward_ends_ns(work, computes)
    return Communication(
        messages=tuple(_timed(message, computing, sizes.get(message.label)) for message in messages),
        steps=tuple(
            _step_totals(number, step_messages, computing, ends_ns.get(number))
            for number, step_messages in by_step.items()
        ),
    )


def waiting_s(starts: Sequence[Sequence[tuple[str, float]]], shard_ranks: int | None = None) -> list[list[float]]:
    """For each rank, how long each of its messages waited for the last rank to start it: last start - own start.

    `starts`: for each rank, (label, start on a clock that all ranks share) in order of launch. On one machine, `Trace.zero_ns` plus
    a start is such a clock. `shard_ranks`: ranks in a group, if messages go inside groups or across them (costs/rank_groups.py);
    the last rank is then the last of those that take part in the message. ValueError if the ranks did not start the same messages.
    """
    for rank, rank_starts in enumerate(starts):
        if [label for label, _ in rank_starts] != [label for label, _ in starts[0]]:
            raise ValueError(
                f"starts: rank {rank} does not have the messages of rank 0 in the same order; record the same steps of both"
            )
    levels = [level_of(label) for label, _ in starts[0]] if starts else []
    waits_s = []
    for rank, rank_starts in enumerate(starts):
        among = {level: members(level, rank, len(starts), shard_ranks) for level in dict.fromkeys(levels)}
        last_starts = [max(starts[other][place][1] for other in among[level]) for place, level in enumerate(levels)]
        waits_s.append([last_s - start_s for last_s, (_, start_s) in zip(last_starts, rank_starts, strict=True)])
    return waits_s


def _on_device(named: Sequence[tuple[Range | None, Sequence[Work]]]) -> Iterator[_Message]:
    for span, pieces in named:
        yield _message_of(pieces, pieces[0].name if span is None else span.name)


def _message_of(pieces: Sequence[Work], label: str) -> _Message:
    first = pieces[0]
    return _Message(
        label=label,
        step=first.place.step,
        phase=first.place.phase,
        launched_ns=first.call.start_ns if first.call is not None else first.start_ns,
        started_ns=min(piece.start_ns for piece in pieces),
        finished_ns=max(piece.end_ns for piece in pieces),
    )


def _pieces_of_messages(work: TraceWork) -> list[tuple[Range | None, list[Work]]]:
    """Each message's span and pieces: the library's kernels, else all work issued in the span. Library messages may lack a span."""
    messages: dict[tuple[Thread, int] | int, tuple[Range | None, list[Work]]] = {}
    for number, piece in enumerate(work.pieces):
        call = piece.call
        span = message_span(work.attribution, call.thread, call.start_ns) if call is not None else None
        if span is not None:
            messages.setdefault((span.thread, span.start_ns), (span, []))[1].append(piece)
        elif piece.is_message:
            messages[number] = None, [piece]
    return [(span, [piece for piece in pieces if piece.is_message] or pieces) for span, pieces in messages.values()]


def _on_host(work: TraceWork) -> Iterator[_Message]:
    attribution = work.attribution
    by_gloo: set[tuple[Thread, int]] = set()
    for launch, run in _gloo_messages(attribution.trace):
        place = attribution.place_at(launch.thread, launch.start_ns)
        span = message_span(attribution, launch.thread, launch.start_ns)
        if span is not None:
            by_gloo.add((span.thread, span.start_ns))
        yield _Message(
            label=span.name if span is not None else run.name,
            step=place.step,
            phase=place.phase,
            launched_ns=launch.start_ns,
            started_ns=run.start_ns,
            finished_ns=run.end_ns,
        )
    asked = [op for op in attribution.trace.ranges if op.name in _GLOO_RANGES]
    by_gloo |= {
        (span.thread, span.start_ns)
        for op in asked
        if (span := message_span(attribution, op.thread, op.start_ns)) is not None
    }
    for span in attribution.trace.ranges:
        if is_message(span) and (span.thread, span.start_ns) not in by_gloo:
            place = attribution.place_at(span.thread, span.start_ns)
            yield _Message(
                label=span.name,
                step=place.step,
                phase=place.phase,
                launched_ns=span.start_ns,
                started_ns=span.start_ns,
                finished_ns=span.end_ns,
            )


def _backward_ends_ns(work: TraceWork, computes: Sequence[Work]) -> dict[int | None, int]:
    """Step -> end of the last computing piece of backward on the device; without a device, end of backward's span."""
    last_ends_ns: dict[int | None, int] = {}
    if work.on_device:
        ends_by_step = [(piece.place.step, piece.end_ns) for piece in computes if piece.place.phase == Phase.BACKWARD]
    else:
        attribution = work.attribution
        ends_by_step = [
            (attribution.place_at(span.thread, span.start_ns).step, span.end_ns)
            for span in attribution.trace.ranges
            if span.annotation and span.name == Phase.BACKWARD and span.thread == attribution.main
        ]
    for step, end_ns in ends_by_step:
        step_number = work.steps[0].number if step is None else step
        last_ends_ns[step_number] = max(end_ns, last_ends_ns.get(step_number, end_ns))
    return last_ends_ns


def _timed(message: _Message, computing: Cover, payload_bytes: int | None) -> MessageTime:
    hidden_ns = computing.within_ns(message.started_ns, message.finished_ns)
    return MessageTime(
        label=message.label,
        payload_bytes=payload_bytes,
        step=message.step,
        phase=message.phase,
        launched_s=message.launched_ns / 1e9,
        started_s=message.started_ns / 1e9,
        finished_s=message.finished_ns / 1e9,
        hidden_s=hidden_ns / 1e9,
        exposed_s=(message.finished_ns - message.started_ns - hidden_ns) / 1e9,
    )


def _step_totals(
    number: int | None, messages: Sequence[_Message], computing: Cover, backward_end_ns: int | None
) -> StepCommunication:
    under_way = Cover((message.started_ns, message.finished_ns) for message in messages).merged
    communication_ns = sum(end - start for start, end in under_way)
    hidden_ns = sum(computing.within_ns(start, end) for start, end in under_way)
    gradient_ends_ns = [message.finished_ns for message in messages if message.phase in _GRADIENT_PHASES]
    tail_ns = max(0, max(gradient_ends_ns) - backward_end_ns) if gradient_ends_ns and backward_end_ns is not None else 0
    return StepCommunication(
        step=number,
        communication_s=communication_ns / 1e9,
        exposed_s=(communication_ns - hidden_ns) / 1e9,
        tail_s=tail_ns / 1e9,
    )


def _gloo_messages(trace: Trace) -> list[tuple[Range, Range]]:
    """Pairs (op that asked for a message, range of the gloo thread that sent it), in the order of the ops.

    A message is left out if the trace lacks one of the two.
    """
    # A thread's range does not say which message it sends. But gloo's threads begin messages in the order in which they were
    # asked for, so the first range of a kind belongs to the first op of that kind, and so on.
    asking: dict[str, list[Range]] = {}
    for op in trace.ranges:  # in order of start
        if op.name in _GLOO_RANGES:
            asking.setdefault(_GLOO_RANGES[op.name], []).append(op)
    pairs = []
    paired: Counter[str] = Counter()
    for sent in trace.ranges:
        ops = asking.get(sent.name, [])
        number = paired[sent.name]
        if number < len(ops) and ops[number].start_ns <= sent.start_ns:  # else it was asked for before the recording
            pairs.append((ops[number], sent))
            paired[sent.name] += 1
    return sorted(pairs, key=lambda pair: pair[0].start_ns)


def _main_thread_ops(attribution: Attribution) -> Iterator[tuple[int, int]]:
    """(start, end) of the times at which the main thread computed in an op itself, without the ops inside it.

    Autograd's engine does not count, because it runs hooks that may wait; ops that ask for a message do not count either.
    """
    nesting = attribution.nestings.get(attribution.main) if attribution.main else None
    return _own_intervals(nesting) if nesting else iter(())


def _own_intervals(nesting: Nesting) -> Iterator[tuple[int, int]]:
    children: dict[int, list[Range]] = {}
    for index, parent in enumerate(nesting.parents):
        if parent >= 0:
            children.setdefault(parent, []).append(nesting.ranges[index])
    computes: dict[str, bool] = {}
    in_message: list[bool] = []
    for index, op in enumerate(nesting.ranges):
        parent = nesting.parents[index]
        in_message.append(is_message(op) or (parent >= 0 and in_message[parent]))
        if (
            in_message[index]
            or op.annotation
            or not computes.setdefault(op.name, class_of_op(op.name) not in (COMMUNICATION, OVERHEAD))
        ):
            continue
        reached_ns = op.start_ns
        for child in children.get(index, ()):
            yield reached_ns, child.start_ns
            reached_ns = child.end_ns
        yield reached_ns, op.end_ns
