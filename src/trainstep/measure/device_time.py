"""One step under torch's profiler: how long the device was busy with it, and with what. The whole story is the profile verb's."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from trainstep.traces.intervals import union_s


class DeviceEvent(NamedTuple):
    """A kernel, copy or memset."""

    name: str
    start_ns: int
    end_ns: int


def device_busy_s(run_step: Callable[[], object]) -> float:
    """Seconds the GPU had at least one kernel, copy or memset running during one step, which runs twice."""
    return union_s((event.start_ns, event.end_ns) for event in device_events(run_step))


def device_events(run_step: Callable[..., object], before: Callable[[], Any] | None = None) -> list[DeviceEvent]:
    """What ran on the GPU during one step. `before` runs unseen ahead of it and makes its argument.

    The step runs under the profiler twice: its first start costs a second, which would otherwise fall into the step.
    Ranges of ours that the profiler repeats on the device's line span its gaps too, and are left out.
    """
    for _ in range(2):
        arguments = () if before is None else (before(),)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            run_step(*arguments)
            torch.cuda.synchronize()
    results = profiler.profiler.kineto_results if profiler.profiler else None
    return [
        DeviceEvent(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in (results.events() if results else [])
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
    ]
