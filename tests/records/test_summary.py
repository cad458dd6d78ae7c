"""Statistics agree with NumPy and brute force; doubts are raised for records made to deserve them, and for no others."""

import statistics
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from record_maker import a_record, seconds
from trainstep.records.record import Fact, Record
from trainstep.records.summary import bootstrap_medians, doubts, summarize


def of_steps(values, facts=None) -> Record:
    return a_record(samples={"step": seconds(values)}, facts=as_facts(facts or {}))


def as_facts(values) -> dict[str, Fact]:
    return {name: Fact(value=value) for name, value in values.items()}


def steady(n: int, std: float = 0.01) -> np.ndarray:
    """Random values with this standard deviation and no trend."""
    return 1 + std * np.random.default_rng(4).standard_normal(n)


# Numbers.


def test_a_known_sample_gets_hand_computed_statistics():
    summary = summarize(seconds([3, 1, 2, 5, 4], warmups=(100.0,)))
    assert (summary.n, summary.mean, summary.median) == (5, 3, 3)
    assert summary.std == pytest.approx(2.5**0.5)  # squares 4 + 1 + 0 + 1 + 4 over n - 1 = 4
    assert (summary.p05, summary.p25, summary.p75, summary.p95) == pytest.approx((1.2, 2, 4, 4.8))
    assert summary.spread == pytest.approx(2 / 3)


def test_one_value_has_no_spread():
    summary = summarize(seconds([0.5]))
    assert (summary.n, summary.mean, summary.std, summary.median, summary.low, summary.high) == (
        1,
        0.5,
        0,
        0.5,
        0.5,
        0.5,
    )


def test_no_values_are_refused():
    with pytest.raises(ValueError, match="no samples"):
        summarize(seconds([], warmups=(1.0,)))


def test_spread_of_zero_times_is_zero():
    assert summarize(seconds([0, 0, 0])).spread == 0


@settings(deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=60))
def test_numbers_agree_with_the_standard_library_and_are_ordered(values):
    summary = summarize(seconds(values))
    assert summary.mean == pytest.approx(statistics.fmean(values))
    assert summary.std == pytest.approx(statistics.stdev(values), abs=1e-9 * max(values))
    assert summary.median == pytest.approx(statistics.median(values))
    slack = 1e-9 * max(values)
    ordered = [min(values), summary.p05, summary.p25, summary.median, summary.p75, summary.p95, max(values)]
    assert all(lower <= higher + slack for lower, higher in pairwise(ordered))
    assert min(values) <= summary.low <= summary.median + slack
    assert summary.median - slack <= summary.high <= max(values)


@settings(deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40), st.randoms())
def test_order_does_not_matter_and_units_scale(values, random):
    summary = summarize(seconds(values))
    shuffled = random.sample(values, len(values))
    again = summarize(seconds(shuffled))
    assert (again.median, again.low, again.high, again.p05) == (summary.median, summary.low, summary.high, summary.p05)
    doubled = summarize(seconds([2 * value for value in values]))
    assert (doubled.low, doubled.high) == (pytest.approx(2 * summary.low), pytest.approx(2 * summary.high))


# The bootstrap.


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 9, 10, 20, 21])
def test_resampled_medians_have_the_distribution_of_draws_with_replacement(n):
    """The largest distance of the two empirical distributions; 0.05 is 3 of its standard deviations for 2000 and 20000 draws."""
    values = np.sort(np.random.default_rng(n).uniform(1, 2, n))
    drawn = np.median(np.random.default_rng(1).choice(values, (20_000, n)), axis=1)
    short_cut = bootstrap_medians(values)
    grid = np.unique(np.concatenate((drawn, short_cut))) + 1e-12
    shares = [np.searchsorted(np.sort(sample), grid) / len(sample) for sample in (drawn, short_cut)]
    assert np.abs(shares[0] - shares[1]).max() < 0.05


def test_bootstrap_is_the_same_each_time_and_its_streams_differ():
    values = steady(21)
    assert np.array_equal(bootstrap_medians(values), bootstrap_medians(values))
    first, second = (bootstrap_medians(values, stream=stream) for stream in (1, 2))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.1


