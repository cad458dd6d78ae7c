"""A report of nsys as `nsys export --type sqlite` writes it: `read_report(Path("report.sqlite"))`, the same Trace as kineto's.

Tables are in an export only where something of theirs was recorded. What a range's name says is in nvtx_names.py. Plain NVTX
numbers no op: backward's kernels, launched by autograd's thread, are then placed by what the main thread had open; ranges of
`--pytorch=autograd-nvtx` lead them to their spans. Schema: docs.nvidia.com/nsight-systems, SQLite Schema Reference.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from trainstep.reading import check_regular
from trainstep.traces.kineto import KERNEL, MEMCPY, MEMSET, Activity, Call, Range, Trace
from trainstep.traces.nvtx_names import parse_name

_MAGIC = b"SQLite format 3\0"
_OWN_FORMATS = (".nsys-rep", ".qdrep", ".qdstrm")
_HOW_TO_EXPORT = "make one with: nsys export --type sqlite --output report.sqlite REPORT.nsys-rep"
_LONGEST_VALUE = 2**24
"""Bytes of one text or number that a query may make; a column may be computed, and its text of any length."""
_TID_BITS = 24
"""A global number of a thread holds the thread in the lowest bits, its process in as many above, the machine's above those."""
_NESTED_OF_NO_LIBRARY = (
    "eventType = 59 AND [end] IS NOT NULL AND "  # pushed and popped, and closed
    "coalesce(domainId, 0) NOT IN (SELECT domainId FROM NVTX_EVENTS WHERE eventType = 75)"  # 75: a domain is named
)
_MEMCPYS = dict(enumerate(("HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP"), start=1))
_MEMORIES = dict(enumerate(("Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static")))


def is_report(path: Path) -> bool:
    """Whether a file is nsys's, by its name or its first bytes."""
    return path.suffix in (*_OWN_FORMATS, ".sqlite") or _begins_as_sqlite(path)


def read_report(path: Path) -> Trace:
    """The trace in an SQLite export. ValueError in one sentence for what is none, is cut off or holds no kernel."""
    check_regular(path)
    if not _begins_as_sqlite(path):
        what = "nsys's own format" if path.suffix in _OWN_FORMATS else "no SQLite file"
        raise ValueError(f"{path}: is {what}; {_HOW_TO_EXPORT}")
    try:
        # immutable: no journal beside the file is looked for, and nothing is written there.
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
            database.execute("PRAGMA trusted_schema = OFF")
            database.text_factory = _text
            _check_whole(database, path)
            return _trace(database, str(path))
    except sqlite3.OperationalError as error:
        raise ValueError(f"{path}: is no export of nsys that is known here ({error}); {_HOW_TO_EXPORT}") from None
    except sqlite3.Error as error:
        raise ValueError(f"{path}: the SQLite file is cut off or damaged ({error}); export it again") from None
    except (TypeError, OverflowError):
        raise ValueError(f"{path}: is no export of nsys: an event has no time or no number") from None


def _trace(database: sqlite3.Connection, where: str) -> Trace:
    if not _has_table(database, "StringIds"):
        raise sqlite3.OperationalError("no such table: StringIds")
    strings: dict[int, str] = dict(_rows(database, "StringIds", "id", texts="value", where="typeof(value) = 'text'"))
    found = list(_activities(database, strings))
    if not any(one.kind == KERNEL for _, one in found):
        raise ValueError(
            f"{where}: holds no kernel: nothing ran on a GPU while nsys recorded, or CUDA was not traced; record with "
            "nsys profile --trace=cuda,nvtx"
        )
    processes = sorted({process >> _TID_BITS for process, _ in found})
    if len(processes) > 1:  # each counts correlation numbers of its own
        raise ValueError(f"{where}: holds kernels of {len(processes)} processes: record one of them alone")
    gpus = _rows(database, "TARGET_INFO_GPU", "id", texts="name", where="typeof(name) = 'text'")
    return Trace(
        activities=tuple(sorted((one for _, one in found), key=lambda one: one.start_ns)),
        calls=tuple(sorted(_calls(database, strings, processes[0]), key=lambda one: one.start_ns)),
        ranges=tuple(sorted(_ranges(database, strings, processes[0]), key=lambda one: one.start_ns)),
        gpu=next((name for _, name in gpus), None),
    )


