"""Files that a cell keeps in a folder (traces, snapshots): the folder made and tried before anything is measured, a file whole.

kept_folder("keep_snapshot", "runs/snapshots")      # ValueError, in one sentence, where no file could be made there
with kept_file("keep_snapshot", path) as file:      # ValueError too, where the disk fills up
    file.write(...)
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from trainstep.records.whole_file import make_folder, remove_leftovers, whole_file


def kept_folder(field: str, folder: str) -> Path:
    """The folder, made where it is missing. ValueError, naming the field, where no file can be made in it."""
    path = Path(folder)
    try:
        make_folder(path)
        remove_leftovers(path)
        with tempfile.TemporaryFile(dir=path):  # permissions say nothing of a full disk, a read-only one, or root
            pass
    except OSError as error:
        raise ValueError(
            f"{field}: no file can be made in {folder!r} ({error.strerror}); name another folder"
        ) from None
    return path


@contextmanager
def kept_file(field: str, path: Path) -> Iterator[BinaryIO]:
    """A file in such a folder, there whole or not at all. ValueError, naming the field and the file, where it cannot be written."""
    try:
        with whole_file(path) as file:
            yield file
    except OSError as error:
        raise ValueError(f"{field}: {path} cannot be written: {error.strerror}; name another folder") from None
