"""Reads everything that a profile says from a trace, as tables and numbers per step: `profile_of(read_trace(path))`."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from trainstep.traces.attribution import launched_by_graph
from trainstep.traces.host_track import host_table, launch_count, outliers_table, stall
from trainstep.traces.kineto import Trace, collector_paused
from trainstep.traces.nesting import union_ns
from trainstep.traces.tables import (
    KERNELS_KEPT,
    AttentionShape,
    Columns,
    attention_table,
    classes_table,
    kernels_table,
    layers_table,
    replay_table,
    spans_table,
)
from trainstep.traces.verdict import LAUNCH, Unprofiled, Verdict, alike_table, verdict
from trainstep.traces.work import TraceWork, read_work


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Everything that one trace says. Tuples have one value per step."""

    on_device: bool
    steps_s: tuple[float, ...]
    """The profiled steps' spans on the host."""
    busy_s: tuple[float, ...]
    idle_s: tuple[float, ...]
    total_s: float
    """Sum of all kernels and copies, per step: more than busy if streams overlap."""
    assigned_share: float
    """The share of the trace's device time that the tables hold by phase; below 1, time was lost."""
    fallback_share: float
    """The share of device time placed only by what the main thread was doing meanwhile."""
    pieces: float
    """Kernels and copies (on a CPU: ops) per step."""
    launches: float
    compiled: bool
    tables: Mapping[str, Columns]
    verdict: Verdict
    split: str
    """How a trace that marks no steps was split into steps; empty if it marks them."""
    replayed_share: float | None
    """The share of device time that a graph replayed and that an eager step placed; None if nothing was replayed."""
    replay_idle_share: float | None
    """The share of the time from a replay's first kernel to its last in which the device did nothing, median of the replays."""

    def numbers(self) -> dict[str, str | float | None]:
        """The facts of a record of this profile, by name (records/facts.py)."""
        return {
            "verdict": self.verdict.kind,
            "idle_s": statistics.median(self.idle_s),
            "kernels_s": self.total_s,
            "pieces": self.pieces,
            "launches": self.launches,
            "assigned_share": self.assigned_share,
            "fallback_share": self.fallback_share,
            "replayed_share": self.replayed_share,
            "replay_idle_share": self.replay_idle_share,
        }


@collector_paused()
def profile_of(
    trace: Trace,
    *,
    shape: AttentionShape | None = None,
    unprofiled: Unprofiled | None = None,
    eager: Trace | None = None,
    kernels_kept: int = KERNELS_KEPT,
) -> Profile:
    """Read a trace's pieces of work and tabulate them. `shape`: of attention written out in ops, for its FLOPs and bytes.

    `eager`: a trace of one such step without a graph, if the trace has replays; it tells where each piece of them belongs.
    """
    work = read_work(trace, eager)
    steps, times = len(work.steps), unprofiled or Unprofiled()
    # In a replay the host does nothing for the phases.
    limit, host_stall = verdict(work, times), stall(work) if eager is None else None
    tables = {
        "classes": classes_table(work),
        "kernels": kernels_table(work, kernels_kept),
        "spans": spans_table(work),
        "layers": layers_table(work),
        "attention": attention_table(work, shape),
        "host": host_table(work) if eager is None else {},
        "replay": {} if eager is None else replay_table(work, read_work(eager)),
        "outliers": outliers_table(work),
        "verdict": limit.columns(),
        "alike": alike_table(work, times) if limit.kind == LAUNCH and eager is None else {},
        "stall": host_stall.columns() if host_stall else {},
    }
    return Profile(
        on_device=work.on_device,
        steps_s=tuple(step.window_ns / 1e9 for step in work.steps),
        busy_s=tuple(step.busy_ns / 1e9 for step in work.steps),
        idle_s=_idle_s(work),
        total_s=work.total_ns / 1e9 / steps,
        assigned_share=work.assigned_share,
        fallback_share=work.fallback_share,
        pieces=len(work.pieces) / steps,
        launches=launch_count(work),
        compiled=any(piece.place.compiled for piece in work.pieces),
        tables={name: columns for name, columns in tables.items() if columns},
        verdict=limit,
        split=work.split,
        replayed_share=None if eager is None else work.replayed_ns / max(work.total_ns, 1),
        replay_idle_share=_replay_idle_share(work),
    )


def _replay_idle_share(work: TraceWork) -> float | None:
    """The share of a graph launch, from its first kernel's start to its last's end, in which the device is idle.

    The median of the launches; None without a graph on a device.
    """
    replays: dict[int, list[tuple[int, int]]] = {}
    for piece in work.pieces:
        if piece.call is not None and launched_by_graph(piece.call):
            replays.setdefault(piece.call.correlation, []).append((piece.start_ns, piece.end_ns))
    extents = [
        (max(end for _, end in spans) - min(start for start, _ in spans), union_ns(spans)) for spans in replays.values()
    ]
    shares = [1 - busy_ns / extent_ns for extent_ns, busy_ns in extents if extent_ns]
    return statistics.median(shares) if shares else None


def _idle_s(work: TraceWork) -> tuple[float, ...]:
    gaps = {step.number: step.after_ns for step in work.steps}
    first = min(gaps)
    for piece in work.pieces:  # a step that only another thread names is not among the steps of the main thread
        step = piece.place.step
        gaps[first if step is None or step not in gaps else step] += piece.gap_ns
    return tuple(gap / 1e9 for gap in gaps.values())
