"""Comparisons: rates of false and missed verdicts under simulated noise, coverage of the interval, and what is refused."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from record_maker import ENVIRONMENT, a_record, seconds
from trainstep.records.compare import Comparison, compare_records, compare_samples, match_records, student_point
from trainstep.records.record import Fact, Failure, Record, Samples

SIMULATIONS = 500
N = 20


def of_steps(values, **changes) -> Record:
    return a_record(**{"samples": {"step": seconds(values)}, **changes})


def interleaved(group="g", turn_steps=1, interleaving="live") -> dict[str, Fact]:
    facts = {"interleaving": interleaving, "interleaving_group": group, "turn_steps": turn_steps}
    return {name: Fact(value=value) for name, value in facts.items()}


# Noise. Each function returns factors on the true time for 2 n steps taken in the order a b a b.


def normal(std: float) -> Callable:
    return lambda rng, n: 1 + std * rng.standard_normal(n)


def student(rng, n):
    return np.maximum(0.3, 1 + 0.02 * rng.standard_t(2, n))


def outliers(rng, n):
    return normal(0.02)(rng, n) * np.where(rng.random(n) < 0.05, 3, 1)


def drift(rng, n):
    return normal(0.02)(rng, n) * (1 + rng.uniform(0.1, 0.2) * np.linspace(0, 1, n))


def shared_modes(rng, n):
    """The machine changes between two speeds now and then, for both variants alike."""
    slow = np.cumsum(rng.random(n) < 0.1) % 2
    return normal(0.02)(rng, n) * (1 + rng.uniform(0.15, 0.3) * slow)


def independent_modes(rng, n):
    return normal(0.02)(rng, n) * (1 + rng.uniform(0.15, 0.3) * (rng.random(n) < 0.5))


NOISES = {
    "normal 2 %": normal(0.02),
    "normal 10 %": normal(0.10),
    "student t2": student,
    "outliers": outliers,
    "drift": drift,
    "shared modes": shared_modes,
    "independent modes": independent_modes,
}


def share_of_verdicts(noise, effect: float, *, n: int = N, paired: bool = True) -> dict[str, float]:
    """How often each verdict falls when b truly takes (1 + effect) of a's time."""
    rng = np.random.default_rng(7)
    counts = {"faster": 0, "slower": 0, "cannot tell": 0}
    for _ in range(SIMULATIONS):
        factors = noise(rng, 2 * n)
        comparison = compare_samples(seconds(factors[::2]), seconds(factors[1::2] * (1 + effect)), paired=paired)
        counts[comparison.verdict] += 1
    return {verdict: count / SIMULATIONS for verdict, count in counts.items()}


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES.keys())
@pytest.mark.parametrize("paired", [True, False], ids=["pairs", "apart"])
def test_identical_variants_seldom_get_a_verdict(noise, paired):
    assert share_of_verdicts(noise, 0.0, paired=paired)["cannot tell"] >= 0.97


@pytest.mark.parametrize(("effect", "verdict"), [(0.05, "slower"), (1 / 1.05 - 1, "faster")])
def test_five_percent_under_two_percent_noise_is_found(effect, verdict):
    assert share_of_verdicts(normal(0.02), effect)[verdict] >= 0.97


@pytest.mark.parametrize(
    "noise", [student, outliers, drift, shared_modes], ids=["student", "outliers", "drift", "modes"]
)
def test_ten_percent_is_found_under_heavy_tails_and_drift(noise):
    assert share_of_verdicts(noise, 0.10)["slower"] >= 0.95


@pytest.mark.parametrize("n", [5, 6, 8])
def test_few_pairs_do_not_make_false_verdicts(n):
    assert share_of_verdicts(normal(0.02), 0.0, n=n)["cannot tell"] >= 0.95
    assert share_of_verdicts(normal(0.10), 0.0, n=n)["cannot tell"] >= 0.95


def test_five_rounds_find_a_large_difference():
    assert share_of_verdicts(normal(0.01), 0.10, n=5)["slower"] >= 0.95


def test_pairs_find_a_difference_under_drift_and_unpaired_samples_do_not():
    """The purpose of pairing: without pairs, the share of verdicts falls to that of the unpaired comparison."""
    assert share_of_verdicts(drift, 0.05)["slower"] >= 0.95
    assert share_of_verdicts(drift, 0.05, paired=False)["slower"] <= 0.5


