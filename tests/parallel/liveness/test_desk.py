"""Rank 0's desk lets ranks in by their token, and names a rank that dies or does not come. The connections are real, in one
process: the test speaks for every rank."""

import queue
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from trainstep.parallel.liveness import desk as desk_module
from trainstep.parallel.liveness.desk import Desk
from trainstep.parallel.liveness.link import LOOPBACK, Link, listen, proof
from trainstep.parallel.liveness.standstill import Position

TOKEN = "known to all"
PATIENCE_S = 30.0


def position(messages: int, steps: int = 0) -> str:
    return Position(messages=messages, steps=steps, recent=((messages, steps, "all_reduce a"),)).text()


class Rank:
    """The part of a rank's watch, played by the test. `position` is its answer to `where`; None gives no answer."""

    def __init__(self, connection: socket.socket) -> None:
        self.link = Link(connection)
        self.position: str | None = position(0)
        self._lines: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def until(self, word: str) -> str:
        """Wait for the next line that begins with this word; the rest of it."""
        while True:
            received, rest = self._lines.get(timeout=PATIENCE_S)
            if received == word:
                return rest
            assert received != "end", f"the desk closed before it said {word}"

    def until_closed(self) -> set[str]:
        """Wait until the desk closes the connection; the words that come before."""
        words = set()
        while (word := self._lines.get(timeout=PATIENCE_S)[0]) != "end":
            words.add(word)
        return words

    def is_turned_away(self) -> bool:
        """Whether the desk closes the connection and does not let the rank in."""
        return self.until_closed() <= {"challenge", "refused"}

    def leave(self) -> None:
        """Close the connection."""
        self.link.end_writing()

    def _listen(self) -> None:
        while not self.link.has_ended:
            for word, rest in self.link.read():
                if word == "where" and self.position is not None:
                    self.link.say("at", self.position)
                self._lines.put((word, rest))
        self._lines.put(("end", ""))


