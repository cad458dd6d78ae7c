"""Sees what other processes take from a script, between two records: `Contention(ranks).take()` gives the facts.

core_wait_s        the most that a thread of this process waited for a core although it could have run (schedstat of Linux)
others_cpu_share   the share of all cores that other processes used meanwhile
gpu_others         processes on the GPU that are not ours; gpu_others_share: their share of its multiprocessors

A thread also waits where the script itself starts more threads than there are cores; then the others' share is small. Descendants
are ours, and under torchrun the other ranks. What the system does not tell is left out.
"""

import os
import time
from pathlib import Path

from trainstep.measure.machine.environment import machine_ticks, process_ticks
from trainstep.measure.machine.nvml import GpuState

_PROC = Path("/proc")


class Contention:
    """What was taken since the last call of `take`."""

    def __init__(self, *, ranks: int, proc: Path = _PROC) -> None:
        self._proc = proc
        self._root = os.getppid() if ranks > 1 else os.getpid()
        self._gpu: GpuState | None = None
        self._waited_ns, self._ticks, self._ours = self._now()
        self._since_s = time.time()

    def watch_gpu(self, uuid: str | None) -> None:
        """Look at this GPU too."""
        self._gpu = GpuState(uuid) if uuid is not None else None

    def take(self) -> dict[str, float | int | None]:
        """The facts, by name."""
        before_ns, ticks_before, ours_before = self._waited_ns, self._ticks, self._ours
        self._waited_ns, self._ticks, self._ours = self._now()
        since_s, self._since_s = self._since_s, time.time()
        facts: dict[str, float | int | None] = {}
        if self._waited_ns:
            waits_ns = (now - before_ns.get(thread, 0) for thread, now in self._waited_ns.items())
            facts["core_wait_s"] = max(0, *waits_ns, 0) / 1e9
        if self._ticks and ticks_before and (total := self._ticks[1] - ticks_before[1]) > 0:
            ours = sum(count - ours_before.get(pid, 0) for pid, count in self._ours.items())
            share = (self._ticks[0] - ticks_before[0] - ours) / total
            facts["others_cpu_share"] = min(max(share, 0.0), 1.0)
        if self._gpu is not None:
            facts |= self._on_gpu(self._gpu, since_s)
        return facts

    def _on_gpu(self, gpu: GpuState, since_s: float) -> dict[str, float | int | None]:
        """The facts of a GPU. In a container the driver gives the host's process numbers: the busiest is then taken to be ours."""
        pids, shares = gpu.processes(), gpu.process_shares(since_s)
        if pids is None:
            return {}
        known = any(pid in self._ours for pid in pids)
        busiest_last = sorted(pids, key=lambda pid: shares.get(pid, 0.0))
        others = [pid for pid in pids if pid not in self._ours] if known else busiest_last[:-1]
        return {"gpu_others": len(others), "gpu_others_share": sum(shares.get(pid, 0.0) for pid in others)}

    def _now(self) -> tuple[dict[str, int], tuple[int, int] | None, dict[int, int]]:
        """(thread -> ns that it waited for a core so far, ticks of the machine, ticks of our processes)."""
        waited_ns = {}
        for path in (self._proc / "self/task").glob("[0-9]*/schedstat"):
            words = _text(path).split()
            if len(words) == 3:
                waited_ns[path.parent.name] = int(words[1])
        try:
            return waited_ns, machine_ticks(self._proc), process_ticks(self._proc, self._root)
        except (OSError, ValueError, IndexError):
            return waited_ns, None, {}


def _text(path: Path) -> str:
    """The file's text; empty for a thread that has ended."""
    try:
        return path.read_text()
    except OSError:
        return ""
