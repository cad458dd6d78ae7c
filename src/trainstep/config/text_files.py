"""Which files of text `data` names, so that a bad name is refused before anything starts, and by whoever reads them alike."""

import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path

MAXIMUM_FOLDER_BYTES = 64 * 2**20
"""What is read of a folder's files."""
_SUFFIXES = frozenset(
    (".txt", ".md", ".rst", ".py", ".json", ".jsonl", ".csv", ".html", ".xml", ".tex", ".c", ".h", ".rs")
)


def text_files(data: str) -> list[Path]:
    """The file that `data` names, or the text files of that folder (of Python's standard library for 'stdlib').

    A folder's files come in the order of their paths, no more than fill `MAXIMUM_FOLDER_BYTES`. ValueError where there is
    nothing to read: nothing of that name, a device, a folder without text, a file that may not be opened.
    """
    path = Path(sysconfig.get_path("stdlib")) if data == "stdlib" else Path(data)
    try:
        if not path.exists():
            raise ValueError(f"data: there is no file or folder {data!r}; or take random or stdlib")
        if not path.is_file() and not path.is_dir():
            raise ValueError(
                f"data: {data} is no regular file, which has an end; give a file, or a folder of text files"
            )
        files = [path] if path.is_file() else _files_of_folder(path, own=data == "stdlib")
        for file in files:
            file.open("rb").close()
        empty = not any(file.stat().st_size for file in files)
    except OSError as error:
        raise ValueError(f"data: {error.filename or path} cannot be read: {error.strerror or error}") from None
    if empty:
        raise ValueError(f"data: no text found at {path}; give a file, or a folder of text files")
    return files


def check_length(data: str, contexts: Iterable[int]) -> None:
    """ValueError where a text is shorter than one of these contexts (tokens, a byte each) and its target, or `text_files` fails."""
    files = text_files(data)
    byte_count = sum(file.stat().st_size for file in files) + len(files) - 1
    longest = max(contexts, default=0)
    if byte_count < longest + 1:
        raise ValueError(
            f"data: {byte_count} bytes of text are fewer than a sequence of {longest} tokens and its target needs; "
            "give a longer text, or take a smaller context"
        )


def _files_of_folder(folder: Path, *, own: bool) -> list[Path]:
    """`own`: Python's own sources, without what is installed beside them."""
    os.listdir(folder)  # raises where the search below would find nothing in silence
    suffixes = frozenset((".py",)) if own else _SUFFIXES
    found = (file for file in folder.rglob("*") if file.suffix in suffixes and file.is_file())
    kept: list[Path] = []
    total = 0
    for file in sorted(file for file in found if not own or "site-packages" not in file.parts):
        if total >= MAXIMUM_FOLDER_BYTES:
            break
        kept.append(file)
        total += file.stat().st_size
    return kept
