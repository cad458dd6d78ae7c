"""The search of options: its bounds are bounds, and it finds what trying every combination finds."""

from dataclasses import replace
from typing import Any

import pytest

from trainstep.config.machine import gpu_named
from trainstep.config.parallel import RanksConfig
from trainstep.plan.prediction import predict
from trainstep.plan.search.bounds import Bounds
from trainstep.plan.search.difference import difference
from trainstep.plan.search.search import Found, search
from trainstep.plan.search.space import FREE, Space, divisors, space_of, spread
from trainstep.plan.time.calibration import Calibration, calibration_for
from trainstep.plan.time.step_time import step_time

GIB = 2**30
SMALL: dict[str, list[Any]] = {
    "model": ["small"],
    "layers": [3],
    "context": [512],
    "precision": ["bf16_autocast"],
    "recompute_every": [1],
}


@pytest.fixture(scope="module")
def h200() -> Calibration:
    found = calibration_for(gpu_named("h200"))
    assert found is not None
    return found


def found_in(space: Space, h200: Calibration, gib: float, minimize: str = "time") -> Found:
    return search(space, h200, gpu_memory_bytes=round(gib * GIB), minimize=minimize)


def every_config(space: Space, ranks: int) -> list[RanksConfig]:
    configs = [space.allowed(ranks, sync, run) for run in space.runs(ranks) for sync in space.strategies(ranks)]
    return [config for config in configs if config is not None]


def fastest_by_trying(space: Space, ranks: int, h200: Calibration, gib: float) -> float:
    """The time of the fastest that surely fits."""
    for config in sorted(every_config(space, ranks), key=lambda config: step_time(config, h200).step.time_s):
        prediction = predict(config, gpu_memory_bytes=round(gib * GIB))
        if prediction.fits and not prediction.is_tight:
            return step_time(config, h200).step.time_s
    raise AssertionError("nothing fits")


@pytest.mark.parametrize("gib", [3.5, 80])
def test_the_best_on_one_gpu_is_that_of_trying_all(h200: Calibration, gib: float):
    named = {**SMALL, "ops": ["fused"], "capture": ["none", "step"], "adamw": ["fused"], "update": ["after_backward"]}
    space = space_of(named, global_batch=8, ranks=[1])
    best = found_in(space, h200, gib).best
    assert best is not None
    assert best.fits_surely
    assert best.time_s == pytest.approx(fastest_by_trying(space, 1, h200, gib), rel=1e-9)


def test_the_best_of_several_gpus_is_that_of_trying_all(h200: Calibration):
    one_of = {"attention": ["sdpa"], "ops": ["plain"], "adamw": ["fused"], "update": ["after_backward"]}
    named = {**SMALL, **one_of, "recompute": ["none", "block"], "compile": ["none"], "bucket_mib": [None, 25]}
    space = space_of(named, global_batch=8, ranks=[4])
    best = found_in(space, h200, 3.2).best
    assert best is not None
    assert best.time_s == pytest.approx(fastest_by_trying(space, 4, h200, 3.2), rel=1e-9)


