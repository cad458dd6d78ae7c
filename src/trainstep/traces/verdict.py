"""Decides what limits a step, from its profile and the times of the same step without a profiler.

communication-bound  over 30 % of the step is communication with nothing computed beside it
launch-bound         else, the device waits for the host (`step_limit`); on a CPU over half of the step passes between ops
compute-bound        else, at least half of the device's time beside messages goes into matmuls and fused attention
memory-bound         else: the rest (element-wise, softmax, norms, reductions, copies, optimizer) moves more than it computes
near the line        a share is within a tenth of the threshold that decides: `kinds_of` has both verdicts

[Note: the host or the device] Only `step_limit` has this rule, and every workload that calls something launch-bound uses it. As
shares of the step:

    the host launches for at least 95 %   launch-bound; near the line if the device works for 90 % or more
    else the device works under 63 %      launch-bound
    63 to 77 % (70 %, give or take 10 %)  near the line
    77 to 90 %                            near the line if the host launches for 90 to 95 %; else limited by the device
    more                                  limited by the device

The sentences about a verdict are in report/profile/answer.py.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from trainstep.traces.kernel_classes import ATTENTION, COMMUNICATION, MATMUL, OVERHEAD
from trainstep.traces.nesting import union_ns
from trainstep.traces.tables import Columns, columns_of
from trainstep.traces.work import TraceWork, Work

LAUNCH_BOUND, NEAR_THE_LINE, DEVICE_BOUND = "launch-bound", "near the line", "device-bound"
LAUNCH, MEMORY, COMPUTE, COMMUNICATING = LAUNCH_BOUND, "memory-bound", "compute-bound", "communication-bound"
EXPOSED_SHARE, MATMUL_SHARE, OVERHEAD_SHARE = 0.3, 0.5, 0.5
_ALIKE = 1.35
"""Two phases take about the same time if their times differ by less than this factor."""
BUSY_SHARE, ENQUEUE_SHARE = 0.7, 0.95
NEAR = 0.1
"""A share is near a threshold if it differs by at most this much of it: the next day's clock may put it on the other side."""
_FULL_SHARE = 0.9
_LAUNCHING_SHARE = 0.9


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The kind of limit (one of the four, or near the line) and the numbers it rests on, per step.

    Device time is from the profile, because a profiler slows the host but not kernels.
    """

    kind: str
    on_device: bool
    profiled_step: bool
    """Whether `step_s` is the profiled step's time, because no other is known; else it is that of unprofiled steps."""
    step_s: float
    busy_s: float
    enqueue_s: float | None
    """Host time until the last work was issued, unprofiled; None if unknown."""
    exposed_share: float
    """The share of the step in which there is communication and nothing is computed."""
    matmul_share: float
    """The share of matmuls and fused attention in the device time of all work but messages."""
    overhead_share: float
    """The share of a CPU's time that passes between ops."""

    def columns(self) -> Columns:
        """The verdict as a table of one row."""
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
        matmul_share=_share(work, (MATMUL, ATTENTION), besides=COMMUNICATION),
        overhead_share=_share(work, (OVERHEAD,)),
    )
    kinds = kinds_of(numbers)
    return dataclasses.replace(numbers, kind=kinds[0] if len(kinds) == 1 else NEAR_THE_LINE)


def alike_table(work: TraceWork, unprofiled: Unprofiled) -> Columns:
    """A row each for forward and backward if they take about the same time although backward computes twice as much; else empty.

    Per step: time_s without a profiler, pieces of work, and device_s, their time on the device.
    """
    times = unprofiled.phases or {}
    forward, backward = times.get("forward"), times.get("backward")
    if not work.on_device or not forward or not backward or not 1 / _ALIKE < backward / forward < _ALIKE:
        return {}
    steps, rows = len(work.steps), []
    for phase in ("forward", "backward"):
        pieces = [piece for piece in work.pieces if piece.place.phase == phase]
        device_s = sum(piece.duration_ns for piece in pieces) / 1e9 / steps
        rows.append({"phase": phase, "time_s": times[phase], "pieces": len(pieces) / steps, "device_s": device_s})
    return columns_of(rows)


