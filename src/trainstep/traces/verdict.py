"""What limits a step, in one word and one sentence, from a profile and the unprofiled times beside it.

communication-bound  over 30 % of the step is communication with nothing computed beside it
launch-bound         else, the device is idle for over 30 % of the step
compute-bound        else, at least half of the device's time goes into matmuls and fused attention
memory-bound         else: the rest (element-wise, softmax, norms, reductions, copies, optimizer) moves more than it computes
"""

from collections.abc import Mapping
from dataclasses import dataclass

from trainstep.traces.intervals import union_ns
from trainstep.traces.kernel_classes import ATTENTION, COMMUNICATION, MATMUL, OVERHEAD
from trainstep.traces.work import TraceWork, Work

LAUNCH, MEMORY, COMPUTE, COMMUNICATING = "launch-bound", "memory-bound", "compute-bound", "communication-bound"
_IDLE_SHARE, _EXPOSED_SHARE, _MATMUL_SHARE = 0.3, 0.3, 0.5
_ALIKE = 1.35
"""Phases whose times differ by less than this factor take alike."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`kind`: one of the four. `alike`: why forward and backward take alike, where they do; else empty."""

    kind: str
    reason: str
    alike: str = ""


@dataclass(frozen=True, kw_only=True)
class Unprofiled:
    """Medians of the same step without a profiler. `phases`: seconds by phase. All None or empty for a trace alone."""

    step_s: float | None = None
    enqueue_s: float | None = None
    phases: Mapping[str, float] | None = None


def verdict(work: TraceWork, unprofiled: Unprofiled) -> Verdict:
    """The verdict; device time is the profiled one (a profiler slows the host, not kernels), the step's the unprofiled."""
    busy_s = sum(step.busy_ns for step in work.steps) / 1e9 / len(work.steps)
    window_s = sum(step.window_ns for step in work.steps) / 1e9 / len(work.steps)
    step_s = unprofiled.step_s or window_s
    if not work.on_device:
        return _on_host(work)
    idle_share = max(0.0, 1 - busy_s / step_s)
    exposed_share = _exposed_ns(work.pieces) / 1e9 / len(work.steps) / step_s
    if exposed_share > _EXPOSED_SHARE:
        reason = f"{exposed_share:.0%} of the step is communication with no computing beside it"
        return Verdict(kind=COMMUNICATING, reason=f"{reason}.")
    if idle_share > _IDLE_SHARE:
        return Verdict(
            kind=LAUNCH,
            reason=_launch_reason(busy_s, step_s, unprofiled),
            alike=_alike(work, unprofiled),
        )
    return _device_bound(work, f"the device is busy for {busy_s / step_s:.0%} of the step")


def _launch_reason(busy_s: float, step_s: float, unprofiled: Unprofiled) -> str:
    reason = f"the device works {_ms(busy_s)} of a step of {_ms(step_s)}"
    if unprofiled.step_s is None:
        return f"{reason} and waits for the rest, though part of that is the profiler's own slowing of the host."
    if unprofiled.enqueue_s is not None and unprofiled.enqueue_s > 0.9 * step_s:
        return f"{reason}; the host needs {_ms(unprofiled.enqueue_s)} to launch that work, so the device waits for it."
    return f"{reason} and waits for the rest, while the host is not launching all the time: see where it is blocked."


def _device_bound(work: TraceWork, busy: str) -> Verdict:
    share = _share(work, (MATMUL, ATTENTION))
    if share >= _MATMUL_SHARE:
        return Verdict(kind=COMPUTE, reason=f"{busy}, {share:.0%} of that in matmuls and fused attention.")
    return Verdict(
        kind=MEMORY,
        reason=f"{busy}, only {share:.0%} of that in matmuls and fused attention; the rest moves bytes more than it computes.",
    )


def _on_host(work: TraceWork) -> Verdict:
    overhead = _share(work, (OVERHEAD,))
    if overhead > _MATMUL_SHARE:
        return Verdict(
            kind=LAUNCH,
            reason=f"on the CPU {overhead:.0%} of the profiled step passes between ops: Python, autograd, views, the profiler.",
        )
    return _device_bound(work, f"on the CPU {1 - overhead:.0%} of the step passes in ops")


def _alike(work: TraceWork, unprofiled: Unprofiled) -> str:
    """Why forward and backward take alike although backward computes twice as much."""
    times = unprofiled.phases or {}
    forward, backward = times.get("forward"), times.get("backward")
    if not forward or not backward or not 1 / _ALIKE < backward / forward < _ALIKE:
        return ""
    counts, device_s = {}, {}
    for phase in ("forward", "backward"):
        mine = [one for one in work.pieces if one.place.phase == phase]
        counts[phase] = len(mine) / len(work.steps)
        device_s[phase] = sum(one.duration_ns for one in mine) / 1e9 / len(work.steps)
    return (
        f"Forward and backward take alike ({_ms(forward)} and {_ms(backward)}) because each lasts as long as the host needs to "
        f"launch it ({counts['forward']:,.0f} and {counts['backward']:,.0f} pieces of work); on the device they take "
        f"{_ms(device_s['forward'])} and {_ms(device_s['backward'])}."
    )


def _exposed_ns(pieces: tuple[Work, ...]) -> int:
    """Communication while nothing else runs: what all cover, less what computing covers."""
    everything = [(one.start_ns, one.start_ns + one.duration_ns) for one in pieces]
    computing = [(one.start_ns, one.start_ns + one.duration_ns) for one in pieces if one.kind != COMMUNICATION]
    return union_ns(everything) - union_ns(computing)


def _share(work: TraceWork, kinds: tuple[str, ...]) -> float:
    return sum(one.duration_ns for one in work.pieces if one.kind in kinds) / work.total_ns if work.total_ns else 0.0


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.4g} ms"
