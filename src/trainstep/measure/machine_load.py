"""What else the machine does just before a cell begins: others on its cores, others on its GPU.

Not the load average: it counts trainstep's own last cells for minutes. Of the cores, 100 ms of /proc/stat are read, less what this
process and all that it started took meanwhile (a server that imports torch, the end of the last cell). The GPU's utilisation covers
up to a second, so a busy one is read again until that second is over, when the last cell of ours has left it.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from trainstep.measure.nvml import GpuState, read_driver

_PROC = Path("/proc")
_MOMENT_S = 0.1
_GPU_QUIET = 0.05
_GPU_MEMORY_S = 1.2
"""How long NVML's utilisation may remember work, a little more than the longest of its periods."""


def load_before(device: str, visible_devices: str | None = None) -> dict[str, float | int]:
    """Facts of the moment: shares of the cores and, for `cuda`, of the first visible GPU that others keep busy, and how many of
    their processes are on it; none that this machine does not tell."""
    found: dict[str, float | int | None] = {"cpu_busy_before": others_share()}
    gpus = read_driver(visible_devices).gpus if device == "cuda" else ()
    if gpus:
        state = GpuState(gpus[0].uuid)
        found |= {"gpu_busy_before": _gpu_share(state.utilisation), "gpu_other_processes": _others_on(state)}
    return {name: value for name, value in found.items() if value is not None}


def others_share(proc: Path = _PROC, wait: Callable[[float], None] = time.sleep) -> float | None:
    """The share of all cores' time, over a moment, that neither idled nor was ours; None where there is no /proc/stat."""
    try:
        before, ours_before = _machine_ticks(proc), _our_ticks(proc)
        wait(_MOMENT_S)
        after, ours_after = _machine_ticks(proc), _our_ticks(proc)
    except (OSError, ValueError, IndexError):
        return None
    busy, every = (now - then for now, then in zip(after, before, strict=True))
    ours = sum(ticks - ours_before.get(pid, 0) for pid, ticks in ours_after.items())
    return min(max((busy - ours) / every, 0.0), 1.0) if every > 0 else None


def _machine_ticks(proc: Path) -> tuple[int, int]:
    """(not idle, all) of every core together: user, nice, system, idle, iowait, irq, softirq and steal."""
    ticks = [int(word) for word in (proc / "stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _our_ticks(proc: Path) -> dict[int, int]:
    """Process -> its ticks so far, of this process and its descendants."""
    parents, ticks = {}, {}
    for path in proc.glob("[0-9]*/stat"):
        try:
            words = (
                path.read_text(errors="replace").rpartition(")")[2].split()
            )  # a name may hold anything but its own end
        except OSError:  # it has ended
            continue
        pid = int(path.parent.name)
        parents[pid], ticks[pid] = int(words[1]), int(words[11]) + int(words[12])
    return {pid: count for pid, count in ticks.items() if _is_ours(pid, parents)}


def _is_ours(pid: int, parents: Mapping[int, int]) -> bool:
    while pid not in (0, 1, os.getpid()):
        pid = parents.get(pid, 0)
    return pid == os.getpid()


def _gpu_share(read: Callable[[], float | None]) -> float | None:
    """The least that is read until what our own last cell did is forgotten."""
    least, until_s = read(), time.monotonic() + _GPU_MEMORY_S
    while least is not None and least > _GPU_QUIET and time.monotonic() < until_s:
        time.sleep(_MOMENT_S)
        least = min(least, read() or 0.0)
    return least


def _others_on(state: GpuState) -> int | None:
    """Processes on the GPU that are there by their numbers and are not ours; None where the numbers are those of another
    namespace, as in a container, where ours cannot be told."""
    pids, ours = state.processes(), _our_ticks(_PROC)
    if pids is None or any(not (_PROC / str(pid)).exists() for pid in pids):
        return None
    return sum(pid not in ours for pid in pids)
