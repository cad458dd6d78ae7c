"""Steps of a trace that marks none: by its optimizer, by what repeats, or one."""

import dataclasses
import random

import pytest

from trace_maker import AUTOGRAD, EAGER, kernel, launched, op, span, trace
from trainstep.traces.contexts import step_number
from trainstep.traces.kineto import Activity, Call, Range, Trace, read_trace
from trainstep.traces.profile import profile_of
from trainstep.traces.repetition import with_steps
from trainstep.traces.work import by_step, read_work

Event = Activity | Call | Range
LAYER = ["norm", "qkv", "scores", "softmax", "values", "project"]
FORWARD = ["embedding", *LAYER * 4, "head", "loss"]
BACKWARD = [
    "loss backward",
    "head backward",
    *(f"{name} backward" for name in reversed(LAYER * 4)),
    "embedding backward",
]
STEP = [*FORWARD, *BACKWARD, *["adam"] * 5]


def ops(*steps: list[str]) -> Trace:
    """Ops one after the other on a CPU, 10 us each."""
    return trace(*(op(name, 10 * at, 10 * at + 8) for at, name in enumerate(name for step in steps for name in step)))


def kernels(*steps: list[str], late: int = 0) -> Trace:
    """Kernels launched one after the other, each `late` us before it runs."""
    names = [name for step in steps for name in step]
    events: list[Event] = [
        event
        for at, name in enumerate(names)
        for event in launched(name, 10 * at, 10 * at + late, 10 * at + late + 8, at)
    ]
    return trace(*events)


def pieces_by_step(given: Trace) -> list[list[str]]:
    """The names of each step's pieces of work, without what passes between ops."""
    work = read_work(given)
    names = {one.name for one in given.ranges} | {one.name for one in given.activities}
    return [[one.name for one in pieces if one.name in names] for pieces in by_step(work).values()]


@pytest.mark.parametrize("make", [ops, kernels])
def test_five_alike(make):
    assert pieces_by_step(make(*[STEP] * 5)) == [STEP] * 5
    assert with_steps(make(*[STEP] * 5))[1].startswith("The trace marks no steps: it is split into 5 by what repeats")


@pytest.mark.parametrize("seed", range(5))
def test_jitter(seed: int):
    """Here and there a piece more, a piece less, and two that change places, as those of two streams do."""
    chance = random.Random(seed)
    steps = []
    for _ in range(6):
        step = list(STEP)
        step.insert(chance.randrange(1, len(step) - 1), "Memcpy HtoD")
        del step[chance.randrange(2, 20)]
        at = chance.randrange(1, len(step) - 2)
        step[at], step[at + 1] = step[at + 1], step[at]
        steps.append(step)
    found = pieces_by_step(kernels(*steps, late=3))
    assert len(found) == 6
    assert all(abs(len(step) - len(STEP)) <= 3 for step in found)


def test_a_warm_up_that_differs():
    warm_up = [name for name in STEP for name in ("autotune", name)]
    given = kernels(warm_up, *[STEP] * 4)
    assert pieces_by_step(given) == [warm_up, *[STEP] * 4]
    assert with_steps(given)[1].endswith(", of which the first differs from the others.")
    assert len(pieces_by_step(kernels(warm_up, STEP))) == 1, "one step alone has nothing that it is like"


def test_it_begins_and_ends_within_a_step():
    whole = [*STEP * 5]
    found = pieces_by_step(ops(whole[20:-25]))
    assert len(found) in (4, 5)
    assert all(sorted(step) == sorted(STEP) for step in found[1:])


@pytest.mark.parametrize(
    "step",
    [
        STEP,
        FORWARD,
        [*(FORWARD + BACKWARD) * 4, *["adam"] * 5],
        ["embedding", *LAYER * 24, "norm", "head", "cross entropy"],
        [*FORWARD, *BACKWARD, *["decay", "momentum", "update"] * 40],
        ["mul"] * 100,
        [f"op {number}" for number in range(50)],
    ],
    ids=[
        "training",
        "forward",
        "four micro-batches",
        "many layers",
        "an optimizer's loop",
        "a loop of one op",
        "nothing twice",
    ],
)
def test_one_step_stays_one(step: list[str]):
    given = ops(step)
    marked, words = with_steps(given)
    assert marked is given
    assert words.endswith("so it counts as one step; profiler.step() of torch.profiler marks them.")
    assert len(read_work(given).steps) == 1


def test_several_passes_of_micro_batches():
    step = [*(FORWARD + BACKWARD) * 4, *["adam"] * 5]
    assert pieces_by_step(kernels(*[step] * 3)) == [step] * 3


def test_steps_end_with_their_optimizer():
    """Kernels' names change with the shapes from step to step, and two optimizers update in a row."""
    events: list[Event] = []
    for step in range(3):
        at = 1000 * step
        events += launched(f"gemm of shape {step}", at, at + 10, at + 500, step)
        events.append(op("autograd::engine::evaluate_function", at + 300, at + 400, AUTOGRAD))
        events += [
            span("Optimizer.step#Muon.step", at + 500, at + 600),
            span("Optimizer.step#AdamW.step", at + 600, at + 700),
        ]
    given = trace(*events)
    marked, words = with_steps(given)
    assert words == "The trace marks no steps: it is split where the optimizer's 3 steps end."
    steps = [one for one in marked.ranges if step_number(one.name) is not None]
    assert [(one.start_ns, one.end_ns) for one in steps] == [(0, 700_000), (700_000, 1_700_000), (1_700_000, 2_700_000)]
    assert [len(pieces) for pieces in by_step(read_work(given)).values()] == [1, 1, 1]


def test_one_update_is_one_step_whatever_repeats():
    events = [op(name, 10 * at, 10 * at + 8) for at, name in enumerate((FORWARD + BACKWARD) * 4)]
    given = trace(*events, span("Optimizer.step#AdamW.step", 10_000, 10_100))
    assert with_steps(given)[1].startswith("The trace marks no steps and its optimizer steps once")


def test_marks_are_taken_as_they_are():
    given = read_trace(EAGER)
    assert with_steps(given) == (given, "")


def test_the_same_steps_as_marked():
    """A recorded trace without its marks gives the numbers that it has with them."""
    given = read_trace(EAGER)
    bare = dataclasses.replace(given, ranges=tuple(one for one in given.ranges if step_number(one.name) is None))
    with_marks, without = profile_of(given), profile_of(bare)
    assert len(without.steps_s) == 3
    assert without.pieces == with_marks.pieces
    assert without.total_s == with_marks.total_s
    assert without.split


def test_kernels_that_no_call_launched():
    """Some profilers see the device alone."""
    names = STEP * 3
    given = trace(*(kernel(name, 10 * at, 10 * at + 8) for at, name in enumerate(names)))
    assert pieces_by_step(given) == [STEP] * 3


def test_one_launch_for_all_is_one_step():
    """A CUDA graph of several steps: the host did nothing between them."""
    given = trace(
        *launched("embedding", 0, 5, 6, 1),
        *(kernel(name, 10 * at, 10 * at + 8, 1) for at, name in enumerate(STEP * 3, 1)),
    )
    assert len(read_work(given).steps) == 1
