"""Describes where a cell runs (code, packages, processor, memory, GPUs) and how busy the machine is before it.

The environment decides whether two records may be compared. This file imports no torch, so it answers at once.

[Note: load before a cell] The load average is no measure, because it counts our own last cells for minutes. Instead 100 ms
of /proc/stat are read, minus the time that this process and all its descendants took meanwhile (a server that imports
torch, the end of the last cell). The GPU's utilisation covers up to a second. A busy GPU is therefore read again until that
second is over; by then our own last cell is no longer in it.
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import trainstep
from trainstep.measure.machine.nvml import Driver, GpuState, read_driver
from trainstep.records.record import Environment

PACKAGE = Path(trainstep.__file__).parent
_SOURCES = frozenset((".py", ".js", ".css", ".html", ".typed"))
_GIT_TIMEOUT_S = 5.0
_PROC = Path("/proc")
_PROCESSOR_INFO = _PROC / "cpuinfo"
_MEMBERSHIP = _PROC / "self/cgroup"
_CGROUPS = Path("/sys/fs/cgroup")
_MACHINE_EVENTS = _PROC / "vmstat"
_V1, _V2 = 1, 2
_LIMIT_FILES = {_V1: "memory.limit_in_bytes", _V2: "memory.max"}
_EVENT_FILES = {_V1: "memory.oom_control", _V2: "memory.events"}
_MOMENT_S = 0.1
_GPU_QUIET = 0.05
_GPU_MEMORY_S = 1.2
"""How long NVML's utilisation may cover past work: a little more than the longest of its periods."""


def environment(*, visible_devices: str | None = None, driver: Driver | None = None) -> Environment:
    """This machine and this code.

    `visible_devices`: the value of CUDA_VISIBLE_DEVICES. `driver`: the result of `read_driver`, if the caller has it.
    """
    driver = driver or read_driver(visible_devices)
    gpu = driver.gpus[0] if driver.gpus else None
    commit, dirty = git_state(PACKAGE)
    torch, cuda = torch_build()
    return Environment(
        hostname=socket.gethostname(),
        os=os_name(),
        cpu=cpu_model(),
        cores=cores(),
        memory_bytes=memory_bytes(),
        python=platform.python_version(),
        trainstep=trainstep.__version__,
        source=source_hash(PACKAGE),
        commit=commit,
        dirty=dirty,
        torch=torch,
        triton=installed_version("triton"),
        cuda=cuda,
        gpu=gpu.name if gpu else None,
        gpu_count=len(driver.gpus),
        gpu_memory_bytes=gpu.memory_bytes if gpu else None,
        driver=driver.version,
    )


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_packages() -> str:
    """A hash, as 16 hexadecimal digits, of the names and versions of all distributions installed for this interpreter."""
    names = {f"{item.metadata['Name']}=={item.version}" for item in importlib.metadata.distributions()}
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:16]


