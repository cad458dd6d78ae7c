"""Same-named work compared across steps: what took longer in one step than in the others, and why.

A step of a span is an outlier where its time, device time and the idle time before its kernels, exceeds the median of the
steps by a quarter and by 1 % of a step. Its cause is what else was different there: cudaMalloc, other kernels, a host that
came late, or none of these: the same kernels, all slower, which is the clock (or another user of the device).
"""

import bisect
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainstep.traces.attribution import Place
from trainstep.traces.host_track import is_allocation
from trainstep.traces.tables import Columns, columns_of
from trainstep.traces.work import TraceWork, Work, by_step

_EXCESS, _OF_STEP = 1.25, 0.01
MALLOC, KERNELS, HOST, CLOCK = "cudaMalloc", "other kernels", "the host came late", "the same kernels, slower: clock"
_NO_DEVICE = "the same ops, slower"


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """One span in one step."""

    time_ns: int
    gap_ns: int
    names: frozenset[tuple[str, int]]
    """Each name with how often it is there."""
    allocations: int


def outliers_table(work: TraceWork) -> Columns:
    """A row for each span of a step that stands out, the largest first: phase, span, layer, step, times, cause.

    Needs three steps.
    """
    if len(work.steps) < 3:
        return {}
    allocations = _allocations(work)
    seen: dict[tuple[str, str, int | None], dict[int, _Seen]] = {}
    for number, pieces in by_step(work).items():
        groups: dict[tuple[str, str, int | None], list[Work]] = {}
        for piece in pieces:
            groups.setdefault(_key(piece.place), []).append(piece)
        for key, group in groups.items():
            seen.setdefault(key, {})[number] = _seen(group, allocations[(number, *key)])
    threshold_ns = _OF_STEP * statistics.median(step.window_ns for step in work.steps)
    rows: list[dict[str, Any]] = []
    for (phase, span, layer), steps in seen.items():
        median_ns = statistics.median([one.time_ns + one.gap_ns for one in steps.values()])
        together = _Steps(list(steps.values()))
        for number, one in steps.items():
            excess_ns = one.time_ns + one.gap_ns - median_ns
            if excess_ns > max((_EXCESS - 1) * median_ns, threshold_ns) and len(steps) > 1:
                rows.append(
                    {
                        "phase": phase,
                        "span": span,
                        "layer": "" if layer is None else str(layer),
                        "step": number,
                        "time_s": (one.time_ns + one.gap_ns) / 1e9,
                        "median_s": median_ns / 1e9,
                        "cause": _cause(one, together, excess_ns, work.on_device),
                    }
                )
    return columns_of(sorted(rows, key=lambda row: row["median_s"] - row["time_s"]))


class _Steps:
    """One span in all of its steps; each step is compared with the others in logarithmic time."""

    def __init__(self, steps: Sequence[_Seen]) -> None:
        self._allocations = sorted(one.allocations for one in steps)
        self._gaps_ns = sorted(one.gap_ns for one in steps)
        self._names = Counter(one.names for one in steps)

    def median_allocations_without(self, one: _Seen) -> float:
        return _median_without(self._allocations, one.allocations)

    def median_gap_ns_without(self, one: _Seen) -> float:
        return _median_without(self._gaps_ns, one.gap_ns)

    def alone_has_names_of(self, one: _Seen) -> bool:
        return self._names[one.names] == 1


def _median_without(ordered: Sequence[int], value: int) -> float:
    """The median of all but one of the values, which stand in order."""
    left_out = bisect.bisect_left(ordered, value)

    def rest(index: int) -> int:
        return ordered[index + (index >= left_out)]

    count = len(ordered) - 1
    return (rest((count - 1) // 2) + rest(count // 2)) / 2


def _cause(one: _Seen, steps: _Steps, excess_ns: float, on_device: bool) -> str:
    if one.allocations > steps.median_allocations_without(one):
        return MALLOC
    if steps.alone_has_names_of(one):
        return KERNELS
    late_ns = one.gap_ns - steps.median_gap_ns_without(one)
    if late_ns > 0.5 * excess_ns:
        return HOST
    return CLOCK if on_device else _NO_DEVICE


def _seen(pieces: Sequence[Work], allocations: int) -> _Seen:
    return _Seen(
        time_ns=sum(one.duration_ns for one in pieces),
        gap_ns=sum(one.gap_ns for one in pieces),
        names=frozenset(Counter(one.name for one in pieces).items()),
        allocations=allocations,
    )


def _allocations(work: TraceWork) -> Counter[tuple[int, str, str, int | None]]:
    found: Counter[tuple[int, str, str, int | None]] = Counter()
    for call in filter(is_allocation, work.attribution.trace.calls):
        place = work.attribution.place(call.thread, call.start_ns)
        if place.step is not None:
            found[(place.step, *_key(place))] += 1
    return found


def _key(place: Place) -> tuple[str, str, int | None]:
    return place.phase, place.span, place.layer
