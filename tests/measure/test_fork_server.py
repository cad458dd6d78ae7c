"""Forked cells: as fresh as new processes, their deaths explained, nothing left of them whoever is killed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cell_maker import importable, is_alive, planted, silent, wait_until
from trainstep.config.cell import Cell
from trainstep.config.parsing import build_config, to_plain
from trainstep.measure import rank_connection
from trainstep.measure.connection import CellConnection, CellLost
from trainstep.measure.fork_client import server_for
from trainstep.measure.runner import CellRun, Limits, run_alone
from trainstep.records.record import Record

__all__ = ["importable"]
pytestmark = [
    pytest.mark.usefixtures("importable"),
    pytest.mark.skipif(sys.platform != "linux", reason="cells are forked on Linux alone"),
]

Connect = Callable[..., CellConnection]


@pytest.fixture
def connect() -> Iterator[Connect]:
    opened: list[CellConnection] = []

    def open_forked(**variables: str) -> CellConnection:
        opened.append(CellConnection(silent, variables, forked_for="workloads:SLEEP"))
        return opened[-1]

    yield open_forked
    for connection in opened:
        connection.kill()
        connection.close()


def measured(connection: CellConnection, cell: Cell, timeout_s: float = 60.0) -> Record:
    return run_alone(CellRun(cell, Limits(timeout_s=timeout_s), connection))[0]


def begun(connection: CellConnection, cell: Cell) -> int:
    """The number of the process, its cell prepared."""
    assert CellRun(cell, Limits(), connection).prepare()["event"] == "ready"
    assert connection._process.pid is not None
    return connection._process.pid


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def groups_left(groups: Sequence[int]) -> list[int]:
    """Processes that are alive in these process groups."""
    left = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended
            continue
        if int(fields[2]) in groups and fields[0] not in ("Z", "X"):
            left.append(int(folder.name))
    return left


def test_a_forked_cell_is_its_own(connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its folder, variables, limit of memory and last words; the next of the same server has nothing of them."""
    first = connect(CUDA_DEVICE_ORDER="FASTEST_FIRST")
    record = measured(first, planted(act="last_words", words="the end"))
    assert record.failure is not None
    assert record.failure.last_lines == ("the end",)
    monkeypatch.chdir(tmp_path)
    other = connect()
    record = measured(other, planted())
    assert record.failure is None
    assert record.fact("forked") is True
    assert record.fact("folder") == str(tmp_path)
    assert record.fact("device_order") == "PCI_BUS_ID"
    assert record.fact("pid") == other._process.pid != first._process.pid
    assert parent_of(record.fact("pid")) == server_for(os.environ)._process.pid


@pytest.mark.parametrize(
    ("act", "words"),
    [
        ("abort", "the process was killed by SIGABRT in steps"),
        ("segfault", "the process was killed by SIGSEGV in steps"),
        ("real_time_signal", "the process was killed by signal 40 in steps"),
        ("hard_exit", "the process left with exit code 7 in steps"),
        ("kill", "killed by SIGKILL in steps: by whom is not known"),
        ("hang_in_native_code", "killed in steps after its 3 s were over"),
    ],
)
def test_a_death_is_explained(connect: Connect, act: str, words: str):
    record = measured(connect(), planted(act=act), timeout_s=3.0)
    assert record.failure is not None
    assert record.failure.message.startswith(words)


def test_twenty_in_a_row_leave_nothing(connect: Connect):
    pids = [begun(connect(), planted()) for _ in range(3)]
    for index in range(20):
        connection = connect()
        pids.append(begun(connection, planted()))
        connection.kill() if index % 2 else connection.close()
    server = server_for(os.environ)._process
    assert len(set(pids)) == 23
    assert wait_until(lambda: set(groups_left(pids)) <= set(groups_left(pids[:3])))
    assert is_alive(pids[0])
    descriptors = list(Path(f"/proc/{server.pid}/fd").iterdir())
    assert len(descriptors) < 20, "the server keeps no pipe of a cell"


@pytest.mark.slow
def test_variables_read_at_import_mean_another_server(connect: Connect):
    found = {}
    for threads in ("1", "2"):
        connection = connect(OMP_NUM_THREADS=threads)
        found[threads] = parent_of(begun(connection, planted()))
        assert measured(connection, planted()).fact("torch_threads") == int(threads)
    assert found["1"] != found["2"]
    again = connect(OMP_NUM_THREADS="1", RANK="3", MASTER_PORT="77")
    assert parent_of(begun(again, planted())) == found["1"]


@pytest.mark.parametrize("act", ["hang_in_native_code", "spawn"])
def test_a_killed_server_takes_its_cells_along(connect: Connect, tmp_path: Path, act: str):
    waiting, hanging = connect(), connect()
    cell = planted(act=act, then="hang_in_native_code", pid_file=str(tmp_path / "pid"))
    pids = [begun(waiting, planted()), begun(hanging, cell)]
    server = parent_of(pids[0])
    run = CellRun(cell, Limits(timeout_s=60.0), hanging)
    hanging._process.stdin.write(json.dumps({"do": "take", "steps": 1}).encode() + b"\n")
    hanging._process.stdin.flush()
    assert act != "spawn" or wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    os.kill(server, signal.SIGKILL)
    assert wait_until(lambda: not groups_left([*pids, server]))
    with pytest.raises(CellLost, match="killed by SIGKILL in steps") as lost:
        run.ask("finish")
    assert lost.value.failure.kind == "crash"
    after = connect()
    assert parent_of(begun(after, planted())) != server, "the next cell has a new server"


