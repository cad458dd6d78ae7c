"""The driver's side of a cell: it keeps limits, explains deaths and leaves nothing running."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cell_maker import importable, is_alive, planted, silent, wait_until
from trainstep.config.grid import Cell
from trainstep.measure.harness import connection as connection_module
from trainstep.measure.harness.connection import Answer, CellConnection, CellLost
from trainstep.measure.machine.environment import OutOfMemoryKills
from trainstep.records.record import Failure

__all__ = ["importable"]
pytestmark = pytest.mark.usefixtures("importable")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def connect() -> Iterator[Callable[..., CellConnection]]:
    opened: list[CellConnection] = []

    def open_connection(report: Callable[[Cell, str], None] = silent) -> CellConnection:
        opened.append(CellConnection(report))
        return opened[-1]

    yield open_connection
    for connection in opened:
        connection.kill()
        connection.close()


def ask(connection: CellConnection, cell: Cell, do: str, timeout_s: float = 30, **fields: Any) -> Answer:
    request = {"do": do, "workload": cell.workload, "config": dict(cell.config), **fields}
    return connection.ask(cell, request, timeout_s=timeout_s, limit_s=timeout_s)


def run_until_lost(connection: CellConnection, cell: Cell, timeout_s: float = 30) -> Failure:
    """Run the cell until its process is lost; the failure that says how."""
    try:
        for do in ("prepare", "take", "finish"):
            ask(connection, cell, do, timeout_s, steps=1)
    except CellLost as caught:
        return caught.failure
    return pytest.fail("the cell was not lost")


def test_stages_are_reported_before_the_answer(connect: Callable[..., CellConnection]):
    stages: list[tuple[Cell, str]] = []
    connection, cell = connect(lambda *stage: stages.append(stage)), planted()
    assert ask(connection, cell, "prepare") == {"event": "ready", "again": False}
    assert stages == [(cell, "start"), (cell, "build"), (cell, "steps")]
    assert connection.alive
    connection.close()
    assert not connection.alive


@pytest.mark.parametrize("act", ["hang", "hang_in_native_code"])
def test_a_cell_is_killed_at_its_time_limit(connect: Callable[..., CellConnection], act: str):
    connection = connect()
    ask(connection, planted(act=act), "prepare")
    started_s = time.monotonic()
    failure = run_until_lost(connection, planted(act=act), timeout_s=0.3)
    assert time.monotonic() - started_s < 20, "the driver kills it and does not wait for it"
    assert (failure.kind, failure.phase) == ("timeout", "steps")
    assert failure.message == "killed in steps at its time limit of 0.3 s"
    assert not connection.alive


@linux
@pytest.mark.parametrize("act", ["spawn", "fork"])
@pytest.mark.parametrize("then", ["hang", "abort", "hard_exit"])
def test_grandchildren_die_with_a_lost_cell(
    connect: Callable[..., CellConnection], tmp_path: Path, act: str, then: str
):
    cell = planted(act=act, then=then, pid_file=str(tmp_path / "pid"))
    connection = connect()
    ask(connection, cell, "prepare")
    failure = run_until_lost(connection, cell, timeout_s=1 if then == "hang" else 30)
    assert failure.kind == ("timeout" if then == "hang" else "crash"), "a child that has the pipe open hides no death"
    assert wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text())))


@linux
def test_grandchildren_die_with_a_finished_cell(connect: Callable[..., CellConnection], tmp_path: Path):
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
def test_a_crash_names_its_signal_or_exit_code(connect: Callable[..., CellConnection], act: str, words: str):
    failure = run_until_lost(connect(), planted(act=act))
    assert (failure.kind, failure.phase, failure.message) == ("crash", "steps", words)


def count_kills(monkeypatch: pytest.MonkeyPatch, *counts: int | None) -> None:
    """Pretend the kernel's counts of out-of-memory kills: when a process starts, when its cell begins, when it dies."""
    kills = [None if count is None else OutOfMemoryKills(count=count, counted_by="control group g") for count in counts]
    monkeypatch.setattr(connection_module, "out_of_memory_kills", iter(kills).__next__)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_sigkill_that_the_kernel_counted_is_out_of_memory(
    connect: Callable[..., CellConnection], monkeypatch: pytest.MonkeyPatch, device: str
):
    count_kills(monkeypatch, 3, 4)
    failure = run_until_lost(connect(), planted("KILLED", device=device))
    assert (failure.kind, failure.phase) == ("out_of_memory", "steps")
    assert failure.message == "killed by the kernel in steps: out of memory, by the count of the control group g"