@pytest.mark.parametrize("paired", [True, False], ids=["pairs", "apart"])
@pytest.mark.parametrize(("n", "share"), [(5, 0.985), (7, 0.99), (20, 0.99)])
def test_the_interval_holds_the_true_ratio_as_often_as_it_says(paired, n, share):
    """Up to three standard deviations of the count of misses in 1000 draws."""
    rng = np.random.default_rng(3)
    truth, draws = 1.2, 1000
    comparisons = []
    for _ in range(draws):
        a, b = 1 + 0.02 * rng.standard_normal((2, n))
        comparisons.append(compare_samples(seconds(a), seconds(truth * b), paired=paired))
    missed = sum(not comparison.low <= truth <= comparison.high for comparison in comparisons)
    assert missed <= draws * (1 - share) + 3 * (draws * share * (1 - share)) ** 0.5
    if (
        n == 20
    ):  # the interval is not just wide: a normal 99 % interval is 2 x 2.58 x 1.25 x 0.02 x sqrt(2 / 20) x 1.2 = 0.049
        widths = [comparison.high - comparison.low for comparison in comparisons]
        assert 0.035 <= np.median(widths) <= 0.07


@pytest.mark.parametrize(
    ("freedom", "point"),
    [(4, 4.604), (5, 4.032), (9, 3.250), (19, 2.861), (59, 2.662), (10**6, 2.576)],
)
def test_students_points_are_those_of_the_printed_tables(freedom, point):
    assert student_point(freedom) == pytest.approx(point, rel=0.0002)


@pytest.mark.parametrize(
    ("freedom", "alpha", "point"), [(4, 0.001, 8.610), (9, 0.0001, 6.594), (30, 0.05, 2.042), (1, 0.01, 63.657)]
)
def test_students_points_of_other_levels(freedom, alpha, point):
    assert student_point(freedom, alpha) == pytest.approx(point, rel=0.0002)


# Properties of single comparisons.

times = st.floats(1e-4, 1e2)


@settings(deadline=None)
@given(pairs=st.lists(st.tuples(times, times), min_size=5, max_size=30))
def test_swapping_the_sides_mirrors_a_paired_comparison(pairs):
    a, b = (seconds(side) for side in zip(*pairs, strict=True))
    forth, back = compare_samples(a, b), compare_samples(b, a)
    assert back.ratio == pytest.approx(1 / forth.ratio)
    assert (back.low, back.high) == (pytest.approx(1 / forth.high), pytest.approx(1 / forth.low))
    mirrored = {"faster": "slower", "slower": "faster", "cannot tell": "cannot tell"}
    assert back.verdict == mirrored[forth.verdict]


@settings(deadline=None)
@given(pairs=st.lists(st.tuples(times, times), min_size=5, max_size=30), paired=st.booleans())
def test_the_interval_holds_the_ratio_and_equal_samples_get_no_verdict(pairs, paired):
    a, b = (seconds(side) for side in zip(*pairs, strict=True))
    comparison = compare_samples(a, b, paired=paired)
    assert comparison.low <= comparison.ratio * (1 + 1e-9)
    assert comparison.high >= comparison.ratio * (1 - 1e-9)
    itself = compare_samples(a, a)
    assert (itself.ratio, itself.low, itself.high, itself.verdict) == (1, 1, 1, "cannot tell")


def test_the_ratio_is_b_over_a():
    comparison = compare_samples(seconds([1.0, 2.0, 4.0, 1.0, 3.0]), seconds([0.5, 1.0, 2.0, 0.5, 1.5]))
    assert (comparison.ratio, comparison.verdict, comparison.n, comparison.paired) == (
        pytest.approx(0.5),
        "faster",
        5,
        True,
    )
    assert compare_samples(seconds([1, 2, 4, 1, 3]), seconds([2, 4, 8, 2, 6])).verdict == "slower"


def test_the_same_samples_give_the_same_interval_again():
    rng = np.random.default_rng(0)
    a, b = seconds(rng.uniform(1, 2, 20)), seconds(rng.uniform(1, 2, 20))
    assert compare_samples(a, b) == compare_samples(a, b)


