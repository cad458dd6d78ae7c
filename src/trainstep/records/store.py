"""Records on disk: JSON lines, appended whole, read back in order. A torn last line is dropped; anything else is refused."""

import fcntl
import gzip
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from trainstep.reading import read_file
from trainstep.records.record import Record, record_from_plain, record_to_plain

_TABLE_LIMIT_BYTES = 64 * 1024
_LARGEST_TABLE_BYTES = 64 * 2**20
"""Bytes of a table's text that are read: a list in three bytes takes 64 in memory, so that 2 GB may come of it."""
_OPENING = b'{"workload":'
"""How a record's line begins."""
_TABLE_NAME = re.compile(r"[0-9a-f]{16}\.json\.gz")


class Store:
    """One file of records. `runs/warmup.jsonl` keeps tables over 64 KB beside it in `runs/warmup.tables/`, named by hash."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tables = path.with_suffix(".tables")

    def append(self, record: Record) -> None:
        """Write one record and have it on disk before returning. A torn line a crash left behind is cut off first.

        ValueError names the first value JSON cannot hold (NaN, an infinity, an object).
        """
        plain = record_to_plain(record)
        try:
            plain["tables"] = {name: self._set_aside(columns) for name, columns in plain["tables"].items()}
            line = _to_json(plain) + "\n"
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.path}: {_unstorable(plain) or error}") from None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b") as file:
            if not _cut_torn_line(file):
                raise ValueError(f"{self.path}: its last line is no record; give --out another file")
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[Record]:
        """All records, oldest first. ValueError names the file and line of a corrupt or newer record."""
        records, torn = self._read()
        if torn and not records:
            raise ValueError(f"{self.path}: holds no whole record")
        return records

    def latest(self) -> dict[str, Record]:
        """The last record of each key, in the order the keys first appeared; empty if none was finished yet."""
        return {record.key: record for record in self.finished()}

    def finished(self) -> list[Record]:
        """All records, oldest first; none, where `read` refuses, if none was finished yet."""
        return self._read()[0] if self.path.exists() else []

    def remove(self) -> None:
        """Remove the file, then its tables; killed in between, it holds nothing and can be removed again."""
        self.path.unlink(missing_ok=True)
        shutil.rmtree(self._tables, ignore_errors=True)

    def _read(self) -> tuple[list[Record], bool]:
        """The whole records, and whether a torn line follows them."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            raise ValueError(f"{self.path}: there is no such file of records") from None
        except OSError as error:
            raise ValueError(f"{self.path}: cannot be read: {error.strerror}") from None
        *whole, torn = data.split(b"\n")
        records = [self._parse(line, number) for number, line in enumerate(whole, 1) if line.strip()]
        if not _is_torn_record(torn):
            raise ValueError(f"{self.path}: line {len(whole) + 1} is no record; give another file")
        return records, bool(torn)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the store for writing. ValueError if another process does, or if the path is no regular file."""
        existed = self.path.exists()
        if existed and not self.path.is_file():
            raise ValueError(f"{self.path}: cannot be written: it is no regular file")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = open(self.path, "ab")  # noqa: SIM115  (closed below)
        except OSError as error:
            raise ValueError(f"{self.path}: cannot be written: {error.strerror}") from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ValueError(f"{self.path}: another trainstep is writing to it; give --out another file") from None
            try:
                yield
            finally:
                if not existed and self.path.exists() and not self.path.stat().st_size:
                    self.path.unlink()  # nothing was finished: leave nothing behind

    def _parse(self, line: bytes, number: int) -> Record:
        try:
            plain = json.loads(line, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            raise ValueError(f"{self.path}: line {number} is corrupt; remove it to keep the others") from None
        try:
            if isinstance(plain, dict) and isinstance(plain.get("tables"), dict):
                plain["tables"] = {name: self._fetch(columns) for name, columns in plain["tables"].items()}
            return record_from_plain(plain)
        except ValueError as error:
            raise ValueError(f"{self.path}: line {number}: {error}") from None

    def _set_aside(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        text = _to_json(columns).encode()
        if len(text) <= _TABLE_LIMIT_BYTES:
            return dict(columns)
        name = _digest(text) + ".json.gz"
        self._tables.mkdir(parents=True, exist_ok=True)
        partial = self._tables / (name + ".partial")
        with open(partial, "wb") as file:
            file.write(gzip.compress(text, mtime=0))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._tables / name)
        return {"$file": name}

    def _fetch(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        name = columns.get("$file") if isinstance(columns, dict) else None
        if not isinstance(name, str):
            return columns
        if not _TABLE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a table in {self._tables}")
        path = self._tables / name
        try:
            text = read_file(path, largest_bytes=_LARGEST_TABLE_BYTES, way_out="remove the line to keep the others")
        except ValueError as error:
            raise ValueError(f"its table {error}") from None
        if _digest(text) != name.split(".")[0]:
            raise ValueError(f"its table {path} is not what was written")
        return dict(json.loads(text))


def _to_json(plain: Any) -> str:
    return json.dumps(plain, allow_nan=False, separators=(",", ":"))


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _unstorable(plain: Any, where: str = "record") -> str | None:
    """'samples.step.values.3 is nan' for the first value JSON cannot hold, or None."""
    if isinstance(plain, Mapping):
        items = [(f"{where}.{name}", item) for name, item in plain.items()]
    elif isinstance(plain, Sequence) and not isinstance(plain, str | bytes):
        items = [(f"{where}.{index}", item) for index, item in enumerate(plain)]
    elif isinstance(plain, float) and not math.isfinite(plain):
        return f"{where} is {plain}, which JSON cannot hold"
    elif plain is None or isinstance(plain, str | int | float):
        return None
    else:
        return f"{where} is a {type(plain).__name__}, which JSON cannot hold"
    return next((found for name, item in items if (found := _unstorable(item, name))), None)


def _is_torn_record(line: bytes) -> bool:
    """Whether a last line without newline is the beginning of a record (or nothing): what a killed append leaves."""
    begun = line.rstrip(b"\0")
    return begun.startswith(_OPENING) or _OPENING.startswith(begun)


def _cut_torn_line(file: BinaryIO) -> bool:
    """Cut the file back to its last newline; False, and nothing is cut, where what follows it is no record's beginning."""
    keep = _end_of_last_line(file)
    file.seek(keep)
    if not _is_torn_record(file.read()):
        return False
    file.truncate(keep)
    return True


def _end_of_last_line(file: BinaryIO) -> int:
    """Where the last newline ends, or 0: sought from the end, for files get long."""
    position = file.seek(0, os.SEEK_END)
    while position > 0:
        start = max(0, position - 65536)
        file.seek(start)
        newline = file.read(position - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        position = start
    return 0
