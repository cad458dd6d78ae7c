"""The host's launches, waits and stalls, by hand and on a real trace."""

import pytest

from trace_maker import EAGER, call, kernel, launched, span, trace
from trainstep.traces.host_track import ALLOCATION, BLOCKED, NO_STALL, QUEUE_FULL, host_table, stall
from trainstep.traces.kineto import Activity, Call, Range, read_trace
from trainstep.traces.work import TraceWork, read_work


def step(*events: Activity | Call | Range) -> TraceWork:
    """A step of forward 0-1000, backward 1000-5000 and optimizer 5200-6000 us, where a launch takes 4 us."""
    spans = [
        span("step 0", 0, 7000),
        *(span("forward", 0, 1000), span("backward", 1000, 5000), span("optimizer", 5200, 6000)),
    ]
    launches = [
        event for number in range(5) for event in launched("k", 10 * number, 20 + 10 * number, 25 + 10 * number, number)
    ]
    return read_work(trace(*spans, *launches, *events))


def row(work: TraceWork, phase: str) -> dict[str, float]:
    table = host_table(work)
    return {name: values[table["phase"].index(phase)] for name, values in table.items()}


def test_a_phase_has_launches_and_lead():
    columns = row(step(), "forward")
    assert columns["launches"] == 5
    assert columns["launch_s"] == pytest.approx(20e-6)
    assert columns["lead_s"] == pytest.approx(20e-6)
    assert columns["host_s"] == pytest.approx(1e-3)
    assert columns["device_s"] == pytest.approx(25e-6)


def test_a_phase_has_blocked_and_allocation_time():
    work = step(
        call("cudaStreamSynchronize", 1500, 1900, 90),
        call("cudaMalloc", 2000, 2300, 91),
        call("cudaMalloc", 2300, 2400, 92),
        call("cudaDeviceSynchronize", 8000, 9000, 93),
    )
    columns = row(work, "backward")
    assert columns["blocked_s"] == pytest.approx(400e-6)
    assert (columns["allocations"], columns["allocation_s"]) == (2, pytest.approx(400e-6))
    assert sum(host_table(work)["blocked_s"]) == pytest.approx(400e-6), "time outside the steps does not count"


def test_a_full_queue_is_a_long_launch_far_ahead_of_its_kernel():
    far = [call("cudaLaunchKernel", 2000, 3000, 50), kernel("late", 4500, 4600, 50)]
    near = [call("cudaLaunchKernel", 3500, 4000, 51), kernel("lazily loaded", 4700, 4710, 51)]
    work = step(*far, *near)
    columns = row(work, "backward")
    assert (columns["queue_full"], columns["queue_full_s"]) == (2, pytest.approx(1.5e-3))
    work = step(*far, call("cudaLaunchKernel", 3500, 4000, 51), kernel("lazily loaded", 4001, 4010, 51))
    assert row(work, "backward")["queue_full"] == 1


@pytest.mark.parametrize(
    ("between", "kind"),
    [
        ([], NO_STALL),
        ([call("cudaStreamSynchronize", 5005, 5195, 70)], BLOCKED),
        ([call("cudaMalloc", 5005, 5195, 70)], ALLOCATION),
        ([call("cudaLaunchKernel", 2000, 3000, 50), kernel("late", 4500, 4600, 50)], QUEUE_FULL),
    ],
)
def test_a_stall_has_its_cause(between: list[Activity | Call], kind: str):
    found_stall = stall(step(*between, *launched("adam", 5210, 5400, 5500, 60)))
    assert found_stall is not None
    assert found_stall.gap_s == pytest.approx(210e-6)
    assert found_stall.behind_s == pytest.approx(190e-6)
    assert found_stall.kind == kind


def test_no_stall_without_an_optimizer():
    assert stall(step()) is None


def test_the_host_table_of_a_real_trace_adds_up():
    work = read_work(read_trace(EAGER))
    table = host_table(work)
    launches = sum("Launch" in runtime_call.name for runtime_call in work.attribution.trace.calls)
    assert sum(table["launches"]) == pytest.approx(launches / 3)
    assert sum(table["device_s"]) == pytest.approx(work.total_ns / 3e9)
    assert all(lead > 0 for lead in table["lead_s"])
    assert sum(table["allocations"]) == 0
    assert stall(work).kind == NO_STALL  # type: ignore[union-attr]


def test_there_is_no_host_table_without_a_device():
    assert host_table(read_work(trace(span("step 0", 0, 10), span("forward", 1, 9)))) == {}