def test_samples_of_unequal_length_pair_the_turns_that_both_have():
    a, b = seconds([1.0] * 10), seconds([1.1] * 10 + [9.0] * 30)
    comparison = compare_samples(a, b)
    assert (comparison.n, comparison.low, comparison.high, comparison.verdict) == (
        10,
        pytest.approx(1.1),
        pytest.approx(1.1),
        "slower",
    )
    apart = compare_samples(a, b, paired=False)
    assert (apart.n, apart.paired, apart.ratio) == (10, False, pytest.approx(9.0))


def test_turns_of_several_steps_are_paired_by_their_medians():
    """Each turn runs at another speed and has one outlier, so only medians of turns show the constant 10 %."""
    speeds = np.repeat([1.0, 3.0, 2.0, 5.0, 1.5], 3)
    a = seconds(speeds * np.tile([1, 1, 7], 5))
    b = seconds(1.1 * speeds * np.tile([7, 1, 1], 5))
    comparison = compare_samples(a, b, turn_steps=(3, 3))
    assert (comparison.n, comparison.verdict) == (5, "slower")
    assert (comparison.ratio, comparison.low, comparison.high) == (pytest.approx(1.1),) * 3
    assert compare_samples(a, b).verdict == "cannot tell"


def test_a_last_turn_cut_short_counts():
    assert compare_samples(seconds([1.0] * 10), seconds([1.2] * 10), turn_steps=(3, 3)).n == 4


def test_cannot_tell_says_whether_the_effect_is_small_or_the_interval_wide():
    rng = np.random.default_rng(5)
    quiet, loud = 1 + 0.001 * rng.standard_normal(30), 1 + 0.3 * rng.standard_normal(30).clip(-2, 2)
    small_effect = compare_samples(seconds(quiet), seconds(1.01 * quiet[::-1]))
    assert small_effect.verdict == "cannot tell"
    assert small_effect.reason.startswith("difference below the minimum effect of 2.0%: ratio 1.01")
    assert compare_samples(seconds(quiet), seconds(1.01 * quiet[::-1]), minimum_effect=0.005).verdict == "slower"
    wide_interval = compare_samples(seconds(quiet), seconds(loud))
    assert wide_interval.verdict == "cannot tell"
    assert wide_interval.reason.startswith("interval too wide")


@pytest.mark.parametrize(("paired", "noun"), [(True, "pairs"), (False, "values")])
@pytest.mark.parametrize("n", [0, 1, 2, 4])
def test_fewer_than_five_give_a_ratio_without_an_interval(n, paired, noun):
    comparison = compare_samples(seconds([1.0] * n), seconds([2.0] * 10), paired=paired)
    assert (comparison.verdict, comparison.low, comparison.high) == ("cannot tell", None, None)
    assert comparison.ratio == (pytest.approx(2.0) if n else None)
    assert comparison.reason == f"too few {noun}: {n}, and at least 5 are needed"


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_times_without_a_ratio_cannot_tell(bad):
    comparison = compare_samples(seconds([1.0, 1.0, 1.0, bad]), seconds([2.0] * 4))
    assert (comparison.verdict, comparison.ratio) == ("cannot tell", None)
    assert "not positive" in comparison.reason


