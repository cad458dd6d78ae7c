"""Rates and MFU agree with numbers computed by hand; None or an error where no number would be right."""

from dataclasses import replace

import pytest

from record_maker import ENVIRONMENT, a_record, seconds
from trainstep.records.derive import mfu, model_flops_per_s, step_s, tokens_per_s
from trainstep.records.record import Fact, Failure, Record

FACTS = {"tokens": 1024, "model_flops": 99e12, "flops_dtype": "bf16", "flops_convention": "matmuls only"}


def on_gpu(step=(0.2, 0.1, 0.9, 0.2, 0.2), gpu="NVIDIA H200", **changes) -> Record:
    """99 TFLOPs in a median of 0.2 s: 495 TFLOP/s, half of an H200's 990 in bf16."""
    values = {**FACTS, **changes.pop("facts", {})}
    given = {
        "config": {"device": "cuda"},
        "environment": replace(ENVIRONMENT, gpu=gpu),
        "samples": {"step": seconds(step, warmups=(50.0,))},
        "facts": {name: Fact(value=value) for name, value in values.items() if value is not None},
    }
    return a_record(**{**given, **changes})


def test_rates_are_those_of_the_median_step():
    assert step_s(on_gpu()) == 0.2
    assert tokens_per_s(on_gpu()) == pytest.approx(5120)
    assert model_flops_per_s(on_gpu()) == pytest.approx(495e12)


def test_mfu_has_its_convention_its_peak_and_the_source_of_the_peak():
    utilization = mfu(on_gpu())
    assert (utilization.share, utilization.peak_flops) == (pytest.approx(0.5), 990e12)
    assert (utilization.convention, utilization.dtype) == ("matmuls only", "bf16")
    assert utilization.peak_source == "NVIDIA H200 data sheet, dense"


@pytest.mark.parametrize(("dtype", "share"), [("bf16", 0.099 / 0.990), ("tf32", 0.099 / 0.495)])
def test_mfu_takes_the_peak_of_the_dtype(dtype, share):
    assert mfu(on_gpu([1.0], facts={"flops_dtype": dtype})).share == pytest.approx(share)


@pytest.mark.parametrize(
    "record",
    [
        on_gpu(gpu="NVIDIA H300"),
        on_gpu(gpu=None),
        on_gpu(config={"device": "cpu"}),
        on_gpu(facts={"flops_dtype": "fp8"}),
        on_gpu(facts={"flops_dtype": None}),
        on_gpu(facts={"model_flops": None}),
        on_gpu(samples={}),
        on_gpu(step=()),
        on_gpu(failure=Failure(kind="timeout", phase="forward", message="Hung.")),
    ],
    ids=["unknown gpu", "no gpu", "cpu run", "no peak", "no dtype", "no FLOPs", "no step", "no values", "failed"],
)
def test_mfu_is_none_where_a_needed_number_is_missing(record):
    assert mfu(record) is None


@pytest.mark.parametrize("step", [(0.0999,), (0.05,) * 9])
def test_mfu_over_one_is_an_error_that_names_both_numbers(step):
    with pytest.raises(ValueError, match=r"MFU of [12].*9\.9e\+13 FLOPs in 0\.\d+ s .* H200 SXM in bf16.*FLOP count"):
        mfu(on_gpu(step))


def test_mfu_of_exactly_one_is_allowed():
    assert mfu(on_gpu([0.1])).share == pytest.approx(1)


def test_rates_are_none_where_there_is_no_step_or_no_amount():
    failed = on_gpu(failure=Failure(kind="crash", phase="backward", message="Died."))
    for record in (on_gpu(samples={}), on_gpu(step=()), on_gpu(step=(0.0, 0.0)), failed):
        assert (tokens_per_s(record), model_flops_per_s(record)) == (None, None)
    assert tokens_per_s(on_gpu(facts={"tokens": None})) is None
