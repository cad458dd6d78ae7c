"""Writes a page or a table to a file, but never over a file that trainstep did not write in the same format.

    check_output("page", Path("page.html"), "html")           # before hours of measuring
    write_output("page", Path("page.html"), "html", text)

An existing file is replaced if it is empty or recognised as output of that format: a page by its head; Markdown, LaTeX and plain
text by their last line, which is added here; files of options by their first line; CSV and JSON, which cannot carry a mark, by
columns that every report of records has.
"""

import csv
import json
import os
from pathlib import Path

from trainstep.reading import read_file
from trainstep.records.whole_file import check_writable, whole_file

_WRITTEN = "written by trainstep report"
_MARKS = {"markdown": f"\n<!-- {_WRITTEN} -->\n", "latex": f"% {_WRITTEN}\n", "terminal": f"\n({_WRITTEN})\n"}
"""Format -> the end of a file; a file to which somebody added text is not recognised. An empty line would end a LaTeX paragraph."""
FIRST_LINES = {
    "preset": "# A preset that trainstep bench --preset wrote.",
    "options": "# Options that trainstep plan --minimize chose.",
    "proof": "# Options that trainstep explain --prove chose.",
}
"""First lines of the TOML files that `--config` reads, by format."""
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
"""The beginning of pages from versions that did not name their generator."""
_COLUMNS = {"workload", "key", "record_file"}
_NAMES = {
    "html": "page",
    "markdown": "Markdown table",
    "latex": "LaTeX table",
    "csv": "CSV table",
    "json": "JSON table",
    "terminal": "text table",
    "preset": "preset",
    "options": "file of options",
    "proof": "file of proved options",
}
_HEAD_BYTES = 1000
"""A page names its generator within these bytes."""
_EDGE_BYTES = 65536
"""The bytes read from a file's beginning and end to recognise it."""


def check_output(option: str, path: Path, format: str) -> None:
    """ValueError, naming the option, if the file cannot be written, or exists and is not output of this format."""
    try:
        check_writable(path)
        may_write = not os.path.exists(path) or _is_ours(path, format)
    except OSError as error:
        raise ValueError(f"{option}: {path} cannot be written: {error.strerror}; name another file") from None
    if not may_write:
        kind = _NAMES[format]
        raise ValueError(
            f"{option}: {path} does not look like a {kind} that this version of trainstep wrote; name another file, or "
            "remove that one"
        )


def write_output(option: str, path: Path, format: str, text: str) -> None:
    """Write the whole file with the mark of its format. ValueError as `check_output` raises; the file is then unchanged."""
    check_output(option, path, format)
    marked = text + _MARKS.get(format, "")
    try:
        with whole_file(path) as file:
            file.write(marked.encode("utf-8", errors="replace"))  # a record's text may contain a lone surrogate
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
    if format in FIRST_LINES:
        return head.startswith(FIRST_LINES[format].encode())
    if format in _MARKS:
        return tail.endswith(_MARKS[format].encode())
    if format == "csv":
        return _COLUMNS.issubset(next(csv.reader(head.decode(errors="replace").splitlines()), ()))
    return head.startswith((b'{\n "answer": [', b'[\n {\n  "')) and _is_table(path)


def _is_table(path: Path) -> bool:
    """Whether a JSON file has a list of rows of which at least one describes a record."""
    try:
        table = json.loads(read_file(path))
    except (ValueError, RecursionError):  # ValueError also if the file is too large to be a table of ours
        return False
    rows = table.get("rows") if isinstance(table, dict) else table  # before 2026-12 the list was the whole file
    return isinstance(rows, list) and any(isinstance(row, dict) and row.keys() >= _COLUMNS for row in rows)
