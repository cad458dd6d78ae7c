"""The rule for launch-bound steps, at its edges."""

import pytest

from trainstep.traces.verdict import DEVICE_BOUND, LAUNCH_BOUND, NEAR_THE_LINE, is_launch_bound, step_limit


@pytest.mark.parametrize(
    ("busy_s", "enqueue_s", "limit"),
    [
        (0.89, 0.95, LAUNCH_BOUND),
        (0.9, 0.95, NEAR_THE_LINE),
        (1.0, 1.0, NEAR_THE_LINE),
        (0.62, 0.5, LAUNCH_BOUND),
        (0.62, None, LAUNCH_BOUND),
        (0.64, 0.94, NEAR_THE_LINE),
        (0.76, 0.94, NEAR_THE_LINE),
        (0.78, 0.94, NEAR_THE_LINE),
        (0.78, 0.9, DEVICE_BOUND),
        (0.9, 0.94, DEVICE_BOUND),
        (0.78, None, DEVICE_BOUND),
    ],
)
def test_the_limit_of_a_step_follows_from_its_times(busy_s: float, enqueue_s: float | None, limit: str):
    assert step_limit(busy_s=busy_s, enqueue_s=enqueue_s, step_s=1.0) == limit


@pytest.mark.parametrize(
    ("busy_s", "enqueue_s", "launch_bound"),
    [(0.62, 0.91, True), (0.64, 0.91, False), (0.62, 0.5, True), (0.8, 0.95, True), (1.0, 1.0, False)],
)
def test_the_flag_of_a_record_follows_the_same_rule(busy_s: float, enqueue_s: float, launch_bound: bool):
    assert is_launch_bound(busy_s=busy_s, enqueue_s=enqueue_s, step_s=1.0) is launch_bound
