"""The driver's side of forked cells: starts the servers (fork_server.py) and handles the processes that they fork.

    process = fork_cell("train_step", environment, stderr)    # None except on Linux: start a new process instead

[Note: which server] Some libraries read environment variables when they are imported: OpenMP, MKL, torch, Triton, the
dynamic linker, the allocator, Python. These variables must have the cell's values at import, so each set of values has a
server of its own; all other variables are set after the fork. The first cell of a set waits for its server's imports, as
long as it would have waited for its own.

[Note: who ends whom] The kernel ends a server with its driver, and a cell with its server. The cell's guard (cell.py)
ends everything that the cell started as soon as the driver's end of the cell's stdin is gone. A driver that loses a
server ends the groups of that server's cells.
"""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import IO

from trainstep.config.import_path import python_command
from trainstep.config.instruments import INSTRUMENTS

_LARGEST_MESSAGE = 4096
_MOST_SERVERS = 3
"""A server takes some 300 MB. Before a driver starts one more than this, it ends the oldest server without a cell."""
_READ_AT_IMPORT = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "DNNL_", "ONEDNN_", "NPY_", "ATEN_", "C10_"),
    *("TORCH", "PYTORCH", "TRITON", "KINETO_", "CUDA_MODULE_LOADING", "CUDA_HOME", "CUDA_PATH"),
    *("LD_", "GLIBC_TUNABLES", "MALLOC_", "PYTHON", "LANG", "LC_", "TZ"),
)
"""Prefixes of the names of variables that libraries read when they are imported. [Note: which server]"""


class ForkedProcess:
    """A cell's process that a server forked, with the methods of subprocess.Popen that connection.py uses."""

    def __init__(
        self, server: "ForkServerProcess", workload: str, environment: Mapping[str, str], stderr: IO[bytes]
    ) -> None:
        self._server = server
        self._forked, self._ended = threading.Event(), threading.Event()
        self._stderr = os.dup(stderr.fileno())
        self.pid: int | None = None
        """None until the server has forked the process."""
        self.returncode: int | None = None
        stdin, driver_end = os.pipe()
        self.stdin = os.fdopen(driver_end, "wb")
        driver_end, stdout = os.pipe()
        self.stdout = os.fdopen(driver_end, "rb")
        try:
            server.ask(self, workload, environment, (stdin, stdout, self._stderr))
        finally:
            os.close(stdin)
            os.close(stdout)

    def poll(self) -> int | None:
        """The exit code, or None while the process runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("a forked cell", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal as soon as the process is forked; never after it has ended."""
        self._forked.wait()
        if self.pid is not None and self.returncode is None:
            os.kill(self.pid, number)

    def kill_group(self) -> None:
        """End the process and everything it started."""
        if self.pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        elif self.returncode is None:
            self._server.kill()  # the server hangs: it has not forked the process yet

    def was_forked(self, pid: int) -> None:
        """Note that the server has forked the process."""
        self.pid = pid
        self._forked.set()

    def has_ended(self, code: int, last_words: bytes = b"") -> None:
        """Note the exit code. `last_words`: what a server printed that ended before it forked the process."""
        if self._ended.is_set():
            return
        with suppress(OSError):
            os.write(self._stderr, last_words)
        os.close(self._stderr)
        self.returncode = code
        self._forked.set()
        self._ended.set()


