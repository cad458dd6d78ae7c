"""Finds, in a step whose model nobody knows, ways of computing that cost more than another that gives the same.

    patterns_table(read_work(trace))      # a row a pattern: its time in the step, and the least that the other way would take

The trace must have shapes (`torch.profiler.profile(record_shapes=True)`); without them there are no rows. A pattern is told by
what ops do to which shapes, never by a name of the user's:

attention  scores = a batched matmul, then a softmax over its last dimension: all other ops on tensors of that shape go through
           memory, which a fused attention does not do. At least: the batched matmuls. A fused attention does 7 batched matmuls
           where these are 6 (it computes the scores again in backward), skips masked blocks, and also does the softmax; on a CPU
           it took 0.84 to 1.12 times these matmuls' time (docs/log.md, 2026-11-25).
mask       on a GPU, a fused attention that is given a mask of T x T. If it is causal, to say so skips half of the work. At least:
           half of the time; a GPT-2 without the mask of Hugging Face's took 0.42 of it (docs/log.md, 2026-11-27).
optimizer  an Adam (`addcdiv_`) of one tensor after the other, as foreach on a CPU is too; on a GPU foreach, which is a kernel for
           each of its eight ops. At least: a pass over parameter, gradient and two moments, 28 bytes an element. Of lists of more
           than 30 tensors torch writes no shapes; foreach moves 84 bytes an element, so at least a third of the time is taken.
slices     the same few ops at least 8 times in a row, on slices that a split made or that are put together again. At least:
           the same elements in one op. Backward's part is found by autograd's sequence numbers. [Note: numbers] An op's number
           is that of the next gradient function, which an op without a gradient does not make: several ops have one number,
           and the function is the last one's. A batch that is put together of 16 samples has the number of the model's first op.
precision  matmuls of fp32 tensors on a GPU.

Time on a device is that of the kernels that an op launches, and `gap_s` what the device waited before them; without a device it
is the host's time, which the profiler lengthens by some microseconds a range: so a row has its `ranges`, and those of its phase
(`of_s`, `of_ranges`). Memory goes at the rate of the step's own large copies and sums: [Note: rate] the median over
additions, products and copies of at least 2^15 elements, of 4 bytes each, on a GPU also those of foreach. A CPU also needs about
1 ns for an element of a function as gelu.
"""

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainstep.config.run import Phase
from trainstep.traces.fused_attention import mask_of
from trainstep.traces.kineto import Range
from trainstep.traces.nesting import Nesting
from trainstep.traces.tables import Columns, columns_of
from trainstep.traces.work import TraceWork

ATTENTION, OPTIMIZER, SLICES, PRECISION = "written-out attention", "optimizer by tensor", "slices", "fp32 matmuls"
MASK = "attention with a mask"
_BATCHED = ("aten::bmm", "aten::baddbmm")
_MATMULS = (*_BATCHED, "aten::mm", "aten::addmm")
_SOFTMAX = ("aten::_softmax", "aten::_safe_softmax")
_UPDATE = "Optimizer.step#"
_ADAM_BYTES, _FOREACH_BYTES = 28, 84
_FOREACH_UPDATE = "aten::_foreach_addcdiv_"
_SIMPLE = re.compile(r"::(add|add_|mul|mul_|copy_|sub|div)$")
_SIMPLE_FOREACH = re.compile(r"::_foreach_(add_|mul_|lerp_|div_)$")
_LARGE, _ELEMENT_BYTES = 2**15, 4
_RATE_BYTES_PER_S = 2e10
"""Memory's rate where the step has no large op that shows it."""
_FUNCTION_NS = 1.0
_SPLITS = re.compile(r"::(split\w*|tensor_split|chunk|unbind|unsafe_\w+)$")
_JOINS = re.compile(r"::(cat|stack|hstack|vstack|concat\w*)$")
_TAKES = re.compile(r"::(select|slice|narrow|index|index_select|gather)$")
_LONGEST_PERIOD, _FEWEST, _LEAST_TENSORS = 8, 8, 8
_MOST_WITH_SHAPES = 30
"""torch writes no shapes of longer lists."""


@dataclass(frozen=True, kw_only=True)
class _Cost:
    """Nanoseconds of an op: its time, and on a device the idle time before its kernels. `ranges`: that the profiler noted."""

    time_ns: int = 0
    gap_ns: int = 0
    ranges: int = 0

    def __add__(self, other: "_Cost") -> "_Cost":
        return _Cost(
            time_ns=self.time_ns + other.time_ns,
            gap_ns=self.gap_ns + other.gap_ns,
            ranges=self.ranges + other.ranges,
        )


_NOTHING = _Cost()


def patterns_table(work: TraceWork) -> Columns:
    """The rows, per step: one for each pattern and phase."""
    if not has_shapes(work):
        return {}
    return columns_of([row for row in _Reader(work).rows() if row["time_s"] > 0])


