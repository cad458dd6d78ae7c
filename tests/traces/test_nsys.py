"""nsys's export gives the same tables as kineto's trace of the same steps; incomplete and foreign files are refused."""

import dataclasses
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from nsys_maker import NUMBERED, PLAIN, UPPER_BITS, write_report
from trace_maker import COMPILED, EAGER, launched, span, trace
from trainstep.traces.kineto import KERNEL, Trace, read_trace
from trainstep.traces.nsys import is_report, parse_name, read_report
from trainstep.traces.profile import profile_of
from trainstep.traces.tables import Columns

SMALL = trace(span("step 0", 0, 100), span("forward", 10, 90), *launched("gemm", 20, 30, 40, 1))


def export(folder: Path, recorded: Trace = SMALL, *, style: str = NUMBERED, statements: Sequence[str] = ()) -> Path:
    return write_report(folder / "report.sqlite", recorded, style=style, statements=statements)


@pytest.mark.parametrize("path", [EAGER, COMPILED], ids=["eager", "compiled"])
def test_both_readers_make_the_same_tables(tmp_path: Path, path: Path):
    of_kineto = read_trace(path)
    of_nsys = read_report(export(tmp_path, of_kineto))
    assert (of_nsys.activities, of_nsys.calls, of_nsys.gpu) == (of_kineto.activities, of_kineto.calls, of_kineto.gpu)
    # Threads have torch's numbers in kineto's trace, and the system's in nsys's.
    assert profile_of(of_nsys) == profile_of(of_kineto)
    assert {"classes", "kernels", "spans", "layers", "host", "verdict", "stall"} <= set(profile_of(of_nsys).tables)


@pytest.mark.parametrize("path", [EAGER, COMPILED], ids=["eager", "compiled"])
def test_without_annotations_of_ops_backward_keeps_its_phase(tmp_path: Path, path: Path):
    """With trainstep's spans only, all tables agree except backward's spans and layers."""
    of_kineto, of_nsys = (
        profile_of(read_trace(path)),
        profile_of(read_report(export(tmp_path, read_trace(path), style=PLAIN))),
    )
    for name in ("classes", "host", "verdict", "stall"):
        assert of_nsys.tables[name] == of_kineto.tables[name]
    for name in ("spans", "layers"):
        assert of_phase(of_nsys.tables[name], "forward") == of_phase(of_kineto.tables[name], "forward")
    assert of_nsys.assigned_share == of_kineto.assigned_share == 1
    assert of_kineto.fallback_share == 0 < of_nsys.fallback_share < 1


def of_phase(columns: Columns, phase: str) -> list[tuple[object, ...]]:
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [tuple(row.values()) for row in rows if row["phase"] == phase]


def test_the_capture_range_is_no_span(tmp_path: Path):
    """The range that starts nsys's recording is around all steps."""
    around = trace(span("profiled_steps", 0, 110), span("step 0", 1, 100), *launched("gemm", 20, 30, 40, 1))
    assert profile_of(read_report(export(tmp_path, around, style=PLAIN))).tables["spans"]["span"] == ["(no span)"]


def test_ranges_of_libraries_and_unclosed_ones_are_left_out(tmp_path: Path):
    thread = UPPER_BITS | 1 << 24 | 1
    report = read_report(
        export(
            tmp_path,
            style=PLAIN,
            statements=[
                f"INSERT INTO NVTX_EVENTS VALUES (0, NULL, 75, 'NCCL', NULL, {thread}, 3)",
                f"INSERT INTO NVTX_EVENTS VALUES (21000, 22000, 59, 'ncclAllReduce', NULL, {thread}, 3)",
                f"INSERT INTO NVTX_EVENTS VALUES (21000, NULL, 59, 'never closed', NULL, {thread}, 0)",
                f"INSERT INTO NVTX_EVENTS VALUES (21000, NULL, 34, 'a mark', NULL, {thread}, 0)",
            ],
        )
    )
    assert [range_.name for range_ in report.ranges] == ["step 0", "forward"]


