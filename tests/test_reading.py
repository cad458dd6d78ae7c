"""Files from outside are unpacked up to a limit, in a process that ends at its limits of memory and time."""

import gzip
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cell_maker import import_path
from trainstep.reading import ReadLimits, limited_here, read_file, read_within

FILE = Path("somebody's.json")
SMALL = ReadLimits(memory_bytes=300_000_000, time_s=20)


def test_a_plain_and_a_compressed_file_are_read(tmp_path: Path):
    for name, content in (("plain", b"words"), ("zipped", gzip.compress(b"words"))):
        (tmp_path / name).write_bytes(content)
        assert read_file(tmp_path / name) == b"words"


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_file_over_the_limit_is_refused(tmp_path: Path, pack: Callable[[bytes], bytes]):
    path = tmp_path / "bomb"
    path.write_bytes(pack(bytes(3_000_000)))
    assert len(read_file(path, largest_bytes=3_000_000)) == 3_000_000
    with pytest.raises(ValueError, match=r"bomb: over 2,999,999 bytes once unpacked, which is the limit; record fewer"):
        read_file(path, largest_bytes=2_999_999)


def test_a_path_that_is_no_regular_file_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"words")[:12])
    for path, words in (
        (tmp_path / "absent", "there is no such file"),
        (tmp_path, "cannot be read: it is a folder"),
        (tmp_path / "pipe", "cannot be read: it is not a regular file"),
        (tmp_path / "loop", "cannot be read: Too many levels of symbolic links"),
        (tmp_path / "cut.gz", "the compressed file is cut off or damaged"),
        (Path("/dev/zero"), "cannot be read: it is not a regular file"),
        (Path("/dev/full"), "cannot be read: it is not a regular file"),
    ):
        with pytest.raises(ValueError, match=words) as raised:
            read_file(path)
        assert str(raised.value).startswith(f"{path}: ")


def test_the_result_of_the_reader_is_returned():
    text = "words"
    assert read_within(SMALL, FILE, lambda: [text, os.getppid()]) == ["words", os.getpid()]


def test_a_reader_in_a_reader_starts_no_further_process():
    assert read_within(SMALL, FILE, lambda: read_within(SMALL, FILE, os.getppid)) == os.getpid()


def refusal(read: Callable[[], Any], limits: ReadLimits = SMALL) -> str:
    with pytest.raises(ValueError) as raised:
        read_within(limits, FILE, read)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def grow() -> None:
    taken = []
    while True:
        taken.append(bytearray(10_000_000))


def stand_still() -> None:
    while True:
        pass


def nest() -> Any:
    return nest()


def test_each_limit_is_named_with_the_file_and_a_remedy():
    assert refusal(grow) == (
        "somebody's.json: reading it takes more than 0.3 GB of memory; record fewer steps, or allow more with --memory-limit-gib"
    )
    assert refusal(stand_still, ReadLimits(time_s=0.2)) == (
        "somebody's.json: reading it takes more than 0.2 s; record fewer steps, or allow more with --timeout-s"
    )
    assert refusal(nest) == "somebody's.json: it is nested too deeply to be read"
    assert refusal(lambda: bytes(200_000_000) + bytes(200_000_000)) == refusal(grow), (
        "the result is too large in one piece"
    )
    assert "the process that read it ended (SIGSEGV)" in refusal(lambda: os.kill(os.getpid(), signal.SIGSEGV))
    assert "the process that read it ended (exit code 3)" in refusal(lambda: os._exit(3))


def test_a_call_that_never_returns_to_python_is_ended():
    assert "more than 0.2 s" in refusal(lambda: sum(iter(int, 1)), ReadLimits(time_s=0.2))


def test_errors_of_the_reader_are_raised_in_the_caller():
    with pytest.raises(ValueError, match=r"^no trace$"):
        read_within(SMALL, FILE, lambda: refuse("no trace"))
    with pytest.raises(KeyError, match="absent") as raised:  # an internal error keeps the place where it happened
        read_within(SMALL, FILE, lambda: {}["absent"])
    assert "test_reading.py" in raised.value.__notes__[0]
    with pytest.raises(FileNotFoundError):
        read_within(SMALL, FILE, lambda: Path("/absent").read_bytes())


def refuse(words: str) -> None:
    raise ValueError(words)


FORGOTTEN = """
import os, time
from pathlib import Path
from trainstep.reading import ReadLimits, read_within
def read():
    print(os.getpid(), flush=True)
    time.sleep(100)
read_within(ReadLimits(time_s=100), Path("x"), read)
"""


def test_a_reader_ends_with_the_process_that_waits_for_it():
    parent = subprocess.Popen(
        [sys.executable, "-c", FORGOTTEN], env={"PYTHONPATH": import_path()}, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    reader = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    end = time.monotonic() + 50
    while is_alive(reader):
        assert time.monotonic() < end, "the reader is still there"
        time.sleep(0.01)
    parent.stdout.close()


def is_alive(process: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_limits_of_a_block_end_with_it():
    with (
        pytest.raises(ValueError, match=r"records: reading takes more than 0\.3 GB of memory"),
        limited_here(SMALL, "records"),
    ):
        grow()
    assert len(bytearray(400_000_000)) == 400_000_000, "the limit ends with the block"
    left_s, _ = signal.getitimer(signal.ITIMER_REAL)
    short = ReadLimits(time_s=0.1)
    with pytest.raises(ValueError, match=r"records: reading takes more than 0\.1 s"), limited_here(short, "records"):
        stand_still()
    after_s, _ = signal.getitimer(signal.ITIMER_REAL)
    assert (after_s > 0) == (left_s > 0), "pytest's own alarm continues"
    assert after_s <= left_s


def small_pickle(body: bytes) -> bytes:
    return b"\x80\x04" + body + b"."


@pytest.mark.parametrize("threads", [0, 4])
def test_a_process_with_threads_may_read(threads: int):
    """A forked process has none of its parent's threads, and must not wait for a lock that one of them holds."""
    stop = threading.Event()
    started = [threading.Thread(target=stop.wait) for _ in range(threads)]
    for thread in started:
        thread.start()
    try:
        assert read_within(SMALL, FILE, lambda: pickle.loads(small_pickle(b"]"))) == []
    finally:
        stop.set()
        for thread in started:
            thread.join()
