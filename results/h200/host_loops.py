"""How evenly the CPUs of a machine run the same plain Python, alone and beside each other: `python results/h200/host_loops.py`.

A line a case: its name, then of each process the CPU it is bound to (None: any), the 2nd, 25th, 50th, 75th and 98th percentile of
a loop's time (microseconds, medians of windows of 10 ms), and the share of windows more than 1.3 times as long as the 2nd.
"""

import os
import time
from collections.abc import Sequence
from multiprocessing import Process, Queue
from statistics import median
from typing import Any

_SECONDS = 3.0
_WINDOW_S = 0.01
_CASES = {
    "one": [None],
    "two": [None, None],
    "0+1": [0, 1],
    "0+2": [0, 2],
    "0+16": [0, 16],
    "four": [None] * 4,
}


def run(cpu: int | None, answers: "Queue[Any]") -> None:
    """Run loops for some seconds, and answer what they took."""
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    ends_s = time.perf_counter() + _SECONDS
    windows, window = [], []
    while (started_s := time.perf_counter()) < ends_s:
        total = 0
        for i in range(4000):
            total += i * i
        window.append(time.perf_counter() - started_s)
        if sum(window) > _WINDOW_S:
            windows.append(median(window))
            window = []
    windows.sort()
    percentiles_s = [windows[int(len(windows) * share)] for share in (0.02, 0.25, 0.5, 0.75, 0.98)]
    slow = sum(window_s > 1.3 * percentiles_s[0] for window_s in windows) / len(windows)
    answers.put((cpu, [round(seconds * 1e6) for seconds in percentiles_s], round(slow, 3)))


def side_by_side(cpus: Sequence[int | None]) -> list[Any]:
    answers: Queue[Any] = Queue()
    processes = [Process(target=run, args=(cpu, answers)) for cpu in cpus]
    for process in processes:
        process.start()
    found = [answers.get() for _ in processes]
    for process in processes:
        process.join()
    return sorted(found, key=str)


if __name__ == "__main__":
    for name, cpus in _CASES.items():
        if all(cpu is None or cpu < (os.cpu_count() or 1) for cpu in cpus):
            print(name, side_by_side(cpus), flush=True)
