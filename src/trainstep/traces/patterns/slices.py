"""Finds the same few ops at least 8 times in a row, on slices that a split made or that are joined again.

Least time: one op over all the elements in place of each op, without splitting and joining. The ops of backward are found by
autograd's sequence numbers. [Note: numbers] An op has the number of the next gradient function. An op without a gradient makes no
such function, so several ops may share a number, and the function belongs to the last of them. For example, ops that join a batch
of 16 samples have the number of the model's first op.

A CPU also takes time to compute each element: gelu took 1.0 ns by erf and 2.4 ns by tanh (one thread, AVX-512). A trace does not
tell the two apart, so 1.7 ns are assumed.
"""

import itertools
import math
import re
from collections.abc import Iterator, Sequence

from trainstep.traces.attribution import OUTSIDE
from trainstep.traces.kineto import Range
from trainstep.traces.nesting import Nesting
from trainstep.traces.patterns.pattern import SLICES, Pattern
from trainstep.traces.patterns.step_ops import ELEMENT_BYTES, NOTHING, PYTHON_NS, UPDATE, Cost, StepOps, tensors

_FUNCTION_NS = 1.7
_SPLITS = re.compile(r"::(split\w*|tensor_split|chunk|unbind|unsafe_\w+)$")
_JOINS = re.compile(r"::(cat|stack|hstack|vstack|concat\w*)$")
_TAKES = re.compile(r"::(select|slice|narrow|index|index_select|gather)$")
_MOVES = re.compile("|".join(pattern.pattern for pattern in (_SPLITS, _JOINS, _TAKES)))
_LONGEST_PERIOD, _FEWEST = 8, 8


def in_slices(ops: StepOps) -> Iterator[Pattern]:
    """The pattern of such repeated ops, all steps together."""
    costs: dict[str, Cost] = {}
    elements, calls, most = 0, 0, 0
    backward: dict[int, list[Range]] = {}
    for opened in ops.all:
        if opened.backward and opened.name.startswith("autograd::engine::evaluate_function"):
            backward.setdefault(opened.sequence, []).append(opened)
    for nesting in ops.nestings:
        forward = [opened for opened in nesting.ranges if not opened.annotation and not opened.backward]
        made_at_ns = {opened.sequence: opened.start_ns for opened in sorted(forward, key=lambda op: op.start_ns)}
        for run, repeats in _runs(_outer(ops, nesting)):
            within = [opened for opened in _within(nesting, run) if not opened.backward]
            sequences = {opened.sequence for opened in within if opened.sequence >= 0}
            makers = [number for number in sequences if made_at_ns[number] < run[-1].end_ns]  # [Note: numbers]
            own = [opened for number in makers for opened in backward.get(number, ())]
            for opened in (*run, *own):
                phase = ops.phases[id(opened)]
                costs[phase] = costs.get(phase, NOTHING) + ops.whole[id(opened)]
            if not ops.on_device:
                costs[ops.phases[id(run[0])]] += Cost(time_ns=_python_ns(run))
            passes = 2 if own else 1
            computing = [opened for opened in run if not _MOVES.search(opened.name)] or run
            elements += passes * sum(max(map(math.prod, tensors(opened)), default=0) for opened in computing)
            calls += repeats
            most = max(most, repeats)
    if not calls:
        return
    least_ns = 2 * ELEMENT_BYTES * elements / ops.bytes_per_ns
    yield Pattern(
        name=SLICES,
        calls=calls,
        costs=costs,
        least_ns=least_ns if ops.on_device else max(least_ns, _FUNCTION_NS * elements),
        what=f"the same ops run {most} times in a row on slices, {calls / ops.steps:,.0f} times a step",
    )


def _python_ns(run: Sequence[Range]) -> int:
    """Python's time between the ops of a run."""
    between_ns = [after.start_ns - before.end_ns for before, after in itertools.pairwise(run)]
    return sum(gap_ns for gap_ns in between_ns if 0 < gap_ns <= PYTHON_NS)


def _outer(ops: StepOps, nesting: Nesting) -> list[Range]:
    """The ops of a phase of a step that no other op calls, of one thread and outside an optimizer.

    Ops of no phase make a batch ready, which no compiled model does for them.
    """
    updates = [opened for opened in nesting.ranges if opened.annotation and opened.name.startswith(UPDATE)]

    def is_outer(index: int) -> bool:
        opened, parent = nesting.ranges[index], nesting.parents[index]
        return (
            not opened.annotation
            and not opened.backward
            and ops.phases.get(id(opened), OUTSIDE) != OUTSIDE
            and (parent < 0 or nesting.ranges[parent].annotation)
            and not any(ops.is_of_update(opened, update) for update in updates)
        )

    return [nesting.ranges[index] for index in range(len(nesting.ranges)) if is_outer(index)]


def _within(nesting: Nesting, run: Sequence[Range]) -> list[Range]:
    start, end = run[0].start_ns, run[-1].end_ns
    return [opened for opened in nesting.ranges if start <= opened.start_ns < end and not opened.annotation]


def _runs(ops: Sequence[Range]) -> Iterator[tuple[list[Range], int]]:
    """Runs of ops on slices, each with the split before and the join after it, and the number of repeats."""
    names = [opened.name for opened in ops]
    index = 0
    while index < len(ops):
        period, repeats = _repetition(names, index)
        if repeats < _FEWEST:
            index += 1
            continue
        end = index + period * repeats
        splits = index > 0 and bool(_SPLITS.search(names[index - 1]))
        joins = end < len(ops) and bool(_JOINS.search(names[end]))
        takes = any(_TAKES.search(name) for name in names[index : index + period])
        if splits or joins or (takes and period > 1):
            yield list(ops[index - splits : end + joins]), repeats
        index = end


def _repetition(names: Sequence[str], start: int) -> tuple[int, int]:
    """From `start` on, the period whose repeats cover the most ops, and the number of repeats."""
    best = 1, 1
    for period in range(1, _LONGEST_PERIOD + 1):
        repeats, first = 1, names[start : start + period]
        while names[start + repeats * period : start + (repeats + 1) * period] == first and first:
            repeats += 1
        if repeats >= _FEWEST and repeats * period > best[0] * best[1]:
            best = period, repeats
    return best
