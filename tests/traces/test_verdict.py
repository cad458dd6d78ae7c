"""The verdict on what limits a step, case by case, and the split of attention with its costs."""

import pytest

from trace_maker import COMPILED, EAGER, launched, op, span, trace
from trainstep.costs.attention import matmuls_flops, softmax_bytes
from trainstep.traces.kineto import read_trace
from trainstep.traces.profile import profile_of
from trainstep.traces.tables import AttentionShape, attention_table
from trainstep.traces.verdict import (
    COMMUNICATING,
    COMPUTE,
    LAUNCH,
    MEMORY,
    NEAR_THE_LINE,
    Unprofiled,
    alike_table,
    kinds_of,
    verdict,
)
from trainstep.traces.work import TraceWork, read_work


def work(*kernels: tuple[str, int, int]) -> TraceWork:
    """A step of 1000 us: forward 0-500, backward 500-1000, and kernels (name, start, end) in them."""
    spans = [span("step 0", 0, 1000), span("forward", 0, 500), span("backward", 500, 1000)]
    events = [
        event
        for number, (name, start, end) in enumerate(kernels)
        for event in launched(name, start, start, end, number)
    ]
    return read_work(trace(*spans, *events))


@pytest.mark.parametrize(
    ("kernels", "kind"),
    [
        ([("nvjet_gemm", 0, 950)], COMPUTE),
        ([("nvjet_gemm", 0, 300), ("elementwise_kernel", 300, 950)], MEMORY),
        ([("nvjet_gemm", 0, 300)], LAUNCH),
        ([("nvjet_gemm", 0, 500), ("ncclDevKernel_AllReduce", 500, 1000)], COMMUNICATING),
    ],
)
def test_each_kind_of_step_has_its_verdict(kernels: list[tuple[str, int, int]], kind: str):
    result = verdict(work(*kernels), Unprofiled())
    assert result.kind == kind
    assert result.profiled_step
    assert result.step_s == pytest.approx(1e-3)
    assert result.busy_s == pytest.approx(max(end for _, _, end in kernels) / 1e6)


def test_hidden_communication_is_no_verdict():
    overlapped = trace(
        span("step 0", 0, 1000),
        *(span("forward", 0, 1000), *launched("gemm", 0, 0, 1000, 1), *launched("ncclDevKernel", 5, 5, 800, 2)),
    )
    assert verdict(read_work(overlapped), Unprofiled()).kind == COMPUTE


@pytest.mark.parametrize(
    ("kernels", "times", "kinds"),
    [
        # As measured for small at context 256: 26.2 of 37.3 ms on the device, while the host launches for 36.9 ms
        ([("nvjet_gemm", 0, 702)], Unprofiled(step_s=1e-3, enqueue_s=0.989e-3), (LAUNCH,)),
        ([("nvjet_gemm", 0, 890)], Unprofiled(step_s=1e-3, enqueue_s=0.95e-3), (LAUNCH,)),
        ([("nvjet_gemm", 0, 960)], Unprofiled(step_s=1e-3, enqueue_s=0.96e-3), (LAUNCH, COMPUTE)),
        ([("nvjet_gemm", 0, 740)], Unprofiled(step_s=1e-3, enqueue_s=0.8e-3), (LAUNCH, COMPUTE)),
        ([("nvjet_gemm", 0, 780)], Unprofiled(step_s=1e-3, enqueue_s=0.8e-3), (COMPUTE,)),
        ([("nvjet_gemm", 0, 480), ("elementwise_kernel", 480, 1000)], Unprofiled(), (MEMORY, COMPUTE)),
        ([("nvjet_gemm", 0, 720), ("ncclDevKernel_AllReduce", 720, 1000)], Unprofiled(), (COMPUTE, COMMUNICATING)),
        ([("nvjet_gemm", 0, 680), ("ncclDevKernel_AllReduce", 680, 1000)], Unprofiled(), (COMMUNICATING, COMPUTE)),
    ],
)
def test_near_a_limit_both_verdicts_are_given(
    kernels: list[tuple[str, int, int]], times: Unprofiled, kinds: tuple[str, ...]
):
    result = verdict(work(*kernels), times)
    assert kinds_of(result) == kinds
    assert result.kind == (kinds[0] if len(kinds) == 1 else NEAR_THE_LINE)


