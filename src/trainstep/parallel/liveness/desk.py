"""Rank 0's desk: a thread to which every rank's watch is connected, and which decides when the job must end.

It sees a death as the end of a connection, asks the ranks how far they are when nothing moves, and tells all of them when the job
must end (watch.py says why).

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

from trainstep.parallel.liveness.link import Link, proof
from trainstep.parallel.liveness.standstill import Position, Standstill, rank_words

SAYS = "trainstep: "
"""Prefix of every sentence of the watch."""
_SLOW_MEETING_S = 10.0
_SLOW_COLLECTIVE_S = 60.0
"""After these times rank 0 prints which rank is waited for, and again after twice as long, four times as long and so on."""
_CHECK_S = 5.0
"""Between checks whether the ranks move. Only rank 0 is asked while it moves."""
_CHECK_AT_THE_END_S = 1.0
"""Between checks during the meeting and after a rank has failed or stopped."""
_ANSWER_S = 5.0
"""Time for ranks to say how far they are."""
_HELLO_S = 5.0
"""Time for a new connection to prove that it knows the token."""
_LATECOMERS_S = 10.0
"""Time for ranks that have not arrived when the job ends, so that they hear why."""
_DRAIN_S = 2.0
"""Time for all ranks together to receive why the job ends."""


class Desk:
    """`own_link`: the connection of rank 0's watch. Other ranks connect to `listener` and must prove that they know the token."""

    def __init__(
        self, own_link: Link, name: str, *, listener: socket.socket, token: str, world_size: int, timeout_s: float
    ) -> None:
        self._listener: socket.socket | None = listener
        listener.setblocking(False)  # else a connection that is reset before it is accepted would block this thread
        self._token = token
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._links = {0: own_link}
        self._names = {0: name}
        self._guests: dict[Link, tuple[str, float]] = {}
        """Connections that have not proved anything yet, with their challenge and the time when they came."""
        self._came = {0}
        """Ranks that have come so far, also those that have left again."""
        self._why_over = ""
        """The sentence that ended the job."""
        self._over_s = 0.0
        self._started_s = time.monotonic()
        self._next_warning_s = _SLOW_MEETING_S
        self._standstill = Standstill()
        self._missing = ""
        """The sentence about a standstill that still lasts."""
        self._asked = ""
        """Which ranks are being asked how far they are: `rank 0`, `all`, or "" for none."""
        self._unanswered: set[int] = set()
        self._asked_s = 0.0
        self._failing: set[int] = set()
        """Ranks that have an exception and ask whether another rank caused it."""
        self._leaving: set[int] = set()
        """Ranks that leave by themselves or were told to."""
        self._check_s = min(_CHECK_S, timeout_s / 10)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(own_link, selectors.EVENT_READ)
        threading.Thread(target=self._serve, name="trainstep-desk", daemon=True).start()

    def close(self) -> None:
        """Close all connections. Called in a forked child, which would keep them open after its parent's death."""
        for link in (*self._guests, *self._links.values()):
            link.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()

    def _serve(self) -> None:
        with self._selector:
            while self._links:
                ready = [key.fileobj for key, _ in self._selector.select(self._wait_s())]
                if self._listener in ready:
                    self._accept()
                links = [link for link in ready if isinstance(link, Link)]
                # Lines before ends, so that the rank that says why it ends counts before ranks that end because of it.
                for link in links:
                    for word, rest in link.read():
                        self._receive(link, word, rest)
                self._handle_ends([link for link in links if link.has_ended])
                self._check_meeting() if self._listener else self._check_standstill()

    def _wait_s(self) -> float:
        if self._listener or self._failing or self._some_have_stopped:
            return min(_CHECK_AT_THE_END_S, self._check_s)
        return self._check_s

    @property
    def _some_have_stopped(self) -> bool:
        stopped = [position.has_stopped for position in self._standstill.positions.values()]
        return any(stopped) and sum(stopped) < self._world_size

    # The meeting.

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            peer, _ = self._listener.accept()
        except OSError:  # the process has closed its connection again
            return
        peer.setblocking(True)
        link = Link(peer)
        challenge = secrets.token_hex(16)
        self._guests[link] = challenge, time.monotonic()
        self._selector.register(link, selectors.EVENT_READ)
        link.say("challenge", challenge)

    def _welcome(self, link: Link, word: str, rest: str) -> None:
        """Make the guest a rank if it proves that it knows the token."""
        challenge, _ = self._guests[link]
        given_proof, _, text = rest.partition(" ")
        rank, _, name = text.partition(" ")
        expected_proof = proof(self._token, challenge, text)
        known = word == "hello" and hmac.compare_digest(given_proof.encode(), expected_proof.encode())
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

    def _check_meeting(self) -> None:
        """End the meeting when all ranks are there; print which ranks are not when that takes long."""
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

    # Lines from ranks, and the ends of their connections.

    def _tell(self, ranks: Sequence[int] | dict[int, Link], word: str, rest: str = "") -> None:
        for rank in ranks:
            self._links[rank].say(word, rest)

    def _rank_of(self, link: Link) -> int | None:
        return next((rank for rank, rank_link in self._links.items() if rank_link is link), None)

    def _receive(self, link: Link, word: str, rest: str) -> None:
        if link in self._guests:
            self._welcome(link, word, rest)
            return
        rank = self._rank_of(link)
        if rank is None:
            return  # the connection was closed before
        if word == "at":
            self._standstill.heard(rank, Position.parse(rest), time.monotonic())
            self._unanswered.discard(rank)
        elif word == "failed":
            self._failing.add(rank)
            self._asked = ""  # answers to an earlier question would be too old
        elif word == "ended":
            self._leaving.add(rank)
            self._end(f"{self._names[rank]} {rest}", knows=[rank])
        elif word == "bye":
            self._leaving.add(rank)

    def _handle_ends(self, links: list[Link]) -> None:
        dead = []
        for link in links:
            self._close_guest(link)
            rank = self._rank_of(link)
            if rank is not None:
                self._selector.unregister(link)
                if rank != 0:
                    self._links.pop(rank).close()
                self._unanswered.discard(rank)
                self._failing.discard(rank)
                if rank not in self._leaving:
                    dead.append(rank)
        if dead:
            why = f" ({self._missing})" if self._missing else ""
            self._end(f"{' and '.join(self._names[rank] for rank in dead)} died{why}", knows=dead)
        if set(self._links) == {0} and self._links[0].has_ended:  # rank 0 goes last, since it serves the store
            self._links.pop(0).close()

    def _end(self, sentence: str, *, knows: Sequence[int] = ()) -> None:
        """Tell all ranks but those that know to leave.

        Rank 0 is told last, since this thread ends with it; during the meeting it stays a while, so that ranks to come hear why.
        """
        others = [rank for rank in self._links if rank and rank not in knows and rank not in self._leaving]
        self._tell(others, "leave", sentence)
        self._leaving.update(rank for rank in self._links if rank)
        self._why_over, self._over_s = self._why_over or sentence, time.monotonic()
        deadline_s = self._over_s + _DRAIN_S
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

    # Which rank waits for which.

    def _check_standstill(self) -> None:
        """Ask the ranks how far they are when it is time to, and judge when they have answered or the time for that is over."""
        now_s = time.monotonic()
        if self._asked == "":
            if self._failing or now_s - self._asked_s >= self._wait_s():
                self._ask("all" if self._failing or self._some_have_stopped else "rank 0", now_s)
        elif not self._unanswered or now_s - self._asked_s > _ANSWER_S:
            asked, self._asked = self._asked, ""
            if asked == "all":
                self._judge(now_s)
            elif self._standstill.idle_s(0, now_s) >= self._check_s:
                self._ask("all", now_s)
            elif self._missing:
                self._say_missing("")
                self._next_warning_s = _SLOW_COLLECTIVE_S

    def _ask(self, asked: str, now_s: float) -> None:
        self._asked, self._asked_s = asked, now_s
        self._unanswered = set(self._links if asked == "all" else [0]) & set(self._links) - self._leaving
        self._tell(sorted(self._unanswered), "where")

    def _judge(self, now_s: float) -> None:
        contradiction = self._standstill.contradiction()
        if contradiction:
            self._end(contradiction)
            return
        sentence = self._standstill.who_waits(now_s, self._unanswered)
        for rank in self._failing:
            timed_out = self._standstill.idle_s(rank, now_s) >= self._timeout_s / 2
            self._links[rank].say("verdict", sentence if sentence and timed_out else "")
        self._failing.clear()
        waited_s = self._standstill.idle_s(0, now_s)
        if sentence and waited_s >= self._next_warning_s:
            self._next_warning_s = 2 * waited_s
            _print(sentence)
            self._say_missing(sentence)

    def _say_missing(self, sentence: str) -> None:
        # Every rank is told, since rank 0 may be the first to end because of the standstill.
        self._missing = sentence
        self._tell(self._links, "missing", sentence)


def _print(sentence: str) -> None:
    os.write(2, f"{SAYS}{sentence}\n".encode())
