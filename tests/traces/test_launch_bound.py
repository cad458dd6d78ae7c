"""The rule of launch-bound, at its edges."""

import pytest

from trainstep.traces.launch_bound import DEVICE_BOUND, LAUNCH_BOUND, NEAR_THE_LINE, is_launch_bound, step_limit


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
        (0.78, 0.94, DEVICE_BOUND),
        (0.78, None, DEVICE_BOUND),
    ],
)
def test_what_limits_a_step(busy_s: float, enqueue_s: float | None, limit: str):
    assert step_limit(busy_s=busy_s, enqueue_s=enqueue_s, step_s=1.0) == limit


@pytest.mark.parametrize(
    ("busy_s", "enqueue_s", "found"),
    [(0.62, 0.91, True), (0.64, 0.91, False), (0.62, 0.9, False), (0.8, 0.95, True), (1.0, 1.0, False)],
)
def test_the_doubt_needs_a_host_that_launches(busy_s: float, enqueue_s: float, found: bool):
    assert is_launch_bound(busy_s=busy_s, enqueue_s=enqueue_s, step_s=1.0) is found
