"""Keeps a file that grows, such as a file of records, for one process."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainstep.records.whole_file import make_folder


@contextmanager
def locked_file(path: Path) -> Iterator[bool]:
    """Lock `path`, which is made if it is missing, and yield whether it was. Missing folders are made.

    ValueError, with what to do, if it is not a regular file, cannot be written or locked, or another process has locked it.
    """
    try:
        made_here = not os.path.lexists(path)
        if path.exists() and not path.is_file():
            raise ValueError(f"{path}: cannot be written: it is not a regular file")
        make_folder(path.parent)
        file = open(path, "ab")  # noqa: SIM115  (closed below)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{path}: another trainstep is writing to it; give --out another file") from None
        except OSError as error:
            reason = f"it cannot be locked: {error.strerror}"
            raise ValueError(f"{path}: {reason}; give --out a file on another file system") from None
        yield made_here