def test_units_that_differ_or_are_no_time_are_refused():
    clock = Samples(unit="Hz", values=(1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="unit: 's' against 'Hz'"):
        compare_samples(seconds([1, 1, 1]), clock)
    with pytest.raises(ValueError, match="not values in 'Hz'"):
        compare_samples(clock, clock)


def test_invalid_options_are_refused():
    a = seconds([1, 1, 1])
    with pytest.raises(ValueError, match="minimum_effect"):
        compare_samples(a, a, minimum_effect=-0.1)
    with pytest.raises(ValueError, match="turn_steps"):
        compare_samples(a, a, turn_steps=(1, 0))


# Records.


def test_interleaved_records_are_compared_as_pairs():
    drifting = np.linspace(1, 3, 12)
    a, b = of_steps(drifting, facts=interleaved()), of_steps(1.1 * drifting, facts=interleaved())
    comparison = compare_records(a, b)
    assert (comparison.verdict, comparison.paired, comparison.n, comparison.interleaving) == (
        "slower",
        True,
        12,
        "live",
    )
    assert (comparison.quantity, comparison.ratio) == ("step", pytest.approx(1.1))
    rounds = compare_records(
        of_steps(drifting, facts=interleaved("r", 2, "rounds")),
        of_steps(1.1 * drifting, facts=interleaved("r", 2, "rounds")),
    )
    assert (rounds.n, rounds.interleaving, rounds.verdict) == (6, "rounds", "slower")


@pytest.mark.parametrize(
    "facts", [{}, interleaved("another"), interleaved(""), interleaved(interleaving="none")], ids=str
)
def test_records_not_interleaved_with_each_other_are_not_paired(facts):
    drifting = np.linspace(1, 3, 12)
    facts_of_a = (
        interleaved("", 1)
        if facts == interleaved("")
        else interleaved(interleaving="none" if facts == interleaved(interleaving="none") else "live")
    )
    comparison = compare_records(of_steps(drifting, facts=facts_of_a), of_steps(1.1 * drifting, facts=facts))
    assert (comparison.paired, comparison.interleaving, comparison.verdict) == (False, "none", "cannot tell")
    assert "not interleaved" in comparison.reason


def test_turns_with_different_counts_of_values_are_paired():
    """`--compare sync`: a turn of four steps is four values with sync=step and one window with sync=4."""
    speeds = [1.0, 3.0, 2.0, 5.0, 1.5]
    a = of_steps(np.repeat(speeds, 4), facts=interleaved(turn_steps=4))
    b = of_steps(1.1 * np.array(speeds), facts=interleaved(turn_steps=1))
    for comparison, ratio in ((compare_records(a, b), 1.1), (compare_records(b, a), 1 / 1.1)):
        assert (comparison.n, comparison.paired, comparison.ratio) == (5, True, pytest.approx(ratio))
        assert comparison.low == pytest.approx(ratio)


@pytest.mark.parametrize(("steps", "turn_steps"), [(20, 2), (12, 4), (10, 1)])
def test_a_quantity_with_one_value_for_each_turn_is_paired_by_turns(steps: int, turn_steps: int):
    """In `trainstep parallel` a turn ends with one window."""
    windows = seconds(np.arange(1, steps // turn_steps + 1))
    slower = seconds(1.2 * np.arange(1, steps // turn_steps + 1))
    facts = interleaved(turn_steps=turn_steps)
    a, b = (
        of_steps([1] * steps, facts=facts, samples={"step": seconds([1] * steps), "window_step": samples_of_windows})
        for samples_of_windows in (windows, slower)
    )
    comparison = compare_records(a, b, quantity="window_step")
    assert (comparison.n, comparison.paired, comparison.ratio) == (steps // turn_steps, True, pytest.approx(1.2))


def test_a_turn_length_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="turn_steps: must be a whole number, not 'x'"):
        compare_records(of_steps([1] * 6, facts=interleaved(turn_steps="x")), of_steps([1] * 6, facts=interleaved()))


@pytest.mark.parametrize("field", ["gpu", "driver", "torch", "triton", "cuda", "cpu"])
def test_different_environments_are_refused_unless_allowed(field):
    a = of_steps([1.0] * 5)
    b = of_steps([2.0] * 5, environment=replace(ENVIRONMENT, **{field: "another"}))
    with pytest.raises(ValueError, match=f"{field} .* against another"):
        compare_records(a, b)
    assert compare_records(a, b, allow_mixed=True).verdict == "slower"


def test_records_of_another_commit_or_source_are_compared():
    b = of_steps([2.0] * 5, environment=replace(ENVIRONMENT, commit="f00", dirty=True, source="new", hostname="other"))
    assert compare_records(of_steps([1.0] * 5), b).verdict == "slower"


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_failure_on_either_side_gives_cannot_tell_with_its_kind(side):
    """That holds even where the process died before it recorded its version of torch."""
    failure = Failure(kind="out_of_memory", phase="backward", message="No.")
    records = {name: of_steps([1.0] * 5) for name in "ab"}
    records[side] = of_steps([9.0] * 5, failure=failure, environment=replace(ENVIRONMENT, torch=None))
    comparison = compare_records(records["a"], records["b"])
    assert comparison == Comparison(
        verdict="cannot tell", reason=f"{side} failed: out_of_memory in backward", quantity="step"
    )


def test_a_quantity_that_one_record_lacks_is_refused_by_name():
    with pytest.raises(ValueError, match="forward: a has no such quantity; it has step"):
        compare_records(of_steps([1.0] * 5), of_steps([1.0] * 5), quantity="forward")
    with pytest.raises(ValueError, match="no samples at all"):
        compare_records(of_steps([1.0] * 5, samples={}), of_steps([1.0] * 5))


def test_records_are_matched_by_key_and_the_last_of_a_key_counts():
    first, first_again, second, third = (of_steps([i], key=key) for i, key in enumerate(["1", "1", "2", "3"], 1))
    matched = match_records([first, second, first_again], [third, second, first])
    assert matched.pairs == ((first_again, first), (second, second))
    assert (matched.only_a, matched.only_b) == ((), (third,))
    assert match_records([second], []).only_a == (second,)


def test_records_without_a_field_that_came_later_are_matched_by_its_default():
    """Neither file has a key of the other; --capture came between."""
    config = {"device": "cpu", "steps": 3}
    old = of_steps([1.0], config=config, key="old")
    new = of_steps([1.0], config={**config, "capture": "none"}, key="new")
    other = of_steps([1.0], config={**config, "capture": "step"}, key="other")
    assert match_records([old], [other, new]).pairs == ((old, new),)
    assert match_records([old], [other]).pairs == ()


# Several processes for each variant.


def of_processes(biases, *, values=10, noise=0.0, turn_steps=2, seed=0):
    """A record with one process per bias; a step of each takes 10 ms times (1 + its bias)."""
    generator = np.random.default_rng(seed)
    times = np.concatenate([0.01 * (1 + bias) * np.exp(noise * generator.standard_normal(values)) for bias in biases])
    return of_steps(
        times, facts=interleaved(turn_steps=turn_steps) | {"process_steps": Fact(value=values, unit="count")}
    )


def test_the_pair_of_processes_is_the_unit():
    """Turns of one process agree, so the interval follows from the pairs of processes, by Student's t."""
    a, b = of_processes([0.0] * 6), of_processes([0.01, 0.03, 0.02, 0.04, 0.00, 0.02])
    comparison = compare_records(a, b)
    logs = np.log(1 + np.array([0.01, 0.03, 0.02, 0.04, 0.00, 0.02]))
    reach = 4.032 * logs.std(ddof=1) / 6**0.5
    assert (comparison.n, comparison.paired, comparison.interleaving) == (6, True, "live")
    assert comparison.ratio == pytest.approx(np.exp(logs.mean()))
    assert (comparison.low, comparison.high) == pytest.approx(
        (np.exp(logs.mean() - reach), np.exp(logs.mean() + reach)), rel=1e-3
    )
    assert comparison.reason.endswith("over 6 pairs of processes")


def test_biases_of_processes_give_no_verdict():
    """At most 1 of 100 false verdicts is promised; with a bias of 2 % per process, pairs of turns give one half of the time."""
    generator = np.random.default_rng(1)
    false_verdicts, true_verdicts = 0, 0
    for seed in range(200):
        biases = generator.normal(scale=0.02, size=(2, 12))
        a, b = (of_processes(side_biases, noise=0.03, seed=2 * seed + side) for side, side_biases in enumerate(biases))
        slower = of_processes(biases[1] + 0.05, noise=0.03, seed=2 * seed + 1)
        false_verdicts += compare_records(a, b).verdict != "cannot tell"
        true_verdicts += compare_records(a, slower).verdict == "slower"
    assert false_verdicts <= 4
    assert true_verdicts >= 180


@pytest.mark.parametrize("processes", [2, 4])
def test_too_few_pairs_of_processes_give_a_ratio_without_an_interval(processes: int):
    comparison = compare_records(of_processes([0.0] * processes), of_processes([0.1] * processes))
    assert (comparison.verdict, comparison.low) == ("cannot tell", None)
    assert comparison.ratio == pytest.approx(1.1)
    assert comparison.reason == f"too few pairs of processes: {processes}, and at least 5 are needed"


def test_variants_of_one_process_are_compared_by_their_turns():
    assert compare_records(of_processes([0.0]), of_processes([0.1])).n == 5


def test_process_steps_that_are_no_number_are_refused():
    with pytest.raises(ValueError, match="process_steps: must be a whole number, not 'x'"):
        compare_records(
            of_processes([0.0]), of_steps([1] * 6, facts=interleaved() | {"process_steps": Fact(value="x")})
        )


def test_a_difference_of_exactly_the_minimum_effect_has_one_word():
    compared = compare_samples(Samples(unit="s", values=[1.0] * 20), Samples(unit="s", values=[1.02] * 20))
    assert (compared.verdict, compared.word) in {("slower", "slower"), ("cannot tell", "under 2 %")}