def _activities(database: sqlite3.Connection, strings: Mapping[int, str]) -> Iterator[tuple[int, Activity]]:
    """(global number of the process, what it ran on the device)."""
    common = "globalPid, deviceId, streamId, start, [end], correlationId"
    for *row, name in _rows(database, "CUPTI_ACTIVITY_KIND_KERNEL", f"{common}, demangledName"):
        yield _activity(KERNEL, strings.get(name, "(kernel without a name)"), *row)
    # Graphs recorded whole: their kernels are not known, their time must not be lost.
    for graph in _rows(database, "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", common):
        yield _activity(KERNEL, "CUDA graph (its kernels: --cuda-graph-trace=node)", *graph)
    for *row, kind, source, target in _rows(
        database, "CUPTI_ACTIVITY_KIND_MEMCPY", f"{common}, copyKind, srcKind, dstKind"
    ):
        ends = f" ({_MEMORIES[source]} -> {_MEMORIES[target]})" if {source, target} <= _MEMORIES.keys() else ""
        yield _activity(MEMCPY, f"Memcpy {_MEMCPYS.get(kind, 'of unknown kind')}{ends}", *row)
    for *row, kind in _rows(database, "CUPTI_ACTIVITY_KIND_MEMSET", f"{common}, memKind"):
        yield _activity(MEMSET, f"Memset ({_MEMORIES.get(kind, 'Device')})", *row)


def _activity(
    kind: str, name: str, process: int, device: int, stream: int, start: int, end: int, correlation: int | None
) -> tuple[int, Activity]:
    return process, Activity(
        kind=kind,
        name=name,
        device=device,
        stream=stream,
        start_ns=start,
        duration_ns=max(0, end - start),
        correlation=-1 if correlation is None else correlation,
    )


def _calls(database: sqlite3.Connection, strings: Mapping[int, str], process: int) -> Iterator[Call]:
    columns = "globalTid, start, [end], correlationId, nameId"
    for thread, start, end, correlation, name in _rows(database, "CUPTI_ACTIVITY_KIND_RUNTIME", columns):
        if thread >> _TID_BITS == process:
            yield Call(
                name=_without_version(strings.get(name, "(call without a name)")),
                thread=_numbers(thread),
                start_ns=start,
                duration_ns=max(0, end - start),
                correlation=-1 if correlation is None else correlation,
            )


def _ranges(database: sqlite3.Connection, strings: Mapping[int, str], process: int) -> Iterator[Range]:
    """Nested ranges of torch and of people; those of libraries are in domains of their own."""
    table, columns = "NVTX_EVENTS", "globalTid, start, [end], textId"
    rows = [
        (thread, start, end, parse_name(text if isinstance(text, str) else strings.get(text_id, "")))
        for thread, start, end, text_id, text in _rows(database, table, columns, "text", _NESTED_OF_NO_LIBRARY)
        if thread >> _TID_BITS == process
    ]
    forward_threads = {name.sequence: _numbers(thread)[1] for thread, _, _, name in rows if not name.backward}
    for thread, start, end, name in rows:
        yield Range(
            name=name.name,
            thread=_numbers(thread),
            start_ns=start,
            duration_ns=max(0, end - start),
            annotation=name.annotation,
            sequence=name.sequence,
            forward_thread=forward_threads.get(name.sequence, 0) if name.backward else 0,
        )


def _rows(
    database: sqlite3.Connection, table: str, integers: str, texts: str = "", where: str = "1"
) -> Iterable[tuple[Any, ...]]:
    """Columns of integers (or nothing), then of texts; no rows where the export has no such table. TypeError for other values."""
    if not _has_table(database, table):
        return ()
    wrong = " OR ".join(f"typeof({name}) NOT IN ('integer', 'null')" for name in integers.split(", "))
    if database.execute(f"SELECT 1 FROM {table} WHERE ({where}) AND ({wrong}) LIMIT 1").fetchone():
        raise TypeError(f"{table} holds no integers in {integers}")
    return database.execute(f"SELECT {integers}{', ' * bool(texts)}{texts} FROM {table} WHERE {where}")


def _has_table(database: sqlite3.Connection, name: str) -> bool:
    """OperationalError for a view, whose rows are computed and need have no end, and for a virtual table."""
    made = [sql for (sql,) in database.execute("SELECT sql FROM sqlite_master WHERE name = ?", (name,))]
    if not all(isinstance(sql, str) and sql.startswith("CREATE TABLE ") for sql in made):
        raise sqlite3.OperationalError(f"{name} is no plain table")
    return bool(made)


def _check_whole(database: sqlite3.Connection, path: Path) -> None:
    """SQLite itself notices a cut file only where it misses a page, and not one that is cut inside its last."""
    [[pages]], [[page_bytes]] = (database.execute(f"PRAGMA {name}").fetchall() for name in ("page_count", "page_size"))
    if path.stat().st_size < pages * page_bytes:
        raise sqlite3.DatabaseError(f"{path.stat().st_size:,} of {pages * page_bytes:,} bytes")


def _begins_as_sqlite(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def _numbers(global_number: int) -> tuple[int, int]:
    """Process and thread in the global number of a thread."""
    return (global_number >> _TID_BITS) % (1 << _TID_BITS), global_number % (1 << _TID_BITS)


def _without_version(name: str) -> str:
    """nsys writes the version of the interface behind it: cudaLaunchKernel_v7000."""
    stem, _, version = name.rpartition("_v")
    return stem if stem and len(version) >= 4 and version.isdigit() else name


def _text(raw: bytes) -> str:
    """Names are the recorded program's, and need not be UTF-8."""
    return raw.decode("utf-8", errors="replace")
