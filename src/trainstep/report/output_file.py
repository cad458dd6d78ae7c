"""The file that a page or a table is written into: never over a file that trainstep did not write in the same format.

    check_output("page", Path("page.html"), "html")           # before hours of measuring
    write_output("page", Path("page.html"), "html", text)

An existing file is replaced if it is empty or recognised as output of that format: a page by its head; Markdown, LaTeX and plain
text by their last line, which is added here; CSV and JSON, where no mark can stand, by columns that every report of records has.
"""

import csv
import json
import os
from pathlib import Path

from trainstep.reading import read_file
from trainstep.records.whole_file import check_writable, whole_file

_WRITTEN = "written by trainstep report"
_MARKS = {"markdown": f"\n<!-- {_WRITTEN} -->\n", "latex": f"% {_WRITTEN}\n", "terminal": f"\n({_WRITTEN})\n"}
"""Format -> how a file ends: one that somebody added to is no longer recognised. No empty line in LaTeX: it ends a paragraph."""
_PAGE = b'<meta name="generator" content="trainstep">'
_EARLIER_PAGE = (
    b"<!DOCTYPE html>\n"
    b'<html lang="en">\n'
    b"<head>\n"
    b'<meta charset="utf-8">\n'
    b'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    b'<meta name="color-scheme" content="light dark">\n'
    b"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline'; "
    b"style-src 'unsafe-inline'; img-src data: blob:; font-src data:\">\n"
    b"<title>"
)
"""How pages began before they named their generator."""
_COLUMNS = {"workload", "key", "record_file"}
_NAMES = {
    "html": "page",
    "markdown": "Markdown table",
    "latex": "LaTeX table",
    "csv": "CSV table",
    "json": "JSON table",
    "terminal": "text table",
}
_HEAD_BYTES = 1000
"""Within these a page names its generator."""
_EDGE_BYTES = 65536
"""How much of a file's beginning and end is read to recognise it."""


def check_output(option: str, path: Path, format: str) -> None:
    """ValueError, naming the option, if the file cannot be written, or is there and is no output of this format."""
    try:
        check_writable(path)
        ours = not os.path.exists(path) or _is_ours(path, format)
    except OSError as error:
        raise ValueError(f"{option}: {path} cannot be written: {error.strerror}; name another file") from None
    if not ours:
        kind = _NAMES[format]
        raise ValueError(
            f"{option}: {path} does not look like a {kind} that this version of trainstep wrote; name another file, or "
            "remove that one"
        )


def write_output(option: str, path: Path, format: str, text: str) -> None:
    """Write the file whole, with the mark of its format. ValueError as of `check_output`; the file then is as it was."""
    check_output(option, path, format)
    marked = text + _MARKS.get(format, "")
    try:
        with whole_file(path) as file:
            file.write(marked.encode("utf-8", errors="replace"))  # text of a record may hold a lone surrogate
    except OSError as error:
        raise ValueError(f"{option}: {path} cannot be written: {error.strerror}; name another file") from None


def _is_ours(path: Path, format: str) -> bool:
    with open(path, "rb") as file:
        head = file.read(_EDGE_BYTES)
        file.seek(max(0, file.seek(0, os.SEEK_END) - _EDGE_BYTES))
        tail = file.read()
    if not head:
        return True
    if format == "html":
        return head.startswith(_EARLIER_PAGE) or _PAGE in head[:_HEAD_BYTES]
    if format in _MARKS:
        return tail.endswith(_MARKS[format].encode())
    if format == "csv":
        return _COLUMNS.issubset(next(csv.reader(head.decode(errors="replace").splitlines()), ()))
    return head.startswith((b'{\n "answer": [', b'[\n {\n  "')) and _is_table(path)


def _is_table(path: Path) -> bool:
    """Whether a JSON file has rows, as a list of objects (before 2026-12 the whole file), one of which at least describes a
    record."""
    try:
        table = json.loads(read_file(path))
    except (ValueError, RecursionError):  # also where it is too large to be a table of ours
        return False
    rows = table.get("rows") if isinstance(table, dict) else table
    return isinstance(rows, list) and any(isinstance(row, dict) and row.keys() >= _COLUMNS for row in rows)
