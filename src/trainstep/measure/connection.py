"""The driving side of a cell's process: start it, ask, wait with a limit, and learn how it died if it does."""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any

from trainstep.config.cell import Cell
from trainstep.measure.failures import asked_bytes
from trainstep.records.record import Failure

_LAST_LINES = 20
_STDERR_TAIL_BYTES = 16_384

Answer = Mapping[str, Any]
Tell = Callable[[Cell, str], None]
"""Told which cell is in which stage."""


class CellLost(Exception):
    """The process died or took too long; `failure` says how."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class CellConnection:
    """One process of `trainstep.measure.cell`, in a session of its own so that all it starts can be killed with it."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._stage = "start"
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trainstep.measure.cell"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,
        )
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, cell: Cell, request: Mapping[str, Any], timeout_s: float) -> Answer:
        """Send a request and wait for its answer. Raises CellLost on death or after `timeout_s`, the process killed."""
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
                raise CellLost(self._timed_out(timeout_s)) from None
            if event is None:
                raise CellLost(self._died(cell))
            if event["event"] != "stage":
                return event
            self._stage = event["stage"]
            self._tell(cell, self._stage)

    def close(self) -> None:
        """Let the process leave; it does as soon as its stdin closes."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.kill()
        self._stderr.close()

    def kill(self) -> None:
        """End the process and whatever it started, now."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(ValueError):
                self._events.put(json.loads(line))
        self._events.put(None)

    def _timed_out(self, timeout_s: float) -> Failure:
        return Failure(
            kind="timeout",
            phase=self._stage,
            message=f"killed in {self._stage} after its {timeout_s:g} s were over",
            last_lines=self._last_lines(),
        )

    def _died(self, cell: Cell) -> Failure:
        code = self._process.wait()
        lines = self._last_lines()
        if code == -signal.SIGKILL and cell.config.get("device") == "cpu":
            message = f"killed by the kernel in {self._stage}: the machine ran out of memory"
            asked = next(filter(None, map(asked_bytes, reversed(lines))), None)
            return Failure(
                kind="out_of_memory", phase=self._stage, message=message, asked_bytes=asked, last_lines=lines
            )
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
        return Failure(
            kind="crash", phase=self._stage, message=f"the process was {how} in {self._stage}", last_lines=lines
        )

    def _last_lines(self) -> tuple[str, ...]:
        end = self._stderr.seek(0, 2)
        self._stderr.seek(max(0, end - _STDERR_TAIL_BYTES))
        return tuple(self._stderr.read().decode(errors="replace").splitlines()[-_LAST_LINES:])
