"""The steps of a trace that marks none, found by its optimizer or by what repeats: `with_steps(trace)`.

[Note: the rule] Where torch's optimizers are named, a step ends with its optimizer's; optimizers with no backward between them
are of one step. Otherwise the names of kernels (of a CPU's: of ops) are read in the order of their start. A name that occurs at
even distances, alone or in bursts, is taken for once a step, and a step ends as far before it as the trace's last does, so that a
trace which begins or ends within a step is cut into whole periods too. The cut holds if all steps have the same names equally
often, up to a fifth of the names; the first of three and more, a warm-up, may differ and be up to three times as long. Of several
cuts the one whose steps are most alike is taken, of equals the one with most steps.

It gives up, and the trace counts as one step, where the last step has a kernel that no other has (an optimizer's after four
micro-batches, a loss's after twelve layers), where a step has fewer than three names, where the shapes and so the kernels change
from step to step, and where a warm-up stands beside one step alone.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median_low

from trainstep.traces.contexts import step_number
from trainstep.traces.kineto import KERNEL, Activity, Call, Range, Thread, Trace

_OPTIMIZER = "Optimizer.step#"
_ENGINE = "autograd::engine"
_LEAST_ALIKE = 0.8
"""The share of a step's names that must occur as often as in the others."""
_LEAST_NAMES = 3
_LONGEST_WARM_UP = 3.0
"""Events of the first step over those of a usual one: more is no warm-up but a loop at the end of a step."""
_MOST_UNEVEN = 1.25
"""The longest distance between a name's bursts over the shortest, in events; the first, of a warm-up, is not looked at."""
_MOST_CUTS = 20
"""Cuts that are looked at closely, so that a large trace takes seconds."""
_MARK_THEM = "profiler.step() of torch.profiler marks them"


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """Where steps end among the events, the last with the last event; `alike`: the mean of the steps but the first."""

    ends: tuple[int, ...]
    alike: float
    first_differs: bool


def with_steps(trace: Trace) -> tuple[Trace, str]:
    """The trace with a range `step N` around each step, and a sentence that says how it was split; as it is where it marks them."""
    if any(one.annotation and step_number(one.name) is not None for one in trace.ranges):
        return trace, ""
    updates = _updates(trace)
    if len(updates) == 1:
        return trace, f"The trace marks no steps and its optimizer steps once, so it counts as one step; {_MARK_THEM}."
    if updates:
        said = f"The trace marks no steps: it is split where the optimizer's {len(updates)} steps end."
        return _marked(trace, [one.end_ns for one in updates[:-1]], updates[0].thread), said
    names, times_ns = _events(trace)
    cut = _cut(names)
    borders_ns = [times_ns[end] for end in cut.ends[:-1]] if cut else []
    if cut is None or borders_ns != sorted(set(borders_ns)):
        said = f"The trace marks no steps and nothing repeats all through it, so it counts as one step; {_MARK_THEM}."
        return trace, said
    said = f"The trace marks no steps: it is split into {len(cut.ends)} by what repeats in it"
    said += ", of which the first differs from the others." if cut.first_differs else "."
    return _marked(trace, borders_ns, _busiest_thread(trace)), said


def _updates(trace: Trace) -> list[Range]:
    """The last of each group of optimizers that update with no backward between them."""
    updates = [one for one in trace.ranges if one.annotation and one.name.startswith(_OPTIMIZER)]
    backward_ns = iter([one.start_ns for one in trace.ranges if one.backward or one.name.startswith(_ENGINE)])
    kept: list[Range] = []
    next_ns = next(backward_ns, None)
    for one in updates:
        between = False
        while next_ns is not None and next_ns < one.start_ns:
            between = True
            next_ns = next(backward_ns, None)
        if kept and not between:
            one = max(kept.pop(), one, key=lambda update: update.end_ns)
        kept.append(one)
    return kept


def _marked(trace: Trace, borders_ns: Sequence[int], thread: Thread) -> Trace:
    events: list[Activity | Call | Range] = [*trace.activities, *trace.calls, *trace.ranges]
    times_ns = [min(one.start_ns for one in events), *borders_ns, max(one.end_ns for one in events)]
    steps = [
        Range(name=f"step {number}", thread=thread, start_ns=start, duration_ns=end - start, annotation=True)
        for number, (start, end) in enumerate(pairwise(times_ns))
    ]
    ranges = sorted([*steps, *trace.ranges], key=lambda one: one.start_ns)  # stable: a step before what begins with it
    return dataclasses.replace(trace, ranges=tuple(ranges))