@pytest.mark.parametrize("n", [10, 30])
def test_the_interval_holds_the_true_median_about_as_often_as_it_says(n):
    rng = np.random.default_rng(8)
    covered = [
        (summary := summarize(seconds(rng.exponential(size=n)))).low <= np.log(2) <= summary.high for _ in range(1000)
    ]
    assert 0.92 <= np.mean(covered) <= 0.985


def test_six_hundred_summaries_take_under_half_a_second():
    """600 summaries; the limit is several times their usual time, so that only another algorithm exceeds it."""
    samples = [seconds(steady(20 + i % 7)) for i in range(600)]
    started_s = time.process_time()
    for sample in samples:
        summarize(sample)
    assert time.process_time() - started_s < 0.5


# Doubts.


def test_a_steady_run_raises_no_doubt():
    assert doubts(of_steps(steady(20))) == ()
    assert doubts(of_steps([1.0] * 20)) == ()


def test_fewer_than_five_samples_are_a_doubt():
    assert doubts(of_steps([1.0] * 4)) == ("few samples",)
    assert doubts(of_steps([1.0] * 5)) == ()


def test_a_wide_middle_half_is_unstable_and_one_outlier_is_not():
    assert doubts(of_steps([1.0, 1.1] * 10)) == ("unstable",)
    assert doubts(of_steps([1.0] * 19 + [9.0])) == ("outliers",)
    assert doubts(of_steps([1.0, 1.03] * 10)) == ()


def test_outliers_are_values_far_beyond_the_quartiles():
    noise = np.linspace(-0.01, 0.01, 21)[np.random.default_rng(0).permutation(21)]
    assert doubts(of_steps(1 + noise)) == ()
    assert doubts(of_steps([*(1 + noise), 1.3])) == ("outliers",)
    assert doubts(of_steps([1.0] * 19 + [1.05])) == (), "under 2 % of the median"
    assert doubts(of_steps([1.0] * 6 + [9.0])) == (), "too few values for quartiles"


def test_a_trend_in_either_direction_or_a_step_is_drifting():
    up = np.linspace(1, 1.04, 20) + steady(20, 0.003) - 1
    assert doubts(of_steps(up)) == ("drifting",)
    assert doubts(of_steps(up[::-1])) == ("drifting",)
    assert doubts(of_steps([1.0] * 10 + [1.04] * 10)) == ("drifting",)


def test_a_small_trend_is_no_doubt():
    assert doubts(of_steps(np.linspace(1, 1.015, 20))) == ()


def test_steady_runs_are_seldom_called_drifting():
    rng = np.random.default_rng(6)
    for n in (5, 10, 30):
        drifting = [doubts(of_steps(1 + 0.03 * rng.standard_normal(n))).count("drifting") for _ in range(500)]
        assert np.mean(drifting) <= 0.03


def test_throttled_names_the_harmful_reasons_only():
    harmless = {"throttle_reasons": "application clocks"}
    assert doubts(of_steps([1.0] * 9, harmless)) == ()
    assert doubts(of_steps([1.0] * 9, {"throttle_reasons": ""})) == ()
    mixed = {"throttle_reasons": "application clocks, power cap,hardware thermal"}
    assert doubts(of_steps([1.0] * 9, mixed)) == ("throttled (power cap, hardware thermal)",)


def test_doubts_are_combined_and_need_no_samples():
    facts = {"capture_left_out": "a sync", "captured": "nothing", "throttle_reasons": "sw_power_cap"}
    assert doubts(of_steps([1.0, 2.0], facts)) == (
        "few samples",
        "unstable",
        "throttled (sw_power_cap)",
        "captured: nothing",
    )
    assert doubts(a_record(samples={}, facts=as_facts(facts))) == ("throttled (sw_power_cap)", "captured: nothing")
    assert doubts(of_steps([])) == ()


def test_a_record_without_steps_is_judged_by_its_first_quantity():
    assert doubts(a_record(samples={"time": seconds([1.0, 1.2] * 5)})) == ("unstable",)
    both = {"forward": seconds([1.0, 1.2] * 5), "step": seconds([1.0] * 10)}
    assert doubts(a_record(samples=both)) == ()