DRIVER = """
import sys, threading
from cell_maker import planted, silent
from trainstep.measure.connection import CellConnection
from trainstep.measure.fork_client import server_for
from trainstep.measure.runner import CellRun, Limits
import os

print(server_for(os.environ)._process.pid, flush=True)
if sys.argv[1] != "imports":
    connections = [CellConnection(silent, forked_for="workloads:SLEEP") for _ in range(2)]
    acts = [planted(), planted(act=sys.argv[1], where="take", then="hang_in_native_code", pid_file=sys.argv[2])]
    runs = [CellRun(cell, Limits(), connection) for cell, connection in zip(acts, connections)]
    for run in runs:
        run.prepare()
        print(run.connection._process.pid, flush=True)
    print("taking", flush=True)
    runs[1].ask("take", steps=1)
threading.Event().wait()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
@pytest.mark.parametrize("act", ["spawn", "fork", "imports"])
def test_a_killed_driver_leaves_nothing(tmp_path: Path, act: str, number: signal.Signals):
    """`imports`: the server's, which are not done yet."""
    child = tmp_path / "pid"
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, act, str(child)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pids = [int(driver.stdout.readline()) for _ in range(1 if act == "imports" else 3)]
    if act != "imports":
        assert driver.stdout.readline() == "taking\n"
        assert wait_until(lambda: child.exists() and child.read_text() != "")
        pids.append(int(child.read_text()))
    assert all(map(is_alive, pids))
    driver.send_signal(number)
    driver.communicate()
    assert wait_until(lambda: not groups_left(pids) and not any(map(is_alive, pids)))


def test_an_environment_of_any_size_reaches_the_cell(connect: Connect):
    for variables in ({"A": "a" * 120_000, "B": "b" * 120_000}, {f"A{n}": "a" * 100_000 for n in range(15)}):
        assert measured(connect(**variables), planted()).failure is None


def test_a_fork_that_is_refused_fails_its_own_cell(connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The third: one tries out forks, one is the first cell."""
    with_torch(monkeypatch, tmp_path, REFUSING)
    first = connect()
    begun(first, planted())
    second = measured(connect(), planted())
    assert second.failure is not None
    assert second.failure.last_lines == ("no further process can be started: Resource temporarily unavailable",)
    first.ask(planted(), {"do": "take", "steps": 1}, timeout_s=30, limit_s=30)


REFUSING = """
import errno
server, real, count = os.getpid(), os.fork, 0
def fork():
    global count
    count += os.getpid() == server
    if count > 2 and os.getpid() == server:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return real()
os.fork = fork
"""


def with_torch(monkeypatch: pytest.MonkeyPatch, folder: Path, line: str) -> None:
    """Servers started from now on import this in place of torch."""
    (folder / "torch.py").write_text(f"import os, sys, threading, time\n{line}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ["PYTHONPATH"]]))


@pytest.mark.parametrize(
    "line", ["raise ImportError('broken')", "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"]
)
def test_where_a_fork_would_not_do(connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str):
    """torch does not import, or starts a thread: the cell is a new process."""
    with_torch(monkeypatch, tmp_path, line)
    record = measured(connect(), planted())
    assert record.failure is None
    assert record.fact("forked") is False


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("print('last words', flush=True); os.abort()", "the process was killed by SIGABRT in start"),
        ("time.sleep(600)", "killed in start after its 1 s were over"),
    ],
)
def test_a_server_that_does_not_come_to_fork(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, words: str
):
    with_torch(monkeypatch, tmp_path, line)
    connection = connect()
    record = measured(connection, planted(), timeout_s=1.0 if "sleep" in line else 30.0)
    assert record.failure is not None
    assert record.failure.message.startswith(words)
    assert record.failure.last_lines == (("last words",) if "abort" in line else ())
    assert not connection.alive


def test_which_cells_are_forked(monkeypatch: pytest.MonkeyPatch):
    """Ours, but where the cache of compiled code must be empty; none on Slurm."""
    asked: list[str] = []
    monkeypatch.setattr(rank_connection, "CellConnection", lambda tell, *_, forked_for: asked.append(forked_for))
    config: dict[str, Any] = {"model": "tiny", "device": "cpu"}
    ours = Cell(workload="train_step", config=config, point={})
    for cell, forks in (
        (ours, True),
        (ours, False),
        (Cell(workload="train_step", config={**config, "cold_compile": True}, point={}), True),
        (planted(), True),
    ):
        rank_connection.connect(cell, silent, forks=forks)
    assert asked == ["train_step", "", "", ""]


@pytest.mark.slow
def test_a_step_is_the_same_forked_or_not(connect: Connect):
    config = to_plain(build_config("train_step", {"model": "tiny", "context": 16, "steps": 2, "device": "cpu"}))
    cell = Cell(workload="train_step", config=config, point={})
    fresh = CellConnection(silent)
    records = [measured(connect(), cell), measured(fresh, cell)]
    fresh.close()
    assert [record.fact("forked") for record in records] == [True, False]
    assert records[0].fact("loss") == records[1].fact("loss")
    assert records[0].fact("import_s") < records[1].fact("import_s")
