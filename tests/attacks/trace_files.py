"""Attacks on `trainstep profile --from`: damaged and hostile traces of torch's profiler and exports of nsys.

Reading a hostile file takes at most 2 GB and 60 s, whatever it unpacks to or refers to.
"""

import gzip
import json
import random
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from attacks.attack import Outcome
from attacks.damage import BYTES, NUMBERS, TEXTS, any_value, dumped, json_value
from attacks.reader import Readers, judged
from nsys_maker import NUMBERED, PLAIN, write_report
from trace_maker import FIXTURES, launched, op, span, trace
from trainstep.traces.kineto import Trace

Draw = random.Random

_TRACES = ("tiny_eager.json.gz", "tiny_compiled.json.gz", "gloo_rank0.json.gz")
_TRACE_KINDS = ("bytes", "values", "values", "values", "zip", "bomb")
_EXPORT_KINDS = ("bytes", "statements", "statements", "bomb")
_MOST_EVENTS = 3000
_MEMBER = 64 * 2**20
"""The unpacked bytes of one part of a bomb."""
_TABLES = (
    "StringIds",
    "TARGET_INFO_GPU",
    "NVTX_EVENTS",
    "CUPTI_ACTIVITY_KIND_RUNTIME",
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_MEMCPY",
)
_COLUMNS = {
    "StringIds": ("id", "value"),
    "TARGET_INFO_GPU": ("id", "name"),
    "NVTX_EVENTS": ("start", "end", "text", "textId", "globalTid", "domainId", "eventType"),
    "CUPTI_ACTIVITY_KIND_RUNTIME": ("start", "end", "globalTid", "correlationId", "nameId"),
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        "start",
        "end",
        "deviceId",
        "streamId",
        "correlationId",
        "globalPid",
        "demangledName",
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": ("start", "end", "bytes", "copyKind", "srcKind", "dstKind"),
}
_WITHOUT_END = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n)"


class TraceFiles:
    """Damaged traces and exports, half of each: 150 cases at full size."""

    name = "trace_files"
    full = 150

    def __init__(self, readers: Readers, *, bombs: bool = True) -> None:
        """`bombs`: include files that take gigabytes or hours without limits; otherwise their cases are left out."""
        self._readers = readers
        self._bombs = bombs
        self._traces = {name: json.loads(gzip.decompress((FIXTURES / name).read_bytes())) for name in _TRACES}

    def afterwards(self) -> Iterable[Outcome]:
        return self._readers.left()

    def attack(self, draw: Draw, folder: Path) -> Outcome:
        of_nsys = draw.random() < 0.5
        kind = draw.choice(_EXPORT_KINDS if of_nsys else _TRACE_KINDS)
        if kind == "bomb" and not self._bombs:
            return Outcome(case="a bomb, left out")
        file, what = _export(draw, kind, folder) if of_nsys else self._trace(draw, kind, folder)
        size, written = file.stat().st_size, file.stat().st_mtime_ns
        end = self._readers.run(["profile", "--from", file.name, *draw.choice(([], ["--json"]))], folder)
        others = sorted(path.name for path in folder.iterdir() if path != file)
        lost = "the file was changed" if (file.stat().st_size, file.stat().st_mtime_ns) != (size, written) else ""
        other = f"there is {', '.join(others)}" if others else ""
        return judged(f"{file.name}: {what}", [end], lost=lost, other=other)

    def _trace(self, draw: Draw, kind: str, folder: Path) -> tuple[Path, str]:
        name = draw.choice(_TRACES)
        if kind == "bomb":
            return _trace_bomb(draw, folder)
        document = _some_events(draw, self._traces[name])
        what = ""
        if kind == "values":
            what = "; ".join(_change_an_event(draw, document) for _ in range(draw.choice((1, 1, 3, 30))))
        content = dumped(document)
        if kind == "bytes":
            content, what = draw.choice(BYTES)(draw, content)
        zipped = kind == "zip" or draw.random() < 0.3
        if zipped:
            content = gzip.compress(content, compresslevel=1)
        if kind == "zip":
            content, what = draw.choice(BYTES[:3])(draw, content)
        file = folder / ("t.json.gz" if zipped else "t.json")
        file.write_bytes(content)
        return file, f"{name}: {what}"


def _export(draw: Draw, kind: str, folder: Path) -> tuple[Path, str]:
    file = folder / "t.sqlite"
    if kind == "bytes":
        write_report(file, _made_trace(draw), style=draw.choice((NUMBERED, PLAIN)))
        content, what = draw.choice(BYTES[:3])(draw, file.read_bytes())
        file.write_bytes(content)
        return file, what
    statements = (
        [_bomb_statement(draw)] if kind == "bomb" else [_statement(draw) for _ in range(draw.choice((1, 1, 3)))]
    )
    write_report(file, _made_trace(draw))
    changes = []
    with closing(sqlite3.connect(file)) as database:
        for script in statements:
            try:
                database.executescript(script)
                changes.append(script)
            except sqlite3.Error:  # an earlier statement dropped the table
                continue
        database.commit()
    return file, " ".join("; ".join(changes).split())[:600]


def _some_events(draw: Draw, document: dict[str, Any]) -> dict[str, Any]:
    """A trace with some consecutive events."""
    events = document["traceEvents"]
    start = draw.randrange(max(1, len(events) - 100))
    chosen = events[start : start + draw.choice((20, 300, _MOST_EVENTS))]
    return json.loads(json.dumps({**document, "traceEvents": chosen}))