def has_shapes(work: TraceWork) -> bool:
    """Whether the profiler recorded shapes, without which no pattern is seen."""
    return any(opened.shapes for opened in work.attribution.trace.ranges)


class _Reader:
    """The ops of a trace with their costs."""

    def __init__(self, work: TraceWork) -> None:
        self._work = work
        self._steps = len(work.steps)
        windows = [(step.start_ns, step.start_ns + step.window_ns) for step in work.steps]
        self._nestings = list(work.attribution.nestings.values())
        self._own: dict[int, _Cost] = {}
        self._whole: dict[int, _Cost] = {}
        (self._launched if work.on_device else self._computed)()
        for nesting in self._nestings:
            for index in range(len(nesting.ranges) - 1, -1, -1):
                cost = self._whole[id(nesting.ranges[index])] = self._whole.get(
                    id(nesting.ranges[index]), _NOTHING
                ) + self._own.get(id(nesting.ranges[index]), _NOTHING)
                if (parent := nesting.parents[index]) >= 0:
                    key = id(nesting.ranges[parent])
                    self._whole[key] = self._whole.get(key, _NOTHING) + cost
        self._ops = [
            opened
            for nesting in self._nestings
            for opened in nesting.ranges
            if any(start <= opened.start_ns < end for start, end in windows)
        ]
        self._phases = {
            id(opened): work.attribution.place_at(opened.thread, opened.start_ns).phase for opened in self._ops
        }
        # An update's range begins before that of its phase, and has the time of Python between its ops
        updates = [opened for opened in self._ops if opened.annotation and opened.name.startswith(_UPDATE)]
        self._phases |= {id(opened): str(Phase.OPTIMIZER) for opened in updates}
        self._of: dict[str, _Cost] = {}
        for opened in self._ops:
            phase = self._phases[id(opened)]
            self._of[phase] = self._of.get(phase, _NOTHING) + self._own.get(id(opened), _NOTHING)
        self._bytes_per_ns = self._rate()

    def rows(self) -> Iterator[dict[str, Any]]:
        """The patterns that are there."""
        for row in (self._attention(), self._mask(), self._optimizer(), self._slices(), self._precision()):
            yield from row

    def _rows(
        self, pattern: str, calls: int, costs: Mapping[str, _Cost], least_ns: float, what: str
    ) -> Iterator[dict[str, Any]]:
        """A row for each phase of `costs`, among which the least is divided as the time is."""
        per_step, whole_ns = 1e9 * self._steps, sum(cost.time_ns for cost in costs.values())
        for phase, cost in costs.items():
            of = self._of.get(phase, _NOTHING)
            yield {
                "pattern": pattern,
                "phase": phase,
                "calls": calls / self._steps,
                "time_s": cost.time_ns / per_step,
                "least_s": min(least_ns, whole_ns) * cost.time_ns / max(whole_ns, 1) / per_step,
                "gap_s": cost.gap_ns / per_step,
                "ranges": cost.ranges / self._steps,
                "of_s": of.time_ns / per_step,
                "of_ranges": of.ranges / self._steps,
                "what": what,
            }

    def _computed(self) -> None:
        for nesting in self._nestings:
            for opened, self_ns in zip(nesting.ranges, nesting.self_ns(), strict=True):
                self._own[id(opened)] = _Cost(time_ns=max(0, self_ns), ranges=1)

    def _launched(self) -> None:
        for piece in self._work.pieces:
            nesting = None if piece.call is None else self._work.attribution.nestings.get(piece.call.thread)
            opened = None if nesting is None or piece.call is None else next(nesting.around(piece.call.start_ns), None)
            if opened is not None:
                cost = _Cost(time_ns=piece.duration_ns, gap_ns=piece.gap_ns)
                self._own[id(opened)] = self._own.get(id(opened), _NOTHING) + cost

    def _costs(self, ops: Iterable[Range], *, whole: bool = False) -> dict[str, _Cost]:
        """Phase -> the cost of these ops alone, without those that they call, or as a `whole`."""
        known = self._whole if whole else self._own
        costs: dict[str, _Cost] = {}
        for opened in ops:
            phase = self._phases[id(opened)]
            costs[phase] = costs.get(phase, _NOTHING) + known.get(id(opened), _NOTHING)
        return costs

    def _rate(self) -> float:
        """[Note: rate]"""
        rates = []
        for opened in self._ops:
            sizes = [math.prod(shape) for shape in _tensors(opened)]
            time_ns = self._own.get(id(opened), _NOTHING).time_ns
            if time_ns and max(sizes, default=0) >= _LARGE and _SIMPLE.search(opened.name):
                reads = sum(size for size in sizes if size >= _LARGE)
                rates.append(_ELEMENT_BYTES * (reads + max(sizes)) / time_ns)
            elif time_ns and self._work.on_device and _SIMPLE_FOREACH.search(opened.name):
                written = sum(map(math.prod, _first_list(opened)))
                rates += [_ELEMENT_BYTES * (sum(sizes) + written) / time_ns] if written >= _LARGE else []
        return statistics.median(rates) if rates else _RATE_BYTES_PER_S / 1e9

    # Attention

    def _attention(self) -> Iterator[dict[str, Any]]:
        products = {_product(opened) for opened in self._ops if opened.name in _BATCHED}
        soft = [
            opened
            for opened in self._ops
            if opened.name in _SOFTMAX and len(_first(opened)) >= 3 and _scores(_first(opened)) in products
        ]
        shapes = {_scores(_first(opened)) for opened in soft}
        if not shapes:
            return
        touching = [opened for opened in self._ops if any(_scores(shape) in shapes for shape in _tensors(opened))]
        others = [opened for opened in touching if opened.name not in _BATCHED]
        matmuls = [opened for opened in self._ops if opened.name in _BATCHED and self._meets(opened, shapes)]
        least_ns = sum(cost.time_ns for cost in self._costs(matmuls).values())
        words = ", ".join(" x ".join(map(str, shape[-2:])) for shape in sorted(shapes))
        what = f"scores of {words} are written to memory by {len(others) / self._steps:,.0f} ops"
        yield from self._rows(ATTENTION, len(soft), self._costs([*others, *matmuls]), least_ns, what)

    def _meets(self, opened: Range, shapes: set[tuple[int, int, int]]) -> bool:
        return _product(opened) in shapes or any(_scores(shape) in shapes for shape in _tensors(opened))

    def _mask(self) -> Iterator[dict[str, Any]]:
        masked = [op for op in self._ops if self._work.on_device and mask_of(op)]
        costs = self._costs(masked, whole=True)
        words = ", ".join(sorted({" x ".join(map(str, mask_of(op)[-2:])) for op in masked}))
        least_ns = sum(cost.time_ns for cost in costs.values()) / 2
        what = f"attention is given a mask of {words}; if it is causal, half of its work is for nothing"
        yield from self._rows(MASK, len(masked), costs, least_ns, what)

    # Optimizer

    def _optimizer(self) -> Iterator[dict[str, Any]]:
        cost, least_ns, tensors, is_foreach, is_without = _NOTHING, 0.0, 0, False, False
        for nesting in self._nestings:
            for update in nesting.ranges:
                if not (update.annotation and update.name.startswith(_UPDATE)):
                    continue
                inside = [op for op in nesting.ranges if self._updates(op, update)]
                own = [_first(op) for op in inside if op.name == "aten::addcdiv_"]
                lists = not own and self._work.on_device and "Adam" in update.name
                if lists:
                    own = [shape for op in inside if op.name == _FOREACH_UPDATE for shape in _first_list(op)]
                without = lists and any(op.name == _FOREACH_UPDATE and not _first_list(op) for op in inside)
                if without or len(own) >= _LEAST_TENSORS:
                    is_without |= without
                    is_foreach |= lists
                    whole = sum((self._own.get(id(op), _NOTHING) for op in inside), _NOTHING)
                    cost += whole
                    bytes_ns = _ADAM_BYTES * sum(map(math.prod, own)) / self._bytes_per_ns
                    least_ns += whole.time_ns * _ADAM_BYTES / _FOREACH_BYTES if without else bytes_ns
                    tensors += len(own) or 1
        if not tensors:
            return
        way = "by foreach, a pass over memory for each op" if is_foreach else "one after the other"
        many = f"more than {_MOST_WITH_SHAPES}" if is_without else f"{tensors / self._steps:,.0f}"
        what = f"{many} tensors are updated {way}"
        yield from self._rows(OPTIMIZER, tensors, {str(Phase.OPTIMIZER): cost}, least_ns, what)

    def _updates(self, opened: Range, update: Range) -> bool:
        """Whether an op belongs to this update. A closure (Lightning has one) runs forward and backward inside of it."""
        is_inside = update.start_ns <= opened.start_ns < update.end_ns
        return is_inside and self._phases.get(id(opened)) not in (str(Phase.FORWARD), str(Phase.BACKWARD))

    # Slices

    def _slices(self) -> Iterator[dict[str, Any]]:
        costs: dict[str, _Cost] = {}
        elements, calls, most = 0, 0, 0
        backward: dict[int, list[Range]] = {}
        for opened in self._ops:
            if opened.backward and opened.name.startswith("autograd::engine::evaluate_function"):
                backward.setdefault(opened.sequence, []).append(opened)
        for nesting in self._nestings:
            forward = [opened for opened in nesting.ranges if not opened.annotation and not opened.backward]
            made_at_ns = {opened.sequence: opened.start_ns for opened in sorted(forward, key=lambda op: op.start_ns)}
            for run, repeats in _runs(self._outer(nesting)):
                within = [opened for opened in self._within(nesting, run) if not opened.backward]
                sequences = {opened.sequence for opened in within if opened.sequence >= 0}
                makers = [number for number in sequences if made_at_ns[number] < run[-1].end_ns]  # [Note: numbers]
                own = [opened for number in makers for opened in backward.get(number, ())]
                for opened in (*run, *own):
                    phase = self._phases[id(opened)]
                    costs[phase] = costs.get(phase, _NOTHING) + self._whole[id(opened)]
                if not self._work.on_device:
                    between_ns = run[-1].end_ns - run[0].start_ns - sum(opened.duration_ns for opened in run)
                    costs[self._phases[id(run[0])]] += _Cost(time_ns=max(0, between_ns))
                passes = 2 if own else 1
                elements += passes * sum(max(map(math.prod, _tensors(opened)), default=0) for opened in run)
                calls += repeats
                most = max(most, repeats)
        if not calls:
            return
        what = f"the same ops run {most} times in a row on slices, {calls / self._steps:,.0f} times a step"
        least_ns = 2 * _ELEMENT_BYTES * elements / self._bytes_per_ns
        if not self._work.on_device:
            least_ns = max(least_ns, _FUNCTION_NS * elements)
        yield from self._rows(SLICES, calls, costs, least_ns, what)

    def _outer(self, nesting: Nesting) -> list[Range]:
        """The ops of a thread that no other op calls, in a step and outside of an optimizer."""
        known = {id(opened) for opened in self._ops}
        updates = [op for op in nesting.ranges if op.annotation and op.name.startswith(_UPDATE)]

        def is_outer(index: int) -> bool:
            opened, parent = nesting.ranges[index], nesting.parents[index]
            return (
                not opened.annotation
                and not opened.backward
                and id(opened) in known
                and (parent < 0 or nesting.ranges[parent].annotation)
                and not any(self._updates(opened, update) for update in updates)
            )

        return [nesting.ranges[index] for index in range(len(nesting.ranges)) if is_outer(index)]

    def _within(self, nesting: Nesting, run: Sequence[Range]) -> list[Range]:
        start, end = run[0].start_ns, run[-1].end_ns
        return [op for op in nesting.ranges if start <= op.start_ns < end and not op.annotation]

    # Precision

    def _precision(self) -> Iterator[dict[str, Any]]:
        if not self._work.on_device:
            return
        matmuls = [op for op in self._ops if op.name in _MATMULS and op.dtypes[:2] == ("float", "float")]
        yield from self._rows(PRECISION, len(matmuls), self._costs(matmuls), 0.0, "matmuls of fp32 tensors")


