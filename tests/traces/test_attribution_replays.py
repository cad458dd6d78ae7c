"""Where a graph's kernels belong: each in the place of the same kernel of an eager step, on a real trace and by hand."""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from trace_maker import AUTOGRAD, COMPILED, EAGER, call, kernel, launched, op, span, trace
from trainstep.traces.attribution import FALLBACK, OUTSIDE, REPLAYED, Assigned, Attribution, placed_by_order
from trainstep.traces.contexts import step_number
from trainstep.traces.kineto import MEMSET, Call, Trace, read_trace
from trainstep.traces.profile import profile_of
from trainstep.traces.tables import replay_table
from trainstep.traces.work import read_work


def as_graphs(eager: Trace) -> Trace:
    """The trace as if each step had been one graph launch: no spans but the steps', one call for all work of the phases."""
    steps = {number: one for one in eager.ranges if one.annotation and (number := step_number(one.name)) is not None}
    launches = {
        number: Call(
            name="cudaGraphLaunch",
            thread=step.thread,
            start_ns=step.start_ns + 1,
            duration_ns=1,
            correlation=10**6 + number,
        )
        for number, step in steps.items()
    }
    activities = [
        event.activity
        if event.place.phase == OUTSIDE or event.place.step is None
        else dataclasses.replace(event.activity, correlation=launches[event.place.step].correlation)
        for event in Attribution(eager).assign()
    ]
    kept = {activity.correlation for activity in activities}
    calls = [*(one for one in eager.calls if one.correlation in kept), *launches.values()]
    return dataclasses.replace(
        eager,
        activities=tuple(activities),
        calls=tuple(sorted(calls, key=lambda one: one.start_ns)),
        ranges=tuple(steps.values()),
    )


@pytest.mark.parametrize("path", [EAGER, COMPILED], ids=["eager", "compiled"])
def test_every_kernel_of_a_replay_is_where_it_was_in_the_eager_step(path: Path):
    eager = read_trace(path)
    expected = Attribution(eager).assign()
    replayed = Attribution(as_graphs(eager)).assign()
    assert {event.place.phase for event in replayed} == {OUTSIDE}, "the graph alone says nothing"
    placed = placed_by_order(replayed, expected)
    for event, original in zip(placed, expected, strict=True):
        assert event.activity.name == original.activity.name
        assert dataclasses.replace(event.place, how="") == dataclasses.replace(original.place, how="")
    assert Counter(event.place.how for event in placed)[REPLAYED] > 0.95 * len(placed)


def test_the_tables_of_replays_are_those_of_the_eager_steps():
    eager = read_trace(EAGER)
    graphs = as_graphs(eager)
    expected, profiled = profile_of(eager), profile_of(graphs, eager=eager)
    for name in ("classes", "spans", "layers"):
        for column in ("phase", "calls"):
            assert profiled.tables[name][column] == expected.tables[name][column]
    assert profiled.replayed_share == pytest.approx(1, abs=0.05)
    assert (profiled.assigned_share, profiled.fallback_share) == (1, 0)
    assert expected.replayed_share is None
    assert "host" not in profiled.tables, "the host does nothing for a phase"
    table = replay_table(read_work(graphs, eager), read_work(eager))
    assert table["replayed_s"] == table["eager_s"]
    assert profiled.tables["replay"] == table


def eager_step() -> Trace:
    """Two kernels `a`, of forward and backward, and one `b` of the optimizer; the second `a` starts late, on another stream."""
    return trace(
        *(span("step 0", 0, 100), span("forward", 0, 20), span("backward", 20, 50), span("optimizer", 50, 90)),
        *launched("a", 5, 10, 12, 1),
        *(call("cudaLaunchKernel", 30, 34, 2), kernel("a", 60, 70, 2, stream=9)),
        *launched("b", 52, 56, 58, 3),
    )


def replay(*kernels: tuple[str, int, int]) -> list[Assigned]:
    launch = call("cudaGraphLaunch_ptsz", 1, 3, 7)
    events = [kernel(name, start, end, 7) for name, start, end in kernels]
    given = trace(span("step 4", 0, 100), launch, *events, *launched("upload", 90, 94, 96, 8))
    return placed_by_order(Attribution(given).assign(), Attribution(eager_step()).assign())


def places(events: list[Assigned]) -> list[tuple[str, str, str]]:
    return [(event.activity.name, event.place.phase, event.place.how) for event in events]


def test_equal_kernels_are_told_apart_by_the_order_of_their_launch():
    assert places(replay(("a", 5, 10), ("a", 10, 20), ("b", 20, 30))) == [
        ("a", "forward", REPLAYED),
        ("a", "backward", REPLAYED),
        ("b", "optimizer", REPLAYED),
        ("upload", OUTSIDE, "direct"),
    ]
    assert {event.place.step for event in replay(("a", 5, 10))} == {4}, "the replay's own step"


def test_a_kernel_without_a_counterpart_belongs_beside_the_one_before_it():
    kernels = ("c", 4, 5), ("a", 5, 10), ("a", 10, 20), ("b", 22, 30), ("d", 31, 32)
    assert places(replay(*kernels))[:-1] == [
        ("c", "forward", FALLBACK),
        ("a", "forward", REPLAYED),
        ("a", "backward", REPLAYED),
        ("b", "optimizer", REPLAYED),
        ("d", "optimizer", FALLBACK),
    ]