def kinds_of(numbers: Verdict) -> tuple[str, ...]:
    """The verdict by the current rule, whatever `kind` a record stored; near a threshold both verdicts, the likelier first."""
    share = numbers.exposed_share
    if share > EXPOSED_SHARE and not is_near(share, EXPOSED_SHARE):
        return (COMMUNICATING,)
    others = _kinds_of_work(numbers)
    if not is_near(share, EXPOSED_SHARE):
        return others
    return (COMMUNICATING, others[0]) if share > EXPOSED_SHARE else (others[0], COMMUNICATING)


def step_limit(*, busy_s: float, enqueue_s: float | None, step_s: float) -> str:
    """LAUNCH_BOUND, NEAR_THE_LINE or DEVICE_BOUND. [Note: the host or the device]

    `enqueue_s`: host time until the last work was issued; None if unknown.
    """
    busy_share = busy_s / step_s if step_s else 1.0
    if enqueue_s is not None and enqueue_s >= ENQUEUE_SHARE * step_s:
        return NEAR_THE_LINE if busy_share >= _FULL_SHARE else LAUNCH_BOUND
    launching = enqueue_s is not None and host_launches(enqueue_s=enqueue_s, step_s=step_s)
    if is_near(busy_share, BUSY_SHARE) or (launching and BUSY_SHARE < busy_share < _FULL_SHARE):
        return NEAR_THE_LINE
    return LAUNCH_BOUND if busy_share < BUSY_SHARE else DEVICE_BOUND


def is_near(share: float, line: float) -> bool:
    """Whether a share is too close to a threshold for a verdict."""
    return abs(share - line) <= NEAR * line


def host_launches(*, enqueue_s: float, step_s: float) -> bool:
    """Whether the host issues work for over 90 % of the step."""
    return enqueue_s > _LAUNCHING_SHARE * step_s


def is_launch_bound(*, busy_s: float, enqueue_s: float, step_s: float) -> bool:
    """Whether the host limits the work, for a record to note. The times are those of one step, or of one pass of a kernel."""
    return step_limit(busy_s=busy_s, enqueue_s=enqueue_s, step_s=step_s) == LAUNCH_BOUND


def _kinds_of_work(numbers: Verdict) -> tuple[str, ...]:
    """The verdict without regard to communication."""
    share = numbers.matmul_share
    likelier, other = (COMPUTE, MEMORY) if share >= MATMUL_SHARE else (MEMORY, COMPUTE)
    work = (likelier, other) if is_near(share, MATMUL_SHARE) else (likelier,)
    if numbers.on_device:
        limit = step_limit(busy_s=numbers.busy_s, enqueue_s=numbers.enqueue_s, step_s=numbers.step_s)
    elif is_near(numbers.overhead_share, OVERHEAD_SHARE):
        limit = NEAR_THE_LINE
    else:
        limit = LAUNCH if numbers.overhead_share > OVERHEAD_SHARE else ""
    if limit == LAUNCH:
        return (LAUNCH,)
    return (LAUNCH, likelier) if limit == NEAR_THE_LINE else work


def _exposed_ns(pieces: tuple[Work, ...]) -> int:
    """Time in which only communication runs: what all pieces cover, less what computing covers."""
    everything = [(piece.start_ns, piece.end_ns) for piece in pieces]
    computing = [(piece.start_ns, piece.end_ns) for piece in pieces if piece.kind != COMMUNICATION]
    return union_ns(everything) - union_ns(computing)


def _share(work: TraceWork, kinds: tuple[str, ...], *, besides: str = "") -> float:
    """The share of these kinds in the time of all pieces that are not of the kind `besides`."""
    kinds_ns = sum(piece.duration_ns for piece in work.pieces if piece.kind in kinds)
    total_ns = sum(piece.duration_ns for piece in work.pieces if piece.kind != besides)
    return kinds_ns / total_ns if total_ns else 0.0
