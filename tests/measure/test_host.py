"""Memory limits of control groups, both versions; the processor's name."""

import os
from pathlib import Path

import pytest

from trainstep.measure.host import cores, cpu_model, memory_bytes, os_name

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


def test_without_control_groups(tmp_path: Path):
    assert memory_bytes(tmp_path / "absent", tmp_path / "absent") == PHYSICAL


def test_cpu_model(tmp_path: Path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel\t\t: 143\nmodel name\t: Imagined CPU: 64-Core\n\nprocessor\t: 1\n")
    assert cpu_model(info) == "Imagined CPU: 64-Core"
    assert cpu_model(tmp_path / "absent")


def test_cores_follow_the_affinity(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7}, raising=False)
    assert cores() == 3


def test_os_name_names_the_kernel():
    assert os.uname().release in os_name()
