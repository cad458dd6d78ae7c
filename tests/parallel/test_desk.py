"""Rank 0's desk: whom it lets in, whose death it tells, and what it says of a rank that does not come. Real connections, in one
process: the test speaks for every rank."""

import queue
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from trainstep.parallel import desk as desk_module
from trainstep.parallel.desk import Desk
from trainstep.parallel.link import Link, proof
from trainstep.parallel.listening import LOOPBACK, listen
from trainstep.parallel.standstill import Position

TOKEN = "known to all"
PATIENCE_S = 30.0


def position(messages: int, steps: int = 0) -> str:
    return Position(messages=messages, steps=steps, recent=((messages, steps, "all_reduce a"),)).text()


class Rank:
    """What a rank's watch would say and hear. `position`: its answer when it is asked; None to give none."""

    def __init__(self, connection: socket.socket) -> None:
        self.link = Link(connection)
        self.position: str | None = position(0)
        self._heard: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def until(self, word: str) -> str:
        """What follows the next line of this word."""
        while True:
            told, rest = self._heard.get(timeout=PATIENCE_S)
            if told == word:
                return rest
            assert told != "end", f"the desk closed before it said {word}"

    def until_closed(self) -> set[str]:
        """The words that come before the desk closes the connection."""
        words = set()
        while (word := self._heard.get(timeout=PATIENCE_S)[0]) != "end":
            words.add(word)
        return words

    def is_shown_out(self) -> bool:
        """Whether the desk closes the connection without being let in."""
        return self.until_closed() <= {"challenge", "refused"}

    def leave(self) -> None:
        """Close the connection."""
        self.link.end_writing()

    def _listen(self) -> None:
        while not self.link.has_ended:
            for word, rest in self.link.read():
                if word == "where" and self.position is not None:
                    self.link.say("at", self.position)
                self._heard.put((word, rest))
        self._heard.put(("end", ""))


