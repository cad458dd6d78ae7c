"""The environment of a record is complete, fast, without torch, and right about git."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import trainstep
from fake_nvml import FakeNvml, install
from trainstep.measure.machine.environment import environment, git_state, installed_version, source_hash, torch_build


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false"]
    process = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return process.stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of two files, not in a repository."""
    folder = tmp_path / "tree" / "package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "step.py").write_text("x = 1\n")
    return folder


def committed(package: Path) -> str:
    git(package.parent, "init", "-q")
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-q", "-m", "first")
    return git(package.parent, "rev-parse", "HEAD")


def test_the_environment_has_the_visible_gpu(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, FakeNvml("NVIDIA H200", "NVIDIA L4"))
    everything, second = environment(), environment(visible_devices="1")
    assert (everything.gpu, everything.gpu_count, everything.gpu_memory_bytes) == ("NVIDIA H200", 2, 2**30)
    assert (second.gpu, second.gpu_count, second.gpu_memory_bytes) == ("NVIDIA L4", 1, 2 * 2**30)
    assert second.driver == "570.86.15"


def test_the_environment_without_a_gpu_has_none(monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, None)
    here = environment()
    assert (here.gpu, here.gpu_count, here.gpu_memory_bytes, here.driver) == (None, 0, None, None)
    assert here.trainstep == trainstep.__version__
    assert here.cores >= 1
    assert here.memory_bytes > 2**20
    assert here.source == source_hash(Path(trainstep.__file__).parent)


def test_the_environment_is_fast_and_does_not_import_torch():
    program = (
        "import json, sys; from trainstep.measure.machine.environment import environment; here = environment();"
        "print(json.dumps([here.torch, 'torch' in sys.modules]))"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    torch, imported = json.loads(process.stdout)
    assert torch
    assert not imported
    started_s = time.perf_counter()
    environment()
    assert time.perf_counter() - started_s < 5  # 25 ms on an idle machine; the bound only catches a hang


def test_torch_build_is_what_torch_says():
    import torch

    assert torch_build() == (torch.__version__, torch.version.cuda)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n", ("2.13.0+cu130", "13.0")),
        ("__version__ = '2.11.0+cpu'\ncuda: str | None = None\n", ("2.11.0+cpu", None)),
        ("from x import y\n__version__ = '2.13.0'\ncuda = '12.6'\n", ("2.13.0", "12.6")),
    ],
)
def test_torch_build_is_read_from_the_version_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: tuple[str, str | None]
):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('must not be imported')\n")
    (tmp_path / "torch" / "version.py").write_text(text)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert torch_build() == expected


def test_torch_build_without_torch_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert torch_build() == (None, None)


def test_source_hash_sees_names_and_contents(package: Path):
    before = source_hash(package)
    assert len(before) == 16
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "step.pyc").write_text("compiled")
    for left_by_an_editor in (".step.py.swp", "step.py~", ".hidden.py", "#step.py#"):
        (package / left_by_an_editor).write_text("draft")
    assert source_hash(package) == before
    (package / "step.py").rename(package / "other.py")
    renamed = source_hash(package)
    (package / "other.py").write_text("x = 2\n")
    changed = source_hash(package)
    (package / "page.html").write_text("<p>")
    assert len({before, renamed, changed, source_hash(package)}) == 4


def test_git_state_tells_clean_from_changed(package: Path):
    commit = committed(package)
    assert git_state(package) == (commit, False)
    (package / "notes.txt").write_text("untracked")
    assert git_state(package) == (commit, False)
    (package / "step.py").write_text("x = 2\n")
    assert git_state(package) == (commit, True)


def test_git_state_is_none_where_the_package_is_not_tracked(package: Path):
    tree = package.parent
    (tree / "theirs.py").write_text("")
    git(tree, "init", "-q")
    git(tree, "add", "theirs.py")
    git(tree, "commit", "-q", "-m", "theirs")
    assert git_state(package) == (None, None)


def test_git_state_is_none_without_a_repository_or_git(package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert git_state(package) == (None, None)
    committed(package)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(package) == (None, None)


def test_installed_version_is_none_for_an_absent_package():
    assert installed_version("pytest") == pytest.__version__
    assert installed_version("no-such-distribution-here") is None
