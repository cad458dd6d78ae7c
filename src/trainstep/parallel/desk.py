"""Rank 0's desk: every rank's watch is connected to it, and it decides what all are told.

A thread of rank 0. It hears of every death by the end of a connection, asks how far the ranks are when nothing moves, and tells
all of them when the job has to end (watch.py says why, and what for).

    rank -> desk   hello PROOF RANK NAME | at POSITION | failed | ended HOW | bye
    desk -> rank   challenge TEXT | welcome NAME | refused | complete | late RANKS | where | verdict TEXT | missing TEXT
                   | leave SENTENCE
"""

import hmac
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Sequence

from trainstep.parallel.link import Link, proof
from trainstep.parallel.standstill import Position, Standstill, rank_words

SAYS = "trainstep: "
"""Before every sentence of the watch."""
_SLOW_MEETING_S = 10.0
_SLOW_COLLECTIVE_S = 60.0
"""After these something is said, and again after twice as long, four times and so on."""
_LOOK_S = 5.0
"""Between looks at whether anything moves. Only rank 0 is asked while it moves."""
_LOOK_AT_THE_END_S = 1.0
_ANSWER_S = 5.0
_HELLO_S = 5.0
_LATECOMERS_S = 10.0
_MOMENT_S = 2.0


class Desk:
    """`own`: the connection of rank 0's watch. The others connect to `listener`; without proof of the token they are closed."""

    def __init__(
        self, own: Link, name: str, *, listener: socket.socket, token: str, world_size: int, timeout_s: float
    ) -> None:
        self._listener: socket.socket | None = listener
        listener.setblocking(False)  # a connection that is reset before it is accepted must not keep this thread
        self._token = token
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._links = {0: own}
        self._names = {0: name}
        self._guests: dict[Link, tuple[str, float]] = {}
        """Who has not proved anything yet: the challenge, and when it came."""
        self._came = {0}
        self._why_over = ""
        """The sentence that ended the job."""
        self._over_s = 0.0
        self._started_s = time.monotonic()
        self._next_warning_s = _SLOW_MEETING_S
        self._standstill = Standstill()
        self._missing = ""
        """What was said of a standstill that still lasts."""
        self._asked = ""
        """Who is being asked how far they are: `rank 0`, `all`, or nobody."""
        self._unanswered: set[int] = set()
        self._asked_s = 0.0
        self._failing: set[int] = set()
        """Ranks that have an exception and want to know whether it is another's fault."""
        self._leaving: set[int] = set()
        """Ranks that said goodbye."""
        self._look_s = min(_LOOK_S, timeout_s / 10)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(own, selectors.EVENT_READ)
        threading.Thread(target=self._serve, name="trainstep-desk", daemon=True).start()

    def close(self) -> None:
        """Close all connections (in a forked child, which would keep them open beyond its parent's death)."""
        for link in (*self._guests, *self._links.values()):
            link.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()

    def _serve(self) -> None:
        with self._selector:
            while self._links:
                ready = [key.fileobj for key, _ in self._selector.select(self._patience_s())]
                if self._listener in ready:
                    self._let_in()
                links = [link for link in ready if isinstance(link, Link)]
                # Lines before ends: who says why it ends comes before whoever ends because of it.
                for link in links:
                    for word, rest in link.read():
                        self._hear(link, word, rest)
                self._see_ends([link for link in links if link.has_ended])
                self._meet() if self._listener else self._look()

    def _patience_s(self) -> float:
        if self._listener or self._failing or self._someone_has_stopped:
            return min(_LOOK_AT_THE_END_S, self._look_s)
        return self._look_s

    @property
    def _someone_has_stopped(self) -> bool:
        stopped = [position.has_stopped for position in self._standstill.positions.values()]
        return any(stopped) and sum(stopped) < self._world_size

    # The meeting.

    def _let_in(self) -> None:
        assert self._listener is not None
        try:
            peer, _ = self._listener.accept()
        except OSError:  # whoever came has left again
            return
        peer.setblocking(True)
        link = Link(peer)
        challenge = secrets.token_hex(16)
        self._guests[link] = challenge, time.monotonic()
        self._selector.register(link, selectors.EVENT_READ)
        link.say("challenge", challenge)

    def _welcome(self, link: Link, word: str, rest: str) -> None:
        """A guest that proves to know the token becomes its rank."""
        challenge, _ = self._guests[link]
        told, _, text = rest.partition(" ")
        rank, _, name = text.partition(" ")
        known = word == "hello" and hmac.compare_digest(told.encode(), proof(self._token, challenge, text).encode())
        if not known or not rank.isdecimal() or int(rank) in self._links or int(rank) >= self._world_size:
            link.say("refused")
            self._close_guest(link)
            return
        del self._guests[link]
        self._links[int(rank)] = link
        self._names[int(rank)] = name
        self._came.add(int(rank))
        link.say("welcome", self._names[0])
        if self._why_over:
            link.say("leave", self._why_over)
            self._leaving.add(int(rank))

    def _close_guest(self, guest: Link) -> None:
        if self._guests.pop(guest, None):
            self._selector.unregister(guest)
            guest.close()

    def _meet(self) -> None:
        """Go on when all are there; say who is not when that takes long."""
        now_s = time.monotonic()
        for guest in [guest for guest, (_, came_s) in self._guests.items() if now_s - came_s > _HELLO_S]:
            self._close_guest(guest)
        absent = rank_words(set(range(self._world_size)) - set(self._links))
        waited_s = now_s - self._started_s
        if self._why_over:
            if self._came == set(range(self._world_size)) or now_s > self._over_s + _LATECOMERS_S:
                self._end_rank_0()
        elif len(self._links) == self._world_size:
            self._end_meeting("complete")
        elif waited_s > self._timeout_s:
            self._end_meeting("late", absent)
        elif waited_s > self._next_warning_s:
            self._next_warning_s *= 2
            _print(f"rank 0 has waited {waited_s:.0f} s for {absent} to come")

    def _end_meeting(self, word: str, rest: str = "") -> None:
        assert self._listener is not None
        self._selector.unregister(self._listener)
        self._listener.close()
        self._listener = None
        for guest in list(self._guests):
            self._close_guest(guest)
        self._next_warning_s = _SLOW_COLLECTIVE_S
        self._tell(self._links, word, rest)

    # What ranks say, and their ends.

    def _tell(self, ranks: Sequence[int] | dict[int, Link], word: str, rest: str = "") -> None:
        for rank in ranks:
            self._links[rank].say(word, rest)

    def _hear(self, link: Link, word: str, rest: str) -> None:
        if link in self._guests:
            self._welcome(link, word, rest)
            return
        rank = next((rank for rank, known in self._links.items() if known is link), None)
        if rank is None:
            return  # closed
        if word == "at":
            self._standstill.heard(rank, Position.parse(rest), time.monotonic())
            self._unanswered.discard(rank)
        elif word == "failed":
            self._failing.add(rank)
            self._asked = ""  # what was asked before is too old
        elif word == "ended":
            self._leaving.add(rank)
            self._end(f"{self._names[rank]} {rest}", knows=[rank])
        elif word == "bye":
            self._leaving.add(rank)

    def _see_ends(self, links: list[Link]) -> None:
        dead = []
        for link in links:
            self._close_guest(link)
            rank = next((rank for rank, known in self._links.items() if known is link), None)
            if rank is not None:
                self._selector.unregister(link)
                if rank != 0:
                    self._forget(rank)
                self._unanswered.discard(rank)
                self._failing.discard(rank)
                if rank not in self._leaving:
                    dead.append(rank)
        if dead:
            why = f" ({self._missing})" if self._missing else ""
            self._end(f"{' and '.join(self._names[rank] for rank in dead)} died{why}", knows=dead)
        if set(self._links) == {0} and self._links[0].has_ended:  # rank 0, who keeps the store, goes last
            self._forget(0)

    def _forget(self, rank: int) -> None:
        self._links.pop(rank).close()

    def _end(self, sentence: str, *, knows: Sequence[int] = ()) -> None:
        """Tell all that they must leave; rank 0 last, for this thread goes with it. While the ranks still meet it stays a while,
        so that those to come hear why."""
        others = [rank for rank in self._links if rank and rank not in knows and rank not in self._leaving]
        self._tell(others, "leave", sentence)
        self._leaving.update(rank for rank in self._links if rank)
        self._why_over, self._over_s = self._why_over or sentence, time.monotonic()
        deadline_s = self._over_s + _MOMENT_S
        for rank in others:
            self._links[rank].drain(max(deadline_s - time.monotonic(), 0.01))
        if self._listener is None or 0 in knows:
            self._end_rank_0()

    def _end_rank_0(self) -> None:
        if 0 not in self._leaving:
            self._leaving.add(0)
            self._links[0].say("leave", self._why_over)
        for link in self._links.values():
            link.end_writing()

    # Who waits for whom.

    def _look(self) -> None:
        """Ask where the ranks are when it is time to, and judge when they have answered, or have had the time to."""
        now_s = time.monotonic()
        if self._asked == "":
            if self._failing or now_s - self._asked_s >= self._patience_s():
                self._ask("all" if self._failing or self._someone_has_stopped else "rank 0", now_s)
        elif not self._unanswered or now_s - self._asked_s > _ANSWER_S:
            asked, self._asked = self._asked, ""
            if asked == "all":
                self._judge(now_s)
            elif self._standstill.idle_s(0, now_s) >= self._look_s:
                self._ask("all", now_s)
            elif self._missing:
                self._say_missing("")
                self._next_warning_s = _SLOW_COLLECTIVE_S

    def _ask(self, whom: str, now_s: float) -> None:
        self._asked, self._asked_s = whom, now_s
        self._unanswered = set(self._links if whom == "all" else [0]) & set(self._links) - self._leaving
        self._tell(sorted(self._unanswered), "where")

    def _judge(self, now_s: float) -> None:
        contradiction = self._standstill.contradiction()
        if contradiction:
            self._end(contradiction)
            return
        who = self._standstill.who_waits(now_s, self._unanswered)
        for rank in self._failing:
            timed_out = self._standstill.idle_s(rank, now_s) >= self._timeout_s / 2
            self._links[rank].say("verdict", who if who and timed_out else "")
        self._failing.clear()
        waited_s = self._standstill.idle_s(0, now_s)
        if who and waited_s >= self._next_warning_s:
            self._next_warning_s = 2 * waited_s
            _print(who)
            self._say_missing(who)

    def _say_missing(self, who: str) -> None:
        """Every rank knows it, should rank 0 be the first to die of it."""
        self._missing = who
        self._tell(self._links, "missing", who)


def _print(sentence: str) -> None:
    os.write(2, f"{SAYS}{sentence}\n".encode())