@pytest.mark.parametrize(
    ("counts", "words"),
    [((3, 3), "the kernel counted no out-of-memory kill"), ((None, None), "this system counts no out-of-memory kills")],
)
def test_any_other_sigkill_is_a_crash(
    connect: Callable[..., CellConnection],
    monkeypatch: pytest.MonkeyPatch,
    counts: tuple[int | None, ...],
    words: str,
):
    count_kills(monkeypatch, *counts)
    failure = run_until_lost(connect(), planted("KILLED"))
    assert (failure.kind, failure.phase) == ("crash", "steps")
    assert failure.message == f"killed by SIGKILL in steps; the sender is unknown, and {words}"


def test_a_kill_counted_before_the_cell_began_is_not_its_own(
    connect: Callable[..., CellConnection], monkeypatch: pytest.MonkeyPatch
):
    count_kills(monkeypatch, 3, 4, 4)
    connection = connect()
    connection.begin()
    assert run_until_lost(connection, planted("KILLED")).kind == "crash"


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
def test_native_code_that_runs_out_of_memory_is_out_of_memory(connect: Callable[..., CellConnection], words: str):
    failure = run_until_lost(connect(), planted(act="last_words", words=words))
    assert (failure.kind, failure.phase) == ("out_of_memory", "steps")
    assert failure.message == "ran out of memory in steps, and native code ended the process"
    assert failure.last_lines[0] == words


@pytest.mark.parametrize("config", [{"words": "an assertion failed"}, {"words": "std::bad_alloc", "device": "cuda"}])
def test_other_last_words_are_a_crash(connect: Callable[..., CellConnection], config: dict[str, str]):
    assert run_until_lost(connect(), planted(act="last_words", **config)).kind == "crash"


def test_an_answer_to_another_request_is_a_crash(connect: Callable[..., CellConnection]):
    connection = connect()
    # A step so long that both answers to prepare come before its own, whichever process is faster
    failure = run_until_lost(connection, planted(act="return_twice", where="prepare", seconds=20.0))
    assert failure.kind == "crash"
    assert "the process answered take with 'ready'" in failure.message
    assert not connection.alive


def test_a_deleted_working_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(ValueError, match="the working directory was deleted"):
        CellConnection(silent)


def test_a_process_killed_between_cells_fails_the_next_cell(connect: Callable[..., CellConnection]):
    connection = connect()
    ask(connection, planted(), "prepare")
    connection._process.send_signal(signal.SIGTERM)
    connection._process.wait()
    assert run_until_lost(connection, planted()).message == "the process was killed by SIGTERM in steps"


def test_last_lines_are_of_this_cell_only(connect: Callable[..., CellConnection]):
    connection = connect()
    noisy = planted("NOISY")
    connection.begin()
    for do in ("prepare", "take", "finish"):
        ask(connection, noisy, do, steps=1)
    connection.begin()
    ask(connection, planted("RAISE"), "prepare")
    assert ask(connection, planted("RAISE"), "take", steps=1)["event"] == "finished"
    connection.kill()
    failure = run_until_lost(connection, planted())
    assert failure.last_lines == ("about to raise",)


def test_closing_twice_is_allowed(connect: Callable[..., CellConnection]):
    connection = connect()
    connection.kill()
    connection.close()
    connection.close()
    assert not connection.alive