class ForkServerProcess:
    """One server and the cells that it forked."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (read when the server is lost)
        self._lock = threading.Lock()
        self._requested: list[ForkedProcess] = []
        self._running: dict[int, ForkedProcess] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._problem: OSError | None = None
        self.alive = True
        started = threading.Event()
        # The thread that starts the server also listens to it, because the kernel ends a server with that thread.
        threading.Thread(target=self._run, args=(dict(environment), server_end, started), daemon=True).start()
        started.wait()
        if self._problem is not None:
            raise self._problem

    @property
    def idle(self) -> bool:
        """Whether none of the server's cells runs or is requested."""
        return not self._requested and not self._running

    def ask(
        self, process: ForkedProcess, workload: str, environment: Mapping[str, str], descriptors: tuple[int, int, int]
    ) -> None:
        """Request a fork; `process` is told when it is done. Raises OSError if the server has ended."""
        module = INSTRUMENTS[workload].measured.partition(":")[0] if workload in INSTRUMENTS else "torch"
        request = {"module": module, "environment": dict(environment), "folder": os.getcwd()}
        # The request goes into a file, because an environment may be longer than a message can be.
        with os.fdopen(os.memfd_create("request"), "wb") as file, self._lock:
            file.write(json.dumps(request).encode())
            file.flush()
            if not self.alive:
                raise BrokenPipeError("the server of forked cells has ended")
            socket.send_fds(self._control, [b"fork"], (file.fileno(), *descriptors))
            self._requested.append(process)

    def kill(self) -> None:
        """End the server; the kernel ends its cells."""
        assert self._process is not None
        self._process.kill()

    def _run(self, environment: dict[str, str], server_end: socket.socket, started: threading.Event) -> None:
        try:
            self._process = subprocess.Popen(
                python_command("trainstep.measure.harness.fork_server"),
                stdin=server_end.fileno(),
                stdout=self._stderr,
                stderr=self._stderr,
                start_new_session=True,
                env=environment,
            )
        except OSError as error:
            self.alive, self._problem = False, error
            return
        finally:
            server_end.close()
            started.set()
        with suppress(ConnectionError):
            while message := self._control.recv(_LARGEST_MESSAGE):
                self._hear(**json.loads(message))
        self._lose()

    def _hear(self, pid: int, code: int | None = None, refused: str = "") -> None:
        with self._lock:
            if refused:
                self._requested.pop(0).has_ended(1, refused.encode())
            elif code is None:
                process = self._running[pid] = self._requested.pop(0)
                process.was_forked(pid)
            else:
                self._running.pop(pid).has_ended(code)

    def _lose(self) -> None:
        """The server has ended, and the kernel has ended its cells; end what the cells started."""
        assert self._process is not None
        code = self._process.wait()
        with self._lock:
            self.alive = False
            self._stderr.seek(0)
            last_words = self._stderr.read()
            for process in self._running.values():
                process.kill_group()
                process.has_ended(-signal.SIGKILL)
            for process in self._requested:
                process.has_ended(code, last_words)


def fork_cell(workload: str, environment: Mapping[str, str], stderr: IO[bytes]) -> ForkedProcess | None:
    """Fork a process for a cell of this workload, with these variables, in the current folder; None if that fails."""
    if sys.platform != "linux":
        return None
    for _ in range(2):  # the server may end between the check that it is alive and the request
        with suppress(ConnectionError):
            return ForkedProcess(server_for(environment), workload, environment, stderr)
    return None


def start_server() -> None:
    """Start the server for this process's variables now: it imports torch while this process does something else."""
    if sys.platform == "linux":
        with suppress(OSError):  # the first cell reports that no process can be started
            server_for(os.environ)


def server_for(environment: Mapping[str, str]) -> ForkServerProcess:
    """The running or new server that imported its libraries with these variables. [Note: which server]"""
    read_at_import = {name: value for name, value in environment.items() if name.startswith(_READ_AT_IMPORT)}
    # Without Python's option -P, the server's import path begins with the folder that it was started in.
    folder = "" if "-P" in python_command("") else os.getcwd()
    with _lock():
        servers, key = _servers(), (folder, *sorted(read_at_import.items()))
        if key not in servers or not servers[key].alive:
            idle = [server_key for server_key, server in servers.items() if server.idle]
            for idle_key in idle[: max(len(servers) - _MOST_SERVERS + 1, 0)]:
                servers.pop(idle_key).kill()
            servers[key] = ForkServerProcess(environment)
        return servers[key]


@functools.cache
def _servers() -> dict[object, ForkServerProcess]:
    """The servers of this process, shared by all its connections; they end with the process."""
    return {}


@functools.cache
def _lock() -> threading.Lock:
    return threading.Lock()
