"""Reading traces: real ones whole, broken ones refused in a sentence, large ones in time and memory."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainstep.traces.kineto import parse_trace, read_trace

FIXTURES = Path(__file__).parent / "fixtures"
EAGER = FIXTURES / "tiny_eager.json.gz"


@pytest.mark.parametrize("name", ["tiny_eager", "tiny_compiled"])
def test_every_event_is_read(name: str):
    path = FIXTURES / f"{name}.json.gz"
    events = [event for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if event["ph"] == "X"]

    def count(*categories: str) -> int:
        return sum(event.get("cat") in categories for event in events)

    found = read_trace(path)
    assert len(found.activities) == count("kernel", "gpu_memcpy", "gpu_memset") > 400
    assert len(found.calls) == count("cuda_runtime", "cuda_driver")
    assert len(found.ranges) == count("cpu_op", "user_annotation")
    assert found.gpu == "NVIDIA H200"
    starts = [one.start_ns for one in found.activities]
    assert starts == sorted(starts)
    assert sum(one.backward for one in found.ranges) > 0


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


def test_a_cut_archive(tmp_path: Path):
    path = tmp_path / "t.json.gz"
    path.write_bytes(EAGER.read_bytes()[:20_000])
    with pytest.raises(ValueError, match="cut off or damaged"):
        read_trace(path)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "is no profiler trace"),
        (b"hello", "is no profiler trace"),
        (b"\x80\x04\x95", "is no profiler trace: byte 0 is no text"),
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
def test_what_is_no_trace(content: bytes, word: str, tmp_path: Path):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=word) as error:
        read_trace(path)
    assert "\n" not in str(error.value)


def test_no_such_file_and_a_folder(tmp_path: Path):
    with pytest.raises(ValueError, match="there is no such file"):
        read_trace(tmp_path / "absent.json")
    with pytest.raises(ValueError, match="cannot be read"):
        read_trace(tmp_path)


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
def test_a_hundred_megabytes(tmp_path: Path):
    """The eager step again and again, moved on in time, as a long recording would be."""
    document = json.loads(gzip.decompress(EAGER.read_bytes()))
    events = [event for event in document["traceEvents"] if "dur" in event and isinstance(event["pid"], int)]
    whole = max(event["ts"] + event["dur"] for event in events) - min(event["ts"] for event in events)
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
                moved = {**event, "ts": event["ts"] + copies * whole, "args": arguments}
                if event["name"].startswith("step "):
                    moved["name"] = f"step {copies * 3 + int(event['name'][5:])}"
                lines.append(json.dumps(moved))
            file.write((",\n" if copies else "") + ",\n".join(lines))
            copies += 1
        file.write("\n]}")
    done = subprocess.run(
        [sys.executable, "-c", READ_IT, path], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels, read_s, peak_bytes = map(float, done.stdout.split())
    assert kernels == 870 * copies
    assert read_s <= 10
    assert peak_bytes <= 1e9
