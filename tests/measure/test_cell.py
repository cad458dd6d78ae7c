"""A cell's process, spoken to in JSON lines as its driver does."""

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
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
GIB = 2**30


class Spoken:
    """A process of trainstep.measure.cell and the conversation with it."""

    def __init__(self, *python: str) -> None:
        command = [sys.executable, *(python or ("-m", "trainstep.measure.cell"))]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    def ask(self, do: str, **fields: Any) -> list[dict[str, Any]]:
        """Every event up to the answer."""
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
        """Close its stdin and wait; what it printed."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=10)
        assert self.process.stderr is not None
        return self.process.stderr.read()


@pytest.fixture
def speak() -> Iterator[Callable[..., Spoken]]:
    opened: list[Spoken] = []

    def open_one(*python: str) -> Spoken:
        opened.append(Spoken(*python))
        return opened[-1]

    yield open_one
    for spoken in opened:
        with suppress(ProcessLookupError):
            os.killpg(spoken.process.pid, signal.SIGKILL)
        spoken.process.wait()
        for pipe in (spoken.process.stdin, spoken.process.stdout, spoken.process.stderr):
            pipe.close()


def test_a_whole_cell(speak: Callable[..., Spoken]):
    cell = speak()
    assert [event.get("stage", event["event"]) for event in cell.prepare()] == ["start", "build", "steps", "ready"]
    assert cell.ask("take", steps=3) == [{"event": "taken"}]
    assert cell.ask("take", steps=2) == [{"event": "taken"}]
    stage, finished = cell.ask("finish")
    assert stage == {"event": "stage", "stage": "afterwards"}
    assert len(finished["findings"]["samples"]["step"]["values"]) == 5
    assert finished["findings"]["facts"]["import_s"]["value"] > 0
    assert finished["environment"]["python"]
    assert finished["again"] is False


def test_a_shared_worker_says_so(speak: Callable[..., Spoken]):
    cell = speak()
    for _ in range(2):
        cell.prepare("SHARED")
        cell.ask("take", steps=1)
        assert cell.ask("finish")[-1]["again"] is True
    assert cell.prepare("SHARED", act="run_out", where="prepare")[-1]["again"] is False


def test_what_a_workload_prints_is_no_answer(speak: Callable[..., Spoken]):
    cell = speak()
    cell.prepare("NOISY")
    assert cell.ask("take", steps=1) == [{"event": "taken"}]
    assert cell.ask("finish")[-1]["event"] == "finished"
    printed = cell.leave()
    assert "a line on stdout" in printed
    assert "a line on stderr" in printed


def test_a_workload_cannot_read_the_requests(speak: Callable[..., Spoken]):
    cell = speak()
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
def test_what_goes_wrong_is_the_answer(
    speak: Callable[..., Spoken], act: str, where: str, kind: str, phase: str, words: str
):
    cell = speak()
    answer = cell.prepare(act=act, where=where)[-1]
    for do in ("take", "finish"):
        if answer["event"] != "finished":
            answer = cell.ask(do, **({"steps": 1} if do == "take" else {}))[-1]
    failure = answer["failure"]
    assert (failure["kind"], failure["phase"]) == (kind, phase)
    assert words in failure["message"]
    assert answer["environment"]["python"]
    assert cell.prepare()[-1]["event"] == "ready", "it lives, and its driver decides whether it may go on"


@pytest.mark.parametrize("workload", ["nowhere:X", "nowhere.at.all:X"])
def test_a_workload_that_is_not_there(speak: Callable[..., Spoken], workload: str):
    failure = speak().ask("prepare", workload=workload, config={})[-1]["failure"]
    assert failure["kind"] == "import_error"
    assert "nowhere" in failure["message"]


def test_asked_out_of_order(speak: Callable[..., Spoken]):
    assert "nothing prepared" in speak().ask("take", steps=1)[-1]["failure"]["message"]


@linux
def test_limited_and_offered_to_the_kernel_first(speak: Callable[..., Spoken]):
    cell = speak()
    cell.prepare(limit=GIB)
    cell.ask("take", steps=1)
    facts = cell.ask("finish")[-1]["findings"]["facts"]
    assert facts["memory_limit_bytes"]["value"] == GIB
    assert facts["oom_score_adj"]["value"] == 1000
    assert Path(f"/proc/{cell.process.pid}/oom_score_adj").read_text().strip() == "1000"


@linux
def test_an_unlimited_cell_is_left_alone(speak: Callable[..., Spoken]):
    cell = speak()
    cell.prepare()
    assert Path(f"/proc/{cell.process.pid}/oom_score_adj").read_text() == Path("/proc/self/oom_score_adj").read_text()


def test_a_limit_never_rises(speak: Callable[..., Spoken]):
    lower = f"import resource as r; r.setrlimit(r.RLIMIT_DATA, ({GIB}, {GIB}))"
    cell = speak("-c", f"{lower}; from trainstep.measure.cell import main; main()")
    assert cell.prepare(limit=4 * GIB)[-1]["event"] == "ready"
    cell.ask("take", steps=1)
    assert cell.ask("finish")[-1]["findings"]["facts"]["memory_limit_bytes"]["value"] == GIB


@linux
@pytest.mark.parametrize("act", ["spawn", "fork"])
def test_it_leaves_with_all_it_started_when_nobody_asks_any_more(
    speak: Callable[..., Spoken], tmp_path: Path, act: str
):
    cell = speak()
    cell.prepare(act=act, where="take", pid_file=str(tmp_path / "pid"))
    cell.ask("take", steps=1)
    grandchild = int((tmp_path / "pid").read_text())
    assert is_alive(grandchild)
    cell.leave()
    assert wait_until(lambda: not is_alive(grandchild))


def test_gpus_are_counted_as_the_driver_does(speak: Callable[..., Spoken], monkeypatch: pytest.MonkeyPatch):
    """CUDA's own order is fastest first: its GPU 0 need not be the environment's."""
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    orders = []
    for _ in range(2):
        cell = speak()
        cell.prepare()
        cell.ask("take", steps=1)
        orders.append(cell.ask("finish")[-1]["findings"]["facts"]["device_order"]["value"])
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert orders == ["PCI_BUS_ID", "FASTEST_FIRST"]


@pytest.mark.parametrize("asked", [{}, {"settle": False}, {"settle": True}])
@pytest.mark.parametrize("settles", [False, True])
def test_it_settles_where_it_can_and_is_asked(
    speak: Callable[..., Spoken], tmp_path: Path, asked: dict[str, bool], settles: bool
):
    cell = speak()
    cell.prepare(log=str(tmp_path / "log"), settles=settles)
    assert cell.ask("take", steps=3, **asked) == [{"event": "taken"}]
    called = (tmp_path / "log").read_text().split("\n")
    assert (" settle" in called) == (settles and asked.get("settle", False))


def test_words_that_no_file_takes(speak: Callable[..., Spoken]):
    cell = speak()
    cell.prepare(act="raise", message="no file \udc80")
    failure = cell.ask("take", steps=1)[-1]["failure"]
    assert failure["message"] == "RuntimeError: no file ?"
    assert failure["last_lines"][-1] == "RuntimeError: no file ?"


DRIVER = """
import json, os, sys
from cell_maker import planted
from trainstep.measure.connection import CellConnection
from trainstep.measure.runner import CellRun, Limits

def tell(cell, stage):
    print(run.connection._process.pid, stage, flush=True)

run = CellRun(planted(**json.loads(sys.argv[1])), Limits(), CellConnection(tell))
run.prepare()
run.ask("take", steps=1)
"""


@linux
@pytest.mark.parametrize("act", ["hang", "hang_in_native_code"])
def test_it_dies_with_its_driver(act: str):
    driver, pid = drive(act=act)
    driver.kill()
    driver.communicate()
    assert wait_until(lambda: not is_alive(pid))


@linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_all_it_started_dies_with_its_driver(tmp_path: Path, number: signal.Signals):
    child = tmp_path / "pid"
    driver, _ = drive(act="spawn", where="take", then="hang_in_native_code", pid_file=str(child))
    assert wait_until(lambda: child.exists() and child.read_text() != "")
    driver.send_signal(number)
    driver.communicate()
    assert wait_until(lambda: not is_alive(int(child.read_text())))


def drive(**config: Any) -> tuple[subprocess.Popen[str], int]:
    """A driver whose cell is at its steps, and that cell's process."""
    command = [sys.executable, "-c", DRIVER, json.dumps(config)]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    return driver, next(int(line.split()[0]) for line in driver.stdout if "steps" in line)
