"""The ranks that wait and the ranks that they wait for, from the positions that ranks report."""

import pytest

from trainstep.parallel.liveness.standstill import Position, Progress, Standstill, rank_words


def position(
    steps: int, *calls: str, messages: int | None = None, before: int = 0, has_stopped: bool = False
) -> Position:
    """The position of a rank that made `before` calls, which it no longer remembers, and then these, in the step after `steps`."""
    recent = tuple((before + 1 + index, steps, call) for index, call in enumerate(calls))
    count = before + len(calls) if messages is None else messages
    return Position(messages=count + has_stopped, steps=steps, recent=recent, has_stopped=has_stopped)


def standstill(*positions: Position, at_s: float = 0) -> Standstill:
    result = Standstill()
    for rank, reported in enumerate(positions):
        result.heard(rank, reported, at_s)
    return result


def test_a_position_survives_the_connection():
    progress = Progress()
    progress.called("all_reduce a label, with\nwords")
    progress.steps = 3
    progress.called("barrier")
    sent = Position(messages=7, steps=progress.steps, recent=tuple(progress.recent))
    assert Position.parse(sent.text()) == sent
    assert "\n" not in sent.text()
    assert (sent.calls, sent.place) == (2, "barrier in step 4")


def test_only_the_last_calls_are_remembered():
    progress = Progress()
    for index in range(1000):
        progress.called(f"all_reduce {index}")
    recent = tuple(progress.recent)
    assert recent[-1] == (1000, 0, "all_reduce 999")
    assert len(recent) < 100


def test_the_rank_that_is_behind_is_named():
    state = standstill(position(16, "all_reduce a", "all_reduce b"), position(16, "all_reduce a"))
    assert state.who_waits(60) == (
        "rank 0 has waited 60 s, having started all_reduce b in step 17; "
        "rank 1 is not there: it last started all_reduce a in step 17, 60 s ago"
    )


def test_several_waiting_and_several_missing_ranks_are_named():
    ahead, behind = position(2, "all_gather a", "all_gather b"), position(1, "all_gather a")
    state = standstill(ahead, behind, ahead, position(0, messages=0))
    state.heard(1, position(1, "all_gather a"), 30)  # has not moved
    assert state.who_waits(61) == (
        "ranks 0, 2 have waited 61 s, having started all_gather b in step 3; "
        "rank 1 is not there: it last started all_gather a in step 2, 61 s ago; "
        "rank 3 is not there: it last started no collective, 61 s ago"
    )


def test_a_rank_that_has_stopped_waits_too():
    state = standstill(position(10, "all_reduce a"), position(10, "all_reduce a", has_stopped=True))
    assert state.contradiction() is None
    assert state.who_waits(60) == (
        "rank 1 has waited 60 s, in stop_ranks; rank 0 is not there: it last started all_reduce a in step 11, 60 s ago"
    )


def test_a_rank_that_does_not_answer_is_named():
    equal = position(10, "all_reduce a")
    state = standstill(equal, equal)
    assert state.who_waits(60) is None
    assert "; rank 1 does not answer: it is suspended, or native code" in str(state.who_waits(60, silent=[1]))


def test_a_rank_that_moves_does_not_wait():
    state = standstill(position(1, "all_reduce a"), position(1, "all_reduce a"))
    state.heard(0, position(1, "all_reduce a", "all_reduce b"), 50)
    assert state.idle_s(0, 60) == 10
    assert state.idle_s(1, 60) == 60


def test_a_rank_that_stopped_while_another_goes_on_is_a_contradiction():
    state = standstill(position(10, "all_reduce a", "all_reduce b"), position(10, "all_reduce a", has_stopped=True))
    assert state.contradiction() == (
        "rank 1 has stopped after 10 steps and rank 0 is in all_reduce b in step 11: give every rank the same number of "
        "batches"
    )


def test_the_users_own_messages_are_no_contradiction():
    """The group counts the user's own point-to-point messages only on the ranks that take part."""
    state = standstill(
        position(10, "all_reduce a", messages=50), position(10, "all_reduce a", messages=4, has_stopped=True)
    )
    assert state.contradiction() is None


@pytest.mark.parametrize(
    ("call", "ends"), [("all_gather state", True), ("all_reduce bucket 9", False), ("barrier", True)]
)
def test_a_different_operation_is_a_contradiction_and_a_label_is_not(call: str, ends: bool):
    """Calls of the same number with different operations never meet. Labels are only for people."""
    first = position(10, "all_reduce a", "all_reduce bucket 3", "all_reduce bucket 4", before=100)
    state = standstill(first, position(10, "all_reduce a", call, before=100))
    contradiction = state.contradiction()
    assert (contradiction is not None) == ends
    assert (
        contradiction is None
        or f"rank 0 calls all_reduce bucket 3 after 10 steps where rank 1 calls {call} after" in contradiction
    )


def test_calls_too_far_apart_are_not_compared():
    state = standstill(position(10, "all_reduce a", before=100), position(10, "barrier", before=50))
    assert state.contradiction() is None


def test_rank_words():
    assert rank_words([2]) == "rank 2"
    assert rank_words({3, 0}) == "ranks 0, 3"
