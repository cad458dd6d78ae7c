"""The driving side of cells that are forked: their servers (fork_server.py), and processes with the methods of subprocess.Popen.

    process = fork_cell("train_step", environment, stderr)    # None where a new process must be started: on anything but Linux

[Note: which server] What libraries read when they are imported must be the cell's own: variables of OpenMP, MKL, torch, Triton, the
dynamic linker, the allocator, Python. Each set of their values has a server of its own; other variables are set in the fork. The
first cell of a set waits for its server's imports, as long as it would have waited for its own.

[Note: who ends whom] The kernel ends a server with its driver, and a cell with its server; the cell's guard (cell.py) ends all that
the cell started when the driver's end of its stdin is gone. A driver that loses its server ends the groups of its cells.
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
"""Each holds some 300 MB; beyond so many the oldest that has no cell is ended."""
_READ_AT_IMPORT = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "DNNL_", "ONEDNN_", "NPY_", "ATEN_", "C10_"),
    *("TORCH", "PYTORCH", "TRITON", "KINETO_", "CUDA_MODULE_LOADING", "CUDA_HOME", "CUDA_PATH"),
    *("LD_", "GLIBC_TUNABLES", "MALLOC_", "PYTHON", "LANG", "LC_", "TZ"),
)
"""What the names of such variables begin with."""


class ForkedProcess:
    """A cell's process that a server forked, with the parts of subprocess.Popen that connection.py takes."""

    def __init__(
        self, server: "ForkServerProcess", workload: str, environment: Mapping[str, str], stderr: IO[bytes]
    ) -> None:
        self._server = server
        self._forked, self._ended = threading.Event(), threading.Event()
        self._stderr = os.dup(stderr.fileno())
        self.pid: int | None = None
        """None until the server has forked it."""
        self.returncode: int | None = None
        stdin, ours = os.pipe()
        self.stdin = os.fdopen(ours, "wb")
        ours, stdout = os.pipe()
        self.stdout = os.fdopen(ours, "rb")
        try:
            server.ask(self, workload, environment, (stdin, stdout, self._stderr))
        finally:
            os.close(stdin)
            os.close(stdout)

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. subprocess.TimeoutExpired where it does not end in time."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("a forked cell", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Once it is forked; never to a process that has ended."""
        self._forked.wait()
        if self.pid is not None and self.returncode is None:
            os.kill(self.pid, number)

    def kill_group(self) -> None:
        """End it with all it started. A server that has not forked it yet hangs, and is ended itself."""
        if self.pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        elif self.returncode is None:
            self._server.kill()

    def was_forked(self, pid: int) -> None:
        """Called by its server."""
        self.pid = pid
        self._forked.set()

    def has_ended(self, code: int, last_words: bytes = b"") -> None:
        """Called by its server, or for it. `last_words`: of a server that ended before it forked."""
        if self._ended.is_set():
            return
        with suppress(OSError):
            os.write(self._stderr, last_words)
        os.close(self._stderr)
        self.returncode = code
        self._forked.set()
        self._ended.set()


class ForkServerProcess:
    """One server and the cells that it forked.

    The thread that starts it is the one that listens to it: the kernel ends a server with the thread that started it.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (read when the server is lost)
        self._lock = threading.Lock()
        self._asked: list[ForkedProcess] = []
        self._running: dict[int, ForkedProcess] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._problem: OSError | None = None
        self.alive = True
        started = threading.Event()
        threading.Thread(target=self._run, args=(dict(environment), theirs, started), daemon=True).start()
        started.wait()
        if self._problem is not None:
            raise self._problem

    @property
    def idle(self) -> bool:
        """Whether no cell of it runs or is asked for."""
        return not self._asked and not self._running

    def ask(
        self,
        process: ForkedProcess,
        workload: str,
        environment: Mapping[str, str],
        descriptors: tuple[int, int, int],
    ) -> None:
        """Have a cell forked: `process` is told when it is. OSError where the server is gone."""
        module = INSTRUMENTS[workload].measured.partition(":")[0] if workload in INSTRUMENTS else "torch"
        request = {"module": module, "environment": dict(environment), "folder": os.getcwd()}
        # In a file of its own: a message may be shorter than an environment
        with os.fdopen(os.memfd_create("request"), "wb") as file, self._lock:
            file.write(json.dumps(request).encode())
            file.flush()
            if not self.alive:
                raise BrokenPipeError("the server of forked cells has ended")
            socket.send_fds(self._control, [b"fork"], (file.fileno(), *descriptors))
            self._asked.append(process)

    def kill(self) -> None:
        """End it; the kernel ends its cells."""
        assert self._process is not None
        self._process.kill()

    def _run(self, environment: dict[str, str], theirs: socket.socket, started: threading.Event) -> None:
        try:
            self._process = subprocess.Popen(
                python_command("trainstep.measure.fork_server"),
                stdin=theirs.fileno(),
                stdout=self._stderr,
                stderr=self._stderr,
                start_new_session=True,
                env=environment,
            )
        except OSError as error:
            self.alive, self._problem = False, error
            return
        finally:
            theirs.close()
            started.set()
        with suppress(ConnectionError):
            while message := self._control.recv(_LARGEST_MESSAGE):
                self._hear(**json.loads(message))
        self._lose()

    def _hear(self, pid: int, code: int | None = None, refused: str = "") -> None:
        with self._lock:
            if refused:
                self._asked.pop(0).has_ended(1, refused.encode())
            elif code is None:
                process = self._running[pid] = self._asked.pop(0)
                process.was_forked(pid)
            else:
                self._running.pop(pid).has_ended(code)

    def _lose(self) -> None:
        """The server is gone: so are its cells, by the kernel's hand; what they started is ended here."""
        assert self._process is not None
        code = self._process.wait()
        with self._lock:
            self.alive = False
            self._stderr.seek(0)
            last_words = self._stderr.read()
            for process in self._running.values():
                process.kill_group()
                process.has_ended(-signal.SIGKILL)
            for process in self._asked:
                process.has_ended(code, last_words)


def fork_cell(workload: str, environment: Mapping[str, str], stderr: IO[bytes]) -> ForkedProcess | None:
    """A process forked for a cell of this workload, with these variables and in this folder; None where none can be."""
    if sys.platform != "linux":
        return None
    for _ in range(2):  # the server may be lost between the look and the question
        with suppress(ConnectionError):
            return ForkedProcess(server_for(environment), workload, environment, stderr)
    return None


def start_server() -> None:
    """Have the server for cells with this process's variables import torch, while this process does something else."""
    if sys.platform == "linux":
        with suppress(OSError):  # the first cell says that no process can be started
            server_for(os.environ)


def server_for(environment: Mapping[str, str]) -> ForkServerProcess:
    """The server whose imports saw these variables: the one that is there, or a new one."""
    read = {name: value for name, value in environment.items() if name.startswith(_READ_AT_IMPORT)}
    command = python_command("")
    folder = "" if "-P" in command else os.getcwd()  # without -P its path begins with the folder it was started in
    with _lock():
        servers, key = _servers(), (folder, *sorted(read.items()))
        if key not in servers or not servers[key].alive:
            idle = [known for known, server in servers.items() if server.idle]
            for known in idle[: max(len(servers) - _MOST_SERVERS + 1, 0)]:
                servers.pop(known).kill()
            servers[key] = ForkServerProcess(environment)
        return servers[key]


@functools.cache
def _servers() -> dict[object, ForkServerProcess]:
    """This process's servers: whoever starts cells here shares them. They end with it."""
    return {}


@functools.cache
def _lock() -> threading.Lock:
    return threading.Lock()
