"""The computer around the GPU: processor, cores, memory and operating system, as far as this process may use them."""

import os
import platform
from collections.abc import Iterator
from pathlib import Path

_PROCESSOR_INFO = Path("/proc/cpuinfo")
_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


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


def os_name() -> str:
    """`Debian GNU/Linux 12 (bookworm), Linux 6.1.0`."""
    kernel = f"{platform.system()} {platform.release()}"
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {kernel}"
    except (OSError, KeyError):
        return kernel


def _limits(membership: Path, cgroups: Path) -> Iterator[int]:
    """Every memory limit from this process's groups (version 1 or 2) up to the root: a container's root is its own."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, file = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, file = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            limit = _number(folder / file)
            if limit is not None:
                yield limit
            if folder == root:
                break


def _number(path: Path) -> int | None:
    """The number in a control group's file; None for `max`, or without the file."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
