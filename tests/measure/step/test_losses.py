"""The losses of the steps before the timed ones: a captured step, whose first steps are its own, has the same ones in order."""

import math

import pytest

from trainstep.config.parsing import build_run
from trainstep.measure.step.workload import TrainStepMeasurement, prepare_step


def measured(**options: object) -> TrainStepMeasurement:
    run = build_run({"model": "tiny", "batch_size": 1, "context": 8, "steps": 1, **options})
    return prepare_step(run, lambda _stage: None)


def test_the_first_losses_of_a_captured_step_are_those_of_an_eager_one():
    eager, captured = (_losses(measured(warmups=6, capture=capture)) for capture in ("none", "auto"))
    assert len(eager) == 6
    assert len(captured) > 6, "capture takes steps of its own before the warm-ups"
    assert captured[:6] == pytest.approx(eager, rel=1e-6)
    assert len(set(eager)) == 6, "each step has a batch of its own"


def test_without_steps_before_the_timed_ones_there_is_no_table():
    timed = measured(warmups=0)
    timed.take(1)
    assert "losses" not in timed.finish().tables


def test_a_loss_that_is_not_finite_is_none():
    assert None in _losses(measured(warmups=3, learning_rate=1e38))


def _losses(timed: TrainStepMeasurement) -> list[float | None]:
    timed.take(1)
    found: list[float | None] = list(timed.finish().tables["losses"]["loss"])
    assert all(loss is None or math.isfinite(loss) for loss in found)
    return found
