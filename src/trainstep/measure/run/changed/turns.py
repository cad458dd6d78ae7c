"""Processes that start together and then work one at a time: while one runs its window, the others wait.

    for place, end in in_turn(commands, [0, 1, 1, 0], folder=folder, environment=environment, timeout_s=300):
        ...                                   # after each turn; `end` is None while the process waits for another one
    while Turn(descriptor).wait():            # in such a process, once it is warm, and again behind each window
        ...

A short run of a script spends most of its time on imports and compilations. Those of several processes can run at the same time,
while what is timed has the machine to itself, and a process may have several turns.

[Note: nobody waits for ever] Both sides talk through a pair of sockets, which the kernel closes when either process dies. So a
process whose starter was killed ends at its turn instead of keeping its memory.
"""

import multiprocessing
import os
import re
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

_LAST_BYTES = 65_536
# The line of a traceback that names the exception.
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")
_OF_A_RANK = re.compile(r"^\[rank\d+\]: ?")
_LOOK_EVERY_S = 0.2
_GRACE_S = 10.0
"""Seconds that torchrun gets to end its ranks, which have sessions of their own."""

Command = Callable[[int | None], Sequence[str]]
"""The words of a command, given the descriptor of its turn; None for one that runs alone and need not wait."""


class Turn:
    """A process's own side: says that it is ready, and waits for its turn."""

    def __init__(self, descriptor: int) -> None:
        """ValueError for a descriptor that is no socket."""
        try:
            self._socket = socket.socket(fileno=descriptor)
        except OSError as error:
            raise ValueError(
                f"turn: {descriptor} is not a socket ({error.strerror}); only a proof sets this option"
            ) from None

    def wait(self) -> bool:
        """Wait for the next turn, with the workers of loaders stopped. False if no turn comes, as after the last one."""
        with _stopped(multiprocessing.active_children()), suppress(OSError):
            self._socket.sendall(b".")
            return bool(self._socket.recv(1))
        return False


@contextmanager
def _stopped(workers: Sequence[Any]) -> Iterator[None]:
    """Stop processes, so that they fill no queue and take no core meanwhile."""
    _signal(workers, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(workers, signal.SIGCONT)


def _signal(workers: Sequence[Any], number: signal.Signals) -> None:
    for worker in workers:
        with suppress(ProcessLookupError):
            os.kill(worker.pid, number)


@dataclass(frozen=True, kw_only=True)
class End:
    """How a process ended. `code`: its exit code, None for one that the time limit ended.

    `said`: what was raised, if it ended by an exception, else its last line of output.
    """

    code: int | None
    said: str


def in_turn(
    commands: Sequence[Command],
    turns: Sequence[int],
    *,
    folder: str,
    environment: Mapping[str, str],
    timeout_s: float,
) -> Iterator[tuple[int, End | None]]:
    """Start all commands, wait until each is ready or has ended, and let them work in turn.

    `turns`: for each turn the index of its command. Yields, after each turn, that index and how the process ended, or None if it
    waits for a later turn. A process that ended early has no further turns. With a single turn the process starts without waiting.
    `timeout_s`: limit for getting ready, and again for each turn. In the end the processes, and what they started, are killed.
    """
    takes_turns = len(turns) > 1
    with ExitStack() as stack:
        started = [_Started(stack, command, takes_turns, folder, environment) for command in commands]
        if takes_turns:
            _wait_until_ready(started, timeout_s)
        ended = set()
        for number, place in enumerate(turns):
            if place in ended:
                continue
            process, is_last = started[place], place not in turns[number + 1 :]
            process.go()
            if takes_turns and process.works(timeout_s) and not is_last:
                yield place, None
                continue
            ended.add(place)
            yield place, process.end(timeout_s)


class _Started:
    """The starter's side of one process."""

    def __init__(
        self, stack: ExitStack, command: Command, takes_turns: bool, folder: str, environment: Mapping[str, str]
    ) -> None:
        self._output = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  (the stack closes it)
        ours, inherited = socket.socketpair() if takes_turns else (None, None)
        self.socket = None if ours is None else stack.enter_context(ours)
        self.is_ready = self._is_late = False
        descriptors = () if inherited is None else (inherited.fileno(),)
        self.process = subprocess.Popen(
            command(*descriptors or (None,)),
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=descriptors,
        )
        stack.callback(self.kill)
        if inherited is not None:
            inherited.close()

    @property
    def is_waited_for(self) -> bool:
        return not self.is_ready and self.process.poll() is None

    def hear(self) -> None:
        """Read whether the process is ready. If nothing can be read, the connection has ended and the process is about to end."""
        with suppress(OSError):
            self.is_ready = bool(self.socket and self.socket.recv(1))
        if not self.is_ready:
            time.sleep(_LOOK_EVERY_S)

    def give_up(self) -> None:
        """Kill the process, because it was not ready in time."""
        self._is_late = True
        self.kill()

    def go(self) -> None:
        if self.socket is not None:
            with suppress(OSError):  # it has ended already
                self.socket.sendall(b".")

    def works(self, timeout_s: float) -> bool:
        """Wait until the process's window is over. False if the process ended instead, or took too long."""
        self.is_ready = False
        _wait_until_ready([self], timeout_s)
        return self.is_ready

    def end(self, timeout_s: float) -> End:
        """Tell the process that no turn follows, by closing the connection, and wait until it ends."""
        if self.socket is not None:
            self.socket.close()
        code = None
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.give_up()
        self.kill()
        return End(code=None if self._is_late else code, said=_last_words(self._output, code))

    def kill(self) -> None:
        """Kill the process and what it left running."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_GRACE_S)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _wait_until_ready(started: Sequence[_Started], timeout_s: float) -> None:
    until_s = time.monotonic() + timeout_s
    while waiting := [process for process in started if process.is_waited_for]:
        if time.monotonic() > until_s:
            for process in waiting:
                process.give_up()
            return
        ready, _, _ = select.select([process.socket for process in waiting if process.socket], (), (), _LOOK_EVERY_S)
        for process in waiting:
            if process.socket in ready:
                process.hear()


def _last_words(output: Any, code: int | None) -> str:
    """What was raised, by the last traceback that is not torchrun's own; else the last line that is not empty.

    Python ends with code 1 behind an exception that nobody caught; before another code what was raised was caught.
    """
    output.seek(max(0, output.seek(0, os.SEEK_END) - _LAST_BYTES))
    lines = [_OF_A_RANK.sub("", line).rstrip() for line in output.read().decode(errors="replace").splitlines()]
    for number in reversed(range(len(lines) if code == 1 else 0)):
        if lines[number].startswith("Traceback (most recent call last)"):
            raised = _raised(lines[number + 1 :])
            if raised and "ChildFailedError" not in raised:
                return raised
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def _raised(lines: Sequence[str]) -> str:
    """The exception behind a traceback's indented lines, and the first line of its message that says something."""
    at_margin = [
        place for place, line in enumerate(lines) if line[:1].strip() and not line.startswith("+")
    ]  # of a group
    if not at_margin:
        return ""
    words, rest = lines[at_margin[0]], [line.strip() for line in lines[at_margin[0] + 1 :] if line.strip()]
    if "in DataLoader worker process" in words:  # its message is the worker's own traceback
        inner = [line for line in rest if _EXCEPTION.match(line)]
        return inner[-1] if inner else words
    return f"{words} {rest[0]}" if words.endswith(":") and rest else words
