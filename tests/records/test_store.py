"""The file of records: round trips, torn and corrupt lines, tables in files of their own, full disks and the lock."""

import errno
import gzip
import hashlib
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trainstep.records.store as store_module
from full_disk import largest_file
from record_maker import a_record, seconds
from trainstep.records import locked_file
from trainstep.records.amounts import LONGEST_S
from trainstep.records.record import FORMAT, Fact, Failure, Holder, record_to_plain
from trainstep.records.store import Store, new_records_path

HOSTILE = (
    "line\nbreak \r\n tab\t",
    'quote " backslash \\ {"workload":',
    "\u2028 \u2029 \x85 \x00 \x1b[31m",
    "\ud800 alone",
    "日本語 🚂",
    "NaN",
    "</script>",
    "",
)
BIG = {"time": [i / 7 for i in range(10_000)], "name": [HOSTILE[i % len(HOSTILE)] for i in range(10_000)]}


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "runs" / "warmup.jsonl")


def filled(store: Store, count: int = 3) -> Store:
    for i in range(count):
        store.append(a_record(key=f"k{i}"))
    return store


def hold(store: Store) -> None:
    with store.locked():
        pass


def keys(store: Store) -> list[str]:
    return [record.key for record in store.read()]


def table_file(store: Store) -> Path:
    [path] = (store.path.parent / "warmup.tables").iterdir()
    return path


# Round trips.


def test_every_field_of_a_record_comes_back(store):
    record = a_record(
        config={"nested": {"list": [1, [2.5, None, True], {}], "empty": []}, **{word: word for word in HOSTILE}},
        samples={
            "step": seconds([0.1, 5e-324, LONGEST_S], warmups=(5.0,)),
            **{w: seconds([1]) for w in HOSTILE},
        },
        facts={
            "loss": Fact(value=2.5),
            **{f"word {i}": Fact(value=word) for i, word in enumerate(HOSTILE)},
            "flops": Fact(value=2**80, unit="flops"),
        },
        tables={"kernels": {"name": list(HOSTILE), "time": [1.5] * len(HOSTILE)}},
        prediction={"step_s": 0.1},
        failure=Failure(
            kind="crash", phase="build", message="\n", holders=(Holder(name="x", bytes=1),), last_lines=HOSTILE
        ),
    )
    store.append(record)
    assert store.read() == [record]
    assert store.path.read_bytes().count(b"\n") == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
configs = st.dictionaries(st.text().map("any {}".format), json_values, max_size=3)
"""No declared name, which would have a declared type: hypothesis draws words that stand in the sources, too."""


@settings(deadline=None, max_examples=50)
@given(configs=st.lists(configs, min_size=1, max_size=4))
def test_any_records_come_back_in_order(tmp_path_factory, configs):
    store = Store(tmp_path_factory.mktemp("any") / "r.jsonl")
    records = [a_record(config=config) for config in configs]
    for record in records:
        store.append(record)
    assert store.read() == records


def test_latest_is_the_last_of_each_key_in_order_of_appearance(store):
    filled(store)
    store.append(a_record(key="k1", duration_s=9.0))
    latest = store.latest()
    assert list(latest) == ["k0", "k1", "k2"]
    assert latest["k1"].duration_s == 9.0
    assert len(store.read()) == 4


# Files that are missing, empty or not files of records.


def test_reading_a_missing_file_is_an_error_and_resuming_from_it_is_not(store):
    with pytest.raises(ValueError, match=r"warmup\.jsonl: there is no such file"):
        store.read()
    assert store.latest() == {}
    assert not store.path.parent.exists()


def test_an_empty_file_has_no_records(store):
    store.path.parent.mkdir()
    store.path.touch()
    assert store.read() == []
    assert store.latest() == {}
    assert keys(filled(store)) == ["k0", "k1", "k2"]


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        Store(tmp_path).read()


@pytest.mark.parametrize("text", ["a note", "notes\nand more", '{"name": "another JSON"}', '{"workload'[::-1]])
def test_files_of_another_kind_are_refused_and_left_alone(tmp_path, text):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    store = Store(path)
    for access in (store.read, store.latest, lambda: store.append(a_record()), lambda: hold(store)):
        with pytest.raises(ValueError, match=r"notes\.txt: "):
            access()
    assert path.read_text() == text


@pytest.mark.parametrize("name", ["/", ".", "", "runs.tables", "a/b.rounds", "c.slurm"])
def test_a_name_that_no_file_of_records_can_have_is_refused(name):
    with pytest.raises(ValueError, match=r"name a file of records in it|another ending"):
        Store(Path(name))


def test_new_files_get_different_names():
    assert len({new_records_path("bench") for _ in range(100)}) == 100


# Torn and corrupt lines.


