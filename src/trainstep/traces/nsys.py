"""Reads a report of nsys, exported with `nsys export --type sqlite`, into a `Trace` like kineto's: `read_report(path)`.

An export has a table only if something of its kind was recorded. Plain NVTX numbers no op: backward's kernels, which autograd's
thread launches, are then placed by what the main thread had open. Ranges of `--pytorch=autograd-nvtx` (torch's emit_nvtx) lead them
to their spans: each op and each record_function is a range with numbers behind its name, and a forward op and the backward op made
for it carry the same `seq`. NVTX does not distinguish ops from spans that a person named; the name must tell
(`parse_name`). Schema: docs.nvidia.com/nsight-systems, SQLite Schema Reference.
"""

import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainstep.reading import check_regular
from trainstep.traces.kineto import KERNEL, MEMCPY, MEMSET, Activity, Call, Range, Trace

_MAGIC = b"SQLite format 3\0"
_OWN_FORMATS = (".nsys-rep", ".qdrep", ".qdstrm")
_HOW_TO_EXPORT = "make one with: nsys export --type sqlite --output report.sqlite REPORT.nsys-rep"
_LONGEST_VALUE = 2**24
"""The most bytes of one value that a query may return. A column may be computed, and its text of any length."""
_TID_BITS = 24
"""A thread's global number holds the thread in the lowest 24 bits, its process in the next 24, the machine above them."""
_PLAIN_RANGES = (
    "eventType = 59 AND [end] IS NOT NULL AND "  # 59: pushed and popped
    "coalesce(domainId, 0) NOT IN (SELECT domainId FROM NVTX_EVENTS WHERE eventType = 75)"  # 75: a library names its domain
)
_MEMCPYS = dict(enumerate(("HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP"), start=1))
_MEMORIES = dict(enumerate(("Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static")))

_SUFFIX = re.compile(r",\s*(?:seq|op_id|sizes|input_op_ids)\s*=.*$", re.DOTALL)
_SEQUENCE = re.compile(r",\s*seq\s*=\s*(\d+)")
_BACKWARD = re.compile(r"^autograd::engine::evaluate_function: |Backward\d*$")
_OP = re.compile(
    r"^[a-z_]\w*::"  # aten::mm, a library's own ops; people's spans (FSDP::all_gather) begin with a capital
    r"|Backward\d*$|^detach$|^triton_"
    r"|^(?:Torch-Compiled Region|CompiledFunction|TorchDynamo |Pregraph bytecode|AOTDispatcher )"
)


def is_report(path: Path) -> bool:
    """Whether a file is a report of nsys, by its name or its first bytes."""
    return path.suffix in (*_OWN_FORMATS, ".sqlite") or _begins_as_sqlite(path)


def read_report(path: Path) -> Trace:
    """The trace in an SQLite export. ValueError of one sentence if the file is not an export, is cut off or holds no kernel."""
    check_regular(path)
    if not _begins_as_sqlite(path):
        what = "nsys's own format" if path.suffix in _OWN_FORMATS else "not an SQLite file"
        raise ValueError(f"{path}: is {what}; {_HOW_TO_EXPORT}")
    try:
        # immutable: SQLite then neither looks for a journal beside the file nor writes one.
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
            database.execute("PRAGMA trusted_schema = OFF")
            database.text_factory = _text
            _check_whole(database, path)
            return _trace(database, str(path))
    except sqlite3.OperationalError as error:
        raise ValueError(f"{path}: is not an export of nsys that is known here ({error}); {_HOW_TO_EXPORT}") from None
    except sqlite3.Error as error:
        raise ValueError(f"{path}: the SQLite file is cut off or damaged ({error}); export it again") from None
    except (TypeError, OverflowError):
        raise ValueError(f"{path}: is not an export of nsys: an event has no time or no number") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class NvtxName:
    """The name of an NVTX range without its numbers. `sequence`: -1 if none. `annotation`: a user's span, not an op."""

    name: str
    sequence: int
    annotation: bool
    backward: bool


def parse_name(text: str) -> NvtxName:
    """The parts of a range's text: `aten::mm, seq = 12, op_id = 7` is the op aten::mm with sequence number 12."""
    name = _SUFFIX.sub("", text)
    match = _SEQUENCE.search(text, len(name))
    return NvtxName(
        name=name,
        sequence=int(match[1]) if match else -1,
        annotation=match is None and _OP.search(name) is None,
        backward=match is not None and _BACKWARD.search(name) is not None,
    )


