"""Who died, and who waits for whom: when the job cannot go on the ranks say why, name the right one, and leave together.

    trainstep: rank 2 (node7, pid 4711) died; rank 0 leaves
    trainstep: rank 1 has stopped after 10 steps and rank 0 is in all_reduce bucket 3 in step 11: give every rank the same ...

[Note: how a death is seen]
Every rank keeps a connection to rank 0's desk (desk.py). The kernel closes a dead process's connection at once, so that its end
without a goodbye is a death, never a slow step; a node that is cut off is missed after 25 s by TCP's own probes. The desk tells
the others whose it was; when rank 0 itself is gone, all see it. A thread does this: the main one may hang in a collective for
good. While native code keeps the interpreter's lock no thread runs; collectives let it go. A rank is seen from the moment that
it has reached rank 0: of one that dies before, rank 0 says after 10 s that it has not come.

[Note: an error of one rank]
Where a peer died, a collective raises on the living ones before anyone knows why. So a rank with an uncaught exception first asks
the desk, which asks every rank. A dead one does not answer, and all are told its name. Where all answer, the error is this rank's
own: it is printed as ever, and the others are told whose it was. Where the rank had waited as long as a collective may take, the
desk adds who was not there. A rank that ends without `stop_ranks` tells so before torch closes its connections to the others.

[Note: a rank that is not there]
When rank 0 has started no collective for 5 s, the desk asks all ranks how far they are. Ranks that can never meet end at once: one
has called stop_ranks and another goes on (they had not the same number of batches), or their calls differ. One that is merely
late is named after 60 s, and nothing ends: it may evaluate, or compile. Steps that run cost a question to rank 0 every 5 s.

[Note: exit codes]
A process that the watch ends leaves with exit code 87, LEFT: look for the cause at the rank that it names. One whose own exception
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

from trainstep.parallel.desk import SAYS, Desk
from trainstep.parallel.link import Link, proof
from trainstep.parallel.listening import listen
from trainstep.parallel.standstill import Position, Progress

LEFT = 87
"""[Note: exit codes] No shell, launcher or signal gives it a meaning."""
_VERDICT_S = 15.0
_NEWS_S = 5.0
_GOODBYE_S = 10.0
"""For the others to say goodbye too: rank 0, who keeps the store, should be the last to go."""


class Store(Protocol):
    """As much of torch's key-value store as is used here."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...


class Watch:
    """This process's end of the watch. Constructing it waits until every rank is there; `goodbye` ends it.

    `token`: what every rank knows; None to pass one through the store. TimeoutError naming the ranks that did not come,
    ValueError where rank 0 does not let this process in.
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
        """What the main thread waits for."""
        self._name = f"rank {rank} ({socket.gethostname()}, pid {os.getpid()})"
        self._first_name = "rank 0"
        """In full once the desk has let this rank in."""
        self._desk: Desk | None = None
        if rank == 0:
            own, far = socket.socketpair()
            listener = listen(address)
            self._token = token or secrets.token_hex(16)
            self._desk = Desk(
                Link(far),
                self._name,
                listener=listener,
                token=self._token,
                world_size=world_size,
                timeout_s=timeout_s,
            )
            store.set("watch", f"{listener.getsockname()[1]} {'' if token else self._token}")
            self._link = Link(own)
        else:
            port, _, made = store.get("watch").decode().partition(" ")
            self._token = token or made
            self._link = Link(socket.create_connection((address, int(port)), timeout=timeout_s))
        os.register_at_fork(after_in_child=functools.partial(_forget_in_child, weakref.ref(self)))
        self._thread = threading.Thread(target=self._listen, name="trainstep-watch", daemon=True)
        self._thread.start()
        self._wait_for_all(timeout_s)
        self._hook_before = sys.excepthook
        sys.excepthook = self._on_exception
        atexit.register(self._at_exit)

    def follow(self, count_messages: Callable[[], int]) -> None:
        """From now on this tells how many collectives the process group has started."""
        self._count_messages = count_messages

    def stop(self) -> None:
        """Tell that this rank starts no further collective but the one that ends the group.

        In a `finally`, an exception may be on its way that nobody has seen yet: should this process be ended, it is printed.
        """
        error = sys.exception()
        if isinstance(error, SystemExit):
            self._unseen_error = f"{error.code}\n" if isinstance(error.code, str) else ""
            error = error if error.code else None  # without a code it is no failure
        elif error is not None:
            self._unseen_error = "".join(traceback.format_exception(error))
        here = self._position()
        self._stopped_at = dataclasses.replace(
            here,
            messages=here.messages + 1,
            has_stopped=True,
            error="" if error is None else type(error).__name__,
        )
        self._count_messages = lambda: -1  # the group goes
        self._link.say("at", self._stopped_at.text())

    def goodbye(self) -> None:
        """Leave normally: no rank is ended because of this one. Waits until the others leave too."""
        if self._leaving:
            return
        self._leaving = True
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._on_exception:  # somebody may have put his own over it
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
        """Until the desk closes: what it says, and its end."""
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
        return self._stopped_at or Position(
            messages=self._count_messages(), steps=self.progress.steps, recent=tuple(self.progress.recent)
        )

    def _leave(self, sentence: str) -> NoReturn:
        """Say why, and end this process."""
        os.write(2, f"{self._unseen_error}{SAYS}{sentence}; rank {self._rank} leaves\n".encode())
        flush = threading.Thread(target=sys.stdout.flush, daemon=True)  # whoever should read it may not
        flush.start()
        flush.join(1.0)
        os._exit(1 if self._stopped_at is not None and self._stopped_at.error else LEFT)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """See the note: an error of one rank. The others are told now, not after all that happens at exit."""
        verdict = self._verdict() if issubclass(kind, Exception) and not self._leaving else ""
        self._hook_before(kind, error, trace)
        if verdict:
            print(f"{SAYS}{verdict}", file=sys.stderr, flush=True)
        how = f"failed with {kind.__name__}" if issubclass(kind, Exception) else f"was ended by {kind.__name__}"
        self._tell_end(f"{how} ({verdict})" if verdict else how)

    def _verdict(self) -> str:
        """Whose fault an exception is, as far as the desk knows; empty for this rank's own. Where another died this thread waits
        here for the news, which ends the process."""
        self._link.say("failed")
        try:
            return self._answers.get(timeout=_VERDICT_S)[1]
        except queue.Empty:
            return "rank 0 does not answer: it is suspended, or native code keeps its interpreter"

    def _at_exit(self) -> None:
        self._tell_end("ended without stop_ranks")

    def _tell_end(self, how: str) -> None:
        """Waits until the desk has told the others."""
        if self._leaving:
            return
        self._leaving = True
        self._link.say("ended", how)
        self._link.end_writing()
        self._thread.join(_NEWS_S)


def _forget_in_child(parents: weakref.ref[Watch]) -> None:
    """A forked child would hold its parent's connections open beyond the parent's death."""
    watch = parents()
    if watch is not None:
        watch.close()
