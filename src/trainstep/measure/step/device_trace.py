"""Runs steps under torch's profiler: how long the device was busy, the device's events, and traces on disk.

The verb `profile` analyses whole traces; this file only records them.
"""

import gzip
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from trainstep.measure.harness.files import kept_file, kept_folder
from trainstep.measure.harness.gloo_threads import wait_for_gloo_threads
from trainstep.spans import span
from trainstep.traces.nesting import union_s


class DeviceEvent(NamedTuple):
    """A kernel, copy or memset on the GPU."""

    name: str
    start_ns: int
    end_ns: int


def device_busy_s(run_step: Callable[[], object]) -> float:
    """Seconds of one step in which at least one kernel, copy or memset was running on the GPU; the step runs twice."""
    return union_s((event.start_ns, event.end_ns) for event in device_events(run_step))


def device_events(run_step: Callable[..., object], before: Callable[[], Any] | None = None) -> list[DeviceEvent]:
    """The kernels, copies and memsets of one step on the GPU; the step runs twice.

    `before`: runs before each step, outside the profiler, and returns the step's argument.
    """
    # Twice, because the profiler's first start takes a second, which would otherwise fall into the step.
    for _ in range(2):
        arguments = () if before is None else (before(),)
        torch.cuda.synchronize()
        with _profiler([ProfilerActivity.CUDA]) as profiler:
            run_step(*arguments)
            torch.cuda.synchronize()
    results = profiler.profiler.kineto_results if profiler.profiler else None
    # The profiler repeats our own ranges on the device's line, where they cover gaps too: leave them out.
    return [
        DeviceEvent(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in (results.events() if results else [])
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
    ]


def record_steps(
    run_step: Callable[[], object], steps: int, path: Path, *, on_gpu: bool, drain: Callable[[], object] | None = None
) -> None:
    """Record steps into a trace at `path`, each under a span `step N`. `run_step` returns when its device is idle.

    `drain`: waits for the work that the last step left to other threads; the process crashes if the profiler ends while
    gloo's threads are sending. The profiler's first start in a process takes a second, which falls into the first step:
    record a trace first that is not read.
    """
    activities = [ProfilerActivity.CPU]
    if on_gpu:
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with _profiler(activities) as profiler:
        try:
            for number in range(steps):
                with span(f"step {number}"):
                    run_step()
            if drain is not None:
                drain()
        finally:
            wait_for_gloo_threads()
    profiler.export_chrome_trace(str(path))


@contextmanager
def _profiler(activities: list[ProfilerActivity]) -> Iterator[profile]:
    """torch's profiler around a block."""
    # Before 2.13 torch warns that a second cycle would clear this one's events. Its way out, acc_events=True, makes an object per
    # event in Python when the block ends, 60 us each, which nothing here reads: 25 times what ending costs without.
    with ExitStack() as stack:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
            profiler = stack.enter_context(profile(activities=activities))
        yield profiler


def keep_trace(trace: Path, folder: str, name: str) -> Path:
    """Store a trace in a folder as NAME.json.gz, which Perfetto opens.

    Raises ValueError, naming the option keep_trace, if the file cannot be written.
    """
    path = kept_folder("keep_trace", folder) / f"{name}.json.gz"
    with open(trace, "rb") as source, kept_file("keep_trace", path) as file, gzip.open(file, "wb") as compressed:
        shutil.copyfileobj(source, compressed)
    return path
