"""The computer around the GPU: processor, cores, memory and operating system, as far as this process may use them."""

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROCESSOR_INFO = Path("/proc/cpuinfo")
_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_MACHINE_EVENTS = Path("/proc/vmstat")
_V1, _V2 = 1, 2
_LIMIT_FILES = {_V1: "memory.limit_in_bytes", _V2: "memory.max"}
_EVENT_FILES = {_V1: "memory.oom_control", _V2: "memory.events"}


@dataclass(frozen=True, kw_only=True)
class OutOfMemoryKills:
    """How many processes the kernel has ended so far because memory ran out. `counted_by`: in which part of the machine."""

    count: int
    counted_by: str


def cpu_model(processor_info: Path = _PROCESSOR_INFO) -> str:
    """The processor's marketing name, or its architecture where the kernel gives none."""
    try:
        for line in processor_info.read_text(encoding="utf-8", errors="replace").splitlines():
            label, _, value = line.partition(":")
            if label.strip() == "model name" and value.strip():
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def cores() -> int:
    """Logical cores this process may run on: a job on a shared node has fewer than the node."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes(membership: Path = _MEMBERSHIP, cgroups: Path = _CGROUPS) -> int:
    """Physical memory, or the smallest limit of the control groups (a container, a Slurm job) this process is in."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_limits(membership, cgroups)])


def out_of_memory_kills(
    membership: Path = _MEMBERSHIP, cgroups: Path = _CGROUPS, machine_events: Path = _MACHINE_EVENTS
) -> OutOfMemoryKills | None:
    """The count of the nearest control group of this process that has one, else the machine's; None where nothing counts.

    The kernel raises both before it sends the signal. A control group's tells of its own processes alone; the machine's also of
    those in other containers.
    """
    for group, version in _memory_groups(membership, cgroups):
        count = _kills_in(group / _EVENT_FILES[version])
        if count is not None:
            return OutOfMemoryKills(count=count, counted_by=f"control group {group}")
    count = _kills_in(machine_events)
    return None if count is None else OutOfMemoryKills(count=count, counted_by="whole machine")


def os_name() -> str:
    """`Debian GNU/Linux 12 (bookworm), Linux 6.1.0`."""
    kernel = f"{platform.system()} {platform.release()}"
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {kernel}"
    except (OSError, KeyError):
        return kernel


def _limits(membership: Path, cgroups: Path) -> Iterator[int]:
    """Every memory limit from this process's groups up to the root: a container's root is its own."""
    for group, version in _memory_groups(membership, cgroups):
        limit = _number(group / _LIMIT_FILES[version])
        if limit is not None:
            yield limit


def _memory_groups(membership: Path, cgroups: Path) -> Iterator[tuple[Path, int]]:
    """The control groups for memory that this process is in, from its own up to the root, with their version. Some of the
    folders may not be there: in a container the names can be the host's."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, version = cgroups, _V2
        elif "memory" in controllers.split(","):
            root, version = cgroups / "memory", _V1
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder, version
            if folder == root:
                break


def _kills_in(events: Path) -> int | None:
    """The number behind `oom_kill`; None without the file, or from a kernel that does not count."""
    try:
        lines = events.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _number(path: Path) -> int | None:
    """The number in a control group's file; None for `max`, or without the file."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
