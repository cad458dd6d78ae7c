"""Files of a measuring process: temporary folders that never stay behind, and files that the user asked to keep.

    with TemporaryFolder() as folder: ...               # a Path
    remove_abandoned()                                  # where a measurement starts

    kept_folder("keep_snapshot", "runs/snapshots")      # ValueError, in one sentence, if no file can be made there
    with kept_file("keep_snapshot", path) as file:      # ValueError, too, if the disk fills up
        file.write(...)

[Note: who owns a folder] A process keeps a lock (flock) on each of its temporary folders, and the kernel releases the
lock when the process ends, however it ends. A folder with our kind of name that can be locked therefore has no owner any
more, and is removed; no process id has to be trusted. The folder's name holds the host's name, because locks on a shared
file system may be visible to one host alone. On a file system without locks, only the owner removes its folders.

The system's folder for temporary files is often open to everybody. Only a real folder that belongs to this user is locked
and removed, never the target of a link.
"""

import fcntl
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from trainstep.records.whole_file import make_folder, remove_leftovers, whole_file


class TemporaryFolder:
    """A new and empty folder, locked by this process until `remove`, or until the end of `with`."""

    def __init__(self) -> None:
        lock = None
        while lock is None:
            self.path = Path(tempfile.mkdtemp(prefix=_prefix()))
            lock = _lock_new(self.path)
        self._lock: int | None = lock

    def remove(self) -> None:
        """Remove the folder with its content. What cannot be removed now is left to the next measuring process."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


def remove_abandoned() -> None:
    """Remove this user's temporary folders of this host if the process that made them has ended."""
    parent = tempfile.gettempdir()
    name = re.compile(re.escape(_prefix()) + r"[a-z0-9_]{8}")  # mkdtemp adds these eight characters
    with suppress(OSError):
        for path in [entry.path for entry in os.scandir(parent) if name.fullmatch(entry.name)]:
            # The folder belongs to another user, is a link, is gone by now, or is locked by its owner.
            with suppress(OSError):
                _remove_abandoned(path)


def kept_folder(field: str, folder: str) -> Path:
    """Make the folder if it is missing. Raises ValueError, naming the config's field, if no file can be made in it."""
    path = Path(folder)
    try:
        make_folder(path)
        remove_leftovers(path)
        # Try it: permissions tell nothing about a full disk, a read-only disk, or root.
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(
            f"{field}: no file can be made in {folder!r} ({error.strerror}); name another folder"
        ) from None
    return path


@contextmanager
def kept_file(field: str, path: Path) -> Iterator[BinaryIO]:
    """Write a file in such a folder, whole or not at all.

    Raises ValueError, naming the config's field and the file, if the file cannot be written.
    """
    try:
        with whole_file(path) as file:
            yield file
    except OSError as error:
        raise ValueError(f"{field}: {path} cannot be written: {error.strerror}; name another folder") from None


def _remove_abandoned(path: str) -> None:
    folder = _open(path)
    try:
        if os.fstat(folder).st_uid == os.geteuid():
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(folder)


def _lock_new(path: Path) -> int | None:
    """Lock a new folder. None if another process found it not locked yet, and removed it as abandoned."""
    try:
        folder = _open(path)
    except FileNotFoundError:
        return None
    with suppress(OSError):  # this file system has no locks
        fcntl.flock(folder, fcntl.LOCK_EX)  # waits while another process removes the folder
    if path.exists():
        return folder
    os.close(folder)
    return None


def _open(path: str | Path) -> int:
    """Open a folder. Raises OSError for a link, and for anything that is no folder."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _prefix() -> str:
    return f"trainstep-scratch-{re.sub(r'[^A-Za-z0-9.-]', '_', socket.gethostname())}-"
