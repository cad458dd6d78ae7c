"""The choice of what to recompute, against every other choice of small models."""

import dataclasses
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainstep.plan.recomputation import (
    MODES,
    BlockCost,
    BudgetTooSmall,
    Choice,
    StepCost,
    choice_of,
    choose,
    curve,
    slowest_and_largest,
)

SIZES = st.integers(0, 50)


@st.composite
def blocks(draw: st.DrawFn) -> BlockCost:
    """A block that keeps less and takes longer from mode to mode, as measured blocks do."""
    drops = sorted(draw(st.lists(st.integers(1, 100), min_size=4, max_size=4)), reverse=True)
    times = sorted(draw(st.lists(st.integers(1, 100), min_size=3, max_size=3)))
    whole = drops[0] + draw(SIZES)
    return BlockCost(
        kept_bytes=dict(zip(MODES, drops, strict=True)),
        backward_bytes={mode: whole + draw(SIZES) for mode in MODES},
        added_s=dict(zip(MODES, [0.0, *map(float, times)], strict=True)),
        forward_s=float(draw(st.integers(1, 100))),
        gradients_bytes=draw(SIZES),
    )


@st.composite
def steps(draw: st.DrawFn, most: int = 5, least: int = 1) -> StepCost:
    kinds = draw(st.lists(blocks(), min_size=1, max_size=2))
    return StepCost(
        blocks=draw(st.lists(st.sampled_from(kinds), min_size=least, max_size=most)),
        held_bytes=draw(SIZES),
        head_bytes=draw(SIZES),
        after_head_bytes=draw(SIZES),
        optimizer_bytes=draw(st.integers(0, 200)),
    )


def every_choice(step: StepCost) -> list[Choice]:
    return [choice_of(step, modes) for modes in product(MODES, repeat=len(step.blocks))]


def chosen(step: StepCost, budget: int) -> Choice | None:
    try:
        return choose(step, budget)
    except BudgetTooSmall:
        return None


@settings(deadline=None)
@given(steps(), st.integers(0, 800))
def test_no_other_choice_that_fits_takes_less_time(step: StepCost, budget: int):
    choice = chosen(step, budget)
    fitting = [other.added_s for other in every_choice(step) if other.peak_bytes <= budget]
    if choice is None or choice.chains:
        assert not fitting
    else:
        assert choice.added_s == min(fitting)


@settings(deadline=None)
@given(steps(), st.integers(0, 800))
def test_a_choice_never_holds_more_than_the_budget(step: StepCost, budget: int):
    choice = chosen(step, budget)
    assert choice is None or choice.peak_bytes <= budget


@settings(deadline=None)
@given(steps(most=8), st.lists(st.integers(0, 900), min_size=2, max_size=6))
def test_a_larger_budget_never_adds_time(step: StepCost, budgets: list[int]):
    choices = [chosen(step, budget) for budget in sorted(budgets)]
    assert None not in choices[choices.count(None) :], "what fits a budget fits a larger one"
    times = [choice.added_s for choice in choices if choice is not None]
    assert times == sorted(times, reverse=True)


@settings(deadline=None)
@given(steps(most=6), st.integers(0, 800))
def test_less_recomputation_in_any_block_does_not_fit(step: StepCost, budget: int):
    """So a choice is under its budget by less than one block's next mode would take."""
    choice = chosen(step, budget)
    if choice is None or choice.chains:
        return
    for index, mode in enumerate(choice.modes):
        for less in MODES[: MODES.index(mode)]:
            other = choice_of(step, [*choice.modes[:index], less, *choice.modes[index + 1 :]])
            assert other.peak_bytes > budget or other.added_s == choice.added_s


@settings(deadline=None)
@given(steps())
def test_the_curve_goes_from_the_lowest_peak_to_no_recomputation(step: StepCost):
    choices = curve(step)
    whole = choice_of(step, ["none"] * len(step.blocks))
    assert choices[-1].added_s == 0
    assert choices[-1].peak_bytes <= whole.peak_bytes
    assert chosen(step, choices[0].peak_bytes - 1) is None
    times = [choice.added_s for choice in choices]
    assert times == sorted(times, reverse=True)


