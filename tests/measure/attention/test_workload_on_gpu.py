"""The workload `attention` on a GPU: every peer that takes the case is accurate; the record has kernels, times and bytes."""

import statistics
from typing import Any

import pytest

from trainstep.config.attention import DIRECTIONS, IMPLEMENTATIONS, AttentionConfig
from trainstep.config.parsing import to_plain
from trainstep.measure.attention.workload import WORKLOAD
from trainstep.measure.harness.failures import CellFailed
from trainstep.measure.harness.workload import Findings

pytestmark = pytest.mark.gpu
SHAPE = {"batch": 2, "heads": 4, "seq": 512, "head_dim": 64, "device": "cuda", "warmups": 2, "steps": 5}


def measured(**fields: Any) -> Findings:
    measurement = WORKLOAD.prepare(to_plain(AttentionConfig(**{**SHAPE, **fields})), lambda stage: None)
    measurement.take(5)
    return measurement.finish()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_peer_is_as_accurate_as_plain_attention(implementation: str, direction: str):
    try:
        facts = measured(implementation=implementation, dtype="bf16", direction=direction).facts
    except CellFailed as error:
        pytest.skip(error.failure.message)
    assert "afterwards_failed" not in facts
    assert facts["has_nan"].value == 0
    assert facts["which_ran"].value
    assert 0 < facts["device_busy_s"].value < 1
    assert facts["peak_bytes"].value >= facts["inputs_bytes"].value + facts["output_bytes"].value
    names = ["output"] if direction == "forward" else ["output", "dq", "dk", "dv"]
    for name in names:
        plain_error = facts["error_same_dtype" if name == "output" else f"error_same_dtype_{name}"].value
        assert facts[f"error_{name}"].value <= 3 * plain_error, name


def test_ours_names_its_kernels_and_is_deterministic():
    facts = measured(dtype="bf16").facts
    assert "forward_kernel" in facts["which_ran"].value or "gradients_kernel" in facts["which_ran"].value
    assert facts["deterministic"].value == 1
    assert facts["held_bytes"].value == facts["output_bytes"].value + facts["lse_bytes"].value


def test_a_long_kernel_outlasts_its_launch():
    findings = measured(dtype="bf16", seq=8192, direction="forward")
    time_s = statistics.median(findings.samples["time_s"].values)
    assert time_s >= 0.8 * findings.facts["device_busy_s"].value
    assert statistics.median(findings.samples["host_s"].values) < time_s, "a long kernel outlasts its launch"
    assert not findings.facts["launch_bound"].value


def test_a_pass_with_a_cold_cache_is_not_faster():
    hot, cold = (
        statistics.median(measured(dtype="bf16", direction="forward", l2=l2).samples["time_s"].values)
        for l2 in ("hot", "cold")
    )
    assert cold > 0.8 * hot


def test_a_peer_without_a_kernel_says_why():
    with pytest.raises(CellFailed, match="sdpa_flash does not take this case") as caught:
        measured(implementation="sdpa_flash", dtype="bf16", head_dim=512)
    assert caught.value.failure.kind == "unsupported"


def test_tiles_of_the_config_are_accurate():
    facts = measured(dtype="bf16", block_q=64, block_k="rule").facts
    assert facts["error_output"].value <= 2 * facts["error_same_dtype"].value


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3", "fp16x3"])
def test_every_fp32_precision_is_accurate(precision: str):
    facts = measured(fp32_precision=precision).facts
    assert facts["error_output"].value < (2e-3 if precision == "tf32" else 1e-5)


def test_memory_that_runs_out_keeps_what_was_needed():
    with pytest.raises(CellFailed) as caught:
        measured(implementation="plain", heads=64, seq=131072, dtype="bf16")
    assert caught.value.failure.kind == "out_of_memory"
    assert caught.value.facts["needed_bytes"].value > 2 * 64 * 131072**2 * 2
    measured(implementation="trainstep", dtype="bf16")  # the next pass has room


def test_the_longest_sequence_is_checked_in_chunks():
    facts = measured(batch=1, heads=1, seq=65536, head_dim=128, dtype="bf16", steps=2).facts
    assert facts["error_checked"].value.startswith("1 of 1")
    assert facts["error_output"].value <= 2 * facts["error_same_dtype"].value
