"""Spans that took longer in one step are listed with their cause."""

from collections.abc import Sequence

import pytest

from trace_maker import call, launched, span, trace
from trainstep.traces.host_track import CLOCK, HOST, KERNELS, MALLOC, outliers_table
from trainstep.traces.kineto import Activity, Call, Range
from trainstep.traces.work import read_work

Event = Activity | Call | Range


def step(number: int, *, lasts: int = 100, late: int = 0, name: str = "k", more: Sequence[Event] = ()) -> list[Event]:
    """A step of 1000 us with one kernel in span mlp."""
    start = 1000 * number
    spans = [span(f"step {number}", start, start + 1000), span("forward", start, start + 800)]
    inside = span("mlp", start + 50, start + 700)
    begins = start + 100 + late
    return [*spans, inside, *launched(name, start + 60 + late, begins, begins + lasts, 10 * number), *more]


@pytest.mark.parametrize(
    ("odd", "cause"),
    [
        (step(1, lasts=300), CLOCK),
        (step(1, late=300), HOST),
        (step(1, lasts=300, name="another"), KERNELS),
        (step(1, late=300, more=[call("cudaMalloc", 1070, 1300, 99)]), MALLOC),
    ],
)
def test_an_outlier_has_its_cause(odd: list[Event], cause: str):
    table = outliers_table(read_work(trace(*step(0), *odd, *step(2))))
    assert table["step"] == [1]
    assert (table["phase"], table["span"], table["cause"]) == (["forward"], ["mlp"], [cause])
    assert table["time_s"][0] > 1.25 * table["median_s"][0]


def test_similar_steps_have_no_outliers():
    assert outliers_table(read_work(trace(*step(0), *step(1, lasts=105), *step(2, late=5)))) == {}


def test_two_steps_are_too_few_for_outliers():
    assert outliers_table(read_work(trace(*step(0), *step(1, lasts=300)))) == {}
