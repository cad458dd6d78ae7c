"""Each moment belongs to one part: the innermost, or the gap's by its neighbours; together they are the step."""

from collections.abc import Iterator

import pytest

from trainstep.config.script import Part
from trainstep.measure.run.phase_clock import PhaseClock


class Hand:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


@pytest.fixture
def hand() -> Iterator[Hand]:
    return Hand()


def follow(clock: PhaseClock, hand: Hand, events: str) -> dict[Part, int]:
    """Read events such as `10 +forward 20 -forward`: a number is time that passes. The parts that took any."""
    for event in events.split():
        if event[0] == "+":
            clock.enter(Part(event[1:]))
        elif event[0] == "-":
            clock.leave(Part(event[1:]))
        else:
            hand.ns += int(event)
    step_ns, spent_ns = clock.take()
    assert step_ns == sum(spent_ns.values())
    return {part: spent for part, spent in spent_ns.items() if spent}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (
            "1 +data_wait 10 -data_wait 2 +forward 20 -forward 3 +backward 30 -backward 4 +optimizer 40 -optimizer 5",
            {Part.OTHER: 1 + 2 + 5, Part.DATA: 10, Part.FORWARD: 23, Part.BACKWARD: 30, Part.OPTIMIZER: 44},
        ),
        # Accumulation: what follows a backward that is not followed by the optimizer is other code
        (
            "+forward 1 -forward +backward 1 -backward 7 +forward 1 -forward +backward 1 -backward 5 +optimizer 1 -optimizer",
            {Part.FORWARD: 2, Part.BACKWARD: 2, Part.OTHER: 7, Part.OPTIMIZER: 6},
        ),
        # An optimizer's closure: the innermost part counts
        (
            "+optimizer 1 +forward 10 -forward 2 +backward 20 -backward 3 -optimizer",
            {Part.OPTIMIZER: 1 + 2 + 3, Part.FORWARD: 10, Part.BACKWARD: 20},
        ),
        # Batches of an evaluation belong to it, and so does what is between its passes
        (
            "+data_wait 5 -data_wait 1 +evaluation 10 -evaluation 2 +data_wait 5 -data_wait 1 +evaluation 10 -evaluation 4",
            {Part.EVALUATION: 5 + 1 + 10 + 2 + 5 + 1 + 10, Part.OTHER: 4},
        ),
        # An error left parts open: the end of one around them ends them
        ("+backward 1 +forward 2 -backward 3", {Part.BACKWARD: 1, Part.FORWARD: 2, Part.OTHER: 3}),
        # The end of a part that is not open is nobody's
        ("4 -forward 4", {Part.OTHER: 8}),
    ],
)
def test_moments_are_divided(hand: Hand, events: str, expected: dict[Part, int]):
    assert follow(PhaseClock(hand), hand, events) == expected


def test_a_step_begins_where_the_last_one_ended(hand: Hand):
    clock = PhaseClock(hand)
    follow(clock, hand, "+forward 1 -forward")
    assert follow(clock, hand, "3 +forward 2 -forward") == {Part.FORWARD: 5}


def test_time_between_steps_is_forgotten_by_a_restart(hand: Hand):
    clock = PhaseClock(hand)
    follow(clock, hand, "+optimizer 1 -optimizer")
    hand.ns += 1000
    clock.restart()
    assert follow(clock, hand, "3 +optimizer 1 -optimizer") == {Part.OPTIMIZER: 4}


def test_a_step_may_end_inside_a_part(hand: Hand):
    clock = PhaseClock(hand)
    assert follow(clock, hand, "+backward 5") == {Part.BACKWARD: 5}
    assert follow(clock, hand, "6 -backward 1") == {Part.BACKWARD: 6, Part.OTHER: 1}


def test_changes_are_told(hand: Hand):
    told: list[Part | None] = []
    clock = PhaseClock(hand, told.append)
    follow(clock, hand, "+optimizer +forward -forward -optimizer")
    assert told == [Part.OPTIMIZER, Part.FORWARD, Part.OPTIMIZER, None]


def test_the_share_of_updates_leaves_out_what_is_before_them(hand: Hand):
    clock = PhaseClock(hand)
    assert clock.take_update_share() is None
    for _ in range(2):
        follow(clock, hand, "+backward 9 -backward 10 +optimizer 30 -optimizer 5 +forward 7 -forward")
    assert clock.take_update_share() == pytest.approx(0.75)
    assert clock.take_update_share() is None, "each record has the share of its own steps"
    follow(clock, hand, "+optimizer 20 -optimizer")
    assert clock.take_update_share() == 1
