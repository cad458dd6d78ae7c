"""The steps of a trace without marks are found by its optimizer or by repetition, or the trace is one step."""

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
    """A trace of ops one after the other on a CPU, 10 us each."""
    return trace(*(op(name, 10 * at, 10 * at + 8) for at, name in enumerate(name for step in steps for name in step)))


def kernels(*steps: list[str], late: int = 0) -> Trace:
    """A trace of kernels launched one after the other, each `late` us before it runs."""
    names = [name for step in steps for name in step]
    events: list[Event] = [
        event
        for at, name in enumerate(names)
        for event in launched(name, 10 * at, 10 * at + late, 10 * at + late + 8, at)
    ]
    return trace(*events)


def pieces_by_step(recorded: Trace) -> list[list[str]]:
    """Names of each step's pieces of work, without the time between ops."""
    work = read_work(recorded)
    names = {range_.name for range_ in recorded.ranges} | {activity.name for activity in recorded.activities}
    return [[piece.name for piece in pieces if piece.name in names] for pieces in by_step(work).values()]


@pytest.mark.parametrize("make", [ops, kernels])
def test_five_equal_steps_are_found(make):
    assert pieces_by_step(make(*[STEP] * 5)) == [STEP] * 5
    assert with_steps(make(*[STEP] * 5))[1].startswith("The trace marks no steps: it is split into 5 by what repeats")


@pytest.mark.parametrize("seed", range(5))
def test_similar_steps_are_found(seed: int):
    """Each step has one piece more, one piece less, and two that change places, as pieces of two streams do."""
    chance = random.Random(seed)
    steps = []
    for _ in range(6):
        step = list(STEP)
        step.insert(chance.randrange(1, len(step) - 1), "Memcpy HtoD")
        del step[chance.randrange(2, 20)]
        at = chance.randrange(1, len(step) - 2)
        step[at], step[at + 1] = step[at + 1], step[at]
        steps.append(step)
    pieces = pieces_by_step(kernels(*steps, late=3))
    assert len(pieces) == 6
    assert all(abs(len(step) - len(STEP)) <= 3 for step in pieces)


def test_a_different_warm_up_is_the_first_step():
    warm_up = [name for name in STEP for name in ("autotune", name)]
    recorded = kernels(warm_up, *[STEP] * 4)
    assert pieces_by_step(recorded) == [warm_up, *[STEP] * 4]
    assert with_steps(recorded)[1].endswith(", of which the first differs from the others.")
    assert len(pieces_by_step(kernels(warm_up, STEP))) == 1, "a single step repeats nothing"


def test_a_trace_that_begins_and_ends_within_a_step_is_split():
    names = [*STEP * 5]
    pieces = pieces_by_step(ops(names[20:-25]))
    assert len(pieces) in (4, 5)
    assert all(sorted(step) == sorted(STEP) for step in pieces[1:])


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
def test_a_single_step_is_not_split(step: list[str]):
    recorded = ops(step)
    marked, words = with_steps(recorded)
    assert marked is recorded
    assert words.endswith("so it counts as one step; profiler.step() of torch.profiler marks them.")
    assert len(read_work(recorded).steps) == 1


def test_steps_of_several_micro_batches_are_found():
    step = [*(FORWARD + BACKWARD) * 4, *["adam"] * 5]
    assert pieces_by_step(kernels(*[step] * 3)) == [step] * 3


def test_steps_end_with_their_optimizer():
    """Kernel names change with the shapes from step to step, and two optimizers update one after the other."""
    events: list[Event] = []
    for step in range(3):
        at = 1000 * step
        events += launched(f"gemm of shape {step}", at, at + 10, at + 500, step)
        events.append(op("autograd::engine::evaluate_function", at + 300, at + 400, AUTOGRAD))
        events += [
            span("Optimizer.step#Muon.step", at + 500, at + 600),
            span("Optimizer.step#AdamW.step", at + 600, at + 700),
        ]
    recorded = trace(*events)
    marked, words = with_steps(recorded)
    assert words == "The trace marks no steps: it is split where the optimizer's 3 steps end."
    steps = [range_ for range_ in marked.ranges if step_number(range_.name) is not None]
    assert [(range_.start_ns, range_.end_ns) for range_ in steps] == [
        (0, 700_000),
        (700_000, 1_700_000),
        (1_700_000, 2_700_000),
    ]
    assert [len(pieces) for pieces in by_step(read_work(recorded)).values()] == [1, 1, 1]


def test_one_update_is_one_step_whatever_repeats():
    events = [op(name, 10 * at, 10 * at + 8) for at, name in enumerate((FORWARD + BACKWARD) * 4)]
    recorded = trace(*events, span("Optimizer.step#AdamW.step", 10_000, 10_100))
    assert with_steps(recorded)[1].startswith("The trace marks no steps and its optimizer steps once")


def test_marked_steps_are_unchanged():
    recorded = read_trace(EAGER)
    assert with_steps(recorded) == (recorded, "")


def test_steps_without_marks_are_the_marked_ones():
    """A recorded trace gives the same numbers with and without its marks."""
    recorded = read_trace(EAGER)
    unmarked = dataclasses.replace(
        recorded, ranges=tuple(range_ for range_ in recorded.ranges if step_number(range_.name) is None)
    )
    with_marks, without = profile_of(recorded), profile_of(unmarked)
    assert len(without.steps_s) == 3
    assert without.pieces == with_marks.pieces
    assert without.total_s == with_marks.total_s
    assert without.split


def test_kernels_without_launches_are_split_too():
    """Some profilers record only the device."""
    names = STEP * 3
    recorded = trace(*(kernel(name, 10 * at, 10 * at + 8) for at, name in enumerate(names)))
    assert pieces_by_step(recorded) == [STEP] * 3


def test_kernels_of_one_launch_are_one_step():
    """As in a CUDA graph of several steps, the host does nothing between them."""
    recorded = trace(
        *launched("embedding", 0, 5, 6, 1),
        *(kernel(name, 10 * at, 10 * at + 8, 1) for at, name in enumerate(STEP * 3, 1)),
    )
    assert len(read_work(recorded).steps) == 1
