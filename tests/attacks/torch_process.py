"""A process that has imported torch and forks for each call, so that functions of `attacks` may hang or die.

process = TorchProcess()
answer = process.call("attacks.rank_kills:train_and_kill", 2, "fsdp", timeout_s=60)     # its result, by JSON
"""

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from attacks.attack import Outcome
from cell_maker import MARK, import_path, marked, wait_until

_LEFT_S = 15.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of a call, or the traceback of its error, or that it took too long."""

    value: Any = None
    error: str = ""
    timed_out: bool = False


class TorchProcess:
    """The process, which starts with the first call."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._started: subprocess.Popen[str] | None = None

    def call(self, function: str, *arguments: Any, timeout_s: float) -> Answer:
        """Call `module:function` with arguments that JSON can hold."""
        if self._started is None:
            self._started = subprocess.Popen(
                [sys.executable, "-m", "attacks.torch_process"],
                env={**os.environ, "PYTHONPATH": import_path(), "CUDA_VISIBLE_DEVICES": "", MARK: self._mark},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._started.stdin is not None
        assert self._started.stdout is not None
        self._started.stdin.write(json.dumps([function, arguments, timeout_s]) + "\n")
        self._started.stdin.flush()
        return Answer(**json.loads(self._started.stdout.readline()))

    def left(self) -> Iterator[Outcome]:
        """An outcome if processes of calls still run 15 s after the last one."""

        def others() -> list[int]:
            return [pid for pid in marked(self._mark) if self._started is None or pid != self._started.pid]

        if not wait_until(lambda: not others(), _LEFT_S):
            yield Outcome(case="all calls", left=f"processes {others()}")

    def close(self) -> None:
        """Kill the process. Closing its input is not enough, since ranks that other tests forked also hold that pipe open."""
        if self._started is not None:
            self._started.kill()
            self._started.wait()
            self._started = None


def _serve() -> None:
    import torch

    for module in ("torch._dynamo", "parallel_strategies", "trainstep.parallel.checkpoint.save_load"):
        importlib.import_module(module)  # takes seconds, so it is done once and not in every child
    torch.set_num_threads(1)
    gc.freeze()
    for line in sys.stdin:
        function, arguments, timeout_s = json.loads(line)
        reading_end, writing_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading_end)
            _answer(writing_end, function, arguments)
        os.close(writing_end)
        output = _read(reading_end, timeout_s)
        if output is None:
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading_end)
        answer = {"timed_out": True} if output is None else json.loads(output or b'{"error": "it died without a word"}')
        print(json.dumps(answer), flush=True)
    os._exit(0)  # native libraries would print warnings at a normal exit


def _answer(pipe: int, function: str, arguments: list[Any]) -> NoReturn:
    """Call the function, and write its result or error."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    module, _, name = function.partition(":")
    try:
        answer = {"value": getattr(importlib.import_module(module), name)(*arguments)}
    except BaseException:  # noqa: BLE001  (every error belongs to the attack)
        answer = {"error": traceback.format_exc()}
    with open(pipe, "w") as file:
        file.write(json.dumps(answer))
    os._exit(0)


def _read(pipe: int, timeout_s: float) -> bytes | None:
    """All bytes until the other end closes; None if the next piece takes too long."""
    output = b""
    while select.select([pipe], [], [], timeout_s)[0]:
        piece = os.read(pipe, 65536)
        if not piece:
            return output
        output += piece
    return None


if __name__ == "__main__":
    _serve()
