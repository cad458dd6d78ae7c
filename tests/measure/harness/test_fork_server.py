"""Forked cells are as fresh as new processes, their deaths are explained, and no process outlives them whoever is killed."""

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
from trainstep.config.grid import Cell
from trainstep.config.parsing import build_config, to_plain
from trainstep.measure.harness import rank_connection
from trainstep.measure.harness.connection import CellConnection, CellLost
from trainstep.measure.harness.fork_client import server_for
from trainstep.measure.harness.runner import CellRun, Limits, run_alone
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


def begin(connection: CellConnection, cell: Cell) -> int:
    """Prepare a cell; the number of its process."""
    assert CellRun(cell, Limits(), connection).prepare()["event"] == "ready"
    assert connection._process.pid is not None
    return connection._process.pid


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def groups_left(groups: Sequence[int]) -> list[int]:
    """Processes that are alive in these process groups."""
    alive = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended
            continue
        if int(fields[2]) in groups and fields[0] not in ("Z", "X"):
            alive.append(int(folder.name))
    return alive


def test_a_forked_cell_has_its_own_folder_variables_and_limits(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The next cell of the same server has nothing of the folder, variables, memory limit and last words of the one before."""
    first = connect(CUDA_DEVICE_ORDER="FASTEST_FIRST")
    record = measured(first, planted(act="last_words", words="the end"))
    assert record.failure is not None
    assert record.failure.last_lines == ("the end",)
    monkeypatch.chdir(tmp_path)
    second = connect()
    record = measured(second, planted())
    assert record.failure is None
    assert record.fact("forked") is True
    assert record.fact("folder") == str(tmp_path)
    assert record.fact("device_order") == "PCI_BUS_ID"
    assert record.fact("pid") == second._process.pid != first._process.pid
    assert parent_of(record.fact("pid")) == server_for(os.environ)._process.pid


@pytest.mark.parametrize(
    ("act", "words"),
    [
        ("abort", "the process was killed by SIGABRT in steps"),
        ("segfault", "the process was killed by SIGSEGV in steps"),
        ("real_time_signal", "the process was killed by signal 40 in steps"),
        ("hard_exit", "the process left with exit code 7 in steps"),
        ("kill", "killed by SIGKILL in steps; the sender is unknown"),
        ("hang_in_native_code", "killed in steps at its time limit of 8 s"),
    ],
)
def test_the_failure_says_how_a_forked_cell_died(connect: Connect, act: str, words: str):
    record = measured(connect(), planted(act=act), timeout_s=8.0 if act == "hang_in_native_code" else 60.0)
    assert record.failure is not None
    assert record.failure.message.startswith(words)


@pytest.mark.slow
def test_twenty_cells_in_a_row_leave_no_process_and_no_pipe(connect: Connect):
    pids = [begin(connect(), planted()) for _ in range(3)]
    for index in range(20):
        connection = connect()
        pids.append(begin(connection, planted()))
        connection.kill() if index % 2 else connection.close()
    server = server_for(os.environ)._process
    assert len(set(pids)) == 23
    assert wait_until(lambda: set(groups_left(pids)) <= set(groups_left(pids[:3])))
    assert is_alive(pids[0])
    descriptors = list(Path(f"/proc/{server.pid}/fd").iterdir())
    assert len(descriptors) < 20, "the server keeps no pipe of a cell"


@pytest.mark.slow
def test_variables_read_at_import_need_another_server(connect: Connect):
    servers = {}
    for threads in ("1", "2"):
        connection = connect(OMP_NUM_THREADS=threads)
        servers[threads] = parent_of(begin(connection, planted()))
        assert measured(connection, planted()).fact("torch_threads") == int(threads)
    assert servers["1"] != servers["2"]
    third = connect(OMP_NUM_THREADS="1", RANK="3", MASTER_PORT="77")
    assert parent_of(begin(third, planted())) == servers["1"]


@pytest.mark.slow
@pytest.mark.parametrize("act", ["hang_in_native_code", "spawn"])
def test_a_killed_server_takes_its_cells_along(connect: Connect, tmp_path: Path, act: str):
    waiting, hanging = connect(), connect()
    cell = planted(act=act, then="hang_in_native_code", pid_file=str(tmp_path / "pid"))
    pids = [begin(waiting, planted()), begin(hanging, cell)]
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
    assert parent_of(begin(after, planted())) != server, "the next cell has a new server"


DRIVER = """
import sys, threading
from cell_maker import planted, silent
from trainstep.measure.harness.connection import CellConnection
from trainstep.measure.harness.fork_client import server_for
from trainstep.measure.harness.runner import CellRun, Limits
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
    """`imports`: the driver is killed while its server imports."""
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
    """The third fork is refused: the first tries out whether forks work, the second is the first cell."""
    with_torch(monkeypatch, tmp_path, REFUSING)
    first = connect()
    begin(first, planted())
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
def test_a_cell_is_a_new_process_where_forks_do_not_work(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
):
    """A fork does not work where torch does not import, or starts a thread."""
    with_torch(monkeypatch, tmp_path, line)
    record = measured(connect(), planted())
    assert record.failure is None
    assert record.fact("forked") is False


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("print('last words', flush=True); os.abort()", "the process was killed by SIGABRT in start"),
        ("time.sleep(600)", "killed in start at its time limit of 1 s"),
    ],
)
def test_a_server_that_dies_or_hangs_fails_its_cell(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, words: str
):
    with_torch(monkeypatch, tmp_path, line)
    connection = connect()
    record = measured(connection, planted(), timeout_s=1.0 if "sleep" in line else 30.0)
    assert record.failure is not None
    assert record.failure.message.startswith(words)
    assert record.failure.last_lines == (("last words",) if "abort" in line else ())
    assert not connection.alive


def test_only_trainsteps_own_workloads_are_forked(monkeypatch: pytest.MonkeyPatch):
    """A cell is forked unless its workload is the user's, its compile cache must be empty, or it runs on Slurm."""
    workloads: list[str] = []
    monkeypatch.setattr(rank_connection, "CellConnection", lambda tell, *_, forked_for: workloads.append(forked_for))
    config: dict[str, Any] = {"model": "tiny", "device": "cpu"}
    own = Cell(workload="train_step", config=config, point={})
    for cell, forks in (
        (own, True),
        (own, False),
        (Cell(workload="train_step", config={**config, "cold_compile": True}, point={}), True),
        (planted(), True),
    ):
        rank_connection.connect(cell, silent, forks=forks)
    assert workloads == ["train_step", "", "", ""]


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
