"""Attacks on files of records: damaged copies of published ones, read by report in every format, by compare and by a sweep.

No reader changes a file. A sweep that continues a damaged file refuses it or keeps every whole record.
"""

import gzip
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attacks.attack import Outcome
from attacks.damage import BYTES, Draw, dumped, json_value
from attacks.reader import End, Readers, judged
from sources import ROOT

FORMATS = ("terminal", "markdown", "latex", "csv", "json", "html")
_MOST_BYTES = 200_000
_MOST_RECORDS = 6
_SWEEP = '[grid]\nmodel = "tiny"\ndevice = "cpu"\ncontext = [32, 64]\n'


class RecordFiles:
    """Damaged files of records: 2,500 cases at full size, each read by all readers."""

    name = "record_files"
    full = 2500

    def __init__(self, readers: Readers, *, readers_a_file: int | None = None) -> None:
        """`readers_a_file`: the number of readers drawn for each file; None: all of them."""
        self._readers = readers
        self._readers_a_file = readers_a_file
        self._sources = sorted(
            file for file in (ROOT / "results").rglob("*.jsonl") if file.stat().st_size < _MOST_BYTES
        )

    def afterwards(self) -> Iterable[Outcome]:
        return self._readers.left()

    def attack(self, draw: Draw, folder: Path) -> Outcome:
        source = draw.choice(self._sources)
        (folder / "s.toml").write_text(_SWEEP)
        _copy(draw, source, folder / "whole.jsonl")
        what = _damaged_copy(draw, folder)
        before = _contents(folder)
        ends, lost = [], []
        command_lines = _command_lines()
        for words in draw.sample(command_lines, self._readers_a_file or len(command_lines)):
            ends.append(self._readers.run(words, folder))
            lost.append(self._lost(folder, before, words, ends[-1], what))
        case = f"{source.relative_to(ROOT)}: {what}"
        return judged(case, ends, lost="; ".join(filter(None, lost)))

    def _lost(self, folder: Path, before: dict[str, bytes], words: list[str], end: End, what: str) -> str:
        """What the reader with these words lost; the files are restored for the next reader."""
        after = _contents(folder)
        changed = [name for name, content in before.items() if after.get(name) != content]
        if words[0] == "sweep" and "damaged.jsonl" in changed and (lost_records := _gone(before, after)) is not None:
            changed.remove("damaged.jsonl")
            if lost_records:
                changed.append(f"{lost_records} whole records")
        if what == _NO_LAST_NEWLINE and words[0] == "report" and end.code == 0 and "--out" not in words:
            as_whole = self._readers.run([*words[:-1], "whole.jsonl"], folder)
            if as_whole.out.replace(b"whole.jsonl", b"damaged.jsonl") != end.out:
                changed.append("the last record is not shown")
        for name, content in before.items():
            (folder / name).write_bytes(content)
        return f"{' '.join(words)}: {', '.join(changed)}" if changed else ""


_NO_LAST_NEWLINE = "the last newline is gone"


def _command_lines() -> list[list[str]]:
    """The command line of every reader of a file of records. The file of a report is the last word."""
    return [
        *(["report", "--format", name, "damaged.jsonl"] for name in FORMATS if name != "html"),
        ["report", "--out", "page.html", "damaged.jsonl"],
        ["report", "--out", "table.csv", "whole.jsonl", "damaged.jsonl"],
        ["compare", "whole.jsonl", "damaged.jsonl"],
        ["compare", "damaged.jsonl", "whole.jsonl", "--json", "--allow-mixed"],
        ["sweep", "s.toml", "--out", "damaged.jsonl", "--allow-mixed"],
        ["sweep", "s.toml", "--out", "damaged.jsonl", "--retry-failed", "--page", "swept.html"],
    ]


def _copy(draw: Draw, source: Path, target: Path) -> None:
    """Copy some records of a file, in their order, with their tables."""
    lines = source.read_bytes().splitlines(keepends=True)
    chosen = sorted(draw.sample(range(len(lines)), min(len(lines), draw.randrange(1, _MOST_RECORDS + 1))))
    target.write_bytes(b"".join(lines[index] for index in chosen))
    tables = source.with_suffix(".tables")
    target.with_suffix(".tables").mkdir()
    for table in tables.glob("*.gz") if tables.is_dir() else ():
        (target.with_suffix(".tables") / table.name).write_bytes(table.read_bytes())