def test_no_prediction_is_below_its_bounds(h200: Calibration):
    named = {**SMALL, "precision": ["bf16_autocast", "fp32"], "compile": ["none", "block"], "recompute_every": [1, 2]}
    few = {**named, "recompute_every": [1], "recompute": ["selective"], "narrow_blocks": [0, 1, 2]}
    bounds = Bounds(h200)
    configs = [
        config
        for values in (named, few)
        for some in [every_config(space_of(values, global_batch=8, ranks=[4]), 4)]
        for config in some[:: len(some) // 40]
    ]
    for config in configs:
        assert bounds.time_s(config) <= step_time(config, h200).step.time_s * (1 + 1e-9), config
        prediction = predict(config, steps=2)
        assert bounds.bytes(config) <= prediction.needed_bytes, config
        assert bounds.sure_bytes(config) <= prediction.high_bytes, config


def test_the_bound_of_kept_bytes_is_their_formula(h200: Calibration):
    from trainstep.plan.activations import kept_bytes

    spaces = [
        space_of({**SMALL, **values}, global_batch=None, ranks=[1])
        for values in ({"recompute_every": [1, 2]}, {"recompute": ["selective"], "narrow_blocks": [1, 2]})
    ]
    for run in (run for space in spaces for run in space.runs(1)):
        assert Bounds(h200).kept_bytes(run) == sum(kept_bytes(run).values())


def test_no_single_change_is_better_and_the_frontier_falls(h200: Calibration):
    space = space_of(SMALL, global_batch=8, ranks=[2])
    found = found_in(space, h200, 80)
    assert found.best is not None
    assert found.frontier[0] is found.best
    assert all(one.time.step.time_s >= found.best.time_s for one in found.alternatives)
    for before, after in zip(found.frontier, found.frontier[1:], strict=False):
        assert after.time_s > before.time_s
        assert after.needed_bytes < before.needed_bytes
    assert found.runner_up is not None
    assert found.runner_up.time_s > found.best.time_s


def test_the_leanest_needs_less_than_the_fastest(h200: Calibration):
    space = space_of({**SMALL, "ops": ["fused"], "attention": ["trainstep"]}, global_batch=8, ranks=[2])
    fastest, leanest = (found_in(space, h200, 80, minimize).best for minimize in ("time", "memory"))
    assert fastest is not None
    assert leanest is not None
    assert leanest.needed_bytes < fastest.needed_bytes
    assert leanest.time_s > fastest.time_s


def test_the_fewest_ranks_are_those_on_which_it_fits(h200: Calibration):
    few = {"recompute": ["none"], "compile": ["none"], "capture": ["none"], "attention": ["sdpa"], "ops": ["plain"]}
    named = {**SMALL, **few, "model": ["large"], "layers": [12], "update": ["after_backward"]}
    space = space_of(named, global_batch=4, ranks=[1, 2, 4])
    found = found_in(space, h200, 6.5, "ranks")
    assert found.best is not None
    assert found.best.config.ranks == 2
    [(ranks, needed_bytes)] = found.fewer_ranks
    assert ranks == 1
    assert needed_bytes > 6.5 * GIB


def test_where_nothing_fits_the_least_memory_is_told(h200: Calibration):
    found = found_in(space_of({**SMALL, "layers": [12]}, global_batch=None, ranks=[1]), h200, 1.5)
    assert found.best is None
    assert found.leanest.needed_bytes > 1.5 * GIB
    assert found.leanest.config.run.update == "in_backward", "it holds no gradients of the whole model"


def test_every_division_of_the_batch_is_the_global_batch():
    space = space_of(SMALL, global_batch=24, ranks=[2])
    divisions = {(run.batch_size, run.accumulation) for run in space.runs(2)}
    assert divisions == {(size, 12 // size) for size in divisors(12)}
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_of_many_divisors_those_next_to_powers_of_two_are_tried():
    sizes = spread(divisors(720_720))
    assert len(divisors(720_720)) == 240
    assert len(sizes) == 16
    assert sizes[:8] == [1, 2, 4, 8, 16, 33, 65, 130]
    assert spread([1, 3, 9]) == [1, 3, 9]


def test_precision_is_chosen_only_among_named_values():
    assert not {"precision", "compute_dtype", "reduce_dtype", "transport"} & FREE.keys()
    space = space_of({"model": ["small"]}, global_batch=None, ranks=[1])
    assert {run.precision for run in space.runs(1)} == {"fp32"}


def test_what_both_steps_share_is_no_doubt(h200: Calibration):
    [run] = space_of(
        {**SMALL, **{name: [FREE[name][0]] for name in FREE}, "capture": ["step", "none"]}, global_batch=None, ranks=[1]
    ).runs(1)[:1]
    config = RanksConfig(ranks=1, sync=every_config(space_of(SMALL, global_batch=None, ranks=[1]), 1)[0].sync, run=run)
    captured = replace(config, run=replace(run, capture="step"))
    same = difference(step_time(captured, h200), step_time(captured, h200))
    assert (same.time_s, same.half_s, same.is_sure) == (0, 0, False)
    recomputed = replace(captured, run=replace(captured.run, recompute="block"))
    slower = difference(step_time(captured, h200), step_time(recomputed, h200))
    assert slower.is_sure
    assert slower.time_s == pytest.approx(sum(part for _, part in slower.terms))
    whole = step_time(recomputed, h200).step
    assert slower.half_s < (whole.high_s - whole.low_s) / 2


def test_another_strategy_keeps_the_options_that_were_named():
    space = space_of({**SMALL, "sync": ["bucketed", "sharded", "flat"], "in_place": [True]}, global_batch=2, ranks=[2])
    bucketed = next(config for config in every_config(space, 2) if config.sync.name == "bucketed")
    changed = {value: config for name, value, config in space.neighbours(bucketed) if name == "sync"}
    assert changed["sharded"].sync.in_place
    assert not changed["flat"].sync.in_place  # it has no buckets
