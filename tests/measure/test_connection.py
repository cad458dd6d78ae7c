"""The driving side: limits kept, deaths explained, nothing left running."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cell_maker import importable, is_alive, planted, silent, wait_until
from trainstep.config.cell import Cell
from trainstep.measure import connection as connection_module
from trainstep.measure.connection import Answer, CellConnection, CellLost
from trainstep.measure.host import OutOfMemoryKills
from trainstep.records.record import Failure

__all__ = ["importable"]
pytestmark = pytest.mark.usefixtures("importable")
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture
def connect() -> Iterator[Callable[..., CellConnection]]:
    opened: list[CellConnection] = []

    def open_one(tell: Callable[[Cell, str], None] = silent) -> CellConnection:
        opened.append(CellConnection(tell))
        return opened[-1]

    yield open_one
    for connection in opened:
        connection.kill()
        connection.close()


def ask(connection: CellConnection, cell: Cell, do: str, timeout_s: float = 30, **fields: Any) -> Answer:
    request = {"do": do, "workload": cell.workload, "config": dict(cell.config), **fields}
    return connection.ask(cell, request, timeout_s=timeout_s, limit_s=timeout_s)


def lost(connection: CellConnection, cell: Cell, timeout_s: float = 30) -> Failure:
    """How the cell's process is lost on its way."""
    try:
        for do in ("prepare", "take", "finish"):
            ask(connection, cell, do, timeout_s, steps=1)
    except CellLost as caught:
        return caught.failure
    return pytest.fail("the cell was not lost")


def test_stages_are_told_and_answers_come(connect: Callable[..., CellConnection]):
    told: list[tuple[Cell, str]] = []
    connection, cell = connect(lambda *what: told.append(what)), planted()
    assert ask(connection, cell, "prepare") == {"event": "ready", "again": False}
    assert told == [(cell, "start"), (cell, "build"), (cell, "steps")]
    assert connection.alive
    connection.close()
    assert not connection.alive


@pytest.mark.parametrize("act", ["hang", "hang_in_native_code"])
def test_a_time_out(connect: Callable[..., CellConnection], act: str):
    connection = connect()
    ask(connection, planted(act=act), "prepare")
    started_s = time.monotonic()
    failure = lost(connection, planted(act=act), timeout_s=0.3)
    assert time.monotonic() - started_s < 20, "it was killed and not waited for"
    assert (failure.kind, failure.phase) == ("timeout", "steps")
    assert failure.message == "killed in steps after its 0.3 s were over"
    assert not connection.alive


@linux
@pytest.mark.parametrize("act", ["spawn", "fork"])
@pytest.mark.parametrize("then", ["hang", "abort", "hard_exit"])
def test_grandchildren_die_too(connect: Callable[..., CellConnection], tmp_path: Path, act: str, then: str):
    cell = planted(act=act, then=then, pid_file=str(tmp_path / "pid"))
    connection = connect()
    ask(connection, cell, "prepare")
    failure = lost(connection, cell, timeout_s=1 if then == "hang" else 30)
    assert failure.kind == ("timeout" if then == "hang" else "crash"), "a child that holds the pipe hides no death"
    assert wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text())))


@linux
def test_grandchildren_leave_with_a_cell_that_is_done(connect: Callable[..., CellConnection], tmp_path: Path):
    cell, connection = planted("SPAWNS", pid_file=str(tmp_path / "pid")), connect()
    for do in ("prepare", "take", "finish"):
        ask(connection, cell, do, steps=1)
    connection.close()
    assert wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text())))


@pytest.mark.parametrize(
    ("act", "words"),
    [
        ("abort", "the process was killed by SIGABRT in steps"),
        ("segfault", "the process was killed by SIGSEGV in steps"),
        ("real_time_signal", "the process was killed by signal 40 in steps"),
        ("hard_exit", "the process left with exit code 7 in steps"),
    ],
)
def test_a_crash_says_how(connect: Callable[..., CellConnection], act: str, words: str):
    failure = lost(connect(), planted(act=act))
    assert (failure.kind, failure.phase, failure.message) == ("crash", "steps", words)


