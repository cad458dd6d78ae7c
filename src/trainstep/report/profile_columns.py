"""Columns of a profile's tables: their titles, what they mean (also in torch's own words), and how a value is written."""

from typing import Any

from trainstep.report.forms import ABSENT, milliseconds, percent, rate_words, three_digits
from trainstep.report.hand_built import Column
from trainstep.report.tables import Entry

HELP = {
    "phase": "forward, backward, grad_sync, optimizer, or outside phases: the batch's upload and the like",
    "class": "kind of work, by the kernel's name; idle: the device had nothing to do before work of this phase",
    "span": "the named range of the model's code that the work belongs to; a backward kernel has its forward op's",
    "layers": "which layers' spans it ran in",
    "name": "the kernel's name, template arguments left out (on a CPU: the op's)",
    "calls": "how often a step; torch's table calls it # of calls",
    "time_s": "time of a step's calls together: on a GPU torch's Self CUDA, on a CPU its Self CPU",
    "share": "of all device time; in tables by phase, of the phase's; of idle, the part of busy and idle together",
    "mean_s": "time of one call, mean",
    "min_s": "time of the shortest call",
    "max_s": "time of the longest call",
    "host_s": "time of the phase on the host's main thread (torch's CPU total of its range)",
    "device_s": "time of the phase's kernels and copies (torch's CUDA total)",
    "idle_s": "the device had nothing to do, before work of this phase",
    "launches": "kernel launches a step",
    "launch_s": "host time inside launch calls",
    "lead_s": "median time from a launch on the host to the kernel's start: long, the device is the limit; microseconds, the host",
    "blocked_s": "host time in cudaDeviceSynchronize, cudaStreamSynchronize and cudaEventSynchronize",
    "allocations": "calls of cudaMalloc and cudaFree a step",
    "allocation_s": "host time in them",
    "queue_full": "launches that had to wait for room in the driver's queue",
    "queue_full_s": "host time they waited",
    "part": "of attention written out: its matmuls, its softmax, and what lies between",
    "flops": "floating-point operations of a step, from the shapes",
    "bytes": "the least bytes read and written in a step, from the shapes",
    "flops_per_s": "operations over time",
    "bytes_per_s": "bytes over time",
    "layer": "number of the block",
    "step": "which profiled step, from 0",
    "median_s": "the same span's time in the median step",
    "cause": "what else was different in that step",
    "ops": "what Inductor fused into the kernel, as its name lists it",
    "kind": "what limits the step; of a stall, why the host stands still",
    "on_device": "whether kernels on a GPU were seen; else ops on a CPU",
    "profiled_step": "whether the step's time is a profiled one's, for want of one without the profiler",
    "step_s": "time of the step",
    "busy_s": "the device was at work",
    "enqueue_s": "host time until the last work was issued, without the profiler",
    "exposed_share": "of the step: communication with nothing computed beside it",
    "matmul_share": "of device time: matmuls and fused attention",
    "overhead_share": "of a CPU's time: what passes between ops",
    "pieces": "kernels and copies of a step; on a CPU ops",
    "gap_s": "host time from backward's return to the optimizer's first launch",
    "behind_s": "how far the device was behind the host at that launch",
}
TORCH_COLUMNS = (
    "torch's own table of the same trace has other words: Self CPU is an op's time on the host without the ops it calls, CPU "
    "total with them; Self CUDA is the time of the kernels it launched itself, CUDA total with those of the ops it calls; "
    "# of calls is over all profiled steps, here it is a step's."
)
_TITLES = {
    "time_s": "time (ms)",
    "share": "share (%)",
    "lead_s": "lead (µs)",
    "name": "kernel",
    "queue_full": "queue full",
}
_LONGEST = 56
"""Characters of a kernel's name that a table shows; the record has more."""
_MICROSECONDS = ("mean_s", "min_s", "max_s", "lead_s")


def column(name: str) -> Column:
    """The column of that name."""
    unit = " (µs)" if name in _MICROSECONDS else " (ms)" if name.endswith("_s") else ""
    title = _TITLES.get(name) or _rate_title(name) or f"{name.removesuffix('_s').replace('_', ' ')}{unit}"
    words = name in ("phase", "class", "span", "layers", "name", "part", "layer", "cause", "ops", "kind")
    return Column(title=title, number=not words, help=HELP.get(name, ""))


def _rate_title(name: str) -> str:
    return {"flops": "GFLOP", "bytes": "GB", "flops_per_s": "FLOP/s", "bytes_per_s": "bytes/s"}.get(name, "")


def entry(column: str, value: Any) -> Entry:
    """A value as that column shows it."""
    if value is None or value == "":
        return Entry(text="" if value == "" else ABSENT)
    if isinstance(value, bool):
        return Entry(text="yes" if value else "no")
    if isinstance(value, str):
        return Entry(text=value if len(value) <= _LONGEST else f"{value[: _LONGEST - 1]}…")
    if column.endswith("share"):
        return share_entry(value)
    if column in ("flops_per_s", "bytes_per_s"):
        return Entry(text=rate_words(value, "flop/s" if column == "flops_per_s" else "bytes/s"), sort=value)
    if column in ("flops", "bytes"):
        return Entry(text=three_digits(value / 1e9), sort=value)
    if column in _MICROSECONDS:
        return Entry(text=three_digits(value * 1e6), sort=value * 1e6)
    if column.endswith("_s"):
        return time_entry(value)
    return Entry(text=f"{value:,.4g}", sort=value)


def time_entry(seconds: float | None) -> Entry:
    return Entry(text=ABSENT) if seconds is None else Entry(text=milliseconds(seconds), sort=seconds * 1e3)


def share_entry(share: float | None) -> Entry:
    return Entry(text=ABSENT) if share is None else Entry(text=percent(share), sort=share * 100)