def _runs(ops: Sequence[Range]) -> Iterator[tuple[list[Range], int]]:
    """Runs of slices, with the ops around them that split and join, and how often the run repeats."""
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
    """The period from here on that repeats over the most ops, and how often."""
    best = 1, 1
    for period in range(1, _LONGEST_PERIOD + 1):
        repeats, first = 1, names[start : start + period]
        while names[start + repeats * period : start + (repeats + 1) * period] == first and first:
            repeats += 1
        if repeats >= _FEWEST and repeats * period > best[0] * best[1]:
            best = period, repeats
    return best


def _tensors(opened: Range) -> list[tuple[int, ...]]:
    """The shapes of its inputs that are tensors, those in lists too."""
    found: list[tuple[int, ...]] = []
    for shape in opened.shapes:
        if not isinstance(shape, tuple):  # a trace may hold anything
            continue
        nested = [entry for entry in shape if isinstance(entry, tuple)]
        found += [entry for entry in nested or [shape] if entry and all(isinstance(size, int) for size in entry)]
    return found


def _first_list(opened: Range) -> list[tuple[int, ...]]:
    """The shapes of its first input, a list of tensors."""
    first = opened.shapes[0] if opened.shapes else ()
    entries = first if isinstance(first, tuple) else ()
    return [entry for entry in entries if isinstance(entry, tuple) and all(isinstance(size, int) for size in entry)]


def _first(opened: Range) -> tuple[int, ...]:
    return next(iter(_tensors(opened)), ())


def _scores(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(all but the last two, rows, columns): the same of (batch, heads, T, S) and of (batch x heads, T, S)."""
    if len(shape) < 3:
        return 0, 0, 0
    return math.prod(shape[:-2]), shape[-2], shape[-1]


def _product(opened: Range) -> tuple[int, int, int]:
    """The shape of a batched product."""
    factors = [shape for shape in _tensors(opened) if len(shape) == 3][-2:]
    if len(factors) < 2:
        return -1, -1, -1
    return factors[0][0], factors[0][1], factors[1][2]
