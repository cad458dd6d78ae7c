"""A folder that a cell keeps a file in (a trace, a snapshot): made and tried before anything is measured.

kept_folder("keep_snapshot", "runs/snapshots")      # ValueError, in one sentence, where no file could be made there
"""

import tempfile
from pathlib import Path


def kept_folder(field: str, folder: str) -> Path:
    """The folder, made where it is missing. ValueError, naming the field, where no file can be made in it."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):  # permissions say nothing of a full disk, a read-only one, or root
            pass
    except OSError as error:
        raise ValueError(
            f"{field}: no file can be made in {folder!r} ({error.strerror}); name another folder"
        ) from None
    return path
