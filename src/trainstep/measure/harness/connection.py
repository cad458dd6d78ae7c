"""The driver's side of a cell's process: start it, send requests, wait with a time limit, and say how it died."""

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

from trainstep.config.grid import Cell
from trainstep.config.import_path import python_command
from trainstep.measure.harness.failures import asked_bytes, last_lines_of
from trainstep.measure.harness.files import TemporaryFolder, remove_abandoned
from trainstep.measure.harness.fork_client import ForkedProcess, fork_cell
from trainstep.measure.machine.environment import out_of_memory_kills
from trainstep.records.record import Failure

_DRAIN_S = 2.0
"""How long to wait for what a dead process still had in its pipe."""
_ANSWERS = {"prepare": "ready", "take": "taken", "finish": "finished"}
_OUT_OF_MEMORY = re.compile(
    r"bad_alloc|annot allocate memory|Memory allocation still failed"
    r"|Thread creation failed: Resource temporarily unavailable"
)
"""Last words of native code that reached the memory limit of its process and aborted."""

Answer = Mapping[str, Any]
Tell = Callable[[Cell, str], None]
"""Called with a cell and the stage that it has reached."""


def tell_nobody(_cell: Cell, _stage: str) -> None:
    """A `Tell` that ignores every stage."""


class CellLost(Exception):
    """The process died or took too long; `failure` says how. `exit_code`: its exit code, if it ended by itself."""

    def __init__(self, failure: Failure, exit_code: int | None = None) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.exit_code = exit_code


class Connection(Protocol):
    """The process of a cell, or the processes of its ranks (rank_connection.py), as the runner and executors use them."""

    @property
    def alive(self) -> bool: ...
    def begin(self) -> None: ...
    def empty_compile_cache(self) -> str: ...
    def ask(self, cell: Cell, request: Mapping[str, Any], *, timeout_s: float, limit_s: float) -> Answer: ...
    def close(self) -> None: ...
    def kill(self) -> None: ...


class CellConnection:
    """One process of harness/cell.py, in a session of its own so that everything it starts can be killed with it."""

    def __init__(self, tell: Tell, variables: Mapping[str, str] | None = None, *, forked_for: str = "") -> None:
        """Start the process.

        `variables`: environment variables that replace or add to the driver's. `forked_for`: a workload; the process is
        forked from a server that has imported this workload, where the system can do that (fork_client.py).

        Raises ValueError if the working directory, in which the process would start, was deleted.
        """
        try:
            os.getcwd()
        except FileNotFoundError:
            raise ValueError("the working directory was deleted; change to a folder that exists") from None
        self._tell = tell
        self._stage = "start"
        self._compile_cache: TemporaryFolder | None = None
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        self._printed_before = 0
        self._has_begun = False
        self._kernel_kills = out_of_memory_kills()
        environment = {**os.environ, **(variables or {})}
        self._process: subprocess.Popen[bytes] | ForkedProcess = (
            fork_cell(forked_for, environment, self._stderr) if forked_for else None
        ) or subprocess.Popen(
            python_command("trainstep.measure.harness.cell"),
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
        """Whether the process still takes requests."""
        return self._process.poll() is None

    def begin(self) -> None:
        """Start another cell: what the process has printed so far belongs to the cell before it."""
        self._stage = "start"
        self._printed_before = os.fstat(self._stderr.fileno()).st_size if self._has_begun else 0
        self._has_begun = True
        self._kernel_kills = out_of_memory_kills()

    def empty_compile_cache(self) -> str:
        """Make a new folder, removed when the process ends: the process itself is always killed and never cleans up."""
        self._remove_compile_cache()
        self._compile_cache = TemporaryFolder()
        return str(self._compile_cache.path)

    def ask(self, cell: Cell, request: Mapping[str, Any], *, timeout_s: float, limit_s: float) -> Answer:
        """Send a request and wait for its answer.

        `timeout_s`: what is left of the cell's time limit `limit_s`.

        Raises CellLost if the process died. Kills the process and raises CellLost after `timeout_s`, or if the answer
        belongs to another request.
        """
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
                message = f"killed in {self._stage} at its time limit of {limit_s:g} s"
                raise CellLost(self._failure("timeout", message)) from None
            if event is None:
                raise CellLost(self._died(cell), self._process.wait())
            name = event["event"]
            if name in (_ANSWERS[request["do"]], "finished"):
                return event
            if name != "stage":
                self.kill()
                message = f"the process answered {request['do']} with {name!r} in {self._stage}"
                raise CellLost(self._failure("crash", f"{message}: did its code fork and return twice?"))
            self._stage = event["stage"]
            self._tell(cell, self._stage)

    def close(self) -> None:
        """Let the process end; it does, with everything it started, as soon as its stdin closes."""
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
        """End the process and everything it started, now."""
        self._kill_group()
        self._process.wait()
        self._remove_folders()

    def _remove_folders(self) -> None:
        """Remove the folders of an ended process: the compile cache made for it here, and those that it made itself."""
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
        # The end of stdout does not tell that the process is dead: a child that it forked may keep the pipe open.
        self._process.wait()
        self._kill_group()
        self._listener.join(_DRAIN_S)
        self._events.put(None)

    def _died(self, cell: Cell) -> Failure:
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return self._killed()
        lines = self._last_lines()
        if cell.config.get("device") == "cpu" and any(map(_OUT_OF_MEMORY.search, lines)):
            message = f"ran out of memory in {self._stage}, and native code ended the process"
            size_bytes = next(filter(None, map(asked_bytes, reversed(lines))), None)
            return self._failure("out_of_memory", message, size_bytes)
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"left with exit code {code}"
        return self._failure("crash", f"the process {how} in {self._stage}")

    def _killed(self) -> Failure:
        """The failure of a process that SIGKILL ended.

        It ran out of memory if the kernel has counted an out-of-memory kill since this cell began: by their
        oom_score_adj the kernel ends cells before other processes. Otherwise it crashed.
        """
        before, now = self._kernel_kills, out_of_memory_kills()
        if before and now and now.count > before.count:
            message = f"killed by the kernel in {self._stage}: out of memory, by the count of the {now.counted_by}"
            return self._failure("out_of_memory", message)
        counted = "the kernel counted no out-of-memory kill" if now else "this system counts no out-of-memory kills"
        return self._failure("crash", f"killed by SIGKILL in {self._stage}; the sender is unknown, and {counted}")

    def _failure(self, kind: str, message: str, size_bytes: int | None = None) -> Failure:
        return Failure(
            kind=kind, phase=self._stage, message=message, asked_bytes=size_bytes, last_lines=self._last_lines()
        )

    def _last_lines(self) -> tuple[str, ...]:
        return last_lines_of(self._stderr, since=self._printed_before)


def _signal_name(number: int) -> str:
    """`SIGSEGV`; real-time signals have no names."""
    return next((known.name for known in signal.Signals if known == number), f"signal {number}")