class Room:
    """A desk and who comes to it."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        own, far = socket.socketpair()
        listener = listen(LOOPBACK)
        self.port = listener.getsockname()[1]
        self.first = Rank(own)
        self.ranks = [self.first]
        Desk(Link(far), "rank 0 (a)", listener=listener, token=TOKEN, world_size=world_size, timeout_s=timeout_s)

    def guest(self) -> Rank:
        rank = Rank(socket.create_connection((LOOPBACK, self.port), timeout=20))
        self.ranks.append(rank)
        return rank

    def come(self, number: int, token: str = TOKEN) -> Rank:
        rank = self.guest()
        text = f"{number} rank {number} (b)"
        rank.link.say("hello", f"{proof(token, rank.until('challenge'), text)} {text}")
        return rank


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Room]]:
    rooms: list[Room] = []
    monkeypatch.setattr(desk_module, "_LOOK_S", 0.01)
    monkeypatch.setattr(desk_module, "_LOOK_AT_THE_END_S", 0.01)

    def make(world_size: int = 2, timeout_s: float = 600) -> Room:
        rooms.append(Room(world_size, timeout_s))
        return rooms[-1]

    yield make
    for each in rooms:
        for rank in each.ranks:
            rank.leave()


def test_all_are_there(room: Callable[..., Room]):
    meeting = room(3)
    second, third = meeting.come(2), meeting.come(1)
    assert second.until("welcome") == third.until("welcome") == "rank 0 (a)"
    assert {rank.until("complete") for rank in (meeting.first, second, third)} == {""}
    with pytest.raises(ConnectionError):
        socket.create_connection((LOOPBACK, meeting.port))  # nobody else is let in


def test_who_does_not_know_the_token_is_shown_out(room: Callable[..., Room]):
    meeting = room()
    assert meeting.come(1, token="guessed").is_shown_out()
    replayed = meeting.guest()
    replayed.link.say("hello", f"{proof(TOKEN, 'the challenge of another connection', '1 x')} 1 x")
    assert replayed.is_shown_out()
    stranger = meeting.guest()
    stranger.link.say("GET", "/ HTTP/1.1")
    assert stranger.is_shown_out()
    flood = meeting.guest()
    flood.link.say("x" * 1_000_000)
    assert flood.is_shown_out()
    meeting.come(1).until("complete")


@pytest.mark.parametrize("number", [0, 2, 7])
def test_a_rank_that_is_taken_or_none_is_shown_out(room: Callable[..., Room], number: int):
    meeting = room(3)
    meeting.come(2).until("welcome")
    assert meeting.come(number).is_shown_out()


def test_a_silent_guest_keeps_nobody_waiting(room: Callable[..., Room], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(desk_module, "_HELLO_S", 0.05)
    meeting = room()
    silent = meeting.guest()
    assert silent.is_shown_out()
    meeting.come(1).until("complete")


def test_who_dies_while_others_are_missing_is_named(room: Callable[..., Room]):
    meeting = room(4)
    second, third = meeting.come(1), meeting.come(3)
    second.until("welcome")
    third.until("welcome")
    third.leave()
    assert second.until("leave") == "rank 3 (b) died"
    second.leave()
    late = meeting.come(2)  # rank 0 has stayed to tell it
    assert late.until("leave") == "rank 3 (b) died"
    assert meeting.first.until("leave") == "rank 3 (b) died"


def test_who_does_not_come_is_not_waited_for_where_another_died(
    room: Callable[..., Room], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(desk_module, "_LATECOMERS_S", 0.01)
    meeting = room(3)
    second = meeting.come(1)
    second.until("welcome")
    second.leave()
    assert meeting.first.until("leave") == "rank 1 (b) died"


def test_who_has_not_come_is_named(
    room: Callable[..., Room], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(desk_module, "_SLOW_MEETING_S", 0.01)
    meeting = room(4, timeout_s=0.3)
    second = meeting.come(2)
    assert second.until("late") == meeting.first.until("late") == "ranks 1, 3"
    assert "trainstep: rank 0 has waited 0 s for ranks 1, 3 to come\n" in capfd.readouterr().err


def both(room: Callable[..., Room], **keywords: float) -> tuple[Rank, Rank]:
    meeting = room(**keywords)
    other = meeting.come(1)
    for rank in (meeting.first, other):
        rank.until("complete")
    return meeting.first, other


def test_a_standstill_is_said_and_ends_nothing(
    room: Callable[..., Room], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(desk_module, "_SLOW_COLLECTIVE_S", 0.05)
    first, other = both(room)
    first.position, other.position = position(8), position(7)
    missing = other.until("missing")
    assert "rank 0 has waited 0 s, having started all_reduce a; rank 1 is not there: it last" in missing
    assert f"trainstep: {missing}\n" in capfd.readouterr().err
    first.position = position(9)
    assert other.until("missing") == ""  # it goes on
    other.leave()
    assert first.until("leave") == "rank 1 (b) died"


def test_who_dies_in_a_standstill_may_have_died_of_it(room: Callable[..., Room], monkeypatch: pytest.MonkeyPatch):
    """NCCL ends a process whose collective takes too long; the rank that it waited for is named beside it."""
    monkeypatch.setattr(desk_module, "_SLOW_COLLECTIVE_S", 0.05)
    first, other = both(room)
    first.position, other.position = position(7), position(8)
    missing = other.until("missing")
    other.leave()
    assert first.until("leave") == f"rank 1 (b) died ({missing})"
    assert "rank 0 is not there" in missing


def test_ranks_that_only_compute_are_left_alone(
    room: Callable[..., Room], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(desk_module, "_SLOW_COLLECTIVE_S", 0.01)
    first, other = both(room)
    first.position = other.position = position(8)
    for _ in range(20):
        other.until("where")
    assert capfd.readouterr().err == ""


def test_unequal_batches_end_at_once(room: Callable[..., Room]):
    first, other = both(room)
    first.position = position(8, steps=11)
    other.position = Position(messages=8, steps=10, recent=((7, 9, "all_reduce a"),), has_stopped=True).text()
    other.link.say("at", other.position)
    sentence = other.until("leave")
    assert sentence.startswith("rank 1 has stopped after 10 steps and rank 0 is in all_reduce a in step 12: give every")
    other.leave()
    assert first.until("leave") == sentence


def test_an_error_is_its_ranks_own_where_all_answer(room: Callable[..., Room]):
    first, other = both(room)
    first.position = other.position = position(8)
    other.link.say("failed")
    assert other.until("verdict") == ""
    other.link.say("ended", "failed with ArithmeticError")
    assert first.until("leave") == "rank 1 (b) failed with ArithmeticError"


def test_an_error_because_another_died_is_not(room: Callable[..., Room]):
    meeting = room(3)
    second, third = meeting.come(1), meeting.come(2)
    for rank in (meeting.first, second, third):
        rank.until("complete")
        rank.position = position(8)
    third.position = None  # dying
    second.link.say("failed")
    third.until("where")
    third.leave()
    assert second.until("leave") == "rank 2 (b) died"


def test_a_collective_that_took_too_long_names_who_was_missing(
    room: Callable[..., Room], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(desk_module, "_ANSWER_S", 0.5)
    first, suspended = both(room, timeout_s=0.5)
    suspended.position = None
    for _ in range(4):
        first.until("where")
    first.link.say("failed")
    assert "; rank 1 does not answer" in first.until("verdict")


def test_rank_0_goes_last(room: Callable[..., Room]):
    first, other = both(room)
    for rank in (first, other):
        rank.link.say("bye")
    first.leave()
    other.link.say("failed")
    assert other.until("verdict") == ""  # it is still served
    other.leave()
    assert first.until_closed() <= {"where"}


def test_what_a_terminal_would_obey_is_left_out():
    here, there = map(Link, socket.socketpair())
    there.say("leave", "rank 1 (\x1b]0;title\x07b) died")
    assert here.read() == [("leave", "rank 1 (]0;titleb) died")]