def _trace(database: sqlite3.Connection, where: str) -> Trace:
    if not _has_table(database, "StringIds"):
        raise sqlite3.OperationalError("no such table: StringIds")
    strings: dict[int, str] = dict(_rows(database, "StringIds", "id", texts="value", where="typeof(value) = 'text'"))
    activities = list(_activities(database, strings))
    if not any(activity.kind == KERNEL for _, activity in activities):
        raise ValueError(
            f"{where}: holds no kernel: nothing ran on a GPU while nsys recorded, or CUDA was not traced; record with "
            "nsys profile --trace=cuda,nvtx"
        )
    processes = sorted({process >> _TID_BITS for process, _ in activities})
    if len(processes) > 1:  # each process counts its own correlation numbers
        raise ValueError(f"{where}: holds kernels of {len(processes)} processes: record one of them alone")
    gpus = _rows(database, "TARGET_INFO_GPU", "id", texts="name", where="typeof(name) = 'text'")
    return Trace(
        activities=tuple(sorted((activity for _, activity in activities), key=lambda activity: activity.start_ns)),
        calls=tuple(sorted(_calls(database, strings, processes[0]), key=lambda event: event.start_ns)),
        ranges=tuple(sorted(_ranges(database, strings, processes[0]), key=lambda event: event.start_ns)),
        gpu=next((name for _, name in gpus), None),
    )


def _activities(database: sqlite3.Connection, strings: Mapping[int, str]) -> Iterator[tuple[int, Activity]]:
    """Pairs (the process's global number, an activity of it on the device)."""
    common = "globalPid, deviceId, streamId, start, [end], correlationId"
    for *row, name in _rows(database, "CUPTI_ACTIVITY_KIND_KERNEL", f"{common}, demangledName"):
        yield _activity(KERNEL, strings.get(name, "(kernel without a name)"), *row)
    # Graphs that were recorded whole: their kernels are unknown, but their time must not be lost.
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
    """Nested ranges of torch and of users; ranges of libraries, in domains of their own, are left out."""
    table, columns = "NVTX_EVENTS", "globalTid, start, [end], textId"
    rows = [
        (thread, start, end, parse_name(text if isinstance(text, str) else strings.get(text_id, "")))
        for thread, start, end, text_id, text in _rows(database, table, columns, "text", _PLAIN_RANGES)
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
    """Rows with columns of integers (or null), then of texts; none without such a table. TypeError for other values."""
    if not _has_table(database, table):
        return ()
    not_integer = " OR ".join(f"typeof({name}) NOT IN ('integer', 'null')" for name in integers.split(", "))
    if database.execute(f"SELECT 1 FROM {table} WHERE ({where}) AND ({not_integer}) LIMIT 1").fetchone():
        raise TypeError(f"{table} holds no integers in {integers}")
    return database.execute(f"SELECT {integers}{', ' * bool(texts)}{texts} FROM {table} WHERE {where}")


def _has_table(database: sqlite3.Connection, name: str) -> bool:
    """Whether the export has this table. OperationalError for a view or a virtual table, whose computed rows may never end."""
    statements = [sql for (sql,) in database.execute("SELECT sql FROM sqlite_master WHERE name = ?", (name,))]
    if not all(isinstance(sql, str) and sql.startswith("CREATE TABLE ") for sql in statements):
        raise sqlite3.OperationalError(f"{name} is not a plain table")
    return bool(statements)


def _check_whole(database: sqlite3.Connection, path: Path) -> None:
    """DatabaseError for a file that is cut off. SQLite notices a missing page, but not a cut inside the last page."""
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
    """The process and thread in a thread's global number."""
    return (global_number >> _TID_BITS) % (1 << _TID_BITS), global_number % (1 << _TID_BITS)


def _without_version(name: str) -> str:
    """The call's name without the interface's version that nsys appends, as in cudaLaunchKernel_v7000."""
    stem, _, version = name.rpartition("_v")
    return stem if stem and len(version) >= 4 and version.isdigit() else name


def _text(raw: bytes) -> str:
    # Names come from the recorded program and need not be UTF-8.
    return raw.decode("utf-8", errors="replace")
