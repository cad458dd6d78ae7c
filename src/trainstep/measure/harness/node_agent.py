"""A node's agent in a launch over several nodes: starts and ends the ranks of this node as the driver says (nodes.py).

It is the first task of its node, which torchrun or srun has started with the same command line as the driver.
"""

import dataclasses
import os
import queue
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainstep.config.grid import Cell
from trainstep.measure.harness.connection import CellConnection, CellLost
from trainstep.measure.harness.nodes import Lines, node_name
from trainstep.records.record import Failure

LOST = 3
"""The exit code of an agent whose driver is gone."""
_LOOKS, _LOOK_S = 5, 1.0
"""How often, and how many seconds apart, an agent looks for another node's file before it says that it does not see it."""


class Agent:
    """Carries out the driver's lines. Processes are started by this thread, since they end with the thread that started them."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._processes: dict[str, _Process] = {}
        self.lost_driver = False

    def serve(self) -> int:
        """Serve the driver until it ends. Returns the exit code that the driver gives; LOST if it goes without giving one."""
        try:
            for line in self._lines:
                if line["do"] == "end":
                    return int(line["code"])
                self._obey(line)
            self.lost_driver = True
            return LOST
        finally:
            for process in self._processes.values():
                process.connection.kill()
            self._lines.close()

    def _obey(self, line: dict[str, Any]) -> None:
        name, do = line["id"], line["do"]
        if do == "sees":
            self._lines.send(id=name, sees=_sees(Path(line["path"])))
        elif do == "start":
            try:
                self._processes[name] = _Process(self._lines, name, line["variables"], line["forked_for"])
            except (OSError, ValueError) as error:
                failure = Failure(kind="crash", phase="start", message=f"{node_name()} could not start it: {error}")
                self._lines.send(id=name, lost=dataclasses.asdict(failure), exit_code=None)
        elif name in self._processes:
            process = self._processes[name]
            if do == "begin":
                process.connection.begin()
            elif do == "kill":
                process.connection.kill()
            else:
                process.requests.put(line)
            if do == "close":
                del self._processes[name]
        elif do == "close":
            self._lines.send(id=name, closed=True)


def _sees(file: Path) -> bool:
    """Whether the file is there, within some seconds: network file systems show new files late."""
    for look in range(_LOOKS):
        time.sleep(_LOOK_S if look else 0)
        with suppress(OSError):
            os.utime(file.parent)  # has a network file system drop its cached list of the folder's files
        with suppress(OSError):
            if file.name in os.listdir(file.parent):
                return True
    return False


class _Process:
    """A process of a rank, with a thread that waits for its answers."""

    def __init__(self, lines: Lines, name: str, variables: dict[str, str], forked_for: str) -> None:
        self._lines, self._name = lines, name
        self.requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.connection = CellConnection(self._tell, variables, forked_for=forked_for)
        threading.Thread(target=self._work, daemon=True).start()

    def _tell(self, _cell: Cell, stage: str) -> None:
        self._lines.send(id=self._name, stage=stage)

    def _work(self) -> None:
        while (line := self.requests.get())["do"] == "ask":
            self._ask(line)
        self.connection.close()
        self._lines.send(id=self._name, closed=True)

    def _ask(self, line: dict[str, Any]) -> None:
        request = line["request"]
        if request.get("compile_cache"):  # a folder of the driver's node
            request["compile_cache"] = self.connection.empty_compile_cache()
        try:
            answer = self.connection.ask(
                Cell(**line["cell"]), request, timeout_s=line["timeout_s"], limit_s=line["limit_s"]
            )
        except CellLost as lost:
            self._lines.send(id=self._name, lost=dataclasses.asdict(lost.failure), exit_code=lost.exit_code)
        else:
            self._lines.send(id=self._name, answer=answer)
