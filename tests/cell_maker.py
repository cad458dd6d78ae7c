"""Cells of `workloads`, the command line in its own process, and functions that find the processes it left running."""

import contextlib
import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import trainstep
from trainstep.cli import app
from trainstep.config.grid import Cell

TESTS = Path(__file__).parent
MARK = "TRAINSTEP_TEST"
"""The environment variable by which a command line and all processes that it starts are found."""


def planted(name: str = "SLEEP", /, **config: Any) -> Cell:
    """A cell of `workloads:NAME` on a CPU."""
    config = {"device": "cpu", **config}
    return Cell(workload=f"workloads:{name}", config=config, point={"workload": name, **config})


def silent(cell: Cell, stage: str) -> None:
    """A stage callback that does nothing."""


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes that the test starts import `workloads`."""
    monkeypatch.setenv("PYTHONPATH", import_path())


def import_path() -> str:
    """PYTHONPATH for a process in any folder: the tests, and the package that this process imported."""
    return os.pathsep.join([str(TESTS), str(Path(trainstep.__file__).parent.parent)])


def run_python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` in a folder to its end, without GPUs and on one core."""
    environ = {**os.environ, "PYTHONPATH": import_path(), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=100, check=False)


def start(*arguments: object, folder: Path, mark: str = "", **options: Any) -> subprocess.Popen[str]:
    """Start `trainstep ARGUMENTS` in a folder, without GPUs, as leader of a session."""
    environ = {**os.environ, "PYTHONPATH": import_path(), "CUDA_VISIBLE_DEVICES": "", MARK: mark}
    return subprocess.Popen(
        [sys.executable, "-m", "trainstep", *map(str, arguments)],
        cwd=folder,
        env=environ,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        **options,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 60) -> tuple[int, str, str]:
    """Wait for a command line; its exit code, stdout and stderr."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def run_here(*arguments: object, folder: Path) -> tuple[int, str, str]:
    """What `finish(start(...))` returns, without a new process for the command line: the server of forked cells is kept.

    So the import of torch is paid for once, and not by every test. For what is not about the process: signals, kills, streams.
    """
    environ = {"PYTHONPATH": import_path(), "CUDA_VISIBLE_DEVICES": "", MARK: ""}
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
        mock.patch.dict(os.environ, environ),
    ):
        code = app.run([*map(str, arguments)])
    return code, out.getvalue(), err.getvalue()


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def marked(mark: str) -> list[int]:
    """The running processes whose environment has the mark."""
    return [pid for pid, environ in _environs() if f"{MARK}={mark}".encode() in environ.split(b"\0") and is_alive(pid)]


def wait_until(condition: Callable[[], bool], timeout_s: float = 10) -> bool:
    """Wait until the condition is true; False if it is not by the deadline."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def _environs() -> Iterator[tuple[int, bytes]]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            yield int(folder.name), (folder / "environ").read_bytes()
        except OSError:  # it ended, or belongs to somebody else
            continue
