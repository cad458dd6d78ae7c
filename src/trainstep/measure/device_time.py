"""One step under torch's profiler: how long the device was busy with it. The whole story is the profile verb's."""

from collections.abc import Callable, Iterable

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


def device_busy_s(run_step: Callable[[], object]) -> float:
    """Seconds the GPU had at least one kernel, copy or memset running during one step.

    The step runs under the profiler twice: its first start costs a second, which would otherwise fall into the step.
    Ranges of ours that the profiler repeats on the device's line span its gaps too, and are left out.
    """
    for _ in range(2):
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            run_step()
            torch.cuda.synchronize()
    results = profiler.profiler.kineto_results if profiler.profiler else None
    events = results.events() if results else []
    on_device = (event for event in events if event.device_type() == DeviceType.CUDA and not event.is_user_annotation())
    return union_s((event.start_ns(), event.start_ns() + event.duration_ns()) for event in on_device)


def union_s(intervals_ns: Iterable[tuple[int, int]]) -> float:
    """Seconds covered by at least one of these (start, end) intervals in nanoseconds."""
    covered, reached = 0, 0
    for start, end in sorted(intervals_ns):
        start = max(start, reached)
        if end > start:
            covered += end - start
            reached = end
    return covered / 1e9
