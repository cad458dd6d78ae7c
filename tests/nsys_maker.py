"""Exports of nsys for tests: any Trace as an SQLite file of its schema, so that both readers can be compared."""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from trainstep.traces.kineto import KERNEL, MEMCPY, MEMSET, Range, Trace

NUMBERED, PLAIN = "numbered", "plain"
"""Ranges as `--pytorch=autograd-nvtx` writes them, and our spans alone."""

_SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, text TEXT, textId INTEGER,
    globalTid INTEGER, domainId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER, globalTid INTEGER,
    correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER, streamId INTEGER,
    correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER, streamId INTEGER,
    correlationId INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER, srcKind INTEGER, dstKind INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER, streamId INTEGER,
    correlationId INTEGER, globalPid INTEGER, bytes INTEGER, memKind INTEGER);
"""
_COPIES = {"HtoD": 1, "DtoH": 2, "DtoD": 8}
_MEMORIES = {"Pageable": 0, "Pinned": 1, "Device": 2}
UPPER_BITS = 1 << 48
"""A bit that nsys sets above the process number, which a reader must ignore."""


def write_report(path: Path, trace: Trace, *, style: str = NUMBERED, statements: Iterable[str] = ()) -> Path:
    """Write the trace as an export, then run the statements on it."""
    with closing(sqlite3.connect(path)) as database:
        database.executescript(_SCHEMA)
        strings: dict[str, int] = {}
        _write_calls(database, trace, strings)
        _write_activities(database, trace, strings)
        for number, span in enumerate(trace.ranges):
            if style == NUMBERED or span.annotation:
                text = emitted(span, number) if style == NUMBERED else span.name
                text_id = strings.setdefault(text, len(strings)) if number % 2 else None
                row = (span.start_ns, span.end_ns, 59, None if number % 2 else text, text_id, _thread(span.thread), 0)
                database.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        rows = [(number, text) for text, number in strings.items()]
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", rows)
        database.execute("INSERT INTO TARGET_INFO_GPU VALUES (0, ?)", (trace.gpu,))
        for statement in statements:
            database.execute(statement)
        database.commit()
    return path


def emitted(span: Range, number: int) -> str:
    """The name of a range as torch's emit_nvtx writes it."""
    return f"{span.name}{f', seq = {span.sequence}' if span.sequence >= 0 else ''}, op_id = {number}"


def _write_calls(database: sqlite3.Connection, trace: Trace, strings: dict[str, int]) -> None:
    for call in trace.calls:
        name = strings.setdefault(f"{call.name}_v7000", len(strings))
        row = (call.start_ns, call.end_ns, 1, _thread(call.thread), call.correlation, name, 0)
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?, ?, ?)", row)


def _write_activities(database: sqlite3.Connection, trace: Trace, strings: dict[str, int]) -> None:
    process = _thread((trace.calls[0].thread[0], 0)) if trace.calls else UPPER_BITS
    for activity in trace.activities:
        row: tuple[int | None, ...] = (
            activity.start_ns,
            activity.end_ns,
            activity.device,
            activity.stream,
            activity.correlation,
            process,
        )
        if activity.kind == KERNEL:
            name = strings.setdefault(activity.name, len(strings))
            short = strings.setdefault("short", len(strings))
            table, row = "KERNEL", (*row, name, short, None)
        elif activity.kind == MEMCPY:
            table, row = "MEMCPY", (*row, 4096, *_copy_kinds(activity.name))
        else:
            assert activity.kind == MEMSET
            table, row = "MEMSET", (*row, 4096, 2)
        marks = ", ".join("?" * len(row))
        database.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_{table} VALUES ({marks})", row)


def _copy_kinds(name: str) -> tuple[int, ...]:
    """`Memcpy HtoD (Pageable -> Device)` as the numbers of an export."""
    _, kind, ends = name.split(" ", 2)
    return (_COPIES[kind], *(_MEMORIES[word] for word in ends.strip("()").split(" -> ")))


def _thread(thread: tuple[int, int]) -> int:
    return UPPER_BITS | thread[0] << 24 | thread[1]