def _events(trace: Trace) -> tuple[list[str], list[int]]:
    """Names of kernels, or else of ops, and when the host launched or began each."""
    kernels: list[Activity | Range] = [one for one in trace.activities if one.kind == KERNEL]
    events = kernels or [one for one in trace.ranges if not one.annotation]
    launched_ns = {call.correlation: call.start_ns for call in trace.calls if call.correlation >= 0}
    times_ns = [launched_ns.get(getattr(one, "correlation", -1), one.start_ns) for one in events]
    return [one.name for one in events], times_ns


def _busiest_thread(trace: Trace) -> Thread:
    threads = Counter(one.thread for one in trace.ranges) or Counter(one.thread for one in trace.calls)
    return threads.most_common(1)[0][0] if threads else (0, 0)


def _cut(names: Sequence[str]) -> _Cut | None:
    """The best cut of these events into steps that are alike. [Note: the rule]"""
    best: _Cut | None = None
    for ends in _even_cuts(names):
        cut = _judged(names, ends)
        if cut and (best is None or (cut.alike, len(cut.ends)) > (best.alike, len(best.ends))):
            best = cut
    return best


def _even_cuts(names: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """For each number of steps a cut by a name with so many bursts, at even distances; few steps first."""
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(name, []).append(place)
    tried: set[int] = set()
    for its in sorted(map(_bursts, places.values()), key=lambda its: (len(its), its[0])):
        distances = [after - before for before, after in pairwise(its)]
        steady = distances[1:] or distances
        if (
            not 2 <= len(its) <= len(names) // _LEAST_NAMES
            or len(its) in tried
            or max(steady) > _MOST_UNEVEN * min(steady)
        ):
            continue
        tried.add(len(its))
        before = max(0, median_low(steady) - (len(names) - its[-1]))  # a step's events before the name
        yield (*(_last_alike(names, place - before, reach=min(steady) // 10) for place in its[1:]), len(names))
        if len(tried) == _MOST_CUTS:
            return


def _bursts(places: Sequence[int]) -> list[int]:
    """The first of each group of places that lie together: of an optimizer's kernels, of a layer's in all layers."""
    apart = max((after - before for before, after in pairwise(places)), default=0) / 2
    return [places[0], *(after for before, after in pairwise(places) if after - before > apart)]


def _last_alike(names: Sequence[str], end: int, *, reach: int) -> int:
    """Where the step ends that should end here: after the nearest event with the name of the trace's last one."""
    for distance in range(reach + 1):
        for place in (end - distance, end + distance):
            if 0 < place < len(names) and names[place - 1] == names[-1]:
                return place
    return end


def _judged(names: Sequence[str], ends: tuple[int, ...]) -> _Cut | None:
    """The cut, if its steps are alike."""
    starts = (0, *ends[:-1])
    if any(end <= start for start, end in zip(starts, ends, strict=True)):
        return None
    steps = [Counter(names[start:end]) for start, end in zip(starts, ends, strict=True)]
    steady = steps[1:] if len(steps) > 2 else steps
    usual = {
        name: count
        for name in dict.fromkeys(name for step in steady for name in step)
        if (count := median_low([step[name] for step in steady]))
    }
    alike = [_alike(step, usual) for step in steps]
    counted = alike[1:] if len(steps) > 2 else alike
    longer = steps[0].total() / max(1, sum(usual.values()))
    if len(usual) < _LEAST_NAMES or min(counted) < _LEAST_ALIKE or longer > _LONGEST_WARM_UP:
        return None
    if steps[-1].keys() - set().union(*steps[:-1]):
        return None
    differs = alike[0] < _LEAST_ALIKE or abs(longer - 1) > 1 - _LEAST_ALIKE
    return _Cut(ends=ends, alike=fmean(counted), first_differs=differs)


def _alike(step: Counter[str], usual: dict[str, int]) -> float:
    """The share of names that occur in this step as often as usual."""
    every = step.keys() | usual.keys()
    return sum(step[name] == usual.get(name, 0) for name in every) / len(every)
