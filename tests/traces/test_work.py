"""Pieces of work add up to the step: on a device to busy and idle time, on a CPU to the ops' own times."""

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from trace_maker import COMPILED, EAGER, call, kernel, launched, op, span, trace
from trainstep.config.model import size
from trainstep.config.run import RunConfig
from trainstep.spans import span as open_span
from trainstep.traces.kineto import read_trace
from trainstep.traces.nesting import gaps_before, union_ns
from trainstep.traces.tables import classes_table, kernels_table, layers_table, spans_table, top_kernels
from trainstep.traces.work import BETWEEN, by_step, read_work
from trainstep.training.build import build_step

INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (pair[0], pair[0] + pair[1])))


@settings(deadline=None)
@given(INTERVALS)
def test_gaps_and_the_union_fill_the_time(intervals: list[tuple[int, int]]):
    ordered = sorted(intervals)
    end = max((end for _, end in ordered), default=0)
    assert sum(gaps_before(ordered, 0)) + union_ns(ordered) == end


@pytest.mark.parametrize("path", [EAGER, COMPILED], ids=["eager", "compiled"])
def test_busy_and_idle_fill_the_step(path: Path):
    """The fixture synchronises just outside its steps, so the last kernel may end a little after its step."""
    work = read_work(read_trace(path))
    assert len(work.steps) == 3
    for step in work.steps:
        pieces = by_step(work)[step.number]
        last_ns = max(piece.start_ns + piece.duration_ns for piece in pieces)
        idle_ns = sum(piece.gap_ns for piece in pieces)
        assert step.busy_ns + idle_ns == last_ns - step.start_ns
        assert step.busy_ns == sum(piece.duration_ns for piece in pieces), "one stream: nothing overlaps"


def test_idle_time_is_the_gaps_between_kernels():
    work = read_work(
        trace(
            *(span("step 0", 0, 100), span("forward", 0, 50), span("backward", 50, 100)),
            *launched("a", 5, 10, 20, 1),
            *(call("cudaLaunchKernel", 15, 16, 2), kernel("b", 15, 30, 2, stream=9)),
            *launched("c", 60, 70, 80, 3),
        )
    )
    [step] = work.steps
    assert (step.busy_ns, step.after_ns, step.window_ns) == (30_000, 20_000, 100_000)
    assert [(piece.name, piece.gap_ns) for piece in work.pieces] == [("a", 10_000), ("b", 0), ("c", 40_000)]
    assert work.total_ns == 35_000, "two streams at once"
    rows = classes_table(work)
    idle = {
        phase: time_s
        for phase, name, time_s in zip(rows["phase"], rows["class"], rows["time_s"], strict=True)
        if name == "idle"
    }
    assert idle == pytest.approx({"forward": 10e-6, "backward": 60e-6})


@pytest.mark.parametrize("path", [EAGER, COMPILED], ids=["eager", "compiled"])
def test_tables_add_up_to_the_step(path: Path):
    work = read_work(read_trace(path))
    total_s = work.total_ns / 1e9 / 3
    kernels, spans = kernels_table(work, 4), spans_table(work)
    assert sum(kernels["time_s"]) == pytest.approx(total_s)
    assert sum(kernels["share"]) == pytest.approx(1)
    assert sum(kernels["calls"]) * 3 == pytest.approx(len(work.pieces))
    assert sum(spans["time_s"]) == pytest.approx(total_s)
    busy = [
        time
        for time, name in zip(*(classes_table(work)[key] for key in ("time_s", "class")), strict=True)
        if name != "idle"
    ]
    assert sum(busy) == pytest.approx(total_s)
    assert set(layers_table(work)["layer"]) == {0, 1}
    assert len([kind for kind in kernels["class"] if kind != "rest"]) <= 4 * 4


@pytest.mark.parametrize("top", [1, 2, 5])
def test_a_shorter_table_has_the_same_sums(top: int):
    """Cutting a table gives the same as making a shorter one."""
    work = read_work(read_trace(EAGER))
    cut, shorter = top_kernels(kernels_table(work, 6), top), kernels_table(work, top)
    assert cut["name"] == shorter["name"]
    for name in ("time_s", "calls", "share", "mean_s", "min_s", "max_s"):
        assert cut[name] == pytest.approx(shorter[name])


def test_ops_on_a_cpu_have_their_own_times():
    work = read_work(
        trace(
            *(span("step 0", 0, 100), span("forward", 10, 90), op("aten::linear", 20, 60), op("aten::mm", 30, 50)),
            op("aten::sum", 70, 80),
            op("aten::outside", 200, 300),
        )
    )
    assert not work.on_device
    times = {(piece.name, piece.place.phase): piece.duration_ns // 1000 for piece in work.pieces}
    assert times == {
        (BETWEEN, "outside phases"): 20,
        (BETWEEN, "forward"): 30,
        ("aten::linear", "forward"): 20,
        ("aten::mm", "forward"): 20,
        ("aten::sum", "forward"): 10,
    }
    assert work.steps[0].busy_ns == work.steps[0].window_ns == 100_000


def test_a_real_step_on_a_cpu_adds_up(tmp_path: Path):
    """Backward runs on the main thread here, and its ops still have the spans of their forward ops."""
    built = build_step(RunConfig(model=size("tiny"), context=8, batch_size=1, attention="plain"))
    batches = [built.next_batch(0)]
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler, open_span("step 0"):
        built.step(batches)
    profiler.export_chrome_trace(str(tmp_path / "t.json"))
    work = read_work(read_trace(tmp_path / "t.json"))
    assert work.total_ns == work.steps[0].window_ns == work.steps[0].busy_ns
    places = {(piece.place.phase, piece.place.layer, piece.place.span) for piece in work.pieces}
    assert {(phase, 1, "attention softmax") for phase in ("forward", "backward")} <= places
    assert {("backward", None, "head"), ("backward", None, "loss"), ("optimizer", None, "")} <= places
    matmuls = [piece for piece in work.pieces if piece.kind == "matmul" and piece.name in ("aten::mm", "aten::bmm")]
    assert len([piece for piece in matmuls if piece.place.phase == "forward"]) == 2 * 7 + 1
    assert len([piece for piece in matmuls if piece.place.phase == "backward"]) == 2 * (2 * 7 + 1)
    assert torch.is_grad_enabled()


def test_a_trace_without_work_in_a_step_is_refused():
    with pytest.raises(ValueError, match="record it around whole steps"):
        read_work(trace(op("aten::mm", 0, 10), span("step 0", 20, 20)))


def test_compiled_kernels_list_what_inductor_fused():
    table = kernels_table(read_work(read_trace(COMPILED)), kept=100)
    ops = dict(zip(table["name"], table["ops"], strict=True))
    assert ops["triton_poi_fused__to_copy_t_9"] == "_to_copy, t"
    assert ops["multi_tensor_apply_kernel FusedAdamMathFunctor"] == ""
    assert set(top_kernels(table, 1)) == set(table), "the row `rest` has the column too"
    assert "ops" not in kernels_table(read_work(read_trace(EAGER)))


def test_the_assigned_share_is_counted():
    """A piece in no phase that tables show does not count."""
    work = read_work(trace(span("step 0", 0, 100), span("forward", 0, 90), *launched("a", 5, 10, 40, 1)))
    assert work.assigned_share == 1
    [piece] = work.pieces
    lost = dataclasses.replace(piece, place=dataclasses.replace(piece.place, phase="nowhere"))
    assert dataclasses.replace(work, pieces=(lost,)).assigned_share == 0