def _change_an_event(draw: Draw, document: dict[str, Any]) -> str:
    events = document["traceEvents"]
    if not events or draw.random() < 0.1:
        return json_value(draw, document)
    at = draw.randrange(len(events))
    if not isinstance(events[at], dict) or draw.random() < 0.1:
        events[at] = any_value(draw)
        return f"event {at} replaced"
    if draw.random() < 0.5:
        name = draw.choice(("name", "ts", "dur", "ph", "cat", "pid", "tid", "args"))
        events[at][name] = draw.choice((None, *NUMBERS, *TEXTS, [], {}, "X", "kernel", "cpu_op", "user_annotation"))
        return f"event {at}: {name} = {ascii(events[at][name])[:60]}"
    return f"event {at}: {json_value(draw, events[at])}"


def _trace_bomb(draw: Draw, folder: Path) -> tuple[Path, str]:
    """A trace that takes far more memory or time than its size suggests."""
    file = folder / "t.json.gz"
    event = '{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":%s,"dur":%s,"args":{}}'
    bombs = (
        (lambda: gzip.compress(b" " * _MEMBER) * 90, "6 GB of blanks"),
        (
            lambda: gzip.compress(b'{"traceEvents":[') + gzip.compress(b"{}," * (_MEMBER // 3)) * 60,
            "a billion empty events",
        ),
        (lambda: _zipped(",".join(event % (i, 10**6 - 2 * i) for i in range(20_000))), "20,000 nested ranges"),
        (lambda: _zipped(",".join(event % (0, 5) for _ in range(300_000))), "300,000 ranges at one time"),
        (lambda: _zipped(event % (0, '"' + "9" * 10**7 + '"')), "a time of ten million digits, as text"),
        (lambda: _zipped(event % ("9" * 10**6, 1)), "a time of a million digits"),
        (lambda: _zipped('{"a":' * 10**6), "a million nested mappings"),
        (lambda: _zipped(event.replace('"a"', '"' + "a" * 10**8 + '"') % (0, 1)), "a name of 100 MB"),
    )
    make, what = draw.choice(bombs)
    file.write_bytes(make())
    return file, what


def _zipped(events: str) -> bytes:
    return gzip.compress(f'{{"traceEvents":[{events}]}}'.encode(), compresslevel=1)


def _made_trace(draw: Draw) -> Trace:
    """A constructed trace of steps with kernels."""
    events: list[Any] = []
    for number in range(draw.choice((1, 3, 20))):
        at = 1000 * number
        events += [
            span("trainstep.step", at, at + 900),
            op("aten::mm", at + 10, at + 100, sequence=number),
            *launched("sgemm", at + 20, at + 40, at + 90, number + 1),
        ]
    return trace(*events)


def _statement(draw: Draw) -> str:
    """SQL that changes the tables of an export."""
    table = draw.choice(_TABLES)
    column = draw.choice(_COLUMNS[table])
    value = _sql(draw)
    statements = (
        f"DROP TABLE {table}",
        f"ALTER TABLE {table} RENAME COLUMN [{column}] TO other",
        f"UPDATE {table} SET [{column}] = {value}",
        f"UPDATE {table} SET [{column}] = {value} WHERE rowid = 1",
        f"INSERT INTO {table} ([{column}]) VALUES ({value})",
        f"DELETE FROM {table}",
        f"DROP TABLE {table}; CREATE TABLE {table} ([{column}]); INSERT INTO {table} VALUES ({value})",
        f"DROP TABLE {table}; CREATE VIEW {table} AS SELECT 1 AS [{column}]",
        f"DROP TABLE {table}; CREATE VIEW {table} AS SELECT * FROM {table}",
        f"CREATE VIEW CUPTI_ACTIVITY_KIND_GRAPH_TRACE AS SELECT {value} AS start",
        "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start, [end], deviceId, streamId, correlationId, globalPid);"
        f"INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES ({value}, {value}, 0, 0, {value}, 0)",
    )
    return draw.choice(statements)


def _sql(draw: Draw) -> str:
    """A random value of a type of SQLite."""
    text = draw.choice([text for text in TEXTS if "\0" not in text and text != "\ud800"]).replace("'", "''")
    values = (
        "NULL",
        "''",
        f"'{text}'",
        "x'ff00'",
        "zeroblob(1000)",
        "-1",
        str(2**63 - 1),
        str(-(2**63)),
        "9e999",
        "0.5",
    )
    return draw.choice(values)


def _bomb_statement(draw: Draw) -> str:
    """SQL that makes endless views, or rows that take gigabytes."""
    table = draw.choice(("StringIds", "TARGET_INFO_GPU", "CUPTI_ACTIVITY_KIND_KERNEL", "NVTX_EVENTS"))
    columns = ", ".join(f"i AS [{column}]" for column in _COLUMNS[table])
    statements = (
        f"DROP TABLE {table}; CREATE VIEW {table} AS {_WITHOUT_END} SELECT {columns} FROM n",
        f"DROP TABLE {table}; CREATE VIEW {table} AS {_WITHOUT_END} SELECT {columns} FROM n WHERE i < 0",
        f"DROP TABLE StringIds; CREATE VIEW StringIds AS {_WITHOUT_END} SELECT i AS id, zeroblob(900000000) AS value FROM n",
        "UPDATE StringIds SET value = zeroblob(900000000)",
        "UPDATE NVTX_EVENTS SET text = hex(zeroblob(200000000)), eventType = 59",
        f"DROP TABLE StringIds; CREATE VIEW StringIds AS {_WITHOUT_END} SELECT i AS id, 'a' AS value FROM n LIMIT 100000000",
        f"INSERT INTO NVTX_EVENTS (start, [end], eventType, text, globalTid) {_WITHOUT_END} "
        f"SELECT i, 1000000 - i, 59, 'a', {1 << 48 | 1 << 24 | 1} FROM n LIMIT 20000",
    )
    return draw.choice(statements)
