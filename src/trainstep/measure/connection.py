"""The driving side of a cell's process: start it, ask, wait with a limit, and learn how it died if it does."""

import json
import os
import queue
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any, Protocol

from trainstep.config.cell import Cell
from trainstep.config.import_path import python_command
from trainstep.measure.failures import asked_bytes, last_lines_of
from trainstep.measure.fork_client import ForkedProcess, fork_cell
from trainstep.measure.host import out_of_memory_kills
from trainstep.measure.temporary_folder import TemporaryFolder, remove_abandoned
from trainstep.records.record import Failure

_DRAIN_S = 2.0
"""For what a dead process still had in its pipe to arrive."""
_ANSWERS = {"prepare": "ready", "take": "taken", "finish": "finished"}
_OUT_OF_MEMORY = re.compile(
    r"bad_alloc|annot allocate memory|Memory allocation still failed"
    r"|Thread creation failed: Resource temporarily unavailable"
)
"""Last words of native code that met the limit of a process's memory and aborted."""

Answer = Mapping[str, Any]
Tell = Callable[[Cell, str], None]
"""Told which cell is in which stage."""


def tell_nobody(_cell: Cell, _stage: str) -> None:
    """For those who do not ask."""


class CellLost(Exception):
    """The process died or took too long; `failure` says how. `exit_code`: its own, where it ended by itself."""

    def __init__(self, failure: Failure, exit_code: int | None = None) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.exit_code = exit_code


class Connection(Protocol):
    """The process of a cell, or the processes of its ranks (rank_connection.py), as runner and executors see them."""

    @property
    def alive(self) -> bool: ...
    def begin(self) -> None: ...
    def empty_compile_cache(self) -> str: ...
    def ask(self, cell: Cell, request: Mapping[str, Any], *, timeout_s: float, limit_s: float) -> Answer: ...
    def close(self) -> None: ...
    def kill(self) -> None: ...