def alike(count: int, **changes: int) -> StepCost:
    """Blocks that keep 30 bytes, or 10, 5 or 1."""
    block = BlockCost(
        kept_bytes={"none": 30, "selective": 10, "narrow": 5, "block": 1},
        backward_bytes=dict.fromkeys(MODES, 40),
        added_s={"none": 0.0, "selective": 1.0, "narrow": 3.0, "block": 4.0},
        forward_s=4.0,
    )
    return StepCost(blocks=[block] * count, **{"held_bytes": 0, "head_bytes": 0, **changes})


def test_early_blocks_recompute_first():
    step = alike(4)
    assert choose(step, 130).modes == ("none",) * 4
    assert choose(step, 111).modes == ("selective", "none", "none", "none")


def test_chains_hold_about_two_roots_of_the_inputs():
    step = alike(64)
    all_blocks = choice_of(step, ["block"] * 64)
    assert all_blocks.peak_bytes == 63 + 40
    choice = choose(step, 40 + 15)
    assert choice.peak_bytes <= 40 + 2 * 8
    assert sum(choice.chains) == 64
    assert choice.added_s == 64 * 4.0 + (64 - len(choice.chains)) * 4.0


def test_the_lowest_peak_is_that_of_chains_of_the_root():
    lowest = curve(alike(64))[0]
    assert lowest.peak_bytes == 40 + 8 + 8 - 2
    with pytest.raises(BudgetTooSmall) as refusal:
        choose(alike(64), 40)
    assert refusal.value.minimum == lowest


@settings(deadline=None)
@given(st.integers(1, 4).flatmap(lambda count: st.lists(of_count(count), min_size=1, max_size=3)), st.integers(0, 800))
def test_what_fits_on_the_largest_rank_fits_on_all(of_ranks: list[StepCost], budget: int):
    """And it takes as long as on the slowest, block by block, so no choice is faster on any rank than together."""
    together = slowest_and_largest(of_ranks)
    choice = chosen(together, budget)
    for step in of_ranks:
        if choice is not None:
            alone = choice_of(step, choice.modes, choice.chains)
            assert alone.peak_bytes <= choice.peak_bytes <= budget
            assert alone.added_s <= choice.added_s
        elif len(of_ranks) == 1:
            assert chosen(step, budget) is None


def of_count(count: int) -> st.SearchStrategy[StepCost]:
    return steps(most=count, least=count)


def test_blocks_that_may_not_chain_form_no_chains():
    step = alike(64)
    apart = dataclasses.replace(step, may_chain=False)
    assert any(choice.chains for choice in curve(step))
    assert not any(choice.chains for choice in curve(apart))
    with pytest.raises(BudgetTooSmall):
        choose(apart, curve(apart)[0].peak_bytes - 1)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"head_bytes": 2000}, "ops fused"),
        ({"optimizer_bytes": 2000}, "16-bit weights"),
        ({}, "smaller batch_size or context"),
    ],
)
def test_a_budget_below_the_minimum_says_what_would_lower_it(changes: dict[str, int], remedy: str):
    with pytest.raises(BudgetTooSmall, match=remedy) as refusal:
        choose(alike(4, **changes), 10)
    assert str(refusal.value).startswith("recompute_budget_gib: ")


def test_many_different_blocks_are_rounded_up_and_stay_within_the_budget():
    kinds = [
        BlockCost(
            kept_bytes={"none": 10**6 + 977 * index, "selective": 10**5 + 31 * index, "block": 10**4},
            backward_bytes=dict.fromkeys(("none", "selective", "block"), 2 * 10**6),
            added_s={"none": 0.0, "selective": 1.0 + index / 7, "block": 3.0},
            forward_s=3.0,
        )
        for index in range(40)
    ]
    step = StepCost(blocks=kinds, held_bytes=0, head_bytes=0)
    times = []
    for budget in range(3 * 10**6, 45 * 10**6, 3 * 10**6):
        choice = choose(step, budget)
        assert choice.peak_bytes <= budget
        times.append(choice.added_s)
    assert times == sorted(times, reverse=True)
    assert times[0] > 0 == times[-1]
