"""Find the text files that the field `data` names.

A bad name is refused before anything starts, with the same error as when the text is read.
"""

import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path

MAXIMUM_FOLDER_BYTES = 64 * 2**20
"""The most that is read from a folder's files together."""
_SUFFIXES = frozenset(
    (".txt", ".md", ".rst", ".py", ".json", ".jsonl", ".csv", ".html", ".xml", ".tex", ".c", ".h", ".rs")
)


def text_files(data: str) -> list[Path]:
    """The file that `data` names, or the text files in that folder (Python's standard library for 'stdlib').

    The files of a folder are sorted by path and end once they fill `MAXIMUM_FOLDER_BYTES`. ValueError if nothing can be read: no
    such file or folder, a device, a folder without text, a file that cannot be opened.
    """
    path = Path(sysconfig.get_path("stdlib")) if data == "stdlib" else Path(data)
    try:
        if not path.exists():
            raise ValueError(f"data: there is no file or folder {data!r}; or take random or stdlib")
        if not path.is_file() and not path.is_dir():
            # A device may have no end.
            raise ValueError(f"data: {data} is not a regular file; give a file, or a folder of text files")
        files = [path] if path.is_file() else _files_in_folder(path, stdlib=data == "stdlib")
        for file in files:
            file.open("rb").close()
        empty = not any(file.stat().st_size for file in files)
    except OSError as error:
        raise ValueError(f"data: {error.filename or path} cannot be read: {error.strerror or error}") from None
    if empty:
        raise ValueError(f"data: no text found at {path}; give a file, or a folder of text files")
    return files


def check_length(data: str, contexts: Iterable[int]) -> None:
    """ValueError if the text is shorter than the longest context (a token is a byte) and its target, or if `text_files` fails."""
    files = text_files(data)
    byte_count = sum(file.stat().st_size for file in files) + len(files) - 1
    longest = max(contexts, default=0)
    if byte_count < longest + 1:
        raise ValueError(
            f"data: {byte_count} bytes of text are fewer than a sequence of {longest} tokens and its target need; "
            "give a longer text, or take a smaller context"
        )


def _files_in_folder(folder: Path, *, stdlib: bool) -> list[Path]:
    """The text files in a folder; in Python's standard library only its sources, without installed packages."""
    os.listdir(folder)  # raises OSError; rglob would silently find nothing
    suffixes = frozenset((".py",)) if stdlib else _SUFFIXES
    candidates = (file for file in folder.rglob("*") if file.suffix in suffixes and file.is_file())
    files: list[Path] = []
    total_bytes = 0
    for file in sorted(file for file in candidates if not stdlib or "site-packages" not in file.parts):
        if total_bytes >= MAXIMUM_FOLDER_BYTES:
            break
        files.append(file)
        total_bytes += file.stat().st_size
    return files
