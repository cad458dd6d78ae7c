"""Seconds of calls: many in a row, each between its neighbours' ends, or one that begins with the device idle.

By CUDA events on a GPU; on a CPU, where work runs as it is issued, by the host's clock. A training step has clock.py.
"""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

Call = Callable[[], object]


def times_in_a_row_s(calls: Sequence[Call], device: str) -> list[float]:
    """Seconds of each call, all issued without a wait between them."""
    return _host_times_s(calls) if device == "cpu" else _event_times_s(calls)


def time_alone_s(call: Call, device: str) -> tuple[float, float]:
    """Seconds of one call on the device, which is idle before, and of the host until it was issued."""
    if device == "cpu":
        (seconds,) = _host_times_s([call])
        return seconds, seconds
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    started_s = time.perf_counter()
    result = call()
    host_s = time.perf_counter() - started_s
    end.record()
    end.synchronize()
    del result  # alive until here: freeing is no part of the call
    return start.elapsed_time(end) / 1e3, host_s


def _event_times_s(calls: Sequence[Call]) -> list[float]:
    """Differences between neighbouring events. An untimed call goes first: the GPU is busy when the first is due."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    calls[0]()
    events[0].record()
    for call, event in zip(calls, events[1:], strict=True):
        call()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairwise(events)]


def _host_times_s(calls: Sequence[Call]) -> list[float]:
    times = []
    for call in calls:
        started_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - started_s)
    return times
