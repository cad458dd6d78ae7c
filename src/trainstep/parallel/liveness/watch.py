"""The watch on each rank: when the job cannot go on, all ranks print which rank is the cause, and leave together.

    trainstep: rank 2 (node7, pid 4711) died; rank 0 leaves
    trainstep: rank 1 has stopped after 10 steps and rank 0 is in all_reduce bucket 3 in step 11: give every rank the same ...

[Note: how a death is seen]
Every rank keeps a connection to rank 0's desk (desk.py). The kernel closes a dead process's connection at once, so an end without a
goodbye is a death and never a slow step; TCP's own probes notice a node that is cut off after 25 s. The desk tells the others which
rank it was; when rank 0 itself is gone, all see it. A thread of its own does this, since the main thread may hang in a collective
for good. While native code keeps the interpreter's lock no thread runs, but collectives release it. A rank is watched from the
moment that it has reached rank 0; if it dies before, rank 0 prints after 10 s that it has not come.

[Note: an error of one rank]
Where a peer died, a collective raises on the living ranks before they know why. So a rank with an uncaught exception first asks the
desk, which asks every rank. A dead rank does not answer, and all are told its name. Where all answer, the error is this rank's own:
it is printed as always, and the others are told which rank failed. Where the rank had waited as long as a collective may take, the
desk adds which rank was missing. A rank that ends without `stop_ranks` says so before torch closes its connections to the others.

[Note: a rank that is not there]
When rank 0 has started no collective for 5 s, the desk asks all ranks how far they are. Ranks that can never meet end at once: one
has called stop_ranks and another goes on (their numbers of batches differ), or their calls differ. A rank that is only late is
named after 60 s, and the job goes on: the rank may evaluate, or compile. Running steps cost one question to rank 0 every 5 s.

[Note: exit codes]
A process that the watch ends has exit code 87, LEFT: search for the cause at the rank that it names. A process whose own exception
is the cause ends with 1, as any script does.
"""

import atexit
import dataclasses
import functools
import os
import queue
import secrets
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, Protocol

from trainstep.parallel.liveness.desk import SAYS, Desk
from trainstep.parallel.liveness.link import Link, listen, proof
from trainstep.parallel.liveness.standstill import Position, Progress

LEFT = 87
"""[Note: exit codes] No shell, launcher or signal gives this code a meaning."""
_VERDICT_S = 15.0
"""Time for the desk's answer about an exception."""
_NEWS_S = 5.0
"""Time for the desk to tell the others that this rank ends."""
_GOODBYE_S = 10.0
"""Time for the others to say goodbye too: rank 0 should leave last, since it serves the store."""


