"""Reading traces: real ones completely, broken ones refused in one sentence, large ones within time and memory."""

import gc
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainstep.traces.kineto import parse_trace, read_trace
from trainstep.traces.profile import profile_of

FIXTURES = Path(__file__).parent / "fixtures"
EAGER = FIXTURES / "tiny_eager.json.gz"


@pytest.mark.parametrize("name", ["tiny_eager", "tiny_compiled"])
def test_every_event_is_read(name: str):
    path = FIXTURES / f"{name}.json.gz"
    events = [event for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if event["ph"] == "X"]

    def count(*categories: str) -> int:
        return sum(event.get("cat") in categories for event in events)

    recorded = read_trace(path)
    assert len(recorded.activities) == count("kernel", "gpu_memcpy", "gpu_memset") > 400
    assert len(recorded.calls) == count("cuda_runtime", "cuda_driver")
    assert len(recorded.ranges) == count("cpu_op", "user_annotation")
    assert recorded.gpu == "NVIDIA H200"
    starts = [event_.start_ns for event_ in recorded.activities]
    assert starts == sorted(starts)
    assert sum(event_.backward for event_ in recorded.ranges) > 0


def test_plain_json_reads_the_same(tmp_path: Path):
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.decompress(EAGER.read_bytes()))
    assert read_trace(path) == read_trace(EAGER)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9, 0.9999])
def test_a_cut_trace_says_where(share: float):
    text = gzip.decompress(EAGER.read_bytes()).decode()
    cut = text[: int(share * text.rindex("]"))]
    with pytest.raises(ValueError, match="cut off or damaged at character") as error:
        parse_trace(cut, "t.json")
    position = int(str(error.value).split("character ")[1].split(" ")[0].replace(",", ""))
    assert 0 < position <= len(cut)


def test_a_cut_archive_is_refused(tmp_path: Path):
    path = tmp_path / "t.json.gz"
    path.write_bytes(EAGER.read_bytes()[:20_000])
    with pytest.raises(ValueError, match="cut off or damaged"):
        read_trace(path)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "is not a profiler trace"),
        (b"hello", "is not a profiler trace"),
        (b"\x80\x04\x95", "is not a profiler trace: byte 0 is not text"),
        (b'{"schemaVersion": 1}', "has no list traceEvents"),
        (b'{"traceEvents": []}', "the trace is empty.*trainstep profile --keep-trace"),
        (b'{"traceEvents": [{"ph": "M", "name": "process"}]}', "the trace is empty"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k"}]}', "lacks a name or times"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1, "dur": 1}]}', "lacks a name or times"),
        (
            b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 1, "pid": "x", "tid": 1}]}',
            "lacks",
        ),
        (b'{"traceEvents": [[[[[', "cut off or damaged"),
    ],
)
def test_files_that_are_no_trace_are_refused(content: bytes, word: str, tmp_path: Path):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=word) as error:
        read_trace(path)
    assert "\n" not in str(error.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="there is no such file"):
        read_trace(tmp_path / "absent.json")
    with pytest.raises(ValueError, match="cannot be read"):
        read_trace(tmp_path)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(enabled: bool, monkeypatch: pytest.MonkeyPatch):
    seen: list[bool] = []
    sort = sorted
    monkeypatch.setattr(
        "builtins.sorted", lambda *given, **options: [seen.append(gc.isenabled()), sort(*given, **options)][1]
    )
    try:
        if not enabled:
            gc.disable()
        parse_trace(text_of(STEP), "t.json")
        assert seen
        assert not any(seen), "paused while it reads"
        with pytest.raises(ValueError, match="cut off"):
            parse_trace('{"traceEvents": [{', "t.json")
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


STEP = [
    {"ph": "X", "cat": "user_annotation", "name": "step 0", "pid": 1, "tid": 1, "ts": 0, "dur": 100},
    {
        "ph": "X",
        "cat": "cpu_op",
        "name": "aten::mm",
        "pid": 1,
        "tid": 1,
        "ts": 10,
        "dur": 20,
        "args": {"Sequence number": 3},
    },
    {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "pid": 1,
        "tid": 1,
        "ts": 12,
        "dur": 2,
        "args": {"correlation": 5},
    },
    {
        "ph": "X",
        "cat": "kernel",
        "name": "gemm",
        "ts": 20,
        "dur": 30,
        "args": {"correlation": 5, "device": 0, "stream": 7},
    },
]
"""One step as the events of a trace."""
ODD = [
    None,
    True,
    -1,
    1.5,
    1e300,
    1e308,
    10**30,
    2**63,
    "",
    "1",
    "step 99999999999999999999",
    "step 7",
    [],
    [1],
    {},
    {"a": 1},
]
ODD_NUMBERS = ["NaN", "Infinity", "-Infinity", "9" * 5000, "[" * 5000]
"""JSON values that Python cannot write."""


def profiled(text: str) -> bool:
    """Whether the trace could be read and analysed; if not, it was refused with a ValueError."""
    try:
        return bool(profile_of(parse_trace(text, "t.json")).tables)
    except ValueError:
        return False


