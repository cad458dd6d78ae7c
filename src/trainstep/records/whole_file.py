"""Write a file whole or not at all: the content goes into a neighbour file, which is then renamed.

    with whole_file(Path("table.csv")) as file:
        file.write(b"...")

Every file that a verb writes goes through here, except records, which are appended (records/store.py).

[Note: a kill at any moment] Until the neighbour is renamed, the old content stays. An error, such as a full disk, removes the
neighbour at once. A kill leaves the neighbour behind; its name contains the writer's machine and process id, and the next write
into that folder, or check that it is writable, removes it. Jobs on other nodes may be writing into the same folder, and we cannot
tell whether they still run. So a neighbour from another machine is removed once nothing has been written to it for an hour.
"""

import errno
import fcntl
import os
import re
import secrets
import stat
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_NEIGHBOUR = re.compile(r"\..*\.([0-9a-f]{8})-(\d{1,7})-[0-9a-f]{8}\.partial", re.DOTALL)
_ABANDONED_S = 3600
_KEPT_CHARACTERS = 50
"""The part of a file's name that its neighbour's name repeats: at most 200 bytes of the 255 that a name may have."""


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the block ends; if an error ends the block, `path` stays as it was.

    If `path` is a symbolic link, the file that it points to is replaced. Permissions stay. Missing folders are made. OSError, with
    `path` as its file name, if the file cannot be written.
    """
    target = _target(path)
    neighbour = _neighbour(target)
    try:
        old = _status(target)
        make_folder(target.parent)
        remove_leftovers(target.parent)
        with open(neighbour, "xb") as file:
            with suppress(OSError):  # not every file system has locks
                _lock(file)
            if old is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
            neighbour.replace(target)  # before the file is closed, and its lock with it
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # a failed write names no file, a failed rename names two
        raise
    finally:
        with suppress(OSError):  # it exists only after an error
            neighbour.unlink()


def check_writable(path: Path) -> None:
    """OSError if `whole_file` could not write `path`. Missing folders are made."""
    target = _target(path)
    if _status(target) is not None and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, "it is write-protected", str(path))
    make_folder(target.parent)
    remove_leftovers(target.parent)
    neighbour = _neighbour(target)
    with open(neighbour, "xb"):  # permissions do not show that a disk is read-only, so try it
        neighbour.unlink()


def remove_leftovers(folder: Path) -> None:
    """Remove the neighbour files whose writers have ended from a folder. A folder that cannot be listed stays as it is."""
    try:
        paths = list(folder.iterdir())
    except OSError:
        return
    for path in paths:
        if match := _NEIGHBOUR.fullmatch(path.name):
            with suppress(OSError):  # another process may have removed or renamed it, or it is another user's
                writer_ended = match[1] == _machine() and not _is_running(int(match[2]))
                if writer_ended or time.time() - path.stat().st_mtime > _ABANDONED_S:
                    with open(path, "rb") as file:
                        # A container may have this machine's name and its own process ids, so the writer may still run: then
                        # the lock raises OSError.
                        _lock(file)
                        path.unlink()


def make_folder(folder: Path) -> None:
    """Make a folder and its parents. OSError also if they are nested more deeply than pathlib's recursion limit."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except RecursionError:
        raise OSError(errno.ENAMETOOLONG, "its folders are nested too deeply", str(folder)) from None


def _lock(file: BinaryIO) -> None:
    """Lock a file as its writer. OSError if another process has locked it, or if the file system has no locks."""
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _target(path: Path) -> Path:
    """The file behind symbolic links."""
    return Path(os.path.realpath(path))  # Path.resolve would raise RuntimeError for a loop of links


def _neighbour(target: Path) -> Path:
    writer = f"{_machine()}-{os.getpid()}-{secrets.token_hex(4)}"
    return target.parent / f".{target.name[:_KEPT_CHARACTERS]}.{writer}.partial"


def _machine() -> str:
    """Eight characters that tell this machine from others."""
    return f"{zlib.crc32(os.uname().nodename.encode()):08x}"


def _status(target: Path) -> os.stat_result | None:
    """The status of a regular file, or None if there is none. OSError for a folder, a device or a pipe."""
    try:
        status = target.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        is_folder = stat.S_ISDIR(status.st_mode)
        raise OSError(errno.EINVAL, "it is a folder" if is_folder else "it is not a regular file", str(target))
    return status


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # the process is another user's
        return True
    return True
