"""What limits a step, in one word with the numbers it rests on, from a profile and the unprofiled times beside it.

communication-bound  over 30 % of the step is communication with nothing computed beside it
launch-bound         else, the device waits for the host (launch_bound.py); on a CPU over half of the step passes between ops
compute-bound        else, at least half of the device's time goes into matmuls and fused attention
memory-bound         else: the rest (element-wise, softmax, norms, reductions, copies, optimizer) moves more than it computes
near the line        a share is within a tenth of the line that decides: `kinds_of` has both verdicts

The sentences made of it are report/profile_words.py's.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from trainstep.traces.intervals import union_ns
from trainstep.traces.kernel_classes import ATTENTION, COMMUNICATION, MATMUL, OVERHEAD
from trainstep.traces.launch_bound import LAUNCH_BOUND, NEAR_THE_LINE, is_near, step_limit
from trainstep.traces.tables import Columns, columns_of
from trainstep.traces.work import TraceWork, Work

LAUNCH, MEMORY, COMPUTE, COMMUNICATING = LAUNCH_BOUND, "memory-bound", "compute-bound", "communication-bound"
EXPOSED_SHARE, MATMUL_SHARE, OVERHEAD_SHARE = 0.3, 0.5, 0.5
_ALIKE = 1.35
"""Phases whose times differ by less than this factor take alike."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`kind`: one of the four or near the line, and what it rests on, a step. Device time is the profiled one: a profiler slows
    the host, not kernels.
    """

    kind: str
    on_device: bool
    profiled_step: bool
    """Whether `step_s` is a profiled step's, as of a trace alone; else it is the unprofiled one beside it."""
    step_s: float
    busy_s: float
    enqueue_s: float | None
    """Host time until the last work was issued, unprofiled; None where it is not known."""
    exposed_share: float
    """Of the step: communication with nothing computed beside it."""
    matmul_share: float
    """Of device time: matmuls and fused attention."""
    overhead_share: float
    """Of a CPU's time: what passes between ops."""

    def columns(self) -> Columns:
        """As a table of one row."""
        return columns_of([dataclasses.asdict(self)])


@dataclass(frozen=True, kw_only=True)
class Unprofiled:
    """Medians of the same step without a profiler. `phases`: seconds by phase. All None or empty for a trace alone."""

    step_s: float | None = None
    enqueue_s: float | None = None
    phases: Mapping[str, float] | None = None


def verdict(work: TraceWork, unprofiled: Unprofiled) -> Verdict:
    """The verdict on the trace's mean step."""
    steps = len(work.steps)
    busy_s = sum(step.busy_ns for step in work.steps) / 1e9 / steps
    step_s = unprofiled.step_s or sum(step.window_ns for step in work.steps) / 1e9 / steps
    numbers = Verdict(
        kind=MEMORY,
        on_device=work.on_device,
        profiled_step=unprofiled.step_s is None,
        step_s=step_s,
        busy_s=busy_s,
        enqueue_s=unprofiled.enqueue_s,
        exposed_share=_exposed_ns(work.pieces) / 1e9 / steps / step_s if work.on_device else 0.0,
        matmul_share=_share(work, (MATMUL, ATTENTION)),
        overhead_share=_share(work, (OVERHEAD,)),
    )
    kinds = kinds_of(numbers)
    return dataclasses.replace(numbers, kind=kinds[0] if len(kinds) == 1 else NEAR_THE_LINE)


def alike_table(work: TraceWork, unprofiled: Unprofiled) -> Columns:
    """Forward and backward where they take alike although backward computes twice as much: a row each, per step. Else empty.

    time_s: unprofiled; pieces: of work; device_s: what they take on the device.
    """
    times = unprofiled.phases or {}
    forward, backward = times.get("forward"), times.get("backward")
    if not work.on_device or not forward or not backward or not 1 / _ALIKE < backward / forward < _ALIKE:
        return {}
    steps, rows = len(work.steps), []
    for phase in ("forward", "backward"):
        mine = [one for one in work.pieces if one.place.phase == phase]
        device_s = sum(one.duration_ns for one in mine) / 1e9 / steps
        rows.append({"phase": phase, "time_s": times[phase], "pieces": len(mine) / steps, "device_s": device_s})
    return columns_of(rows)


def kinds_of(numbers: Verdict) -> tuple[str, ...]:
    """The verdict by today's rule, whatever a record's `kind` says; both verdicts, the likelier first, near a line."""
    share = numbers.exposed_share
    if share > EXPOSED_SHARE and not is_near(share, EXPOSED_SHARE):
        return (COMMUNICATING,)
    others = _kinds_of_work(numbers)
    if not is_near(share, EXPOSED_SHARE):
        return others
    return (COMMUNICATING, others[0]) if share > EXPOSED_SHARE else (others[0], COMMUNICATING)


def _kinds_of_work(numbers: Verdict) -> tuple[str, ...]:
    """The same, communication aside."""
    share = numbers.matmul_share
    likelier, other = (COMPUTE, MEMORY) if share >= MATMUL_SHARE else (MEMORY, COMPUTE)
    work = (likelier, other) if is_near(share, MATMUL_SHARE) else (likelier,)
    if numbers.on_device:
        limit = step_limit(busy_s=numbers.busy_s, enqueue_s=numbers.enqueue_s, step_s=numbers.step_s)
    elif is_near(numbers.overhead_share, OVERHEAD_SHARE):
        limit = NEAR_THE_LINE
    else:
        limit = LAUNCH if numbers.overhead_share > OVERHEAD_SHARE else ""
    return (LAUNCH,) if limit == LAUNCH else (LAUNCH, likelier) if limit == NEAR_THE_LINE else work


def _exposed_ns(pieces: tuple[Work, ...]) -> int:
    """Communication while nothing else runs: what all cover, less what computing covers."""
    everything = [(one.start_ns, one.start_ns + one.duration_ns) for one in pieces]
    computing = [(one.start_ns, one.start_ns + one.duration_ns) for one in pieces if one.kind != COMMUNICATION]
    return union_ns(everything) - union_ns(computing)


def _share(work: TraceWork, kinds: tuple[str, ...]) -> float:
    return sum(one.duration_ns for one in work.pieces if one.kind in kinds) / work.total_ns if work.total_ns else 0.0