def test_a_name_that_is_there_once_more_is_not_placed_by_its_order():
    """Which of the three is the new one is not known, and those after it would move into the next phase."""
    assert places(replay(("a", 5, 10), ("b", 12, 14), ("a", 15, 20), ("a", 20, 21)))[:-1] == [
        ("a", "forward", FALLBACK),
        ("b", "optimizer", REPLAYED),
        ("a", "optimizer", FALLBACK),
        ("a", "optimizer", FALLBACK),
    ]


def test_the_kernel_in_a_memsets_place_belongs_where_the_memset_was():
    launch, cleared = launched("Memset (Device)", 32, 36, 38, 4)
    memset = dataclasses.replace(cleared, kind=MEMSET)  # in backward, between two kernels of the same step
    eager = trace(
        *(span("step 0", 0, 100), span("forward", 0, 20), span("backward", 20, 50), span("optimizer", 50, 90)),
        *(*launched("a", 5, 10, 12, 1), launch, memset, *launched("b", 52, 56, 58, 3)),
    )
    fill = "void at::native::vectorized_elementwise_kernel<8, at::native::FillFunctor<unsigned char>, ...>"
    graph = call("cudaGraphLaunch", 1, 3, 7), kernel("a", 5, 10, 7), kernel(fill, 12, 13, 7), kernel("b", 20, 25, 7)
    placed = placed_by_order(Attribution(trace(span("step 4", 0, 100), *graph)).assign(), Attribution(eager).assign())
    assert places(placed) == [("a", "forward", REPLAYED), (fill, "backward", REPLAYED), ("b", "optimizer", REPLAYED)]


def test_a_phase_outside_of_the_graph_has_no_place_for_its_kernels():
    """The optimizer runs eagerly behind the graph, under its own span."""
    graph = call("cudaGraphLaunch", 1, 3, 7), kernel("a", 5, 10, 7), kernel("a", 10, 20, 7), kernel("b", 20, 25, 7)
    given = trace(span("step 0", 0, 100), span("optimizer", 50, 90), *graph, *launched("b", 52, 56, 58, 8))
    events = placed_by_order(Attribution(given).assign(), Attribution(eager_step()).assign())
    assert places(events) == [
        ("a", "forward", REPLAYED),
        ("a", "backward", REPLAYED),
        ("b", "backward", FALLBACK),
        ("b", "optimizer", "direct"),
    ]


def test_without_an_eager_kernel_nothing_is_made_up():
    given = trace(span("step 0", 0, 9), call("cudaGraphLaunch", 1, 2, 7), kernel("a", 3, 4, 7))
    [event] = placed_by_order(Attribution(given).assign(), [])
    assert (event.place.phase, event.place.how) == (OUTSIDE, FALLBACK)


def test_idle_time_of_a_replay_is_between_its_first_kernel_and_its_last():
    """Two streams: 10 to 20 and 15 to 30 are busy, 30 to 40 is idle, 40 to 50 is busy. The upload belongs to no graph."""
    kernels = kernel("a", 10, 20, 7), kernel("a", 15, 30, 7, stream=9), kernel("b", 40, 50, 7)
    step = trace(span("step 0", 0, 100), call("cudaGraphLaunch", 5, 6, 7), *kernels, *launched("upload", 90, 94, 96, 8))
    assert profile_of(step, eager=eager_step()).replay_idle_share == pytest.approx(0.25)
    assert profile_of(eager_step()).replay_idle_share is None


def test_copies_around_a_graph_do_not_stand_for_a_phase():
    """Autograd numbers the copy of a batch, as it numbers ops of a forward pass."""
    copy = op("aten::copy_", 0, 4, sequence=3), *launched("Memcpy DtoD", 1, 2, 3, 9)
    graph = call("cudaGraphLaunch", 5, 6, 7), kernel("a", 7, 10, 7), kernel("a", 10, 20, 7), kernel("b", 20, 25, 7)
    work = read_work(trace(span("step 0", 0, 100), *copy, *graph), eager_step())
    assert [(piece.name, piece.place.phase) for piece in work.pieces] == [
        ("Memcpy DtoD", OUTSIDE),
        ("a", "forward"),
        ("a", "backward"),
        ("b", "optimizer"),
    ]


def test_on_a_cpu_operators_are_placed_alike():
    eager = trace(
        *(span("step 0", 0, 100), span("forward", 0, 40), op("aten::mm", 5, 30)),
        *(span("backward", 40, 100), op("aten::mm", 50, 60, AUTOGRAD)),
    )
    tape = trace(span("step 0", 0, 100), op("aten::mm", 10, 40), op("aten::mm", 40, 80), op("aten::copy_", 80, 90))
    work = read_work(tape, eager)
    phases = {(piece.name, piece.start_ns): piece.place.phase for piece in work.pieces if piece.name != "(between ops)"}
    assert phases == {
        ("aten::mm", 10_000): "forward",
        ("aten::mm", 40_000): "backward",
        ("aten::copy_", 80_000): "backward",
    }
    assert work.total_ns == 100_000
