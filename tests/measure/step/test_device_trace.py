"""Device-busy time is the union of intervals, as counted by brute force; on a GPU, gaps do not count."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainstep.measure.step.device_trace import device_busy_s
from trainstep.spans import span
from trainstep.traces.nesting import union_s

INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (pair[0], pair[0] + pair[1])))


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