def test_on_a_cpu_half_of_the_time_is_the_limit():
    spans = [span("step 0", 0, 100), span("forward", 0, 100)]
    assert kinds_of(verdict(read_work(trace(*spans, op("aten::mm", 0, 52))), Unprofiled())) == (LAUNCH, COMPUTE)


def test_unprofiled_times_decide():
    """The profiler slows the host, so idle time in the trace need not be idle time in the step."""
    profiled = work(("gemm", 0, 300))
    assert verdict(profiled, Unprofiled()).kind == LAUNCH
    assert verdict(profiled, Unprofiled(step_s=310e-6)).kind == COMPUTE


def test_similar_phases_of_a_launch_bound_step_are_explained():
    profiled = work(("gemm", 0, 50), ("gemm", 500, 600))
    times = Unprofiled(step_s=900e-6, enqueue_s=890e-6, phases={"forward": 430e-6, "backward": 470e-6})
    assert alike_table(profiled, times) == {
        "phase": ["forward", "backward"],
        "time_s": [430e-6, 470e-6],
        "pieces": [1.0, 1.0],
        "device_s": [50e-6, 100e-6],
    }
    unlike = Unprofiled(step_s=900e-6, enqueue_s=890e-6, phases={"forward": 300e-6, "backward": 600e-6})
    assert alike_table(profiled, unlike) == {}
    assert alike_table(profiled, Unprofiled()) == {}


def test_ops_of_a_cpu_have_verdicts():
    spans = [span("step 0", 0, 100), span("forward", 0, 100)]
    assert verdict(read_work(trace(*spans, op("aten::mm", 5, 95))), Unprofiled()).kind == COMPUTE
    assert verdict(read_work(trace(*spans, op("aten::mul", 5, 95))), Unprofiled()).kind == MEMORY
    assert verdict(read_work(trace(*spans, op("aten::mm", 5, 15))), Unprofiled()).kind == LAUNCH


def test_attention_is_split_with_its_costs():
    """The fixture is tiny at batch 2 and context 64: 2 x 4 heads x 2 layers."""
    shape = AttentionShape(batch_heads=16, positions=64, head_dim=32, matmul_element_bytes=4, softmax_element_bytes=4)
    eager = read_work(read_trace(EAGER))
    table = attention_table(eager, shape)
    rows = {(phase, part): index for index, (phase, part) in enumerate(zip(table["phase"], table["part"], strict=True))}
    assert table["calls"][rows["forward", "matmuls"]] == 4
    assert table["calls"][rows["backward", "matmuls"]] == 8
    assert table["flops"][rows["backward", "matmuls"]] == matmuls_flops("backward", 16, 64, 32)
    assert table["bytes"][rows["forward", "softmax"]] == softmax_bytes("forward", 16, 64, 4)
    assert table["flops"][rows["forward", "mask, scale and copies"]] is None
    time_s = sum(
        piece.duration_ns
        for piece in eager.pieces
        if piece.place.phase == "forward" and "attention s" in piece.place.span
    )
    values_s = sum(
        piece.duration_ns
        for piece in eager.pieces
        if piece.place.phase == "forward" and piece.place.span == "attention values"
    )
    forward = [table["time_s"][index] for (phase, _), index in rows.items() if phase == "forward"]
    assert sum(forward) == pytest.approx((time_s + values_s) / 3e9)


def test_compiled_code_has_no_split_of_attention():
    compiled_profile = profile_of(read_trace(COMPILED))
    assert "attention" not in compiled_profile.tables
    assert compiled_profile.compiled
    assert compiled_profile.verdict.kind == LAUNCH
