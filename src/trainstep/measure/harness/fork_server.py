"""Imports torch once and then forks a process for each cell, in milliseconds instead of seconds.

fork_client.py starts this process as `python -m trainstep.measure.harness.fork_server`. Requests and answers are JSON
messages on the socket that is its stdin:

    fork, with four descriptors: a file that holds {"module": ..., "environment": {...}, "folder": ...}, and the cell's
    stdin, stdout and stderr                  -> {"pid": ...}, or {"pid": 0, "refused": why no process can be started}
                                              -> {"pid": ..., "code": ...} when it has ended; -9: by SIGKILL

[Note: what a fork shares] A cell changes nothing for the next cell: what it writes to memory is its own. The server runs
no operation of torch, so that it has no thread, no CUDA context and no random state when it forks. Every cell has its own
session, folder, environment and guard (cell.py). All cells of a server share the addresses of libraries and the seed of
Python's hashes, so forks of one server differ less from each other than processes that are started anew.

[Note: where a fork would not do] If the imports failed, left a thread running, or opened a GPU, the forked process
executes `python -m trainstep.measure.harness.cell`: the cell is then a new process, as if there were no server.
"""

import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainstep.config.import_path import make_children_safe, python_command
from trainstep.measure.harness import cell

_LARGEST_MESSAGE = 2**10
_AT_START = ("torch", "torch._dynamo")
"""Modules imported at once; every optimizer of torch imports torch._dynamo when it is constructed."""


class ForkServer:
    """Forks cells and reports when they have ended."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._environment = dict(os.environ)
        self._fit: dict[str, bool] = {}
        """Imported module -> whether a fork after this import is as good as a new process."""
        self._wakeup, self._wakes = os.pipe()
        os.set_blocking(self._wakes, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, nothing is written to the pipe
        signal.set_wakeup_fd(self._wakes)

    def serve(self) -> None:
        """Answer until the driver closes the socket."""
        for module in _AT_START:
            self._import(module)
        sources = select.poll()
        sources.register(self._control, select.POLLIN)
        sources.register(self._wakeup, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in sources.poll()}
            if self._wakeup in ready:
                os.read(self._wakeup, 4096)
                self._reap()
            if self._control.fileno() in ready:
                message, descriptors, _, _ = socket.recv_fds(self._control, _LARGEST_MESSAGE, 4)
                if not message:
                    return
                with os.fdopen(descriptors[0], "rb") as file:
                    file.seek(0)
                    self._fork(json.load(file), descriptors[1:])

    def _import(self, module: str) -> None:
        if module in self._fit:
            return
        try:
            importlib.import_module(module)
            self._fit[module] = is_fit()
        except Exception:  # noqa: BLE001  (the cell imports the module again and reports what is wrong)
            self._fit[module] = False

    def _fork(self, request: dict[str, Any], descriptors: list[int]) -> None:
        self._import(request["module"])
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # only this cell fails; running cells go on
            pid = -1
            self._tell(pid=0, refused=f"no further process can be started: {error.strerror}\n")
        if pid == 0:
            try:
                self._become_cell(request, descriptors, server)
            except BaseException:  # noqa: BLE001  (whatever happened, this process must not go on as a second server)
                traceback.print_exc()
            os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)
        if pid > 0:
            self._tell(pid=pid)

    def _become_cell(self, request: dict[str, Any], descriptors: list[int], server: int) -> None:
        """Serve requests as a cell; runs in the forked process and first undoes what belongs to the server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        cell.die_with_parent()
        if os.getppid() != server:  # the server died before die_with_parent took effect
            os._exit(1)
        self._control.close()
        os.close(self._wakeup)
        os.close(self._wakes)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        imports_set = {name: value for name, value in os.environ.items() if self._environment.get(name) != value}
        os.environ.clear()
        os.environ.update(request["environment"] | imports_set)
        os.chdir(request["folder"])
        if not all(self._fit.values()):
            command = python_command("trainstep.measure.harness.cell")
            os.execv(command[0], command)
        tempfile.tempdir = None  # have it read again from this cell's environment
        importlib.invalidate_caches()  # the driver may have written modules after the server's start
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()
        cell.main(forked=True)

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self._tell(pid=pid, code=os.waitstatus_to_exitcode(status))

    def _tell(self, **fields: int | str) -> None:
        with suppress(BrokenPipeError):  # the driver has ended; `serve` notices when it next reads the socket
            self._control.send(json.dumps(fields).encode())


def is_fit() -> bool:
    """Whether this process has one thread and no GPU open."""
    # OpenBLAS, which comes with numpy, starts threads when it is imported and ends them before each fork: so fork first.
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    opened = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor with which listdir read the folder
            opened.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    gpu_open = any(path.startswith("/dev/nvidia") for path in opened)
    return len(list(Path("/proc/self/task").iterdir())) == 1 and not gpu_open


def main() -> None:
    """Import, then serve. Standard output and error are the driver's choice; no cell writes to them."""
    cell.die_with_parent()
    control = socket.socket(fileno=os.dup(0))
    hang_up = select.poll()
    hang_up.register(control, 0)  # poll always reports a hang-up
    if hang_up.poll(0):  # the driver ended before die_with_parent took effect
        return
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    make_children_safe()
    ForkServer(control).serve()


if __name__ == "__main__":
    main()
