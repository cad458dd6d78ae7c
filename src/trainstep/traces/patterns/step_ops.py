"""The ops of profiled steps, each with its cost and the shapes of its tensors, from which patterns are found.

    ops = StepOps(read_work(trace))
    ops.costs([op for op in ops.all if op.name == "aten::bmm"])       # phase -> Cost

On a device an op's time is that of the kernels that it launches, and `gap_ns` is the device's idle time before them. Without a
device it is the host's time. The profiler lengthens that by some microseconds per range, so a cost counts its `ranges`.

[Note: rate] The rate of memory is that of the step's own large copies and sums: the median over additions, products and copies of
at least 2^15 elements of 4 bytes each; on a GPU those of foreach count too.
"""

import math
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from trainstep.config.run import Phase
from trainstep.traces.kineto import Range
from trainstep.traces.nesting import Cover, Nesting
from trainstep.traces.work import TraceWork, is_wait_for_data

UPDATE = "Optimizer.step#"
"""Prefix of torch's own range of an optimizer's step."""
ELEMENT_BYTES = 4
_SIMPLE = re.compile(r"::(add|add_|mul|mul_|copy_|sub|div)$")
_SIMPLE_FOREACH = re.compile(r"::_foreach_(add_|mul_|lerp_|div_)$")
_AUTOGRAD = re.compile(r"^autograd::engine|^\w+Backward\d*$")
"""Names of the ranges that autograd's engine opens around the ops of a backward."""
PYTHON_NS = 50_000
"""A longer time before an op is not Python's: a sleep, a file, another op's backward."""
_LARGE = 2**15
_RATE_BYTES_PER_S = 2e10
"""Memory's rate where the step has no large op that shows it."""

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of an op: its time, and on a device the idle time before its kernels. `ranges`: number of recorded ranges."""

    time_ns: int = 0
    gap_ns: int = 0
    ranges: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            time_ns=self.time_ns + other.time_ns,
            gap_ns=self.gap_ns + other.gap_ns,
            ranges=self.ranges + other.ranges,
        )


NOTHING = Cost()


class StepOps:
    """The ops of a trace's steps.

    `all`: the ops by thread, in order of start, without those with which a loader makes a batch: that time is a wait.
    `own`: id -> cost without the ops that it calls; `whole`: the cost with them.
    `phases`: id -> phase. `of`: phase -> cost of all of its ops.
    """

    def __init__(self, work: TraceWork) -> None:
        self.on_device = work.on_device
        self.steps = len(work.steps)
        self.nestings = list(work.attribution.nestings.values())
        self.own: dict[int, Cost] = {}
        self.whole: dict[int, Cost] = {}
        if work.on_device:
            self._launched(work)
        else:
            self._computed()
        for nesting in self.nestings:
            for index in range(len(nesting.ranges) - 1, -1, -1):
                key = id(nesting.ranges[index])
                cost = self.whole[key] = self.whole.get(key, NOTHING) + self.own.get(key, NOTHING)
                if (parent := nesting.parents[index]) >= 0:
                    above = id(nesting.ranges[parent])
                    self.whole[above] = self.whole.get(above, NOTHING) + cost
        windows = [(step.start_ns, step.start_ns + step.window_ns) for step in work.steps]
        self.all = [
            opened
            for nesting in self.nestings
            for opened in _outside_of_waits(nesting)
            if any(start <= opened.start_ns < end for start, end in windows)
        ]
        self.phases = {
            id(opened): work.attribution.place_at(opened.thread, opened.start_ns).phase for opened in self.all
        }
        # An update's range begins before its phase's range, and its own cost is Python's time between its ops
        updates = [opened for opened in self.all if opened.annotation and opened.name.startswith(UPDATE)]
        self.phases |= {id(opened): str(Phase.OPTIMIZER) for opened in updates}
        self.of: dict[str, Cost] = {}
        for opened in self.all:
            phase = self.phases[id(opened)]
            self.of[phase] = self.of.get(phase, NOTHING) + self.own.get(id(opened), NOTHING)
        self.bytes_per_ns = self._rate()

    def costs(self, ops: Iterable[Range], *, whole: bool = False) -> dict[str, Cost]:
        """Phase -> the cost of these ops, without the ops that they call, or with them if `whole`."""
        cost_of = self.whole if whole else self.own
        costs: dict[str, Cost] = {}
        for opened in ops:
            phase = self.phases[id(opened)]
            costs[phase] = costs.get(phase, NOTHING) + cost_of.get(id(opened), NOTHING)
        return costs

    def around(self, ops: Iterable[Range]) -> dict[str, Cost]:
        """Phase -> what a CPU spends to reach these ops: autograd's own ranges around them, and Python's time before each.

        None on a device. A longer time than `PYTHON_NS` before an op is not Python's.
        """
        wanted = {id(opened) for opened in ops}
        costs: dict[str, Cost] = {}
        for nesting in () if self.on_device else self.nestings:
            ended_ns: dict[int, int] = {}
            before_ns: list[int] = []
            for opened, parent in zip(nesting.ranges, nesting.parents, strict=True):
                before_ns.append(max(0, opened.start_ns - ended_ns.get(parent, opened.start_ns)))
                ended_ns[parent] = opened.end_ns
            reached: set[int] = set()
            for place, opened in enumerate(nesting.ranges):
                if id(opened) not in wanted:
                    continue
                phase, index = self.phases[id(opened)], place
                while index >= 0 and index not in reached and not nesting.ranges[index].annotation:
                    reached.add(index)
                    frame, above = nesting.ranges[index], nesting.parents[index]
                    if _AUTOGRAD.search(frame.name) and id(frame) not in wanted:
                        costs[phase] = costs.get(phase, NOTHING) + self.own[id(frame)]
                    if (above < 0 or nesting.ranges[above].annotation) and before_ns[index] <= PYTHON_NS:
                        costs[phase] = costs.get(phase, NOTHING) + Cost(time_ns=before_ns[index])
                    index = above
        return costs

    def is_of_update(self, opened: Range, update: Range) -> bool:
        """Whether an op belongs to this update. A closure (Lightning has one) runs forward and backward inside of it."""
        is_inside = update.start_ns <= opened.start_ns < update.end_ns
        return is_inside and self.phases.get(id(opened)) not in (str(Phase.FORWARD), str(Phase.BACKWARD))

    def _computed(self) -> None:
        for nesting in self.nestings:
            for opened, self_ns in zip(nesting.ranges, nesting.self_ns(), strict=True):
                self.own[id(opened)] = Cost(time_ns=max(0, self_ns), ranges=1)

    def _launched(self, work: TraceWork) -> None:
        for piece in work.pieces:
            nesting = None if piece.call is None else work.attribution.nestings.get(piece.call.thread)
            opened = None if nesting is None or piece.call is None else next(nesting.around(piece.call.start_ns), None)
            if opened is not None:
                cost = Cost(time_ns=piece.duration_ns, gap_ns=piece.gap_ns)
                self.own[id(opened)] = self.own.get(id(opened), NOTHING) + cost

    def _rate(self) -> float:
        """[Note: rate]"""
        rates = []
        for opened in self.all:
            sizes = [math.prod(shape) for shape in tensors(opened)]
            time_ns = self.own.get(id(opened), NOTHING).time_ns
            if time_ns and max(sizes, default=0) >= _LARGE and _SIMPLE.search(opened.name):
                reads = sum(size for size in sizes if size >= _LARGE)
                rates.append(ELEMENT_BYTES * (reads + max(sizes)) / time_ns)
            elif time_ns and self.on_device and _SIMPLE_FOREACH.search(opened.name):
                written = sum(map(math.prod, first_list(opened)))
                rates += [ELEMENT_BYTES * (sum(sizes) + written) / time_ns] if written >= _LARGE else []
        return statistics.median(rates) if rates else _RATE_BYTES_PER_S / 1e9


def _outside_of_waits(nesting: Nesting) -> list[Range]:
    """The ranges of a thread that begin while it waits for no data."""
    waits = Cover((opened.start_ns, opened.end_ns) for opened in nesting.ranges if is_wait_for_data(opened))
    return [opened for opened in nesting.ranges if not waits.within_ns(opened.start_ns, opened.start_ns + 1)]


def tensors(opened: Range) -> list[Shape]:
    """The shapes of an op's inputs that are tensors, including tensors in lists."""
    shapes: list[Shape] = []
    for shape in opened.shapes:
        if not isinstance(shape, tuple):  # a trace may hold anything
            continue
        nested = [entry for entry in shape if isinstance(entry, tuple)]
        shapes += [entry for entry in nested or [shape] if entry and all(isinstance(size, int) for size in entry)]
    return shapes


def first_list(opened: Range) -> list[Shape]:
    """The shapes of the tensors in an op's first input, a list."""
    first = opened.shapes[0] if opened.shapes else ()
    entries = first if isinstance(first, tuple) else ()
    return [entry for entry in entries if isinstance(entry, tuple) and all(isinstance(size, int) for size in entry)]


def first(opened: Range) -> Shape:
    """The shape of an op's first tensor; () for an op without tensors."""
    return next(iter(tensors(opened)), ())