def torch_build() -> tuple[str | None, str | None]:
    """(torch's version, the CUDA version it was built for), each None if unknown."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None, None
    # Read version.py as text, because importing torch takes a second or more.
    values = _constants(Path(spec.submodule_search_locations[0]) / "version.py")
    return values.get("__version__") or installed_version("torch"), values.get("cuda")


def _constants(path: Path) -> dict[str, str]:
    """Name -> value of the plain strings that a module assigns, annotated or not."""
    try:
        statements = ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError):
        return {}
    constants = {}
    for statement in statements:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        value = getattr(statement, "value", None)
        if isinstance(targets[0], ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
            constants[targets[0].id] = value.value
    return constants


def source_hash(package: Path) -> str:
    """A hash, as 16 hexadecimal digits, of the names and contents of a package's sources, without files of editors."""
    digest = hashlib.sha256()
    for parts, path in sorted(_source_files(str(package))):
        with open(path, "rb", buffering=0) as file:
            content = file.read()
        digest.update(f"{'/'.join(parts)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def _source_files(package: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """(The path below the package, in parts; the whole path) of each source. With pathlib every cell begins 15 ms later."""
    for folder, folders, files in os.walk(package):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = tuple(filter(None, folder.removeprefix(package).split(os.sep)))
        for name in files:
            path = f"{folder}{os.sep}{name}"
            if os.path.splitext(name)[1] in _SOURCES and not name.startswith(".") and os.path.isfile(path):
                yield (*inside, name), path


def git_state(package: Path) -> tuple[str | None, bool | None]:
    """(commit, whether tracked files differ from it) of the repository that tracks the package; (None, None) without one."""
    # Being inside a repository is not enough: a virtual environment often lies inside an unrelated repository.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    commit = _git(package, "rev-parse", "HEAD")
    status = _git(package, "status", "--porcelain", "--untracked-files=no")
    return commit, None if commit is None or status is None else bool(status)


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None if it fails, hangs or is missing."""
    # Without locks, so that a commit that the user makes meanwhile does not fail.
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def cpu_model(processor_info: Path = _PROCESSOR_INFO) -> str:
    """The processor's marketing name, or its architecture if the kernel gives no name."""
    try:
        for line in processor_info.read_text(encoding="utf-8", errors="replace").splitlines():
            label, _, value = line.partition(":")
            if label.strip() == "model name" and value.strip():
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def cores() -> int:
    """The number of logical cores on which this process may run; a job on a shared node has fewer than the node."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def os_name() -> str:
    """`Debian GNU/Linux 12 (bookworm), Linux 6.1.0`."""
    kernel = f"{platform.system()} {platform.release()}"
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {kernel}"
    except (OSError, KeyError):
        return kernel


def memory_bytes(membership: Path = _MEMBERSHIP, cgroups: Path = _CGROUPS) -> int:
    """Physical memory, or the smallest limit of this process's control groups (a container, a Slurm job)."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    groups = _memory_groups(membership, cgroups)
    limits = (_number(group / _LIMIT_FILES[version]) for group, version in groups)
    return min([physical, *(limit for limit in limits if limit is not None)])


@dataclass(frozen=True, kw_only=True)
class OutOfMemoryKills:
    """How many processes the kernel has ended because memory ran out, and which part of the machine counted them."""

    count: int
    counted_by: str


def out_of_memory_kills(
    membership: Path = _MEMBERSHIP, cgroups: Path = _CGROUPS, machine_events: Path = _MACHINE_EVENTS
) -> OutOfMemoryKills | None:
    """The count of this process's nearest control group that has one, else the machine's; None if nothing counts.

    The kernel raises both counts before it sends the signal. A control group counts only its own processes; the machine
    also counts processes of other containers.
    """
    for group, version in _memory_groups(membership, cgroups):
        count = _kills_in(group / _EVENT_FILES[version])
        if count is not None:
            return OutOfMemoryKills(count=count, counted_by=f"control group {group}")
    count = _kills_in(machine_events)
    return None if count is None else OutOfMemoryKills(count=count, counted_by="whole machine")


def _memory_groups(membership: Path, cgroups: Path) -> Iterator[tuple[Path, int]]:
    """The folders of this process's memory control groups, from its own up to the root, with their version.

    Some folders may be missing: in a container the names can be the host's.
    """
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


def _number(path: Path) -> int | None:
    """The number in a control group's file; None for `max`, or without the file."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _kills_in(events: Path) -> int | None:
    """The number after `oom_kill`; None without the file, or from a kernel that does not count."""
    try:
        lines = events.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def load_before(device: str, visible_devices: str | None = None) -> dict[str, float | int]:
    """Facts about other processes just before a cell. [Note: load before a cell]

    cpu_busy_before: the share of the cores that they keep busy. For `cuda` also, of the first visible GPU:
    gpu_busy_before, the share of time in which it is busy, and gpu_other_processes, how many of them use it. A fact that
    this machine cannot tell is left out.
    """
    facts: dict[str, float | int | None] = {"cpu_busy_before": others_share()}
    gpus = read_driver(visible_devices).gpus if device == "cuda" else ()
    if gpus:
        state = GpuState(gpus[0].uuid)
        facts |= {"gpu_busy_before": _gpu_share(state.utilisation), "gpu_other_processes": _others_on(state)}
    return {name: value for name, value in facts.items() if value is not None}


def others_share(proc: Path = _PROC, wait: Callable[[float], None] = time.sleep) -> float | None:
    """The share of all cores' time, over 100 ms, that other processes used; None without /proc/stat."""
    try:
        before, ours_before = machine_ticks(proc), process_ticks(proc, os.getpid())
        wait(_MOMENT_S)
        after, ours_after = machine_ticks(proc), process_ticks(proc, os.getpid())
    except (OSError, ValueError, IndexError):
        return None
    busy, total = (now - then for now, then in zip(after, before, strict=True))
    ours = sum(ticks - ours_before.get(pid, 0) for pid, ticks in ours_after.items())
    return min(max((busy - ours) / total, 0.0), 1.0) if total > 0 else None


def machine_ticks(proc: Path) -> tuple[int, int]:
    """(busy ticks, all ticks) of all cores together: user, nice, system, idle, iowait, irq, softirq and steal."""
    ticks = [int(word) for word in (proc / "stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def process_ticks(proc: Path, root: int) -> dict[int, int]:
    """Process -> its ticks so far, for the process `root` and its descendants."""
    parents, ticks = {}, {}
    for path in proc.glob("[0-9]*/stat"):
        try:
            text = path.read_text(errors="replace")
        except OSError:  # the process has ended
            continue
        words = text.rpartition(")")[2].split()  # the last parenthesis ends the name, which may hold anything else
        pid = int(path.parent.name)
        parents[pid], ticks[pid] = int(words[1]), int(words[11]) + int(words[12])
    return {pid: count for pid, count in ticks.items() if _is_below(pid, parents, root)}


def _is_below(pid: int, parents: Mapping[int, int], root: int) -> bool:
    while pid not in (0, 1, root):
        pid = parents.get(pid, 0)
    return pid == root


def _gpu_share(read: Callable[[], float | None]) -> float | None:
    """The smallest utilisation that is read until our own last cell is no longer in it."""
    least, until_s = read(), time.monotonic() + _GPU_MEMORY_S
    while least is not None and least > _GPU_QUIET and time.monotonic() < until_s:
        time.sleep(_MOMENT_S)
        least = min(least, read() or 0.0)
    return least


def _others_on(state: GpuState) -> int | None:
    """The number of processes on the GPU that are not ours; None if their numbers belong to another namespace.

    In a container, for example, NVML gives the host's numbers, from which ours cannot be told.
    """
    pids, ours = state.processes(), process_ticks(_PROC, os.getpid())
    if pids is None or any(not (_PROC / str(pid)).exists() for pid in pids):
        return None
    return sum(pid not in ours for pid in pids)