@pytest.mark.parametrize("event", range(len(STEP)), ids=[str(event["cat"]) for event in STEP])
def test_any_value_in_any_place_is_read_or_refused(event: int):
    places = [*STEP[event], *(("args", name) for name in STEP[event].get("args", {}))]
    for place in places:
        for odd in [*map(json.dumps, ODD), *ODD_NUMBERS]:
            changed = {**STEP[event], **({place: "@"} if isinstance(place, str) else {"args": {place[1]: "@"}})}
            profiled(text_of([*STEP[:event], changed, *STEP[event + 1 :]]).replace('"@"', odd))
    for odd in [*map(json.dumps, ODD), *ODD_NUMBERS]:
        profiled(text_of([*STEP[:event], "@", *STEP[event + 1 :]]).replace('"@"', odd))


def text_of(events: list[Any]) -> str:
    return json.dumps({"traceEvents": events})


@pytest.mark.parametrize(
    "changes", [{"name": None}, {"name": 5}, {"ts": "1"}, {"dur": [1]}, {"ts": 1e300}, {"args": [1]}]
)
def test_an_event_that_lacks_a_field_is_named_by_its_place(changes: dict[str, Any]):
    prefix = text_of([STEP[0]])[:-2]
    text = text_of([STEP[0], {**STEP[1], **changes}])
    with pytest.raises(
        ValueError, match=r"t\.json: is not a profiler trace: an event before character [\d,]+ lacks a name"
    ) as raised:
        parse_trace(text, "t.json")
    position = int(str(raised.value).split("character ")[1].split(" ")[0].replace(",", ""))
    assert len(prefix) < position <= len(text)


def test_a_step_that_only_another_thread_names_is_read():
    of_another_thread = [{**STEP[0], "name": "step 9", "tid": 2}, {**STEP[2], "tid": 2, "args": {"correlation": 6}}]
    launched = {**STEP[3], "args": {"correlation": 6}, "ts": 60}
    assert profiled(text_of([{**STEP[0], "name": "step 1", "ts": -200}, *STEP, *of_another_thread, launched]))


def test_a_trace_whose_steps_take_no_time_is_refused():
    assert not profiled(text_of([{**STEP[0], "dur": 0}, *STEP[1:]]))


@pytest.mark.parametrize(
    ("properties", "gpu"),
    [
        ([{"id": 0, "name": "NVIDIA H200"}], "NVIDIA H200"),
        ([{"name": 5}], None),
        ([], None),
        ([5], None),
        ({"name": "x"}, None),
        (None, None),
    ],
)
def test_the_gpus_name_is_read_if_it_is_there(properties: Any, gpu: str | None):
    text = json.dumps({"deviceProperties": properties, "traceEvents": STEP})
    assert parse_trace(text, "t.json").gpu == gpu


def test_an_archive_that_unpacks_too_large_is_refused(tmp_path: Path):
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + bytes(3_000_000)))
    with pytest.raises(ValueError, match="over 1,000,000 bytes once unpacked"):
        read_trace(path, largest_bytes=1_000_000)


READ_IT = """
import sys, time
from pathlib import Path
from trainstep.traces.kineto import read_trace
from trainstep.traces.profile import profile_of
start = time.process_time()
trace = read_trace(Path(sys.argv[1]))
read_s = time.process_time() - start
assert profile_of(trace).fallback_share == 0
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))  # ru_maxrss would be the parent's too
print(len(trace.activities), read_s, int(peak.split()[1]) * 1024)
"""


@pytest.mark.slow
def test_a_hundred_megabytes_are_read_within_time_and_memory(tmp_path: Path):
    """The eager steps are repeated, shifted in time, as a long recording would have them."""
    document = json.loads(gzip.decompress(EAGER.read_bytes()))
    events = [event for event in document["traceEvents"] if "dur" in event and isinstance(event["pid"], int)]
    duration = max(event["ts"] + event["dur"] for event in events) - min(event["ts"] for event in events)
    path, copies = tmp_path / "large.json", 0
    with open(path, "w") as file:
        file.write('{"traceEvents": [\n')
        while file.tell() < 100e6:
            lines = []
            for event in events:
                arguments = dict(event.get("args", {}))
                for name in ("correlation", "Sequence number"):
                    if arguments.get(name, -1) >= 0:
                        arguments[name] += 1_000_000 * copies
                moved = {**event, "ts": event["ts"] + copies * duration, "args": arguments}
                if event["name"].startswith("step "):
                    moved["name"] = f"step {copies * 3 + int(event['name'][5:])}"
                lines.append(json.dumps(moved))
            file.write((",\n" if copies else "") + ",\n".join(lines))
            copies += 1
        file.write("\n]}")
    process = subprocess.run(
        [sys.executable, "-c", READ_IT, path], capture_output=True, text=True, timeout=110, check=False
    )
    assert process.returncode == 0, process.stderr[-2000:]
    kernels, read_s, peak_bytes = map(float, process.stdout.split())
    assert kernels == 870 * copies
    assert read_s <= 10
    assert peak_bytes <= 1e9
