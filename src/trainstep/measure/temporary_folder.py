"""A folder for as long as a process needs it: removed by the process, or, where that was killed, by the next one that measures.

    with TemporaryFolder() as folder: ...     # a Path
    remove_abandoned()                        # at the start of whatever measures

[Note: who owns a folder] A process keeps a lock (flock) on each folder of its own, and the kernel releases the lock when the
process ends, however it ends. So a folder with our kind of name that can be locked has no owner any more, and is removed; no
process id has to be trusted. The name holds the host's, because locks on a shared file system may be seen by one host alone.
Where a file system has no such locks, nothing is removed but by its owner.

The folder for temporary files is often open to everybody. Only a real folder of this user's own is locked and removed, never
what a link points to.
"""

import fcntl
import os
import re
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path


class TemporaryFolder:
    """A new and empty folder, locked by this process until `remove`, or until the end of `with`."""

    def __init__(self) -> None:
        lock = None
        while lock is None:
            self.path = Path(tempfile.mkdtemp(prefix=_prefix()))
            lock = _lock_new(self.path)
        self._lock: int | None = lock

    def remove(self) -> None:
        """Remove it with all it holds. What cannot be removed now is left to the next process that measures."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


def remove_abandoned() -> None:
    """Remove the folders of this user, made on this host, whose processes have ended."""
    parent = tempfile.gettempdir()
    name = re.compile(re.escape(_prefix()) + r"[a-z0-9_]{8}")  # as mkdtemp ends it
    with suppress(OSError):
        for path in [entry.path for entry in os.scandir(parent) if name.fullmatch(entry.name)]:
            with suppress(OSError):  # another user's, a link, gone by now, or locked by its owner
                _remove_abandoned(path)


def _remove_abandoned(path: str) -> None:
    folder = _open(path)
    try:
        if os.fstat(folder).st_uid == os.geteuid():
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(folder)


def _lock_new(path: Path) -> int | None:
    """The locked folder; None where another process took it for abandoned before it was locked, and removed it."""
    try:
        folder = _open(path)
    except FileNotFoundError:
        return None
    with suppress(OSError):  # no locks on this file system
        fcntl.flock(folder, fcntl.LOCK_EX)  # waits for one who is removing it
    if path.exists():
        return folder
    os.close(folder)
    return None


def _open(path: str | Path) -> int:
    """OSError for a link, and for what is no folder."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _prefix() -> str:
    return f"trainstep-scratch-{re.sub(r'[^A-Za-z0-9.-]', '_', socket.gethostname())}-"
