"""The context of open ranges agrees with a naive reading of the whole stack at every moment, and takes linear time."""

import random
from collections.abc import Sequence

import pytest

from trace_maker import MAIN, op, span
from trainstep.traces import contexts
from trainstep.traces.contexts import NOTHING_OPEN, Context, Contexts, Spans
from trainstep.traces.kineto import Range
from trainstep.traces.nesting import Nesting

NAMES = (
    *("step 0", "step 1", "forward", "backward", "layer 0", "mlp", "mlp.fc", "model.h.3.mlp", "model.h.3.mlp.fc"),
    *("Optimizer.step#AdamW.step", "## Call CompiledFxGraph f", "aten::mm", "MmBackward0", "AccumulateGrad"),
)


def nested(seed: int, *, crossing: bool) -> list[Range]:
    """Random nested ranges; if crossing, some end up to two nanoseconds early or late, as rounding makes them."""
    rng = random.Random(seed)
    ranges: list[Range] = []

    def fill(start: int, end: int, depth: int) -> None:
        while end - start > 4 and depth < 7 and rng.random() < 0.8:
            first = rng.randint(start, end - 3)
            last = rng.randint(first + 1, end)
            name = rng.choice(NAMES)
            make = span if name in NAMES[:11] else op
            example = make(name, 0, 0)
            late = rng.randint(-2, 2) if crossing else 0
            ranges.append(
                Range(
                    name=name,
                    thread=MAIN,
                    start_ns=first,
                    duration_ns=max(0, last - first + late),
                    annotation=example.annotation,
                    sequence=7 if name == "MmBackward0" else -1,
                    forward_thread=1 if name == "MmBackward0" else 0,
                )
            )
            fill(first, last, depth + 1)
            start = last

    fill(0, 600, 0)
    return Nesting(ranges).ranges


def folded(stack: Sequence[Range]) -> Context:
    """The context of a stack, from the outermost range in."""
    context = NOTHING_OPEN
    for opened in stack:
        context = context.with_range(opened, names_phases=True)
    return context


def parts(context: Context) -> tuple[object, ...]:
    return tuple(getattr(context, name) for name in Context.__dataclass_fields__)


@pytest.mark.parametrize("crossing", [False, True], ids=["nested", "rounded"])
def test_contexts_agree_with_the_whole_stack_at_every_moment(crossing: bool):
    for seed in range(30):
        ranges = nested(seed, crossing=crossing)
        nesting, swept = Nesting(ranges), Contexts(ranges, names_phases=True)
        for time_ns in range(-1, 605):
            stack = list(nesting.around(time_ns))[::-1]
            assert parts(swept.at(time_ns)) == parts(folded(stack)), (seed, time_ns)


def test_two_stacks_put_together_are_one():
    rng = random.Random(1)
    for _ in range(500):
        outer, inner = ([rng.choice(NAMES[:9]) for _ in range(rng.randint(0, 4))] for _ in range(2))
        joined = spans([*outer, *inner])
        assert spans(inner).inside(spans(outer)) == joined, (outer, inner)


def spans(names: Sequence[str]) -> Spans:
    context = Spans()
    for name in names:
        context = context.with_annotation(name, names_phases=True)
    return context


def test_the_innermost_names_of_a_deep_stack_are_left_out():
    context = spans([f"a{number}" for number in range(1000)])
    assert context.names == tuple(f"a{number}" for number in range(50))


@pytest.mark.parametrize("shape", ["nested", "crossing"])
def test_the_sweep_is_linear_in_ranges(shape: str, monkeypatch: pytest.MonkeyPatch):
    """Contexts are counted, not timed. Ranges that all cross are the worst case, as none ends inside the range before it."""
    count_made = 0
    original = Context.with_range

    def counted(self: Context, opened: Range, names_phases: bool) -> Context:
        nonlocal count_made
        count_made += 1
        return original(self, opened, names_phases)

    monkeypatch.setattr(contexts.Context, "with_range", counted)
    count = 2000
    ends = (lambda number: 3 * count - number) if shape == "nested" else (lambda number: count + number)
    ranges = [span(f"a{number}", number, ends(number)) for number in range(count)]
    Contexts(ranges, names_phases=False)
    assert count_made <= 2 * count
