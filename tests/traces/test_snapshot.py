"""A snapshot is read without running code in it; other files are refused in one sentence."""

import gzip
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from trainstep.reading import ReadLimits
from trainstep.traces.snapshot import HOW_TO_RECORD, Frame, read_snapshot, snapshot_of

FIXTURE = Path(__file__).parent / "fixtures" / "snapshot_tiny.pickle.gz"


class Runs:
    """An object that calls a function when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        read_snapshot(path, **options)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def written(path: Path, document: Any) -> Path:
    path.write_bytes(pickle.dumps(document, protocol=4))
    return path


def an_event(**changes: Any) -> dict[str, Any]:
    return {"action": "alloc", "addr": 512, "size": 4, "stream": 0, "time_us": 1, "frames": [], **changes}


def test_a_real_snapshot_is_read():
    snapshot = read_snapshot(FIXTURE)
    assert len(snapshot.events) == 1601
    assert {event.action for event in snapshot.events} == {"alloc", "free_requested", "free_completed", "segment_alloc"}
    assert sum(segment.bytes for segment in snapshot.segments) == 79_691_776
    assert {segment.pool for segment in snapshot.segments} == {"small", "large"}
    assert snapshot.events[1].stack[2] == Frame(
        function="__init__", file="src/trainstep/training/transformer.py", line=93
    )
    assert [span.name for span in snapshot.spans][:2] == [
        "Optimizer.step#AdamW.step",
        "Optimizer.zero_grad#AdamW.zero_grad",
    ]
    assert not snapshot.history_is_full


def test_a_snapshot_may_be_zipped_or_not(tmp_path: Path):
    unzipped = tmp_path / "plain.pickle"
    unzipped.write_bytes(gzip.decompress(FIXTURE.read_bytes()))
    assert read_snapshot(unzipped) == read_snapshot(FIXTURE)


@pytest.mark.parametrize("zipped", [False, True])
def test_code_in_a_snapshot_does_not_run(tmp_path: Path, zipped: bool):
    marker = tmp_path / "made"
    path = written(tmp_path / "hostile.pickle", {"segments": [], "device_traces": [[Runs(marker)]]})
    if zipped:
        path.write_bytes(gzip.compress(path.read_bytes()))
    assert "mkdir, which is not run" in refusal(path)
    assert not marker.exists()


def test_persistent_objects_are_refused(tmp_path: Path):
    path = tmp_path / "persistent.pickle"
    path.write_bytes(b"\x80\x04\x8c\x01aQ.")
    assert "objects outside it" in refusal(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"not a pickle", b"\x80\x04", b"\x80\x04]\x94.", b"\x80\x04N.", b"{}", b"[1, 2]"],
    ids=["empty", "text", "cut off", "a list", "none", "json", "json list"],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "other"
    path.write_bytes(content)
    assert "no memory snapshot" in refusal(path)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"\x80\x04}r\xff\xff\xff\xff.", "takes more than 2 GB of memory"),
        (b"\x80\x04}p4000000000\n.", "takes more than 2 GB of memory"),
        (b"\x80\x04})" + b"\x85" * 2_000_000 + b"Ns.", "the process that read it ended"),
    ],
    ids=["a memo of 64 GB", "the same in digits", "a tuple too deep to hash"],
)
def test_files_that_take_all_memory_or_crash_are_refused(tmp_path: Path, content: bytes, word: str):
    path = tmp_path / "hostile.pickle"
    path.write_bytes(content)
    assert word in refusal(path)


SMALL = ReadLimits(memory_bytes=300_000_000, time_s=30)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        pytest.param(b"}" * 5_000_000, "more than 0.3 GB of memory", id="dicts"),
        pytest.param(b"]" * 200_000 + b"a" * 199_999, "", id="lists in lists"),
        pytest.param(b")" + b"\x85" * 500_000, "", id="tuples in tuples"),
        pytest.param(b"]" + b"2\x86" * 100_000, "", id="pairs of pairs"),
        pytest.param(b"\x8d" + (2**62).to_bytes(8, "little"), "no memory snapshot: ", id="a text of 4 EB"),
        pytest.param(b"\x8e" + (2**40).to_bytes(8, "little"), "more than 0.3 GB of memory", id="bytes of 1 TB"),
        pytest.param(b"\x95" + (2**60).to_bytes(8, "little"), "no memory snapshot: ", id="a frame of 1 EB"),
        pytest.param(b"I" + b"9" * 1_000_000 + b"\n", "no memory snapshot: ", id="digits"),
        pytest.param(b"L" + b"9" * 1_000_000 + b"L\n", "no memory snapshot: ", id="digits of a long"),
        pytest.param(b"\x8b" + b"\xff\xff\xff\x7f" + b"1", "no memory snapshot: ", id="a long of 2 GB"),
        pytest.param(b"\x82\x01", "no memory snapshot: ", id="an extension"),
        pytest.param(b"(\x8c\x02os\x8c\x06system\x93", "os.system, which is not run", id="a name from the stack"),
        pytest.param(b"ccopyreg\n_reconstructor\n", "copyreg._reconstructor, which is not run", id="a name"),
        pytest.param(b"(S'touch x'\nios\nsystem\n", "os.system, which is not run", id="an instance"),
    ],
)
def test_hostile_pickles_end_in_a_sentence(tmp_path: Path, body: bytes, word: str):
    path = tmp_path / "hostile.pickle.gz"
    path.write_bytes(gzip.compress(b"\x80\x04" + body + b"."))
    assert path.stat().st_size < 20_000
    assert word in refusal(path, limits=SMALL)


def test_a_list_named_many_times_is_refused(tmp_path: Path):
    """Two bytes of a pickle refer to a list again, so 20 KB may have ten million events, or an endless text."""
    trace = [an_event()] * 4000
    path = written(tmp_path / "again.pickle", {"segments": [], "device_traces": [trace] * 4000})
    assert path.stat().st_size < 50_000
    assert "more than is read" in refusal(path)
    nested: list[Any] = []
    for _ in range(40):
        nested = [nested] * 8
    hostile = {"segments": [], "device_traces": [[an_event(action=nested)]]}
    assert "text is expected" in refusal(written(tmp_path / "nested.pickle", hostile))


def test_a_stack_that_events_share_is_read_once():
    frames = [{"name": "f", "filename": "f.py", "line": 1}]
    document = {"segments": [], "device_traces": [[an_event(frames=frames), an_event(frames=frames)]]}
    first, second = snapshot_of(document, where="here").events
    assert first.stack == (Frame(function="f", file="f.py", line=1),)
    assert first.stack is second.stack


def test_a_damaged_archive_is_refused(tmp_path: Path):
    path = tmp_path / "cut.pickle.gz"
    path.write_bytes(FIXTURE.read_bytes()[:5000])
    assert "cut off or damaged" in refusal(path)


def test_a_missing_file_is_refused(tmp_path: Path):
    assert "no such file" in refusal(tmp_path / "absent.pickle")


def test_an_archive_that_unpacks_too_large_is_refused(tmp_path: Path):
    bomb = tmp_path / "bomb.pickle.gz"
    bomb.write_bytes(gzip.compress(b"\0" * 2_000_000))
    assert bomb.stat().st_size < 10_000
    assert "over 1,000,000 bytes" in refusal(bomb, limits=ReadLimits(memory_bytes=2_000_000))


@pytest.mark.parametrize("traces", [[], [[]]])
def test_empty_says_how_to_record(tmp_path: Path, traces: list[Any]):
    assert HOW_TO_RECORD in refusal(written(tmp_path / "empty.pickle", {"segments": [], "device_traces": traces}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"addr": "x"},
        {"size": None},
        {"frames": [1]},
        {"time_us": []},
        {"size": float("inf")},
        {"size": -4},
        {"size": 1 << 100_000},
        {"time_us": float("nan")},
        {"action": ["alloc"]},
    ],
    ids=["address", "size", "frames", "time", "infinite", "negative", "no machine has it", "no time", "action"],
)
def test_fields_of_a_wrong_type_are_refused(tmp_path: Path, wrong: dict[str, Any]):
    document = {"segments": [], "device_traces": [[an_event(**wrong)]]}
    assert "no memory snapshot" in refusal(written(tmp_path / "wrong.pickle", document))


def test_the_device_with_most_events_is_read():
    segments = [{"device": 1, "address": 512, "total_size": 512, "blocks": []}]
    document = {"segments": segments, "device_traces": [[], [an_event()], []]}
    snapshot = snapshot_of(document, where="here")
    assert (len(snapshot.events), len(snapshot.segments)) == (1, 1)


@pytest.mark.parametrize(
    ("events", "ring", "full"), [(1000, None, True), (999, None, False), (7, 7, True), (7, 8, False)]
)
def test_a_full_ring_is_reported(events: int, ring: int | None, full: bool):
    document = {"segments": [], "device_traces": [[an_event()] * events]}
    assert snapshot_of(document, where="here", ring_entries=ring).history_is_full is full
