"""The workload `op` on a GPU: every implementation that runs is accurate; the record has kernels, times and bytes."""

from typing import Any

import pytest

from trainstep.config.op import IMPLEMENTATIONS, OPS, OpConfig
from trainstep.config.parsing import to_plain
from trainstep.measure.harness.failures import CellFailed
from trainstep.measure.op.workload import WORKLOAD

pytestmark = pytest.mark.gpu
SIZES: dict[str, dict[str, int]] = {
    "rms_norm": {"tokens": 512, "width": 1024},
    "add_rms_norm": {"tokens": 512, "width": 1024},
    "rotary": {"tokens": 512, "heads": 8, "key_heads": 2, "head_dim": 64},
    "swiglu": {"tokens": 512, "width": 1024},
    "linear_cross_entropy": {"tokens": 512, "width": 256, "vocabulary": 4096},
    "adamw": {"parameters": 2**20},
}


def measured(op: str, **fields: Any) -> dict[str, Any]:
    config = to_plain(OpConfig(op=op, device="cuda", **{"warmups": 2, "steps": 5, **SIZES[op], **fields}))
    measurement = WORKLOAD.prepare(config, lambda stage: None)
    measurement.take(5)
    return {name: fact.value for name, fact in measurement.finish().facts.items()}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("op", OPS)
def test_every_implementation_is_about_as_accurate_as_plain_pytorch(op: str, implementation: str, dtype: str):
    try:
        facts = measured(op, implementation=implementation, dtype=dtype)
    except CellFailed as error:
        pytest.skip(error.failure.message)
    assert "afterwards_failed" not in facts
    assert facts["has_nan"] == 0
    assert facts["which_ran"]
    assert 0 < facts["device_busy_s"] < 1
    assert facts["peak_bytes"] >= 0
    for name in [name.removeprefix("error_") for name in facts if name.startswith(("error_d", "error_output"))]:
        plain_error = facts["error_same_dtype" if name == "output" else f"error_same_dtype_{name}"]
        assert facts[f"error_{name}"] <= 4 * plain_error + 1e-6, name


@pytest.mark.parametrize("op", OPS)
def test_a_pass_with_a_cold_cache_runs(op: str):
    assert measured(op, l2="cold")["device_busy_s"] > 0


def test_our_loss_needs_less_memory_than_whole_logits():
    ours, eager = (
        measured("linear_cross_entropy", implementation=name, dtype="bf16", tokens=16384, vocabulary=32768)[
            "peak_bytes"
        ]
        for name in ("trainstep", "eager")
    )
    assert ours < eager / 3
