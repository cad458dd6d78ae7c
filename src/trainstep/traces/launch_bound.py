"""What limits a step on a device: the host that launches, the device that works, or nearly both.

The one home of the rule: every workload that calls something launch-bound means this. As shares of the step:

    the host launches for at least 95 %   launch-bound; near the line where the device works for 90 % or more
    else the device works under 63 %      launch-bound
    63 to 77 % (70 %, give or take 10 %)  near the line
    more                                  limited by the device
"""

BUSY_SHARE, ENQUEUE_SHARE = 0.7, 0.95
NEAR = 0.1
"""A share within this much of its line, relative to the line, is near it: the next day's clock may put it on the other side."""
LAUNCH_BOUND, NEAR_THE_LINE, DEVICE_BOUND = "launch-bound", "near the line", "device-bound"
_FULL_SHARE = 0.9
_LAUNCHING_SHARE = 0.9


def step_limit(*, busy_s: float, enqueue_s: float | None, step_s: float) -> str:
    """LAUNCH_BOUND, NEAR_THE_LINE or DEVICE_BOUND. `enqueue_s`: host time until the last work was issued; None: not known."""
    busy_share = busy_s / step_s if step_s else 1.0
    if enqueue_s is not None and enqueue_s >= ENQUEUE_SHARE * step_s:
        return NEAR_THE_LINE if busy_share >= _FULL_SHARE else LAUNCH_BOUND
    if is_near(busy_share, BUSY_SHARE):
        return NEAR_THE_LINE
    return LAUNCH_BOUND if busy_share < BUSY_SHARE else DEVICE_BOUND


def is_near(share: float, line: float) -> bool:
    """Whether a share is too close to a line for a verdict."""
    return abs(share - line) <= NEAR * line


def host_launches(*, enqueue_s: float, step_s: float) -> bool:
    """Whether the host issues work for over 90 % of the step."""
    return enqueue_s > _LAUNCHING_SHARE * step_s


def is_launch_bound(*, busy_s: float, enqueue_s: float, step_s: float) -> bool:
    """Whether the host limits it and launches nearly all the time: the doubt that a record keeps. Times of one step, or of one
    pass of a kernel, in the same unit."""
    limit = step_limit(busy_s=busy_s, enqueue_s=enqueue_s, step_s=step_s)
    return limit == LAUNCH_BOUND and host_launches(enqueue_s=enqueue_s, step_s=step_s)