class Store(Protocol):
    """The methods of torch's key-value store that are used here."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...


class Watch:
    """This process's end of the watch. The constructor waits until every rank is there; `goodbye` ends the watch.

    `token`: a secret that every rank knows; None: rank 0 makes one and leaves it in the store. TimeoutError naming the ranks that
    did not come; ValueError where rank 0 does not let this process in.
    """

    def __init__(
        self, store: Store, *, rank: int, world_size: int, address: str, timeout_s: float, token: str | None = None
    ) -> None:
        self.progress = Progress()
        self._rank = rank
        self._leaving = False
        self._count_messages: Callable[[], int] = lambda: -1
        self._stopped_at: Position | None = None
        self._missing = ""
        self._unseen_error = ""
        self._answers: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        """Lines from the desk for the main thread."""
        self._name = f"rank {rank} ({socket.gethostname()}, pid {os.getpid()})"
        self._first_name = "rank 0"
        """The full name of rank 0 once the desk has let this rank in."""
        self._desk: Desk | None = None
        if rank == 0:
            watch_end, desk_end = socket.socketpair()
            listener = listen(address)
            self._token = token or secrets.token_hex(16)
            self._desk = Desk(
                Link(desk_end),
                self._name,
                listener=listener,
                token=self._token,
                world_size=world_size,
                timeout_s=timeout_s,
            )
            store.set("watch", f"{listener.getsockname()[1]} {'' if token else self._token}")
            self._link = Link(watch_end)
        else:
            port, _, stored_token = store.get("watch").decode().partition(" ")
            self._token = token or stored_token
            self._link = Link(socket.create_connection((address, int(port)), timeout=timeout_s))
        os.register_at_fork(after_in_child=functools.partial(_forget_in_child, weakref.ref(self)))
        self._thread = threading.Thread(target=self._listen, name="trainstep-watch", daemon=True)
        self._thread.start()
        self._wait_for_all(timeout_s)
        self._hook_before = sys.excepthook
        sys.excepthook = self._on_exception
        atexit.register(self._at_exit)

    def follow(self, count_messages: Callable[[], int]) -> None:
        """Use this function for the number of collectives that the process group has started."""
        self._count_messages = count_messages

    def stop(self) -> None:
        """Report that this rank starts no further collective but the last one, which ends the group."""
        # In a `finally`, an exception may be active that has not been printed: if the watch ends this process, it is.
        error = sys.exception()
        if isinstance(error, SystemExit):
            self._unseen_error = f"{error.code}\n" if isinstance(error.code, str) else ""
            error = error if error.code else None  # without a code it is not a failure
        elif error is not None:
            self._unseen_error = "".join(traceback.format_exception(error))
        here = self._position()
        self._stopped_at = dataclasses.replace(
            here, messages=here.messages + 1, has_stopped=True, error="" if error is None else type(error).__name__
        )
        self._count_messages = lambda: -1  # the group ends
        self._link.say("at", self._stopped_at.text())

    def goodbye(self) -> None:
        """Leave normally: no other rank is ended because of it. Waits until the others leave too."""
        if self._leaving:
            return
        self._leaving = True
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._on_exception:  # the program may have set another hook since
            sys.excepthook = self._hook_before
        self._link.say("bye")
        self._link.end_writing()
        self._thread.join(_GOODBYE_S)
        self._link.close()

    def close(self) -> None:
        """Close this process's ends of the connections, silently."""
        self._leaving = True
        self._link.close()
        if self._desk is not None:
            self._desk.close()

    def _wait_for_all(self, timeout_s: float) -> None:
        try:
            word, rest = self._answers.get(timeout=timeout_s + _VERDICT_S)
        except queue.Empty:
            word, rest = "late", "the answer of rank 0"
        if word != "complete":
            self._leaving = True
        if word == "late":
            raise TimeoutError(f"{rest} did not come within {timeout_s:g} s")
        if word == "refused":
            raise ValueError(
                f"TRAINSTEP_TOKEN: rank 0 did not let rank {self._rank} in; set the same token for every rank, and give each "
                "process a RANK of its own"
            )

    def _listen(self) -> None:
        """Handle the desk's lines until it closes the connection, then that end."""
        while not self._link.has_ended:
            for word, rest in self._link.read():
                if word == "challenge":
                    text = f"{self._rank} {self._name}"
                    self._link.say("hello", f"{proof(self._token, rest, text)} {text}")
                elif word == "welcome":
                    self._first_name = rest
                elif word == "refused":
                    self._leaving = True
                    self._answers.put((word, rest))
                elif word == "where":
                    self._link.say("at", self._position().text())
                elif word == "missing":
                    self._missing = rest
                elif word == "leave" and not self._leaving:
                    self._leave(rest)
                else:
                    self._answers.put((word, rest))
        if not self._leaving:
            self._leave(f"{self._first_name} died" + (f" ({self._missing})" if self._missing else ""))

    def _position(self) -> Position:
        counted = self._count_messages()
        return self._stopped_at or Position(
            messages=counted if counted < 0 else counted + self.progress.in_groups,
            steps=self.progress.steps,
            recent=tuple(self.progress.recent),
        )

    def _leave(self, sentence: str) -> NoReturn:
        """Print why, and end this process."""
        os.write(2, f"{self._unseen_error}{SAYS}{sentence}; rank {self._rank} leaves\n".encode())
        flush = threading.Thread(target=sys.stdout.flush, daemon=True)  # flushing blocks where the pipe is full
        flush.start()
        flush.join(1.0)
        os._exit(1 if self._stopped_at is not None and self._stopped_at.error else LEFT)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """[Note: an error of one rank] The others are told at once, not after everything that happens at exit."""
        verdict = self._verdict() if issubclass(kind, Exception) and not self._leaving else ""
        self._hook_before(kind, error, trace)
        if verdict:
            print(f"{SAYS}{verdict}", file=sys.stderr, flush=True)
        how = f"failed with {kind.__name__}" if issubclass(kind, Exception) else f"was ended by {kind.__name__}"
        self._tell_end(f"{how} ({verdict})" if verdict else how)

    def _verdict(self) -> str:
        """Which rank caused an exception, as far as the desk knows; empty for this rank's own exception."""
        # Where another rank died, this thread waits here until the other thread is told and ends the process.
        self._link.say("failed")
        try:
            return self._answers.get(timeout=_VERDICT_S)[1]
        except queue.Empty:
            return "rank 0 does not answer: it is suspended, or native code keeps its interpreter"

    def _at_exit(self) -> None:
        self._tell_end("ended without stop_ranks")

    def _tell_end(self, how: str) -> None:
        """Tell the desk how this rank ends, and wait until it has told the others."""
        if self._leaving:
            return
        self._leaving = True
        self._link.say("ended", how)
        self._link.end_writing()
        self._thread.join(_NEWS_S)


def _forget_in_child(parents: weakref.ref[Watch]) -> None:
    """Close the connections in a forked child, which would keep them open after its parent's death."""
    watch = parents()
    if watch is not None:
        watch.close()
