"""A cell's process answers requests in JSON lines, as its driver sends them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cell_maker import importable, is_alive, wait_until

__all__ = ["importable"]
pytestmark = pytest.mark.usefixtures("importable")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
GIB = 2**30


class CellProcess:
    """A process of trainstep.measure.harness.cell that a test sends requests to."""

    def __init__(self, *python: str) -> None:
        command = [sys.executable, *(python or ("-m", "trainstep.measure.harness.cell"))]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    def ask(self, do: str, **fields: Any) -> list[dict[str, Any]]:
        """Send a request; every event up to the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self.process.stdin.flush()
        return list(self._events())

    def prepare(self, name: str = "SLEEP", *, limit: int | None = None, **config: Any) -> list[dict[str, Any]]:
        return self.ask("prepare", workload=f"workloads:{name}", config=config, memory_limit_bytes=limit)

    def _events(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            yield event
            if event["event"] != "stage":
                return

    def leave(self) -> str:
        """Close its stdin and wait until it exits; what it printed."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=10)
        assert self.process.stderr is not None
        return self.process.stderr.read()


@pytest.fixture
def start_cell() -> Iterator[Callable[..., CellProcess]]:
    opened: list[CellProcess] = []

    def start(*python: str) -> CellProcess:
        opened.append(CellProcess(*python))
        return opened[-1]

    yield start
    for cell_process in opened:
        with suppress(ProcessLookupError):
            os.killpg(cell_process.process.pid, signal.SIGKILL)
        cell_process.process.wait()
        for pipe in (cell_process.process.stdin, cell_process.process.stdout, cell_process.process.stderr):
            pipe.close()


def test_prepare_take_and_finish_answer_in_order(start_cell: Callable[..., CellProcess]):
    cell = start_cell()
    assert [event.get("stage", event["event"]) for event in cell.prepare()] == ["start", "build", "steps", "ready"]
    assert cell.ask("take", steps=3) == [{"event": "taken"}]
    assert cell.ask("take", steps=2) == [{"event": "taken"}]
    stage, finished = cell.ask("finish")
    assert stage == {"event": "stage", "stage": "afterwards"}
    assert len(finished["findings"]["samples"]["step"]["values"]) == 5
    assert finished["findings"]["facts"]["import_s"]["value"] > 0
    assert finished["environment"]["python"]
    assert finished["again"] is False


def test_a_shared_worker_says_so(start_cell: Callable[..., CellProcess]):
    cell = start_cell()
    for _ in range(2):
        cell.prepare("SHARED")
        cell.ask("take", steps=1)
        assert cell.ask("finish")[-1]["again"] is True
    assert cell.prepare("SHARED", act="run_out", where="prepare")[-1]["again"] is False


def test_prints_of_a_workload_are_not_read_as_answers(start_cell: Callable[..., CellProcess]):
    cell = start_cell()
    cell.prepare("NOISY")
    assert cell.ask("take", steps=1) == [{"event": "taken"}]
    assert cell.ask("finish")[-1]["event"] == "finished"
    printed = cell.leave()
    assert "a line on stdout" in printed
    assert "a line on stderr" in printed


def test_a_workload_cannot_read_the_requests(start_cell: Callable[..., CellProcess]):
    cell = start_cell()
    cell.prepare(reads=True)
    cell.ask("take", steps=1)
    assert cell.ask("finish")[-1]["findings"]["facts"]["typed"]["value"] == ""


@pytest.mark.parametrize(
    ("act", "where", "kind", "phase", "words"),
    [
        ("raise", "take", "crash", "steps", "RuntimeError: this was planted"),
        ("exit", "take", "crash", "steps", "SystemExit: no more"),
        ("interrupt", "take", "crash", "steps", "KeyboardInterrupt"),
        ("nan", "finish", "crash", "afterwards", "JSON"),
        ("run_out", "prepare", "out_of_memory", "build", "asking for 4,096 bytes"),
        ("run_out", "finish", "out_of_memory", "afterwards", "asking for 4,096 bytes"),
        ("import", "prepare", "import_error", "build", "a_package_that_is_nowhere"),
        ("import", "take", "crash", "steps", "a_package_that_is_nowhere"),
    ],
)
def test_a_failure_is_the_answer(
    start_cell: Callable[..., CellProcess], act: str, where: str, kind: str, phase: str, words: str
):
    cell = start_cell()
    answer = cell.prepare(act=act, where=where)[-1]
    for do in ("take", "finish"):
        if answer["event"] != "finished":
            answer = cell.ask(do, **({"steps": 1} if do == "take" else {}))[-1]
    failure = answer["failure"]
    assert (failure["kind"], failure["phase"]) == (kind, phase)
    assert words in failure["message"]
    assert answer["environment"]["python"]
    assert cell.prepare()[-1]["event"] == "ready", "the process lives, and its driver decides whether to use it again"


@pytest.mark.parametrize("workload", ["nowhere:X", "nowhere.at.all:X"])
def test_an_unknown_workload_is_an_import_error(start_cell: Callable[..., CellProcess], workload: str):
    failure = start_cell().ask("prepare", workload=workload, config={})[-1]["failure"]
    assert failure["kind"] == "import_error"
    assert "nowhere" in failure["message"]


def test_a_step_before_prepare_is_a_failure(start_cell: Callable[..., CellProcess]):
    assert "before anything was prepared" in start_cell().ask("take", steps=1)[-1]["failure"]["message"]


@linux
def test_a_limited_cell_is_the_first_that_the_kernel_kills(start_cell: Callable[..., CellProcess]):
    cell = start_cell()
    cell.prepare(limit=GIB)
    cell.ask("take", steps=1)
    facts = cell.ask("finish")[-1]["findings"]["facts"]
    assert facts["memory_limit_bytes"]["value"] == GIB
    assert facts["oom_score_adj"]["value"] == 1000
    assert Path(f"/proc/{cell.process.pid}/oom_score_adj").read_text().strip() == "1000"


@linux
def test_an_unlimited_cell_is_left_alone(start_cell: Callable[..., CellProcess]):
    cell = start_cell()
    cell.prepare()
    assert Path(f"/proc/{cell.process.pid}/oom_score_adj").read_text() == Path("/proc/self/oom_score_adj").read_text()


def test_a_limit_never_rises(start_cell: Callable[..., CellProcess]):
    lower = f"import resource as r; r.setrlimit(r.RLIMIT_DATA, ({GIB}, {GIB}))"
    cell = start_cell("-c", f"{lower}; from trainstep.measure.harness.cell import main; main()")
    assert cell.prepare(limit=4 * GIB)[-1]["event"] == "ready"
    cell.ask("take", steps=1)
    assert cell.ask("finish")[-1]["findings"]["facts"]["memory_limit_bytes"]["value"] == GIB


@linux
@pytest.mark.parametrize("act", ["spawn", "fork"])
def test_a_cell_exits_with_its_children_when_stdin_closes(
    start_cell: Callable[..., CellProcess], tmp_path: Path, act: str
):
    cell = start_cell()
    cell.prepare(act=act, where="take", pid_file=str(tmp_path / "pid"))
    cell.ask("take", steps=1)
    grandchild = int((tmp_path / "pid").read_text())
    assert is_alive(grandchild)
    cell.leave()
    assert wait_until(lambda: not is_alive(grandchild))


def test_gpus_are_counted_as_the_driver_does(start_cell: Callable[..., CellProcess], monkeypatch: pytest.MonkeyPatch):
    """CUDA's own order is fastest first, so its GPU 0 need not be the environment's."""
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    orders = []
    for _ in range(2):
        cell = start_cell()
        cell.prepare()
        cell.ask("take", steps=1)
        orders.append(cell.ask("finish")[-1]["findings"]["facts"]["device_order"]["value"])
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert orders == ["PCI_BUS_ID", "FASTEST_FIRST"]


@pytest.mark.parametrize("request_fields", [{}, {"settle": False}, {"settle": True}])
@pytest.mark.parametrize("settles", [False, True])
def test_a_cell_settles_if_it_can_and_is_requested_to(
    start_cell: Callable[..., CellProcess], tmp_path: Path, request_fields: dict[str, bool], settles: bool
):
    cell = start_cell()
    cell.prepare(log=str(tmp_path / "log"), settles=settles)
    assert cell.ask("take", steps=3, **request_fields) == [{"event": "taken"}]
    calls = (tmp_path / "log").read_text().split("\n")
    assert (" settle" in calls) == (settles and request_fields.get("settle", False))


def test_text_that_cannot_be_encoded_is_replaced(start_cell: Callable[..., CellProcess]):
    cell = start_cell()
    cell.prepare(act="raise", message="no file \udc80")
    failure = cell.ask("take", steps=1)[-1]["failure"]
    assert failure["message"] == "RuntimeError: no file ?"
    assert failure["last_lines"][-1] == "RuntimeError: no file ?"


DRIVER = """
import json, os, sys
from cell_maker import planted
from trainstep.measure.harness.connection import CellConnection
from trainstep.measure.harness.runner import CellRun, Limits

def report(cell, stage):
    print(run.connection._process.pid, stage, flush=True)

run = CellRun(planted(**json.loads(sys.argv[1])), Limits(), CellConnection(report))
run.prepare()
run.ask("take", steps=1)
"""


@linux
@pytest.mark.parametrize("act", ["hang", "hang_in_native_code"])
def test_a_cell_dies_with_its_driver(act: str):
    driver, pid = drive(act=act)
    driver.kill()
    driver.communicate()
    assert wait_until(lambda: not is_alive(pid))


@linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_children_of_a_cell_die_with_its_driver(tmp_path: Path, number: signal.Signals):
    child = tmp_path / "pid"
    driver, _ = drive(act="spawn", where="take", then="hang_in_native_code", pid_file=str(child))
    assert wait_until(lambda: child.exists() and child.read_text() != "")
    driver.send_signal(number)
    driver.communicate()
    assert wait_until(lambda: not is_alive(int(child.read_text())))


def drive(**config: Any) -> tuple[subprocess.Popen[str], int]:
    """A driver whose cell is at its steps, and the number of that cell's process."""
    command = [sys.executable, "-c", DRIVER, json.dumps(config)]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    return driver, next(int(line.split()[0]) for line in driver.stdout if "steps" in line)
