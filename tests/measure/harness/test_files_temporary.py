"""Temporary folders are removed by their owner or after its death, and nobody else's folder is touched."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cell_maker import importable, planted, silent
from trainstep.measure.harness.connection import CellConnection
from trainstep.measure.harness.files import TemporaryFolder, remove_abandoned
from trainstep.measure.harness.local import run_groups
from trainstep.measure.harness.runner import CellRun, Limits, run_alone

__all__ = ["importable"]
OWNER = """
from trainstep.measure.harness.files import TemporaryFolder
folder = TemporaryFolder()
(folder.path / "inside").mkdir()
(folder.path / "inside" / "file").touch()
print(folder.path, flush=True)
input()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, here and in the processes that a test starts."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def owner(importable: None) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", OWNER], stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.kill()


def folder_of(owner: subprocess.Popen[str]) -> Path:
    assert owner.stdout is not None
    return Path(owner.stdout.readline().strip())


def test_a_folder_stays_until_its_owner_is_done():
    with TemporaryFolder() as folder:
        (folder / "file").touch()
        remove_abandoned()
        assert (folder / "file").exists(), "its owner lives"
    assert not folder.exists()


def test_removing_twice_is_allowed():
    folder = TemporaryFolder()
    folder.remove()
    folder.remove()
    assert not folder.path.exists()


def test_a_folder_is_removed_after_its_owners_death_and_not_before(owner: subprocess.Popen[str]):
    folder = folder_of(owner)
    remove_abandoned()
    assert (folder / "inside" / "file").exists()
    owner.kill()
    owner.wait()
    remove_abandoned()
    assert not folder.exists()


def test_the_next_driver_removes_it_even_with_nothing_to_run(owner: subprocess.Popen[str]):
    folder = folder_of(owner)
    owner.kill()
    owner.wait()
    assert list(run_groups([], Limits(), silent)) == []
    assert not folder.exists()


def test_an_owner_taken_for_dead_while_it_starts_makes_another_folder(monkeypatch: pytest.MonkeyPatch):
    """Another driver may remove a folder between its making and its lock; then a second folder is made."""
    folders: list[str] = []
    make = tempfile.mkdtemp

    def make_and_be_interrupted(prefix: str) -> str:
        folders.append(make(prefix=prefix))
        if len(folders) == 1:
            remove_abandoned()
        return folders[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_be_interrupted)
    with TemporaryFolder() as folder:
        assert str(folder) == folders[1]
        assert not Path(folders[0]).exists()


@pytest.mark.usefixtures("importable")
def test_a_cell_that_dies_leaves_no_folder(temporary: Path):
    connection = CellConnection(silent)
    record, _ = run_alone(CellRun(planted(act="hold_folder", then="kill", cold_compile=True), Limits(), connection))
    assert record.failure is not None
    assert len(list(temporary.iterdir())) == 2, "the driver's own, and the cell's"
    connection.close()
    assert list(temporary.iterdir()) == []


def abandoned_name(parent: Path) -> str:
    """A name that an abandoned folder could have."""
    with TemporaryFolder() as folder:
        pass
    assert folder.parent == parent
    return folder.name


def test_links_and_files_are_left_alone(temporary: Path):
    target = temporary / "target"
    target.mkdir()
    (target / "file").touch()
    link = temporary / abandoned_name(temporary)
    link.symlink_to(target)
    file = temporary / abandoned_name(temporary)
    file.touch()
    remove_abandoned()
    assert (target / "file").exists()
    assert link.is_symlink()
    assert file.exists()


def test_links_inside_are_not_followed(temporary: Path):
    (temporary / "target").mkdir()
    (temporary / "target" / "file").touch()
    folder = temporary / abandoned_name(temporary)
    folder.mkdir()
    (folder / "link").symlink_to(temporary / "target")
    remove_abandoned()
    assert not folder.exists()
    assert (temporary / "target" / "file").exists()


def test_another_users_folder_is_left_alone(temporary: Path, monkeypatch: pytest.MonkeyPatch):
    folder = temporary / abandoned_name(temporary)
    folder.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    remove_abandoned()
    assert folder.exists()


@pytest.mark.parametrize(
    "name", ["trainstep-scratch", "trainstep-scratch-elsewhere.example-abcd_123", "trainstep-main"]
)
def test_other_names_are_left_alone(temporary: Path, name: str):
    (temporary / name).mkdir()
    remove_abandoned()
    assert (temporary / name).exists()


def test_a_missing_folder_for_temporary_files_is_no_error(temporary: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "gone"))
    remove_abandoned()
    assert not (temporary / "gone").exists()
