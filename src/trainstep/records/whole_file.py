"""A file that is written whole or not at all: into a neighbour file first, which then takes its name.

    with whole_file(Path("table.csv")) as file:
        file.write(b"...")

Every file that a verb writes goes through here, but for records, which are appended (records/store.py).

[Note: a kill at any moment] Until the neighbour is renamed the old content stays. An error, such as a full disk, removes the
neighbour at once. What a kill leaves has the writer's machine and process id in its name: whatever next writes into that folder,
or checks that it can, removes it. Jobs on other nodes may be writing into the same folder, and nothing shows here whether they
still run: what carries another machine's name goes once nobody has written to it for an hour.
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
"""How much of a file's name its neighbour's holds: at most 200 bytes of the 255 that a name may have."""


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` when the block ends; if an error ends the block, `path` stays as it was.

    Behind a symbolic link, the file that it names is replaced. Permissions stay. Missing folders are made. OSError, with `path` as
    its file name, where the file cannot be written.
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
        error.filename, error.filename2 = str(path), None  # writing to an open file names none, renaming names two
        raise
    finally:
        with suppress(OSError):  # after an error; once renamed, it is not there
            neighbour.unlink()


def check_writable(path: Path) -> None:
    """OSError if `whole_file` could not write `path`: found out by making a neighbour file, for permissions say nothing of a disk
    that is read-only. Missing folders are made.
    """
    target = _target(path)
    if _status(target) is not None and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, "it is write-protected", str(path))
    make_folder(target.parent)
    remove_leftovers(target.parent)
    neighbour = _neighbour(target)
    with open(neighbour, "xb"):
        neighbour.unlink()


def remove_leftovers(folder: Path) -> None:
    """Remove the neighbour files in a folder whose writers are no more. A folder that may not be listed stays as it is."""
    try:
        paths = list(folder.iterdir())
    except OSError:
        return
    for path in paths:
        if match := _NEIGHBOUR.fullmatch(path.name):
            with suppress(OSError):  # another process may have removed or renamed it, or it is another user's
                here = match[1] == _machine() and not _is_running(int(match[2]))
                if here or time.time() - path.stat().st_mtime > _ABANDONED_S:
                    with open(path, "rb") as file:
                        _lock(
                            file
                        )  # OSError while somebody writes: a container may have our name and its own process ids
                        path.unlink()


def make_folder(folder: Path) -> None:
    """Make a folder and those above it. OSError also where they are nested deeper than pathlib's recursion goes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except RecursionError:
        raise OSError(errno.ENAMETOOLONG, "its folders are nested too deeply", str(folder)) from None


def _lock(file: BinaryIO) -> None:
    """Hold a file as its writer. OSError if another process does, or where the file system has no locks."""
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _target(path: Path) -> Path:
    """The file behind symbolic links. A loop of links comes back as it is, where Path.resolve would raise RuntimeError."""
    return Path(os.path.realpath(path))


def _neighbour(target: Path) -> Path:
    writer = f"{_machine()}-{os.getpid()}-{secrets.token_hex(4)}"
    return target.parent / f".{target.name[:_KEPT_CHARACTERS]}.{writer}.partial"


def _machine() -> str:
    """Eight characters that tell this machine from others."""
    return f"{zlib.crc32(os.uname().nodename.encode()):08x}"


def _status(target: Path) -> os.stat_result | None:
    """The status of a regular file, or None if there is none. OSError for a folder, a device or a pipe."""
    try:
        found = target.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        is_folder = stat.S_ISDIR(found.st_mode)
        raise OSError(errno.EINVAL, "it is a folder" if is_folder else "it is no regular file", str(target))
    return found


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        return True
    return True