def test_a_graph_recorded_as_a_whole_is_an_activity(tmp_path: Path):
    columns = "start INT, end INT, deviceId INT, streamId INT, correlationId INT, globalPid INT"
    create_table = f"CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE ({columns})"
    insert_row = (
        f"INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (50000, 80000, 0, 7, NULL, {UPPER_BITS | 1 << 24})"
    )
    report = read_report(export(tmp_path, statements=[create_table, insert_row]))
    assert [activity.duration_ns for activity in report.activities] == [10_000, 30_000]
    assert report.activities[1].name.startswith("CUDA graph")


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL", "holds no kernel: nothing ran on a GPU"),
        ("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL", "holds no kernel: nothing ran on a GPU"),
        ("DROP TABLE StringIds", "no such table: StringIds"),
        ("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN end", "no such column: end"),
        ("UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET globalTid = NULL", "an event has no time or no number"),
        (
            f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (0, 1, 0, 7, 1, {UPPER_BITS | 2 << 24}, 1, 1, NULL)",
            "holds kernels of 2 processes",
        ),
    ],
)
def test_an_export_without_the_needed_events_is_refused(tmp_path: Path, statement: str, words: str):
    with pytest.raises(ValueError, match=words) as raised:
        read_report(export(tmp_path, statements=[statement]))
    assert str(raised.value).startswith(str(tmp_path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("length", [50, 300, 0.5, 0.999])
def test_a_cut_file_is_refused(tmp_path: Path, length: float):
    complete = export(tmp_path, read_trace(EAGER))
    data = complete.read_bytes()
    cut = tmp_path / "cut.sqlite"
    cut.write_bytes(data[: length if isinstance(length, int) else int(length * len(data))])
    with pytest.raises(ValueError, match=r"cut\.sqlite: .*(cut off or damaged|no export of nsys)"):
        read_report(cut)


def test_files_that_are_no_export_are_refused(tmp_path: Path):
    for name, words in (("words.sqlite", "not an SQLite file"), ("own.nsys-rep", "nsys's own format")):
        (tmp_path / name).write_text("hello")
        assert is_report(tmp_path / name)
        with pytest.raises(ValueError, match=rf"{name}: is {words}; make one with: nsys export --type sqlite"):
            read_report(tmp_path / name)
    with pytest.raises(ValueError, match="there is no such file"):
        read_report(tmp_path / "absent.sqlite")
    sqlite3.connect(tmp_path / "another.db").execute("CREATE TABLE t (x)").connection.close()
    assert is_report(tmp_path / "another.db"), "a report is recognised by its first bytes"
    with pytest.raises(ValueError, match="not an export of nsys that is known here"):
        read_report(tmp_path / "another.db")
    assert not is_report(EAGER)


def test_names_need_not_be_text(tmp_path: Path):
    without_gpu = dataclasses.replace(SMALL, gpu=None)
    report = read_report(
        export(tmp_path, without_gpu, statements=["UPDATE StringIds SET value = CAST(x'ff41' AS TEXT)"])
    )
    assert report.activities[0].name == "\N{REPLACEMENT CHARACTER}A"
    assert report.gpu is None


@pytest.mark.parametrize(
    ("text", "name", "sequence", "annotation", "backward"),
    [
        ("aten::mm, seq = 12, op_id = 7", "aten::mm", 12, False, False),
        ("aten::mm, op_id = 7, sizes = [[2, 3], [3, 4]]", "aten::mm", -1, False, False),
        ("autograd::engine::evaluate_function: MmBackward0, seq = 12, op_id = 9", None, 12, False, True),
        ("MmBackward0, seq = 12", "MmBackward0", 12, False, True),
        ("attention scores, op_id = 3", "attention scores", -1, True, False),
        ("forward", "forward", -1, True, False),
        ("FSDP::all_gather", "FSDP::all_gather", -1, True, False),
        ("Torch-Compiled Region: 0/0", "Torch-Compiled Region: 0/0", -1, False, False),
    ],
)
def test_names_of_ranges_are_parsed(text: str, name: str | None, sequence: int, annotation: bool, backward: bool):
    parsed = parse_name(text)
    assert parsed.name == (name or text.partition(",")[0])
    assert (parsed.sequence, parsed.annotation, parsed.backward) == (sequence, annotation, backward)


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS id, 'x' AS value FROM n"


@pytest.mark.parametrize(
    ("statements", "words"),
    [
        (["DROP TABLE StringIds", f"CREATE VIEW StringIds AS {ENDLESS}"], "StringIds is not a plain table"),
        (
            ["DROP TABLE TARGET_INFO_GPU", f"CREATE VIEW TARGET_INFO_GPU AS {ENDLESS} WHERE i < 0"],
            "TARGET_INFO_GPU is not a plain table",
        ),
        (
            [
                "DROP TABLE StringIds",
                "CREATE TABLE StringIds (id, value TEXT AS (hex(zeroblob(20000000))) VIRTUAL)",
                "INSERT INTO StringIds VALUES (1)",
            ],
            "too big",
        ),
    ],
    ids=["endless", "endless and empty", "computed"],
)
def test_only_tables_are_read(tmp_path: Path, statements: list[str], words: str):
    with pytest.raises(ValueError, match=words):
        read_report(export(tmp_path, statements=statements))


@pytest.mark.parametrize("table", ["KERNEL", "RUNTIME", "MEMCPY"])
@pytest.mark.parametrize("value", ["'x'", "1.5", "9e999", "x'00'", "NULL", "9223372036854775807"])
def test_any_value_in_any_column_is_read_or_refused(tmp_path: Path, table: str, value: str):
    for column in ("start", "end", "correlationId", "globalTid" if table == "RUNTIME" else "globalPid"):
        # A table created again has no types and no constraints.
        name = f"CUPTI_ACTIVITY_KIND_{table}"
        untyped = [f"CREATE TABLE t AS SELECT * FROM {name}", f"DROP TABLE {name}", f"ALTER TABLE t RENAME TO {name}"]
        path = export(tmp_path, statements=[*untyped, f"UPDATE {name} SET [{column}] = {value}"])
        with suppress(ValueError):
            profile_of(read_report(path))
        path.unlink()


def test_names_that_are_no_text_are_replaced(tmp_path: Path):
    untyped = [
        "DROP TABLE StringIds",
        "CREATE TABLE StringIds (id, value)",
        "INSERT INTO StringIds VALUES (0, 5), (1, x'ff')",
    ]
    report = read_report(export(tmp_path, statements=untyped))
    assert {activity.name for activity in report.activities if activity.kind == KERNEL} == {"(kernel without a name)"}


def test_nothing_is_written_beside_the_file(tmp_path: Path):
    path = export(tmp_path)
    Path(f"{path}-journal").write_bytes(b"a journal of somebody's")
    read_report(path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [path.name, f"{path.name}-journal"]
