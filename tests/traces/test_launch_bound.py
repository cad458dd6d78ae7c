"""The rule of launch-bound, at its edges."""

import pytest

from trainstep.traces.launch_bound import is_launch_bound


@pytest.mark.parametrize(
    ("busy_s", "enqueue_s", "found"),
    [(0.69, 0.91, True), (0.7, 0.91, False), (0.69, 0.9, False), (1.0, 1.0, False), (0.1, 0.5, False)],
)
def test_busy_for_little_while_the_host_launches(busy_s: float, enqueue_s: float, found: bool):
    assert is_launch_bound(busy_s=busy_s, enqueue_s=enqueue_s, step_s=1.0) is found
