"""Device-busy time is the union of intervals, as counted by brute force; on a GPU, gaps do not count."""

import time
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainstep.measure.step.device_trace import device_busy_s, record_steps
from trainstep.spans import span
from trainstep.traces.kineto import read_trace
from trainstep.traces.nesting import union_s

INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (pair[0], pair[0] + pair[1])))


@settings(deadline=None)
@given(INTERVALS)
def test_the_union_is_that_of_brute_force(intervals: list[tuple[int, int]]):
    covered = {moment for start, end in intervals for moment in range(start, end)}
    assert union_s(intervals) == len(covered) / 1e9
    assert union_s(reversed(intervals)) == len(covered) / 1e9


@pytest.mark.parametrize(
    ("intervals", "covered_ns"),
    [
        ([], 0),
        ([(5, 5)], 0),
        ([(0, 10), (10, 20)], 20),
        ([(0, 10), (2, 5)], 10),
        ([(0, 10), (5, 15), (100, 101)], 16),
        ([(10**18, 10**18 + 7)], 7),
    ],
)
def test_the_union_of_given_intervals_is_their_covered_time(intervals: list[tuple[int, int]], covered_ns: int):
    assert union_s(iter(intervals)) == covered_ns / 1e9


def test_a_recording_warns_of_nothing_and_makes_no_object_per_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The torch of today does not warn; that of yesterday did, where the profiler is started."""

    def refuse(*_arguments: object, **_options: object) -> None:
        pytest.fail("torch makes its events in Python, which takes 60 us each")

    monkeypatch.setattr(torch.autograd.profiler.profile, "_parse_kineto_results", refuse)
    start = torch.profiler.profile.start

    def start_as_before(profiler: torch.profiler.profile) -> None:
        warnings.warn("Warning: Profiler clears events at the end of each cycle.Only events ...", stacklevel=2)
        start(profiler)

    monkeypatch.setattr(torch.profiler.profile, "start", start_as_before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record_steps(lambda: torch.ones(3) + 1, 2, tmp_path / "t.json", on_gpu=False)
    names = [opened.name for opened in read_trace(tmp_path / "t.json").ranges]
    assert [name for name in names if name.startswith("step")] == ["step 0", "step 1"]
    assert names.count("aten::add") == 2


@pytest.mark.gpu
def test_busy_time_is_the_time_of_the_kernels():
    matrix = torch.randn(4096, 4096, device="cuda")

    def work() -> None:
        for _ in range(10):
            matrix @ matrix

    work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    assert device_busy_s(work) == pytest.approx(start.elapsed_time(end) / 1e3, rel=0.25)


@pytest.mark.gpu
def test_gaps_do_not_count():
    vector = torch.ones(1000, device="cuda")

    def work() -> None:
        with span("around both"):
            vector + 1
            time.sleep(0.2)
            vector + 1

    assert 0 < device_busy_s(work) < 0.02
