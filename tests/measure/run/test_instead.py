"""The other way of a pattern is timed alone, on random tensors of the step's shapes, and leaves the script as it is."""

import contextlib
import functools
import time

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.flop_counter import FlopCounterMode

from trainstep.measure.run import instead
from trainstep.measure.run.instead import seconds_instead
from trainstep.traces.patterns.pattern import ATTENTION, MASK, OPTIMIZER, Instead, Pattern
from trainstep.traces.patterns.table import Patterns

HEADS = ((2, 4, 48, 16),) * 3


def patterns(*ways: Instead, name: str = ATTENTION, steps: int = 1) -> Patterns:
    pattern = Pattern(name=name, calls=1, costs={}, least_ns=1.0, what="", instead=ways)
    return Patterns(patterns=(pattern,), steps=steps)


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


WAYS = [
    (ATTENTION, Instead("attention", HEADS, "float", 1, 1)),
    (ATTENTION, Instead("masked attention", HEADS, "c10::BFloat16", 2, 1)),
    (ATTENTION, Instead("causal attention", HEADS, "float", 1)),
    (OPTIMIZER, Instead("AdamW", ((64, 32), (3,), ()) * 5, "float", 1)),
]
SURROUNDINGS = [
    torch.no_grad,
    torch.inference_mode,
    functools.partial(torch.autocast, "cpu", torch.bfloat16),
    functools.partial(torch.device, "meta"),
    default_dtype,
    functools.partial(FlopCounterMode, display=False),
]


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
@pytest.mark.parametrize(("name", "way"), WAYS)
def test_each_way_is_timed_whatever_the_script_has_set_and_nobody_notices(name, way, surrounding):
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    seen = []  # by whoever follows optimizers' steps
    following = register_optimizer_step_post_hook(lambda *_: seen.append("a step"))
    with surrounding() as entered:
        seconds = seconds_instead(patterns(way, name=name))
    following.remove()
    assert set(seconds) == {name}
    assert seconds[name] > 0
    assert seen == []
    assert torch.equal(torch.random.get_rng_state(), before)
    if isinstance(entered, FlopCounterMode):
        assert entered.get_total_flops() == 0


def test_times_are_per_step_and_of_all_shapes_together(monkeypatch):
    monkeypatch.setattr(instead, "_median_s", lambda run, **_: run() or 1.0)
    ways = Instead("attention", HEADS, "float", 6, 6), Instead("attention", ((2, 4, 20, 16), *HEADS[1:]), "float", 3)
    assert seconds_instead(patterns(*ways, steps=3)) == {ATTENTION: 3.0}


def test_a_long_run_is_timed_once(monkeypatch):
    runs = []
    monkeypatch.setattr(instead, "_LONGEST_S", 0.0)
    assert instead._median_s(lambda: runs.append(time.sleep(0.01))) >= 0.01
    assert len(runs) == 2
    monkeypatch.setattr(instead, "_LONGEST_S", 1e9)
    assert instead._median_s(lambda: runs.append(None)) > 0
    assert len(runs) == 2 + 6


def test_what_was_recomputed_has_more_forwards_than_backwards(monkeypatch):
    monkeypatch.setattr(instead, "_attention", lambda way, *, backward: 3.0 if backward else 1.0)
    monkeypatch.setattr(instead, "_median_s", lambda run: run)
    assert seconds_instead(patterns(Instead("attention", HEADS, "float", 4, 2))) == {ATTENTION: 2 * 1.0 + 2 * 3.0}


def test_what_is_too_large_or_unknown_or_fails_is_left_to_the_formula(monkeypatch):
    small, large = (
        Instead("attention", HEADS, "float", 1, 1),
        Instead("attention", ((64, 64, 4096, 128),) * 3, "float", 1),
    )
    assert seconds_instead(patterns(small, large)) == {}
    assert seconds_instead(patterns(Instead("attention", HEADS, "c10::Float8_e4m3fn", 1))) == {}
    assert seconds_instead(patterns(Instead("attention", ((2, 4, 48, 16), *((2, 4, 48, 8),) * 2), "float", 1))) == {}
    assert seconds_instead(patterns(name=MASK)) == {}

    def fail(*_, **__):
        raise RuntimeError("no memory")

    monkeypatch.setattr(instead, "_median_s", fail)
    assert seconds_instead(patterns(small)) == {}
