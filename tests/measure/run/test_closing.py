"""Which optimizer's update ends a step: the rarest, and of equals the last to appear."""

import pytest

from trainstep.measure.run.closing import Closing


def ends(updates: str) -> str:
    """The updates, a letter each; those that end a step in capitals."""
    closing = Closing()
    return "".join(letter if closing.closes(ord(letter)) else letter.lower() for letter in updates)


@pytest.mark.parametrize(
    ("cycle", "settled"),
    [("A", "A"), ("DG", "dG"), ("DDDDDG", "dddddG"), ("ABC", "abC"), ("AAB", "aaB")],
)
def test_a_cycle_is_one_step(cycle: str, settled: str):
    assert ends(cycle * 200)[len(cycle) * 2 :] == settled * 198


def test_a_step_that_begins_with_the_rarest_is_as_long():
    assert ends("GDDDDD" * 30)[12:].count("G") == 28


def test_an_optimizer_that_replaces_another_ends_steps_from_its_first_update():
    assert ends("A" * 50 + "B" * 50) == "A" * 50 + "B" * 50


def test_an_optimizer_that_is_no_longer_used_is_forgotten():
    assert ends("DG" * 30 + "D" * 60).endswith("D" * 30)


def test_a_second_optimizer_that_comes_later_joins():
    assert ends("A" * 40 + "AB" * 60).endswith("aB" * 20)


def test_the_number_of_optimizers_is_known():
    closing = Closing()
    for update in "ABABABAB":
        closing.closes(ord(update))
    assert closing.seen == 2