def test_a_line_torn_at_any_byte_is_dropped_and_cut_off_by_the_next_append(store):
    filled(store, 2)
    whole = store.path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole) - 1):
        store.path.write_bytes(whole[:cut])
        assert keys(store) == ["k0"], cut
        assert list(store.latest()) == ["k0"], cut
        store.append(a_record(key="new"))
        assert keys(store) == ["k0", "new"], cut
        assert store.path.read_bytes()[:first] == whole[:first], cut


def test_a_first_line_torn_at_any_byte_can_be_resumed(store):
    filled(store, 1)
    whole = store.path.read_bytes()
    for cut in range(1, len(whole) - 1):
        store.path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="has no complete record"):
            store.read()
        assert store.latest() == {}, cut
        store.append(a_record(key="new"))
        assert keys(store) == ["new"], cut


@pytest.mark.parametrize("ending", [b"", b"\0" * 40, b"  "], ids=["nothing", "zeros", "spaces"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_whole_last_record_without_its_newline_is_kept(store, count, ending):
    filled(store, count)
    before = store.path.read_bytes()
    store.path.write_bytes(before[:-1] + ending)
    kept_keys = [f"k{i}" for i in range(count)]
    assert keys(store) == kept_keys
    assert list(store.latest()) == kept_keys
    with store.locked():
        store.append(a_record(key="new"))
    assert keys(store) == [*kept_keys, "new"]
    assert store.path.read_bytes().startswith(before[:-1])
    assert b"\0" not in store.path.read_bytes()


def test_a_last_line_that_is_json_and_no_record_is_never_cut_off(store):
    filled(store, 1)
    for line in (b'{"workload":"mine"}', b"{}", b"5", b'{"workload":' + b"[" * 100_000):
        store.path.write_bytes(whole := store.path.read_bytes().split(b"\n")[0] + b"\n" + line)
        for access in (store.read, store.latest, lambda: store.append(a_record())):
            with pytest.raises(ValueError, match=r"line 2|its last line is not a record"):
                access()
        assert store.path.read_bytes() == whole


def test_a_file_of_zeros_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "disk.img"
    path.write_bytes(bytes(5000))
    for access in (Store(path).read, lambda: Store(path).append(a_record()), lambda: hold(Store(path))):
        with pytest.raises(ValueError, match=r"disk\.img: "):
            access()
    assert path.read_bytes() == bytes(5000)


def test_zeros_a_power_cut_left_at_the_end_are_a_torn_line(store):
    filled(store, 2)
    whole = store.path.read_bytes()
    for written in (0, 5, len(whole) // 2 - 40):
        store.path.write_bytes(whole[: len(whole) // 2 + written] + bytes(40))
        assert keys(store) == ["k0"]
        store.append(a_record(key="new"))
        assert keys(store) == ["k0", "new"]


def test_a_torn_line_longer_than_one_read_is_cut_off_whole(store):
    filled(store, 2)
    long = a_record(key="long", config={"text": "x" * 200_000})
    store.append(long)
    for lost in (2, 65_535, 65_536, 65_537, 131_073, 200_000):
        filled_bytes = store.path.read_bytes()
        store.path.write_bytes(filled_bytes[:-lost])
        store.append(long)
        assert keys(store) == ["k0", "k1", "long"], lost


@pytest.mark.parametrize("line", [1, 2, 3])
@pytest.mark.parametrize("damage", [b"{", b'"', b"[]", b'{"workload":1}', b'{"a":NaN}', b"\xff\xfe", b"[" * 100_000])
def test_a_corrupt_line_is_refused_by_its_number_even_the_last(store, line, damage):
    filled(store)
    lines = store.path.read_bytes().split(b"\n")
    lines[line - 1] = damage
    store.path.write_bytes(b"\n".join(lines))
    for read in (store.read, store.latest):
        with pytest.raises(ValueError, match=rf"warmup\.jsonl: line {line}( is corrupt|: not a record)"):
            read()


def test_blank_lines_are_skipped_and_counted(store):
    filled(store, 1)
    with store.path.open("ab") as file:
        file.write(b"\n  \r\nbad\n")
    with pytest.raises(ValueError, match="line 4 is corrupt"):
        store.read()


def test_a_newer_format_is_refused_by_line_and_version(store):
    filled(store, 1)
    newer = {**record_to_plain(a_record()), "format": FORMAT + 1, "of_later": 1}
    with store.path.open("a") as file:
        file.write(json.dumps(newer) + "\n")
    with pytest.raises(ValueError, match=rf"line 2: format {FORMAT + 1} .*update trainstep"):
        store.read()


# Values JSON cannot hold.


def test_nan_in_a_file_is_no_json(store):
    filled(store, 1)
    store.path.write_bytes(store.path.read_bytes().replace(b'"duration_s":1.5', b'"duration_s":NaN'))
    with pytest.raises(ValueError, match="line 1 is corrupt"):
        store.read()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize(
    ("changes", "where"),
    [
        (lambda bad: {"samples": {"step": seconds([1, bad])}}, "record.samples.step.values.1"),
        (lambda bad: {"facts": {"loss": Fact(value=bad)}}, "record.facts.loss.value"),
        (lambda bad: {"tables": {"t": {"c": [1.0, bad]}}}, "record.tables.t.c.1"),
        (lambda bad: {"tables": {"t": {"c": [1.0] * 50_000 + [bad]}}}, "record.tables.t.c.50000"),
        (lambda bad: {"duration_s": bad}, "record.duration_s"),
    ],
    ids=["samples", "facts", "table", "big table", "duration"],
)
def test_nan_and_infinity_are_refused_by_their_place_and_nothing_is_written(store, bad, changes, where):
    filled(store, 1)
    with pytest.raises(ValueError, match=f"warmup.jsonl: {where} is {bad}, which JSON cannot hold"):
        store.append(a_record(**changes(bad)))
    assert keys(store) == ["k0"]


def test_objects_that_json_cannot_hold_are_refused_by_their_place(store):
    with pytest.raises(ValueError, match=r"record\.facts\.path\.value is a PosixPath, which JSON cannot hold"):
        store.append(a_record(facts={"path": Fact(value=Path("/"))}))


# Tables in files of their own.


def test_a_table_that_could_not_be_read_again_is_not_written(store, monkeypatch):
    monkeypatch.setattr(store_module, "_LARGEST_TABLE_BYTES", 100_000)
    store.append(a_record(config={"first": 1}))
    with pytest.raises(ValueError, match=r"a table of [0-9,]+ bytes is over the limit of 100,000 for reading"):
        store.append(a_record(config={"second": 1}, tables={"kernels": {"name": ["x" * 100_000]}}))
    assert len(store.read()) == 1


def test_big_tables_get_a_file_of_their_own_and_are_read_back(store):
    record = a_record(tables={"big": BIG, "small": {"a": [1]}})
    store.append(record)
    assert store.read() == [record]
    assert store.path.stat().st_size < 2000
    assert table_file(store).name.endswith(".json.gz")
    assert json.loads(gzip.decompress(table_file(store).read_bytes())) == BIG


def test_the_same_table_is_kept_once(store):
    for key in "ab":
        store.append(a_record(key=key, tables={"big": BIG}))
    table_file(store)  # there is just one
    assert [record.tables["big"]["time"][7] for record in store.read()] == [1.0, 1.0]


def test_a_store_is_removed_with_its_tables(store):
    store.append(a_record(tables={"big": {"time": [1.0] * 50_000}}))
    assert len(list(store.path.parent.iterdir())) == 2
    store.remove()
    assert list(store.path.parent.iterdir()) == []
    assert store.finished() == []
    store.remove()


def test_a_store_may_be_moved_with_its_tables(store, tmp_path):
    store.append(a_record(tables={"big": BIG}))
    store.path.parent.rename(tmp_path / "moved")
    assert len(Store(tmp_path / "moved" / "warmup.jsonl").read()[0].tables["big"]["time"]) == 10_000


def test_a_column_may_have_the_key_that_marks_a_table_file(store):
    record = a_record(tables={"odd": {"$file": ["a", "b"]}})
    store.append(record)
    assert store.read() == [record]


def test_a_missing_table_is_refused(store):
    filled(store, 1)
    store.append(a_record(tables={"big": BIG}))
    table_file(store).unlink()
    with pytest.raises(ValueError, match=r"line 2: its table .*\.json\.gz: there is no such file"):
        store.read()


def test_a_table_over_the_limit_is_refused_while_it_is_unpacked(store, monkeypatch):
    filled(store, 1)
    store.append(a_record(tables={"big": BIG}))
    size = len(gzip.decompress(table_file(store).read_bytes()))
    monkeypatch.setattr(store_module, "_LARGEST_TABLE_BYTES", size)
    assert len(store.read()) == 2
    monkeypatch.setattr(store_module, "_LARGEST_TABLE_BYTES", size - 1)
    with pytest.raises(ValueError, match=r"line 2: its table .*: over [\d,]+ bytes once unpacked.*; remove the line"):
        store.read()


def test_a_table_damaged_anywhere_is_refused(store, monkeypatch):
    """A changed byte or a cut is noticed, or it changes nothing (in the time stamp of gzip's header)."""
    monkeypatch.setattr(store_module, "_TABLE_LIMIT_BYTES", 10)
    record = a_record(tables={"t": {"name": ["some words", "some other words"], "time": [1.5, 2.5]}})
    store.append(record)
    path = table_file(store)
    good = path.read_bytes()
    harmless = 0
    damaged = [good[:i] + bytes([good[i] ^ 0xFF]) + good[i + 1 :] for i in range(len(good))]
    damaged += [good[:i] for i in range(len(good))]
    for bad in damaged:
        path.write_bytes(bad)
        try:
            records = store.read()
        except ValueError:
            continue
        assert records == [record]
        harmless += 1
    assert harmless <= 10


def test_a_table_with_other_content_is_refused(store):
    store.append(a_record(tables={"big": BIG}))
    table_file(store).write_bytes(gzip.compress(b'{"time":[1]}'))
    with pytest.raises(ValueError, match=r"line 1: its table .* was changed after it was written"):
        store.read()


@pytest.mark.parametrize(
    "text", ["5", "null", "[]", '"text"', "no JSON", '{"a":5}', "[" * 100_000, '{"a":' + "[" * 480 + "]" * 480 + "}"]
)
def test_a_table_without_columns_is_refused(store, text):
    """The file is named by the hash of its content, so that only its shape is wrong."""
    data = text.encode()
    name = hashlib.sha256(data).hexdigest()[:16] + ".json.gz"
    (store.path.parent / "warmup.tables").mkdir(parents=True)
    (store.path.parent / "warmup.tables" / name).write_bytes(gzip.compress(data))
    plain = {**record_to_plain(a_record()), "tables": {"t": {"$file": name}}}
    store.path.write_text(json.dumps(plain) + "\n")
    with pytest.raises(ValueError, match=r"warmup\.jsonl: line 1(: its table .*json\.gz has no columns| is corrupt)"):
        store.read()


@pytest.mark.parametrize(
    "name", ["../outside.json.gz", "/etc/passwd", "..", ".", "", "a/b.json.gz", "0123456789abcdef.json.gz\n", "\x00"]
)
def test_a_name_that_no_table_has_is_refused(store, name):
    (store.path.parent / "warmup.tables").mkdir(parents=True)
    (store.path.parent / "outside.json.gz").write_bytes(gzip.compress(b"{}"))
    plain = {**record_to_plain(a_record()), "tables": {"t": {"$file": name}}}
    store.path.write_text(json.dumps(plain) + "\n")
    with pytest.raises(ValueError, match=r"line 1: .* is not the name of a table"):
        store.read()


# A full disk, simulated by a limit on the size of files.


@pytest.mark.parametrize("tables", [{}, {"big": BIG}], ids=["record", "table"])
def test_a_full_disk_is_named_and_earlier_records_are_kept(store, tables):
    filled(store, 1)
    before = store.path.read_bytes()
    record = a_record(key="new", tables=tables, config={"text": "x" * 5000})
    with (
        largest_file(len(before) + 1000),
        pytest.raises(ValueError, match=r"warmup\.jsonl: a record cannot be written: File"),
    ):
        store.append(record)
    assert keys(store) == ["k0"]
    assert not list(store.path.parent.rglob("*.partial"))
    store.append(record)
    assert store.path.read_bytes().startswith(before)
    assert keys(store) == ["k0", "new"]


def test_a_partly_written_table_is_removed_at_the_next_start(store):
    store.append(a_record(tables={"big": BIG}))
    killed = f".0123456789abcdef.json.gz.{zlib.crc32(os.uname().nodename.encode()):08x}-4999999-0123abcd.partial"
    for name in ("0123456789abcdef.json.gz.partial", killed):  # the first as earlier versions named it
        (store.path.parent / "warmup.tables" / name).touch()
    hold(store)
    table_file(store)  # there is just one


# The lock.

HOLD = """
import sys
import zlib
from pathlib import Path
from trainstep.records.store import Store, new_records_path
with Store(Path(sys.argv[1])).locked():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_releases_the_lock(store):
    source = Path(store_module.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    command = [sys.executable, "-c", HOLD, str(store.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=r"warmup\.jsonl: another trainstep is writing to it"), store.locked():
            pass
        assert store.latest() == {}  # reading needs no lock
        holder.kill()
        holder.wait()
    with store.locked():
        filled(store)
    assert len(store.read()) == 3


def test_the_lock_is_released_on_errors(store):
    with pytest.raises(RuntimeError), store.locked():
        raise RuntimeError
    with store.locked():
        pass


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be written"), Store(tmp_path / "file" / "r.jsonl").locked():
        pass


def test_a_file_system_without_locks_is_named(store, monkeypatch):
    def no_locks(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locked_file.fcntl, "flock", no_locks)
    with pytest.raises(ValueError, match=r"warmup\.jsonl: it cannot be locked: No locks available; give --out"):
        hold(store)


def test_only_a_regular_file_is_locked(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ValueError, match="cannot be written: it is not a regular file"), Store(path).locked():
            pass
        assert path.exists()


def test_an_empty_file_is_removed_only_if_the_lock_created_it(store):
    with store.locked():
        assert store.path.exists()
    assert not store.path.exists()
    store.path.touch()
    with store.locked():
        pass
    assert store.path.exists()