class CellConnection:
    """One process of `trainstep.measure.cell`, in a session of its own so that all it starts can be killed with it."""

    def __init__(self, tell: Tell, variables: Mapping[str, str] | None = None, *, forked_for: str = "") -> None:
        """`variables`: of the environment, over the driver's own. `forked_for`: the workload that a process is
        forked for from one that has imported it, where that can be (fork_client.py)."""
        _check_folder()
        self._tell = tell
        self._stage = "start"
        self._compile_cache: TemporaryFolder | None = None
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        self._said_before = 0
        self._has_begun = False
        self._kernel_kills = out_of_memory_kills()
        environment = {**os.environ, **(variables or {})}
        self._process: subprocess.Popen[bytes] | ForkedProcess = (
            fork_cell(forked_for, environment, self._stderr) if forked_for else None
        ) or subprocess.Popen(
            python_command("trainstep.measure.cell"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,
            env=environment,
        )
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether the process can still be asked."""
        return self._process.poll() is None

    def begin(self) -> None:
        """Another cell's turn: what was printed until now belongs to the one before, if there was one."""
        self._stage = "start"
        self._said_before = os.fstat(self._stderr.fileno()).st_size if self._has_begun else 0
        self._has_begun = True
        self._kernel_kills = out_of_memory_kills()

    def empty_compile_cache(self) -> str:
        """A new folder, removed with the process: that one is always killed, and never cleans up."""
        self._remove_compile_cache()
        self._compile_cache = TemporaryFolder()
        return str(self._compile_cache.path)

    def ask(self, cell: Cell, request: Mapping[str, Any], *, timeout_s: float, limit_s: float) -> Answer:
        """Send a request and wait for its answer. Raises CellLost on death, or, the process killed, on an answer to
        something else or after `timeout_s`: what was left of the cell's `limit_s`."""
        deadline_s = time.monotonic() + timeout_s
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write((json.dumps(request) + "\n").encode())
            self._process.stdin.flush()
        while True:
            try:
                event = self._events.get(timeout=max(deadline_s - time.monotonic(), 0))
            except queue.Empty:
                self.kill()
                raise CellLost(self._timed_out(limit_s)) from None
            if event is None:
                raise CellLost(self._died(cell), self._process.wait())
            if event["event"] in (_ANSWERS[request["do"]], "finished"):
                return event
            if event["event"] != "stage":
                self.kill()
                raise CellLost(self._answered(event["event"], request["do"]))
            self._stage = event["stage"]
            self._tell(cell, self._stage)

    def close(self) -> None:
        """Let the process leave; it does, with all it started, as soon as its stdin closes."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.kill()
        self._remove_folders()
        self._stderr.close()

    def kill(self) -> None:
        """End the process and whatever it started, now."""
        self._kill_group()
        self._process.wait()
        self._remove_folders()

    def _remove_folders(self) -> None:
        """Remove the folders of a process that has ended: those made for it here, and those that it made and left."""
        self._remove_compile_cache()
        remove_abandoned()

    def _remove_compile_cache(self) -> None:
        if self._compile_cache is not None:
            self._compile_cache.remove()
            self._compile_cache = None

    def _kill_group(self) -> None:
        if isinstance(self._process, ForkedProcess):
            self._process.kill_group()
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for line in answers:
                with suppress(ValueError):
                    self._events.put(json.loads(line))

    def _watch(self) -> None:
        """Say when the process is dead. Its pipe does not: a child that it forked may hold the other end."""
        self._process.wait()
        self._kill_group()
        self._listener.join(_DRAIN_S)
        self._events.put(None)

    def _timed_out(self, limit_s: float) -> Failure:
        return Failure(
            kind="timeout",
            phase=self._stage,
            message=f"killed in {self._stage} after its {limit_s:g} s were over",
            last_lines=self._last_lines(),
        )

    def _answered(self, event: str, asked: str) -> Failure:
        message = (
            f"asked to {asked}, the process answered {event!r} in {self._stage}: did its code fork and return twice?"
        )
        return Failure(kind="crash", phase=self._stage, message=message, last_lines=self._last_lines())

    def _died(self, cell: Cell) -> Failure:
        code = self._process.wait()
        lines = self._last_lines()
        if code == -signal.SIGKILL:
            return self._killed(lines)
        if cell.config.get("device") == "cpu" and any(map(_OUT_OF_MEMORY.search, lines)):
            message = f"ran out of memory in {self._stage}, and native code ended the process"
            asked = next(filter(None, map(asked_bytes, reversed(lines))), None)
            return Failure(
                kind="out_of_memory", phase=self._stage, message=message, asked_bytes=asked, last_lines=lines
            )
        how = f"killed by {_signal_name(-code)}" if code < 0 else f"left with exit code {code}"
        message = f"the process {'was ' if code < 0 else ''}{how} in {self._stage}"
        return Failure(kind="crash", phase=self._stage, message=message, last_lines=lines)

    def _killed(self, lines: tuple[str, ...]) -> Failure:
        """The failure of a process that SIGKILL ended: out of memory if the kernel counted such a kill since this cell's turn
        began (it ends cells before other processes, by their oom_score_adj), else a crash."""
        before, now = self._kernel_kills, out_of_memory_kills()
        if before and now and now.count > before.count:
            message = f"killed by the kernel in {self._stage}: out of memory, by the count of the {now.counted_by}"
            return Failure(kind="out_of_memory", phase=self._stage, message=message, last_lines=lines)
        counted = "the kernel counted no out-of-memory kill" if now else "this system counts no out-of-memory kills"
        message = f"killed by SIGKILL in {self._stage}: by whom is not known; {counted}"
        return Failure(kind="crash", phase=self._stage, message=message, last_lines=lines)

    def _last_lines(self) -> tuple[str, ...]:
        return last_lines_of(self._stderr, since=self._said_before)


def _check_folder() -> None:
    """A cell starts where its driver is. ValueError if that folder was deleted."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ValueError("the working directory was deleted; change to a folder that exists") from None


def _signal_name(number: int) -> str:
    """`SIGSEGV`; real-time signals have no names."""
    return next((known.name for known in signal.Signals if known == number), f"signal {number}")
