"""Finds, in a step of an unknown model, ways of computing that cost more than another with the same result.

    found = find_patterns(read_work(trace))
    found.table()                              # a row per pattern and phase: its time in the step, and the least of the other way
    found.table({ATTENTION: 0.003})            # seconds per step, for patterns whose other way was timed

The trace must have shapes (`torch.profiler.profile(record_shapes=True)`); without them nothing is found. Patterns are
recognised by ops and shapes, never by the user's names. attention.py, optimizer.py, slices.py and matmuls.py say how, and which
time counts as the least.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from trainstep.traces.patterns.attention import fused_in_fp32, with_mask, written_out
from trainstep.traces.patterns.matmuls import NO_MATMULS, MatmulWork, in_fp32, of_odd_sizes, sixteen_bit_work
from trainstep.traces.patterns.optimizer import by_tensor
from trainstep.traces.patterns.pattern import Pattern
from trainstep.traces.patterns.slices import in_slices
from trainstep.traces.patterns.step_ops import NOTHING, Cost, StepOps
from trainstep.traces.patterns.turns import interrupted_share
from trainstep.traces.tables import Columns, columns_of
from trainstep.traces.work import TraceWork

_NONE_TIMED: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Patterns:
    """The patterns of a trace. `of`: phase -> the cost of all of its ops; `interrupted_share`: see turns.py."""

    patterns: tuple[Pattern, ...] = ()
    steps: int = 1
    of: Mapping[str, Cost] = field(default_factory=dict)
    sixteen_bit: MatmulWork = NO_MATMULS
    interrupted_share: float | None = None

    def table(self, timed_s: Mapping[str, float] = _NONE_TIMED) -> Columns:
        """The rows, per step: one for each pattern and phase. `timed_s`: pattern -> seconds of the other way, where timed."""
        rows = [row for pattern in self.patterns for row in self._rows(pattern, timed_s.get(pattern.name))]
        return columns_of([row for row in rows if row["time_s"] > 0])

    def _rows(self, pattern: Pattern, timed_s: float | None) -> Iterator[dict[str, Any]]:
        """A row for each phase; the least time is divided among phases in proportion to their time."""
        per_step, whole_ns = 1e9 * self.steps, pattern.time_ns
        least_s = min(pattern.least_ns, whole_ns) / per_step if timed_s is None else timed_s
        for phase, cost in pattern.costs.items():
            of = self.of.get(phase, NOTHING)
            yield {
                "pattern": pattern.name,
                "phase": phase,
                "calls": pattern.calls / self.steps,
                "time_s": cost.time_ns / per_step,
                "least_s": least_s * cost.time_ns / max(whole_ns, 1),
                "least_is_timed": timed_s is not None,
                "gap_s": cost.gap_ns / per_step,
                "ranges": cost.ranges / self.steps,
                "of_s": of.time_ns / per_step,
                "of_ranges": of.ranges / self.steps,
                "what": pattern.what,
            }


def find_patterns(work: TraceWork) -> Patterns:
    """The patterns of a trace's steps."""
    if not has_shapes(work):
        return Patterns()
    ops = StepOps(work)
    patterns = (
        *written_out(ops),
        *with_mask(ops),
        *by_tensor(ops),
        *in_slices(ops),
        *in_fp32(ops),
        *of_odd_sizes(ops),
        *fused_in_fp32(ops),
    )
    return Patterns(
        patterns=patterns,
        steps=ops.steps,
        of=ops.of,
        sixteen_bit=sixteen_bit_work(ops),
        interrupted_share=interrupted_share(ops),
    )


def has_shapes(work: TraceWork) -> bool:
    """Whether the profiler recorded shapes, without which no pattern is seen."""
    return any(opened.shapes for opened in work.attribution.trace.ranges)
