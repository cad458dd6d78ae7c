"""A few steps under torch's profiler, as a trace on disk; a kept one opens in Perfetto."""

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from trainstep.measure.kept_files import kept_file, kept_folder
from trainstep.spans import span


def record_steps(
    run_step: Callable[[], object], steps: int, path: Path, *, on_gpu: bool, drain: Callable[[], object] | None = None
) -> None:
    """Record steps into a trace at `path`, each under a span `step N`. `run_step` returns when its device is idle.

    `drain`: waits for what the last step left to other threads; a profiler that ends while gloo's still send crashes the process.
    The profiler's first start in a process costs a second, which falls into the first step: record one that nobody reads before.
    """
    activities = [ProfilerActivity.CPU]
    if on_gpu:
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with profile(activities=activities, acc_events=True) as profiler:
        for number in range(steps):
            with span(f"step {number}"):
                run_step()
        if drain is not None:
            drain()
    profiler.export_chrome_trace(str(path))


def keep_trace(trace: Path, folder: str, name: str) -> Path:
    """Put a trace into a folder as NAME.json.gz. ValueError, naming the option keep_trace, if that cannot be."""
    kept = kept_folder("keep_trace", folder) / f"{name}.json.gz"
    with open(trace, "rb") as source, kept_file("keep_trace", kept) as file, gzip.open(file, "wb") as compressed:
        shutil.copyfileobj(source, compressed)
    return kept
