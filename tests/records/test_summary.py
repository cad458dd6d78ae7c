"""Statistics against NumPy and brute force; doubts against records made to deserve them, and ones made not to."""

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
    """Values with that spread in no order of time."""
    return 1 + std * np.random.default_rng(4).standard_normal(n)


# Numbers.


def test_the_numbers_of_a_known_sample():
    found = summarize(seconds([3, 1, 2, 5, 4], warmups=(100.0,)))
    assert (found.n, found.mean, found.median) == (5, 3, 3)
    assert found.std == pytest.approx(2.5**0.5)  # squares 4 + 1 + 0 + 1 + 4 over n - 1 = 4
    assert (found.p05, found.p25, found.p75, found.p95) == pytest.approx((1.2, 2, 4, 4.8))
    assert found.spread == pytest.approx(2 / 3)


def test_one_value_has_no_spread():
    found = summarize(seconds([0.5]))
    assert (found.n, found.mean, found.std, found.median, found.low, found.high) == (1, 0.5, 0, 0.5, 0.5, 0.5)


def test_no_values_are_refused():
    with pytest.raises(ValueError, match="no samples"):
        summarize(seconds([], warmups=(1.0,)))


def test_spread_of_zero_times_is_zero():
    assert summarize(seconds([0, 0, 0])).spread == 0


@settings(deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=60))
def test_numbers_agree_with_the_standard_library_and_are_ordered(values):
    found = summarize(seconds(values))
    assert found.mean == pytest.approx(statistics.fmean(values))
    assert found.std == pytest.approx(statistics.stdev(values), abs=1e-9 * max(values))
    assert found.median == pytest.approx(statistics.median(values))
    slack = 1e-9 * max(values)
    ordered = [min(values), found.p05, found.p25, found.median, found.p75, found.p95, max(values)]
    assert all(one <= other + slack for one, other in pairwise(ordered))
    assert min(values) <= found.low <= found.median + slack
    assert found.median - slack <= found.high <= max(values)


@settings(deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40), st.randoms())
def test_order_does_not_matter_and_units_scale(values, random):
    found = summarize(seconds(values))
    shuffled = random.sample(values, len(values))
    again = summarize(seconds(shuffled))
    assert (again.median, again.low, again.high, again.p05) == (found.median, found.low, found.high, found.p05)
    doubled = summarize(seconds([2 * value for value in values]))
    assert (doubled.low, doubled.high) == (pytest.approx(2 * found.low), pytest.approx(2 * found.high))


# The bootstrap.


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 9, 10, 20, 21])
def test_resampled_medians_are_distributed_as_by_drawing_with_replacement(n):
    """Largest distance between the two empirical distributions; 0.05 is 3 standard deviations of it at 2000 against 20000."""
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
    held = [(found := summarize(seconds(rng.exponential(size=n)))).low <= np.log(2) <= found.high for _ in range(1000)]
    assert 0.92 <= np.mean(held) <= 0.985


def test_a_report_of_a_hundred_records_stays_quick():
    """600 summaries; the limit is several times what they take, so that only another algorithm trips it."""
    samples = [seconds(steady(20 + i % 7)) for i in range(600)]
    started_s = time.process_time()
    for one in samples:
        summarize(one)
    assert time.process_time() - started_s < 0.5


# Doubts.


def test_a_steady_run_raises_no_doubt():
    assert doubts(of_steps(steady(20))) == ()
    assert doubts(of_steps([1.0] * 20)) == ()


def test_few_samples():
    assert doubts(of_steps([1.0] * 4)) == ("few samples",)
    assert doubts(of_steps([1.0] * 5)) == ()


def test_unstable_is_the_middle_half_and_not_one_outlier():
    assert doubts(of_steps([1.0, 1.1] * 10)) == ("unstable",)
    assert doubts(of_steps([1.0] * 19 + [9.0])) == ("outliers",)
    assert doubts(of_steps([1.0, 1.03] * 10)) == ()


def test_outliers_are_a_deviation_far_over_the_quartiles():
    noise = np.linspace(-0.01, 0.01, 21)[np.random.default_rng(0).permutation(21)]
    assert doubts(of_steps(1 + noise)) == ()
    assert doubts(of_steps([*(1 + noise), 1.3])) == ("outliers",)
    assert doubts(of_steps([1.0] * 19 + [1.05])) == (), "under 2 % of the median"
    assert doubts(of_steps([1.0] * 6 + [9.0])) == (), "too few values for quartiles"


def test_drifting_up_and_down_and_in_a_step():
    up = np.linspace(1, 1.04, 20) + steady(20, 0.003) - 1
    assert doubts(of_steps(up)) == ("drifting",)
    assert doubts(of_steps(up[::-1])) == ("drifting",)
    assert doubts(of_steps([1.0] * 10 + [1.04] * 10)) == ("drifting",)


def test_a_trend_too_small_to_matter_is_none():
    assert doubts(of_steps(np.linspace(1, 1.015, 20))) == ()


def test_steady_runs_are_seldom_said_to_drift():
    rng = np.random.default_rng(6)
    for n in (5, 10, 30):
        said = [doubts(of_steps(1 + 0.03 * rng.standard_normal(n))).count("drifting") for _ in range(500)]
        assert np.mean(said) <= 0.03


def test_throttled_names_the_reasons_that_harm():
    harmless = {"throttle_reasons": "application clocks"}
    assert doubts(of_steps([1.0] * 9, harmless)) == ()
    assert doubts(of_steps([1.0] * 9, {"throttle_reasons": ""})) == ()
    mixed = {"throttle_reasons": "application clocks, power cap,hardware thermal"}
    assert doubts(of_steps([1.0] * 9, mixed)) == ("throttled (power cap, hardware thermal)",)


def test_launch_bound():
    assert doubts(of_steps([1.0] * 9, {"launch_bound": True})) == ("launch-bound",)
    assert doubts(of_steps([1.0] * 9, {"launch_bound": False})) == ()


def test_doubts_come_together_and_without_samples():
    facts = {"launch_bound": True, "throttle_reasons": "sw_power_cap"}
    assert doubts(of_steps([1.0, 2.0], facts)) == (
        "few samples",
        "unstable",
        "throttled (sw_power_cap)",
        "launch-bound",
    )
    assert doubts(a_record(samples={}, facts=as_facts(facts))) == ("throttled (sw_power_cap)", "launch-bound")
    assert doubts(of_steps([])) == ()


def test_a_record_without_steps_is_judged_by_its_first_quantity():
    assert doubts(a_record(samples={"time": seconds([1.0, 1.2] * 5)})) == ("unstable",)
    both = {"forward": seconds([1.0, 1.2] * 5), "step": seconds([1.0] * 10)}
    assert doubts(a_record(samples=both)) == ()