def _damaged_copy(draw: Draw, folder: Path) -> str:
    """Write `damaged.jsonl` beside `whole.jsonl`; a description of the damage."""
    content = (folder / "whole.jsonl").read_bytes()
    tables = folder / "damaged.tables"
    tables.mkdir()
    for table in (folder / "whole.tables").iterdir():
        (tables / table.name).write_bytes(table.read_bytes())
    kind = draw.choice(("bytes", "bytes", "values", "values", "values", "values", "table", "end"))
    if kind == "bytes":
        content, what = draw.choice(BYTES)(draw, content)
    elif kind == "values":
        content, what = _with_other_values(draw, content)
    elif kind == "table":
        content, what = _with_other_table(draw, content, tables)
    else:
        content, what = draw.choice(
            [
                (content[:-1], _NO_LAST_NEWLINE),
                (content[:-2], "the last brace is gone"),
                (content + content[: draw.randrange(1, 200)], "torn"),
                (content + bytes(draw.randrange(1, 5000)), "zeros at the end"),
                (content + b"\n\n", "blank lines at the end"),
                (content + b"mine", "a word at the end"),
            ]
        )
    (folder / "damaged.jsonl").write_bytes(content)
    return what


def _with_other_values(draw: Draw, content: bytes) -> tuple[bytes, str]:
    lines = content.splitlines()
    index = draw.randrange(len(lines))
    record = json.loads(lines[index])
    what = "; ".join(_change_a_part(draw, record) for _ in range(draw.choice((1, 1, 1, 3))))
    lines[index] = dumped(record)
    return b"\n".join(lines) + b"\n", f"record {index + 1}: {what}"


def _change_a_part(draw: Draw, record: dict[str, Any]) -> str:
    """Change a value in a random part of a record, so that the many numbers of tables are not drawn more often."""
    parts = [name for name in ("config", "environment", "samples", "facts", "tables", "failure") if record.get(name)]
    name = draw.choice([*parts, ""])
    return f"{name}: {json_value(draw, record.get(name, record))}"


def _with_other_table(draw: Draw, content: bytes, tables: Path) -> tuple[bytes, str]:
    """Damage the file of a table, or write one with a valid name and other content."""
    files = sorted(tables.iterdir())
    if files and draw.random() < 0.5:
        file = draw.choice(files)
        damaged, what = draw.choice(BYTES[:3])(draw, file.read_bytes())
        file.write_bytes(damaged)
        return content, f"{file.name}: {what}"
    text, what = draw.choice(
        [
            (b"5", "5"),
            (b"null", "null"),
            (b"[]", "[]"),
            (b'"x"', "a text"),
            (b"{}", "{}"),
            (b"", "nothing"),
            (b"\xff", "no text"),
            (b"[" * 100_000, "100,000 open lists"),
            (b'{"a":' * 5000 + b"1" + b"}" * 5000, "5,000 nested mappings"),
            (b'{"a": [1], "b": [1, 2]}', "columns of different lengths"),
            (b'{"a": NaN}', "NaN"),
            (b'{"a": [1' + b"0" * 5000 + b"]}", "a number of 5,000 digits"),
        ]
    )
    name = hashlib.sha256(text).hexdigest()[:16] + ".json.gz"
    (tables / name).write_bytes(gzip.compress(text))
    lines = content.splitlines()
    index = draw.randrange(len(lines))
    record = json.loads(lines[index])
    replaced = draw.choice([*record["tables"], "phases"])
    record["tables"][replaced] = {"$file": draw.choice((name, name, name, "../" + name, 5, None))}
    lines[index] = dumped(record)
    return b"\n".join(lines) + b"\n", f"record {index + 1}: table {replaced} is a file of {what}"


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def _gone(before: dict[str, bytes], after: dict[str, bytes]) -> int | None:
    """The number of whole records that the damaged file has lost; None if the file is gone."""
    if "damaged.jsonl" not in after:
        return None
    lines_left = iter(after["damaged.jsonl"].split(b"\n"))
    return sum(line not in lines_left for line in before["damaged.jsonl"].split(b"\n") if _is_whole(line))


def _is_whole(line: bytes) -> bool:
    try:
        plain = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(plain, dict) and "format" in plain