class Room:
    """A desk and the ranks that connect to it."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        own, far = socket.socketpair()
        listener = listen(LOOPBACK)
        self.port = listener.getsockname()[1]
        self.first = Rank(own)
        self.ranks = [self.first]
        Desk(Link(far), "rank 0 (a)", listener=listener, token=TOKEN, world_size=world_size, timeout_s=timeout_s)

    def connect(self) -> Rank:
        rank = Rank(socket.create_connection((LOOPBACK, self.port), timeout=20))
        self.ranks.append(rank)
        return rank

    def join(self, number: int, token: str = TOKEN) -> Rank:
        rank = self.connect()
        text = f"{number} rank {number} (b)"
        rank.link.say("hello", f"{proof(token, rank.until('challenge'), text)} {text}")
        return rank


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Room]]:
    rooms: list[Room] = []
    monkeypatch.setattr(desk_module, "_CHECK_S", 0.01)
    monkeypatch.setattr(desk_module, "_CHECK_AT_THE_END_S", 0.01)

    def make(world_size: int = 2, timeout_s: float = 600) -> Room:
        rooms.append(Room(world_size, timeout_s))
        return rooms[-1]

    yield make
    for opened in rooms:
        for rank in opened.ranks:
            rank.leave()


def test_ranks_are_welcomed_and_nobody_else_is_let_in(room: Callable[..., Room]):
    meeting = room(3)
    second, third = meeting.join(2), meeting.join(1)
    assert second.until("welcome") == third.until("welcome") == "rank 0 (a)"
    assert {rank.until("complete") for rank in (meeting.first, second, third)} == {""}
    with pytest.raises(ConnectionError):
        socket.create_connection((LOOPBACK, meeting.port))  # nobody else is let in


def test_a_rank_without_the_token_is_turned_away(room: Callable[..., Room]):
    meeting = room()
    assert meeting.join(1, token="guessed").is_turned_away()
    replayed = meeting.connect()
    replayed.link.say("hello", f"{proof(TOKEN, 'the challenge of another connection', '1 x')} 1 x")
    assert replayed.is_turned_away()
    stranger = meeting.connect()
    stranger.link.say("GET", "/ HTTP/1.1")
    assert stranger.is_turned_away()
    flood = meeting.connect()
    flood.link.say("x" * 1_000_000)
    assert flood.is_turned_away()
    meeting.join(1).until("complete")


@pytest.mark.parametrize("number", [0, 2, 7])
def test_a_rank_number_that_is_taken_or_wrong_is_turned_away(room: Callable[..., Room], number: int):
    meeting = room(3)
    meeting.join(2).until("welcome")
    assert meeting.join(number).is_turned_away()


def test_a_silent_connection_does_not_delay_the_ranks(room: Callable[..., Room], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(desk_module, "_HELLO_S", 0.05)
    meeting = room()
    silent = meeting.connect()
    assert silent.is_turned_away()
    meeting.join(1).until("complete")


def test_a_rank_that_dies_while_others_are_missing_is_named(room: Callable[..., Room]):
    meeting = room(4)
    second, third = meeting.join(1), meeting.join(3)
    second.until("welcome")
    third.until("welcome")
    third.leave()
    assert second.until("leave") == "rank 3 (b) died"
    second.leave()
    late = meeting.join(2)  # rank 0 waits to tell it
    assert late.until("leave") == "rank 3 (b) died"
    assert meeting.first.until("leave") == "rank 3 (b) died"


def test_a_missing_rank_is_not_waited_for_once_another_died(room: Callable[..., Room], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(desk_module, "_LATECOMERS_S", 0.01)
    meeting = room(3)
    second = meeting.join(1)
    second.until("welcome")
    second.leave()
    assert meeting.first.until("leave") == "rank 1 (b) died"


def test_missing_ranks_are_named(
    room: Callable[..., Room], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(desk_module, "_SLOW_MEETING_S", 0.01)
    meeting = room(4, timeout_s=0.3)
    second = meeting.join(2)
    assert second.until("late") == meeting.first.until("late") == "ranks 1, 3"
    assert "trainstep: rank 0 has waited 0 s for ranks 1, 3 to come\n" in capfd.readouterr().err


def two_ranks(room: Callable[..., Room], **keywords: float) -> tuple[Rank, Rank]:
    meeting = room(**keywords)
    second = meeting.join(1)
    for rank in (meeting.first, second):
        rank.until("complete")
    return meeting.first, second


def test_a_standstill_is_reported_and_ends_no_rank(
    room: Callable[..., Room], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(desk_module, "_SLOW_COLLECTIVE_S", 0.05)
    first, second = two_ranks(room)
    first.position, second.position = position(8), position(7)
    missing = second.until("missing")
    assert "rank 0 has waited 0 s, having started all_reduce a; rank 1 is not there: it last" in missing
    assert f"trainstep: {missing}\n" in capfd.readouterr().err
    first.position = position(9)
    assert second.until("missing") == ""  # the standstill is over
    second.leave()
    assert first.until("leave") == "rank 1 (b) died"


def test_a_death_in_a_standstill_names_the_rank_waited_for(room: Callable[..., Room], monkeypatch: pytest.MonkeyPatch):
    """NCCL ends a process whose collective takes too long, so the death may follow from the standstill."""
    monkeypatch.setattr(desk_module, "_SLOW_COLLECTIVE_S", 0.05)
    first, second = two_ranks(room)
    first.position, second.position = position(7), position(8)
    missing = second.until("missing")
    second.leave()
    assert first.until("leave") == f"rank 1 (b) died ({missing})"
    assert "rank 0 is not there" in missing


def test_ranks_that_only_compute_are_left_alone(
    room: Callable[..., Room], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(desk_module, "_SLOW_COLLECTIVE_S", 0.01)
    first, second = two_ranks(room)
    first.position = second.position = position(8)
    for _ in range(20):
        second.until("where")
    assert capfd.readouterr().err == ""


def test_unequal_numbers_of_batches_end_at_once(room: Callable[..., Room]):
    first, second = two_ranks(room)
    first.position = position(8, steps=11)
    second.position = Position(messages=8, steps=10, recent=((7, 9, "all_reduce a"),), has_stopped=True).text()
    second.link.say("at", second.position)
    sentence = second.until("leave")
    assert sentence.startswith("rank 1 has stopped after 10 steps and rank 0 is in all_reduce a in step 12: give every")
    second.leave()
    assert first.until("leave") == sentence


def test_an_error_is_its_own_ranks_where_all_ranks_answer(room: Callable[..., Room]):
    first, second = two_ranks(room)
    first.position = second.position = position(8)
    second.link.say("failed")
    assert second.until("verdict") == ""
    second.link.say("ended", "failed with ArithmeticError")
    assert first.until("leave") == "rank 1 (b) failed with ArithmeticError"


def test_an_error_after_a_death_is_the_dead_ranks(room: Callable[..., Room]):
    meeting = room(3)
    second, third = meeting.join(1), meeting.join(2)
    for rank in (meeting.first, second, third):
        rank.until("complete")
        rank.position = position(8)
    third.position = None  # dying
    second.link.say("failed")
    third.until("where")
    third.leave()
    assert second.until("leave") == "rank 2 (b) died"


def test_a_collective_that_took_too_long_names_the_missing_rank(
    room: Callable[..., Room], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(desk_module, "_ANSWER_S", 0.5)
    first, suspended = two_ranks(room, timeout_s=0.5)
    suspended.position = None
    for _ in range(4):
        first.until("where")
    first.link.say("failed")
    assert "; rank 1 does not answer" in first.until("verdict")


def test_rank_0_leaves_last(room: Callable[..., Room]):
    first, second = two_ranks(room)
    for rank in (first, second):
        rank.link.say("bye")
    first.leave()
    second.link.say("failed")
    assert second.until("verdict") == ""  # it is still served
    second.leave()
    assert first.until_closed() <= {"where"}


def test_control_characters_are_left_out():
    receiver, sender = map(Link, socket.socketpair())
    sender.say("leave", "rank 1 (\x1b]0;title\x07b) died")
    assert receiver.read() == [("leave", "rank 1 (]0;titleb) died")]
