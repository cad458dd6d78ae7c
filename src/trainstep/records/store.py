"""Records on disk: a store is a file of JSON lines, each appended whole, read back in order.

    with Store(path).locked():
        Store(path).append(record)
    Store(path).read()

A last line that a crash tore is dropped. A complete last record that only lacks its newline is kept. Anything else that is not a
record is refused.
"""

import gzip
import hashlib
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from trainstep.reading import check_regular, read_file
from trainstep.records.locked_file import locked_file
from trainstep.records.record import Record, record_from_plain, record_to_plain
from trainstep.records.whole_file import make_folder, remove_leftovers, whole_file

RUNS = Path("runs")
"""The folder for records unless a path is given."""
_TABLE_LIMIT_BYTES = 64 * 1024
"""A table with more text than this gets a file of its own."""
_LARGEST_TABLE_BYTES = 64 * 2**20
"""The longest table that is read. Three bytes of JSON can be a list of 64 bytes, so this much text may need 2 GB of memory."""
_OPENING = b'{"workload":'
"""The first bytes of a record's line."""
_TABLE_NAME = re.compile(r"[0-9a-f]{16}\.json\.gz")
_FOLDERS = (".tables", ".rounds", ".slurm")
"""Suffixes of the folders beside a file of records, which the file itself therefore cannot have."""


def new_records_path(verb: str) -> Path:
    """A new path, as `runs/bench-20261101-120000-5e0f3a.jsonl`; random, because another process may start in the same second."""
    return RUNS / f"{verb}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}.jsonl"


