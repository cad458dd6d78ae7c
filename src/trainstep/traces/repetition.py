"""Finds the steps of a trace that marks none, by its optimizer or by repetition: `with_steps(trace)`.

[Note: the rule] If the trace names torch's optimizers, a step ends with its optimizer's update; optimizers with no backward between
them belong to one step. Otherwise the names of kernels (without a device, of ops) are read in the order of their start. A name that
occurs at even distances, alone or in bursts, is taken to occur once per step. A step ends as far before this name as the trace's
last step does, so that a trace which begins or ends within a step is cut into whole periods too. The cut holds if all steps have
the same names equally often, except for up to a fifth of the names. The first of three or more steps, a warm-up, may differ and be
up to three times as long. Of several cuts, the one with the most similar steps is taken; if equal, the one with the most steps.

The trace counts as one step if the last step has a kernel that no other step has (an optimizer's after four micro-batches, a loss's
after twelve layers), if a step has fewer than three names, if shapes and so kernels change from step to step, or if there is only
one step beside a warm-up.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median_low

from trainstep.traces.contexts import step_number
from trainstep.traces.kineto import KERNEL, Activity, Range, Thread, Timed, Trace

_OPTIMIZER = "Optimizer.step#"
_ENGINE = "autograd::engine"
_LEAST_ALIKE = 0.8
"""The share of a step's names that must occur as often as in the other steps."""
_LEAST_NAMES = 3
_LONGEST_WARM_UP = 3.0
"""The most events of the first step over a usual step's: with more, it is no warm-up but a loop at the end of a step."""
_MOST_UNEVEN = 1.25
"""The most that the longest distance between a name's bursts may be over the shortest, in events, without the warm-up's."""
_MOST_CUTS = 20
"""How many cuts are judged, so that a large trace takes seconds."""
_MARK_THEM = "profiler.step() of torch.profiler marks them"


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """The ends of the steps among the events. `alike`: the mean similarity of the steps, without a warm-up."""

    ends: tuple[int, ...]
    alike: float
    first_differs: bool


def with_steps(trace: Trace) -> tuple[Trace, str]:
    """The trace with a range `step N` around each step, and a sentence that says how it was split.

    A trace that marks its steps is returned as it is, with an empty sentence.
    """
    if any(span.annotation and step_number(span.name) is not None for span in trace.ranges):
        return trace, ""
    updates = _updates(trace)
    if len(updates) == 1:
        return trace, f"The trace marks no steps and its optimizer steps once, so it counts as one step; {_MARK_THEM}."
    if updates:
        sentence = f"The trace marks no steps: it is split where the optimizer's {len(updates)} steps end."
        return _marked(trace, [update.end_ns for update in updates[:-1]], updates[0].thread), sentence
    names, times_ns = _events(trace)
    cut = _cut(names)
    borders_ns = [times_ns[end] for end in cut.ends[:-1]] if cut else []
    if cut is None or borders_ns != sorted(set(borders_ns)):
        sentence = (
            f"The trace marks no steps and nothing repeats all through it, so it counts as one step; {_MARK_THEM}."
        )
        return trace, sentence
    sentence = f"The trace marks no steps: it is split into {len(cut.ends)} by what repeats in it"
    sentence += ", of which the first differs from the others." if cut.first_differs else "."
    return _marked(trace, borders_ns, _busiest_thread(trace)), sentence


def _updates(trace: Trace) -> list[Range]:
    """The last of each group of optimizer updates with no backward between them."""
    updates = [span for span in trace.ranges if span.annotation and span.name.startswith(_OPTIMIZER)]
    backward_ns = iter([op.start_ns for op in trace.ranges if op.backward or op.name.startswith(_ENGINE)])
    kept: list[Range] = []
    next_ns = next(backward_ns, None)
    for update in updates:
        backward_between = False
        while next_ns is not None and next_ns < update.start_ns:
            backward_between = True
            next_ns = next(backward_ns, None)
        if kept and not backward_between:
            update = max(kept.pop(), update, key=lambda candidate: candidate.end_ns)
        kept.append(update)
    return kept


def _marked(trace: Trace, borders_ns: Sequence[int], thread: Thread) -> Trace:
    events: list[Timed] = [*trace.activities, *trace.calls, *trace.ranges]
    times_ns = [min(event.start_ns for event in events), *borders_ns, max(event.end_ns for event in events)]
    steps = [
        Range(name=f"step {number}", thread=thread, start_ns=start, duration_ns=end - start, annotation=True)
        for number, (start, end) in enumerate(pairwise(times_ns))
    ]
    # The sort is stable, so that a step stands before a range that begins with it.
    ranges = sorted([*steps, *trace.ranges], key=lambda event: event.start_ns)
    return dataclasses.replace(trace, ranges=tuple(ranges))


def _events(trace: Trace) -> tuple[list[str], list[int]]:
    """The names of kernels, or without any the names of ops, and when the host launched or began each."""
    kernels: list[Activity | Range] = [event for event in trace.activities if event.kind == KERNEL]
    events = kernels or [event for event in trace.ranges if not event.annotation]
    launched_ns = {call.correlation: call.start_ns for call in trace.calls if call.correlation >= 0}
    times_ns = [launched_ns.get(getattr(event, "correlation", -1), event.start_ns) for event in events]
    return [event.name for event in events], times_ns


def _busiest_thread(trace: Trace) -> Thread:
    threads = Counter(opened.thread for opened in trace.ranges) or Counter(call.thread for call in trace.calls)
    return threads.most_common(1)[0][0] if threads else (0, 0)


def _cut(names: Sequence[str]) -> _Cut | None:
    """The best cut of these events into steps that are alike. [Note: the rule]"""
    cuts = [cut for ends in _even_cuts(names) if (cut := _judged(names, ends))]
    return max(cuts, key=lambda cut: (cut.alike, len(cut.ends)), default=None)


def _even_cuts(names: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Cuts by names with bursts at even distances: one cut for each number of steps, few steps first."""
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(name, []).append(place)
    tried: set[int] = set()
    for bursts in sorted(map(_bursts, places.values()), key=lambda bursts: (len(bursts), bursts[0])):
        distances = [after - before for before, after in pairwise(bursts)]
        steady = distances[1:] or distances
        if (
            not 2 <= len(bursts) <= len(names) // _LEAST_NAMES
            or len(bursts) in tried
            or max(steady) > _MOST_UNEVEN * min(steady)
        ):
            continue
        tried.add(len(bursts))
        before = max(0, median_low(steady) - (len(names) - bursts[-1]))  # a step's events before the burst
        yield (*(_last_alike(names, place - before, reach=min(steady) // 10) for place in bursts[1:]), len(names))
        if len(tried) == _MOST_CUTS:
            return


def _bursts(places: Sequence[int]) -> list[int]:
    """The first of each group of places that lie together, as an optimizer's kernels do, or a layer's kernels in all layers."""
    least_gap = max((after - before for before, after in pairwise(places)), default=0) / 2
    return [places[0], *(after for before, after in pairwise(places) if after - before > least_gap)]


def _last_alike(names: Sequence[str], end: int, *, reach: int) -> int:
    """Where a step that should end at `end` really ends: after the nearest event named like the trace's last event."""
    for distance in range(reach + 1):
        for place in (end - distance, end + distance):
            if 0 < place < len(names) and names[place - 1] == names[-1]:
                return place
    return end


def _judged(names: Sequence[str], ends: tuple[int, ...]) -> _Cut | None:
    """The cut at these ends if its steps are alike, else None."""
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
