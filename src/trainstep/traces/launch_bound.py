"""When the host limits a step: the device works for little of it while the host launches for nearly all of it.

The one home of the two shares: every workload that calls something launch-bound means this.
"""

BUSY_SHARE, ENQUEUE_SHARE = 0.7, 0.9


def device_waits(*, busy_s: float, step_s: float) -> bool:
    """Whether the device is busy for under BUSY_SHARE of the step."""
    return busy_s < BUSY_SHARE * step_s


def host_launches(*, enqueue_s: float, step_s: float) -> bool:
    """Whether the host issues work for over ENQUEUE_SHARE of the step."""
    return enqueue_s > ENQUEUE_SHARE * step_s


def is_launch_bound(*, busy_s: float, enqueue_s: float, step_s: float) -> bool:
    """Both. Times of one step, or of one pass of a kernel, in the same unit."""
    return device_waits(busy_s=busy_s, step_s=step_s) and host_launches(enqueue_s=enqueue_s, step_s=step_s)