class Store:
    """One file of records. `runs/warmup.jsonl` keeps tables over 64 KB beside it in `runs/warmup.tables/`, named by hash.

    ValueError for a path whose name a file of records cannot have.
    """

    def __init__(self, path: Path) -> None:
        if not path.name:
            raise ValueError(f"{path}: is a folder; name a file of records in it")
        if path.suffix in _FOLDERS:
            raise ValueError(
                f"{path}: a folder beside records has such a name; give the file of records another ending"
            )
        self.path = path
        self._tables = path.with_suffix(".tables")

    def append(self, record: Record) -> None:
        """Write one record; it is on disk when this returns. If the last line lacks its newline, it is completed first where it is
        a complete record, and cut off where a crash tore it.

        ValueError names the first value that JSON cannot represent (NaN, an infinity, an object), or says why writing fails.
        """
        try:
            self._append(record)
        except OSError as error:
            reason = f"a record cannot be written: {error.strerror}"
            raise ValueError(f"{self.path}: {reason}; every record before it is kept") from None

    def _append(self, record: Record) -> None:
        plain = record_to_plain(record)
        try:
            plain["tables"] = {name: self._set_aside(columns) for name, columns in plain["tables"].items()}
            line = _to_json(plain) + "\n"
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.path}: {_unstorable(plain) or error}") from None
        make_folder(self.path.parent)
        with open(self.path, "a+b") as file:
            self._end_last_line(file)
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[Record]:
        """All records, oldest first. ValueError names the file and line of a corrupt or newer record."""
        records, torn = self._read()
        if torn and not records:
            raise ValueError(f"{self.path}: has no complete record")
        return records

    def latest(self) -> dict[str, Record]:
        """The last record of each key, ordered by the first record of the key; empty if there is no record yet."""
        return {record.key: record for record in self.finished()}

    def finished(self) -> list[Record]:
        """All records, oldest first. Unlike `read`, this is empty if the file is missing or has no complete record yet."""
        return self._read()[0] if self.path.exists() else []

    def remove(self) -> None:
        """Remove the file, then its tables. If a kill comes in between, the store is empty and can be removed again."""
        self.path.unlink(missing_ok=True)
        shutil.rmtree(self._tables, ignore_errors=True)

    def _read(self) -> tuple[list[Record], bool]:
        """The complete records, and whether a torn line follows them."""
        check_regular(self.path)
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise ValueError(f"{self.path}: cannot be read: {error.strerror}") from None
        *lines, last = data.split(b"\n")
        records = [self._parse(line, number) for number, line in enumerate(lines, 1) if line.strip()]
        torn = _is_torn(last, follows_records=bool(records))
        if last and not torn:
            records.append(self._parse(last.rstrip(b"\0"), len(lines) + 1))
        return records, torn

    def _end_last_line(self, file: BinaryIO) -> None:
        """Add a missing newline to a complete last record, or cut off a torn line. ValueError for any other last line."""
        start = _end_of_last_newline(file)
        file.seek(start)
        last = file.read()
        if not last:
            return
        if _is_torn(last, follows_records=start > 0):
            file.truncate(start)
            return
        whole = last.rstrip(b"\0")
        try:
            self._parse(whole, 0)
        except ValueError:
            raise ValueError(f"{self.path}: its last line is not a record; give --out another file") from None
        file.truncate(start + len(whole))
        file.write(b"\n")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the store for writing. ValueError if another process has locked it, if the path is not a regular file, or if
        anything in the file is not a record.
        """
        with locked_file(self.path) as made_here:
            if self._tables.is_dir():
                remove_leftovers(self._tables)
            for partial in self._tables.glob("[!.]*.partial"):  # from earlier versions that were killed
                partial.unlink(missing_ok=True)
            try:
                self._read()
                yield
            finally:
                if made_here and self.path.exists() and not self.path.stat().st_size:
                    self.path.unlink()  # no cell finished: leave no empty file behind

    def _parse(self, line: bytes, number: int) -> Record:
        corrupt = (
            f"{self.path}: line {number} is corrupt or not a record; remove it to keep the others, or name another file"
        )
        try:
            plain = json.loads(line, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            raise ValueError(corrupt) from None
        try:
            if isinstance(plain, dict) and isinstance(plain.get("tables"), dict):
                plain["tables"] = {name: self._fetch(columns) for name, columns in plain["tables"].items()}
            return record_from_plain(plain)
        except ValueError as error:
            raise ValueError(f"{self.path}: line {number}: {error}") from None
        except RecursionError:  # values nested so deeply that only JSON's parser could follow
            raise ValueError(corrupt) from None

    def _set_aside(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        text = _to_json(columns).encode()
        if len(text) <= _TABLE_LIMIT_BYTES:
            return dict(columns)
        if len(text) > _LARGEST_TABLE_BYTES:  # `_fetch` could not read it again
            limit = f"the limit of {_LARGEST_TABLE_BYTES:,} for reading"
            raise ValueError(f"a table of {len(text):,} bytes is over {limit}; keep fewer rows")
        name = _digest(text) + ".json.gz"
        with whole_file(self._tables / name) as file:
            file.write(gzip.compress(text, mtime=0))
        return {"$file": name}

    def _fetch(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        name = columns.get("$file") if isinstance(columns, dict) else None
        if not isinstance(name, str):
            return columns
        if not _TABLE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a table in {self._tables}")
        path = self._tables / name
        try:
            text = read_file(path, largest_bytes=_LARGEST_TABLE_BYTES, way_out="remove the line to keep the others")
        except ValueError as error:
            raise ValueError(f"its table {error}") from None
        if _digest(text) != name.split(".")[0]:
            raise ValueError(f"its table {path} was changed after it was written")
        try:
            table = json.loads(text)
        except (ValueError, RecursionError):
            table = None
        if not isinstance(table, dict) or not all(isinstance(column, list) for column in table.values()):
            raise ValueError(f"its table {path} has no columns")
        return table


def _to_json(plain: Any) -> str:
    return json.dumps(plain, allow_nan=False, separators=(",", ":"))


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _unstorable(plain: Any, where: str = "record") -> str | None:
    """The first value that JSON cannot represent, as 'samples.step.values.3 is nan, which JSON cannot hold'; or None."""
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
    return next((reason for name, item in items if (reason := _unstorable(item, name))), None)


def _is_torn(last: bytes, *, follows_records: bool) -> bool:
    """Whether a last line without a newline is only the beginning of a record, as a crash during `append` leaves it."""
    beginning = last.rstrip(b"\0")  # a power cut may leave zeros in place of written bytes
    if not beginning:
        return bool(last) and follows_records  # a file that has only zeros is not a store
    if not (beginning.startswith(_OPENING) or _OPENING.startswith(beginning)):
        return False
    try:
        json.loads(beginning)
    except RecursionError:
        return False
    except ValueError:
        return True
    return False


def _end_of_last_newline(file: BinaryIO) -> int:
    """The position after the last newline, or 0."""
    # Search backwards: files get long.
    position = file.seek(0, os.SEEK_END)
    while position > 0:
        start = max(0, position - 65536)
        file.seek(start)
        newline = file.read(position - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        position = start
    return 0