def count_kills(monkeypatch: pytest.MonkeyPatch, *counts: int | None) -> None:
    """The kernel's count at the beginning of a process, of a cell's turn, and at its death."""
    kills = [None if count is None else OutOfMemoryKills(count=count, counted_by="control group g") for count in counts]
    monkeypatch.setattr(connection_module, "out_of_memory_kills", iter(kills).__next__)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sigkill_that_the_kernel_counted(
    connect: Callable[..., CellConnection], monkeypatch: pytest.MonkeyPatch, device: str
):
    count_kills(monkeypatch, 3, 4)
    failure = lost(connect(), planted("KILLED", device=device))
    assert (failure.kind, failure.phase) == ("out_of_memory", "steps")
    assert failure.message == "killed by the kernel in steps: out of memory, by the count of the control group g"


@pytest.mark.parametrize(
    ("counts", "words"),
    [((3, 3), "the kernel counted no out-of-memory kill"), ((None, None), "this system counts no out-of-memory kills")],
)
def test_any_other_sigkill_is_a_kill(
    connect: Callable[..., CellConnection],
    monkeypatch: pytest.MonkeyPatch,
    counts: tuple[int | None, ...],
    words: str,
):
    count_kills(monkeypatch, *counts)
    failure = lost(connect(), planted("KILLED"))
    assert (failure.kind, failure.phase) == ("crash", "steps")
    assert failure.message == f"killed by SIGKILL in steps: by whom is not known; {words}"


def test_a_count_that_rose_before_the_cells_turn(
    connect: Callable[..., CellConnection], monkeypatch: pytest.MonkeyPatch
):
    count_kills(monkeypatch, 3, 4, 4)
    connection = connect()
    connection.begin()
    assert lost(connection, planted("KILLED")).kind == "crash"


@pytest.mark.parametrize(
    "words",
    [
        "  what():  std::bad_alloc",
        "OSError: [Errno 12] Cannot allocate memory",
        "LLVM ERROR: cannot allocate memory",
        "OpenBLAS error: Memory allocation still failed after 10 retries, giving up.",
        "libgomp: Thread creation failed: Resource temporarily unavailable",
    ],
)
def test_native_code_short_of_memory(connect: Callable[..., CellConnection], words: str):
    failure = lost(connect(), planted(act="last_words", words=words))
    assert (failure.kind, failure.phase) == ("out_of_memory", "steps")
    assert failure.message == "ran out of memory in steps, and native code ended the process"
    assert failure.last_lines[0] == words


@pytest.mark.parametrize("config", [{"words": "an assertion failed"}, {"words": "std::bad_alloc", "device": "cuda"}])
def test_other_last_words_are_a_crash(connect: Callable[..., CellConnection], config: dict[str, str]):
    assert lost(connect(), planted(act="last_words", **config)).kind == "crash"


def test_an_answer_to_something_else(connect: Callable[..., CellConnection]):
    connection = connect()
    failure = lost(connection, planted(act="return_twice", where="prepare"))
    assert failure.kind == "crash"
    assert "asked to take, the process answered 'ready'" in failure.message
    assert not connection.alive


def test_a_deleted_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(ValueError, match="the working directory was deleted"):
        CellConnection(silent)


def test_killed_while_it_waits_for_its_turn(connect: Callable[..., CellConnection]):
    connection = connect()
    ask(connection, planted(), "prepare")
    connection._process.send_signal(signal.SIGTERM)
    connection._process.wait()
    assert lost(connection, planted()).message == "the process was killed by SIGTERM in steps"


def test_last_lines_are_the_end_of_this_cells_words(connect: Callable[..., CellConnection]):
    connection = connect()
    noisy = planted("NOISY")
    connection.begin()
    for do in ("prepare", "take", "finish"):
        ask(connection, noisy, do, steps=1)
    connection.begin()
    ask(connection, planted("RAISE"), "prepare")
    assert ask(connection, planted("RAISE"), "take", steps=1)["event"] == "finished"
    connection.kill()
    failure = lost(connection, planted())
    assert failure.last_lines == ("about to raise",)


def test_closing_twice_is_no_harm(connect: Callable[..., CellConnection]):
    connection = connect()
    connection.kill()
    connection.close()
    connection.close()
    assert not connection.alive
