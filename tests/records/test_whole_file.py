"""A file is written whole or not at all: full disks, kills, links, permissions, and temporary files beside it."""

import fcntl
import os
import signal
import stat
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import trainstep
from full_disk import largest_file
from trainstep.records.whole_file import check_writable, remove_leftovers, whole_file

OLD, NEW = b"old" * 100, b"new" * 5000
KILLED = """
import os, signal, sys
from pathlib import Path
from trainstep.records.whole_file import whole_file
with whole_file(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def write(path: Path, data: bytes = NEW) -> None:
    with whole_file(path) as file:
        file.write(data)


def write_half(path: Path, error: type[BaseException]) -> None:
    with whole_file(path) as file:
        file.write(NEW)
        raise error


def run(program: str, path: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(Path(trainstep.__file__).parents[1])}
    return subprocess.run([sys.executable, "-c", program, path], env=environ, capture_output=True, text=True)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("name", ["a.html", "new/folder/a.html", "a" * 255, "日" * 85, "line\nbreak", "-", "..."])
def test_a_file_is_created_and_replaced(tmp_path: Path, name: str):
    path = tmp_path / name
    for data in (NEW, b"", OLD):
        check_writable(path)
        write(path, data)
        assert path.read_bytes() == data
    assert [*path.parent.iterdir()] == [path]


def test_an_error_in_the_block_leaves_the_old_content_alone(tmp_path: Path):
    path = tmp_path / "a"
    write(path, OLD)
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error):
            write_half(path, error)
    assert path.read_bytes() == OLD
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("existed", [True, False])
def test_a_full_disk_leaves_the_old_content_alone(tmp_path: Path, existed: bool):
    path = tmp_path / "a"
    if existed:
        write(path, OLD)
    with largest_file(1000), pytest.raises(OSError, match="File too large") as caught:
        write(path)
    assert caught.value.filename == str(path)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [OLD] * existed


def test_the_temporary_file_of_a_killed_writer_is_removed_at_the_next_start(tmp_path: Path):
    path = tmp_path / "a"
    write(path, OLD)
    for clean in (
        lambda: write(path, OLD),
        lambda: check_writable(tmp_path / "another"),
        lambda: remove_leftovers(tmp_path),
    ):
        assert run(KILLED, path).returncode == -signal.SIGKILL
        assert path.read_bytes() == OLD
        assert len([*tmp_path.iterdir()]) == 2
        clean()
        assert [*tmp_path.iterdir()] == [path]


def test_files_that_other_processes_are_writing_are_left_alone(tmp_path: Path):
    """The writer may run here or on a machine whose processes are unknown here; files of other names with this ending stay, too."""
    with whole_file(tmp_path / "here") as file:
        file.write(NEW)
        [here] = tmp_path.iterdir()
        machine = here.name.split(".")[2].split("-")[0]
        elsewhere = tmp_path / f".there.{int(machine, 16) ^ 1:08x}-4999999-0123abcd.partial"
        others = [elsewhere, tmp_path / ".a.partial", tmp_path / "a.partial"]
        for other in others:
            other.touch()
        write(tmp_path / "a")
        assert sorted(tmp_path.iterdir()) == sorted([here, *others, tmp_path / "a"])
    os.utime(elsewhere, (0, 0))
    remove_leftovers(tmp_path)
    assert not elsewhere.exists(), "nobody has written to it for an hour"
    assert (tmp_path / "here").read_bytes() == NEW


def test_a_symbolic_link_stays_and_its_target_is_replaced(tmp_path: Path):
    (tmp_path / "far").mkdir()
    link, target = tmp_path / "link", tmp_path / "far" / "a"
    link.symlink_to(target)
    for data in (NEW, OLD):  # at first the link names a file that is not there
        check_writable(link)
        write(link, data)
        assert link.is_symlink()
        assert target.read_bytes() == data
    assert [*target.parent.iterdir()] == [target]


def test_permissions_stay_and_a_new_file_gets_the_default(tmp_path: Path):
    path, usual = tmp_path / "a", tmp_path / "usual"
    usual.touch()
    write(path)
    assert mode(path) == mode(usual)
    path.chmod(0o640)
    write(path)
    assert mode(path) == 0o640


def test_paths_that_are_no_regular_files_are_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    paths = [
        tmp_path,
        Path("/"),
        Path(),
        Path("/dev/null"),
        tmp_path / "pipe",
        tmp_path / "loop",
        tmp_path / "loop" / "a",
    ]
    paths += [tmp_path / "file" / "a", tmp_path / ("a" * 256)]
    for path in paths:
        for access in (check_writable, write):
            with pytest.raises(OSError, match=r"."):
                access(path)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert len([*tmp_path.iterdir()]) == 3


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_write_protected_file_or_folder_is_refused(tmp_path: Path):
    path = tmp_path / "a"
    path.touch(0o444)
    with pytest.raises(PermissionError, match="it is write-protected"):
        check_writable(path)
    tmp_path.chmod(0o555)
    with pytest.raises(PermissionError, match="Permission denied"):
        check_writable(tmp_path / "b")


def test_a_write_protected_file_is_refused_to_root_of_a_read_only_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a").touch()
    monkeypatch.setattr(os, "access", lambda path, how: False)
    with pytest.raises(PermissionError, match="it is write-protected"):
        check_writable(tmp_path / "a")


def test_a_locked_temporary_file_is_left_alone(tmp_path: Path):
    """A container with the same host name has its own process ids, so an unknown process id does not show that the writer ended."""
    machine = f"{zlib.crc32(os.uname().nodename.encode()):08x}"
    neighbour = tmp_path / f".a.{machine}-4999999-0123abcd.partial"
    with open(neighbour, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        remove_leftovers(tmp_path)
        assert neighbour.exists()
    remove_leftovers(tmp_path)
    assert not neighbour.exists()
