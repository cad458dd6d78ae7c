"""Memory limits and out-of-memory kills of control groups of both versions; cores, processor and operating system."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cell_maker import importable, wait_until
from trainstep.measure.machine.environment import (
    _CGROUPS,
    _LIMIT_FILES,
    _MEMBERSHIP,
    OutOfMemoryKills,
    _memory_groups,
    cores,
    cpu_model,
    memory_bytes,
    os_name,
    out_of_memory_kills,
)

__all__ = ["importable"]

PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def group(tmp_path: Path, membership: str, **limits: str) -> tuple[Path, Path]:
    """A membership file and a tree of groups; `limits`: path with __ for / -> content."""
    (tmp_path / "membership").write_text(membership)
    for name, content in limits.items():
        path = (
            tmp_path
            / "cgroup"
            / name.replace("__", "/")
            .replace("memory_max", "memory.max")
            .replace("memory_limit_in_bytes", "memory.limit_in_bytes")
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path / "membership", tmp_path / "cgroup"


@pytest.mark.parametrize(
    ("membership", "limits", "expected"),
    [
        ("0::/job/step\n", {"job__step__memory_max": "max\n", "job__memory_max": "1048576\n"}, 2**20),
        ("0::/job/step\n", {"job__step__memory_max": "2048\n", "job__memory_max": "1048576\n"}, 2048),
        ("0::/\n", {"memory_max": "4096\n"}, 4096),
        ("0::/job\n", {"job__memory_max": "max\n"}, PHYSICAL),
        ("4:memory:/docker/x\n", {"memory__docker__x__memory_limit_in_bytes": "8192\n"}, 8192),
        # In a container the path is the host's, but the container's own group is mounted as the root.
        ("4:cpu,memory:/docker/x\n", {"memory__memory_limit_in_bytes": "8192\n"}, 8192),
        ("4:memory:/\n", {"memory__memory_limit_in_bytes": "9223372036854771712\n"}, PHYSICAL),
        ("3:cpuset:/a\n4:memory:/a\n0::/\n", {"memory__a__memory_limit_in_bytes": "1024\n"}, 1024),
        ("", {}, PHYSICAL),
    ],
)
def test_the_smallest_limit_counts(tmp_path: Path, membership: str, limits: dict[str, str], expected: int):
    assert memory_bytes(*group(tmp_path, membership, **limits)) == expected


def test_without_control_groups_the_limit_is_the_physical_memory(tmp_path: Path):
    assert memory_bytes(tmp_path / "absent", tmp_path / "absent") == PHYSICAL


@pytest.mark.parametrize(
    ("membership", "files", "count", "counted_by"),
    [
        ("0::/job\n", {"job/memory.events": "oom 9\noom_kill 3\noom_group_kill 0\n"}, 3, "control group {}/job"),
        (
            "0::/job/step\n",
            {"job/memory.events": "oom_kill 3\n"},
            3,
            "control group {}/job",
        ),  # counts the groups below it too
        (
            "4:memory:/a\n0::/\n",
            {"memory/a/memory.oom_control": "oom_kill_disable 0\noom_kill 2\n"},
            2,
            "control group {}/memory/a",
        ),
        ("4:memory:/docker/x\n", {"memory/memory.oom_control": "oom_kill 5\n"}, 5, "control group {}/memory"),
        (
            "4:memory:/a\n",
            {"memory/a/memory.oom_control": "under_oom 0\n", "vmstat": "oom_kill 8\n"},
            8,
            "whole machine",
        ),
        ("", {"vmstat": "pgfault 1\noom_kill 8\n"}, 8, "whole machine"),
    ],
)
def test_the_nearest_group_counts_the_kernels_kills(
    tmp_path: Path, membership: str, files: dict[str, str], count: int, counted_by: str
):
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    kills = out_of_memory_kills(tmp_path / "membership", tmp_path, tmp_path / "vmstat")
    assert kills == OutOfMemoryKills(count=count, counted_by=counted_by.format(tmp_path))


def test_no_count_of_kills_is_none(tmp_path: Path):
    assert out_of_memory_kills(tmp_path / "absent", tmp_path, tmp_path / "absent") is None


GROUP_DRIVER = """
import json, os, sys
from pathlib import Path
from cell_maker import planted, silent
from trainstep.measure.harness.connection import CellConnection
from trainstep.measure.harness.runner import CellRun, Limits, run_alone
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
record, _ = run_alone(CellRun(planted(act="fill_memory"), Limits(memory_limit_bytes=2**40), CellConnection(silent)))
print(record.failure.kind, record.failure.message)
"""


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of 200 MiB below this process's own; skips where none can be made."""
    parent, version = next(_memory_groups(_MEMBERSHIP, _CGROUPS), (Path("/nowhere"), 1))
    group = parent / f"trainstep-test-{os.getpid()}"
    limits = group / _LIMIT_FILES[version]
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        if not limits.exists():
            pytest.skip("control groups made here do not limit memory")
        limits.write_text(str(200 * 2**20))
        yield group
    finally:
        assert wait_until(lambda: (group / "cgroup.procs").read_text() == "")
        group.rmdir()


@pytest.mark.slow
@pytest.mark.usefixtures("importable")
def test_a_cell_that_the_kernel_kills_is_out_of_memory(small_group: Path):
    command = [sys.executable, "-c", GROUP_DRIVER, str(small_group)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert output.startswith(
        "out_of_memory killed by the kernel in steps: out of memory, by the count of the control group"
    )
    assert str(small_group) in output


def test_cpu_model_is_the_model_name(tmp_path: Path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel\t\t: 143\nmodel name\t: Imagined CPU: 64-Core\n\nprocessor\t: 1\n")
    assert cpu_model(info) == "Imagined CPU: 64-Core"
    assert cpu_model(tmp_path / "absent")


def test_cores_follow_the_affinity(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7}, raising=False)
    assert cores() == 3


def test_os_name_names_the_kernel():
    assert os.uname().release in os_name()
