"""A trace to everything a profile says: `profile_of(read_trace(path))`. Tables per step, and numbers."""

from collections.abc import Mapping
from dataclasses import dataclass

from trainstep.traces.attention_split import AttentionShape, attention_table
from trainstep.traces.host_track import host_table, launch_count, stall
from trainstep.traces.kineto import Trace
from trainstep.traces.outliers import outliers_table
from trainstep.traces.tables import (
    KERNELS_KEPT,
    Columns,
    classes_table,
    kernels_table,
    layers_table,
    spans_table,
)
from trainstep.traces.verdict import LAUNCH, Unprofiled, Verdict, alike_table, verdict
from trainstep.traces.work import TraceWork, read_work


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What one trace says. Lists hold a value a step, in seconds."""

    on_device: bool
    steps_s: tuple[float, ...]
    """The profiled steps' spans on the host."""
    busy_s: tuple[float, ...]
    idle_s: tuple[float, ...]
    total_s: float
    """Sum of all kernels and copies, a step: more than busy where streams overlap."""
    assigned_share: float
    """Of all device time in the trace, what the tables hold by phase: 1, or time was lost."""
    fallback_share: float
    """Of it, what found its place only by what the main thread was doing meanwhile."""
    pieces: float
    """Kernels and copies (on a CPU: ops) a step."""
    launches: float
    compiled: bool
    tables: Mapping[str, Columns]
    verdict: Verdict
    split: str
    """How a trace that marks no steps was split into them; empty where it marks them."""


def profile_of(
    trace: Trace,
    *,
    shape: AttentionShape | None = None,
    unprofiled: Unprofiled | None = None,
    kernels_kept: int = KERNELS_KEPT,
) -> Profile:
    """Read a trace's pieces of work and tabulate them. `shape`: of written-out attention, for its FLOPs and bytes."""
    work = read_work(trace)
    steps, times = len(work.steps), unprofiled or Unprofiled()
    found, halted = verdict(work, times), stall(work)
    tables = {
        "classes": classes_table(work),
        "kernels": kernels_table(work, kernels_kept),
        "spans": spans_table(work),
        "layers": layers_table(work),
        "attention": attention_table(work, shape),
        "host": host_table(work),
        "outliers": outliers_table(work),
        "verdict": found.columns(),
        "alike": alike_table(work, times) if found.kind == LAUNCH else {},
        "stall": halted.columns() if halted else {},
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
        compiled=any(one.place.compiled for one in work.pieces),
        tables={name: columns for name, columns in tables.items() if columns},
        verdict=found,
        split=work.split,
    )


def _idle_s(work: TraceWork) -> tuple[float, ...]:
    gaps = {step.number: step.after_ns for step in work.steps}
    first = min(gaps)
    for one in work.pieces:  # a step that another thread alone names is none of the main thread's
        step = one.place.step
        gaps[first if step is None or step not in gaps else step] += one.gap_ns
    return tuple(gap / 1e9 for gap in gaps.values())
