"""The workload `numerics`: a timed step, and the errors and ranges of its precision."""

import json
from typing import Any

import pytest
import torch

from trainstep.config.parsing import build_config, to_plain
from trainstep.measure.harness.workload import Findings, load_workload
from trainstep.measure.numerics.workload import WORKLOAD

SMALL = {"model": "tiny", "d_model": 32, "d_ff": 64, "heads": 2, "context": 8, "batch_size": 2}


def measured(**values: Any) -> Findings:
    stages: list[str] = []
    config = to_plain(build_config("numerics", {"steps": 2, "warmups": 1, **values}))
    measurement = WORKLOAD.prepare(config, stages.append)
    measurement.take(2)
    findings = measurement.finish()
    assert [stage for stage in stages if stage in ("reference", "errors", "sums")] == ["reference", "errors", "sums"]
    return findings


def test_the_workload_numerics_is_found_by_name():
    assert load_workload("numerics") is WORKLOAD


@pytest.mark.parametrize("precision", ["fp32", "bf16_autocast", "fp16_autocast", "bf16"])
def test_the_toy_has_errors_and_dtypes(precision: str):
    findings = measured(model="toy", precision=precision, context=16)
    assert len(findings.samples["step"].values) == 2
    assert len(findings.samples["step"].warmups) == 1
    assert findings.facts["reference"].value == "fp64"
    assert findings.facts["error_logits"].unit == "ratio"
    dtypes = findings.tables["dtypes"]
    assert list(dtypes["module"]) == ["fc1", "relu", "norm", "fc2", "(logits)", "(loss)", "(gradients)"]
    compute = {"fp32": "fp32", "fp16_autocast": "fp16"}.get(precision, "bf16")
    assert dtypes["output"][0] == dtypes["output"][4] == compute
    assert dtypes["output"][6] == ("bf16" if precision == "bf16" else "fp32")
    assert ("ranges" in findings.tables) == ("settled_scale" in findings.facts) == (precision == "fp16_autocast")
    json.dumps({name: dict(columns) for name, columns in findings.tables.items()}, allow_nan=False)


def test_a_scaled_loss_keeps_fp16_gradients_in_range():
    findings = measured(**SMALL, precision="fp16_autocast")
    settled = findings.facts["settled_scale"].value
    assert settled >= findings.facts["gradient_scale"].value == 2.0**16
    assert 1e-5 < findings.facts["error_gradient_median"].value < 1e-2
    ranges = findings.tables["ranges"]
    assert {"blocks.0", "blocks.1", "head"} == set(ranges["layer"])
    lost = sum(ranges["zero_unscaled"]) + sum(ranges["subnormal_unscaled"])
    assert lost > 10 * (sum(ranges["zero_scaled"]) + sum(ranges["subnormal_scaled"]))
    assert sum(ranges["overflow_at_twice"]) > 0
    assert all(0 <= share <= 1 for name, column in ranges.items() if "scale" in name for share in column)


def test_blocks_are_folded_and_the_largest_errors_come_first():
    findings = measured(**SMALL, precision="bf16_autocast")
    modules = list(findings.tables["dtypes"]["module"])
    assert "blocks.0-1.mlp.up" in modules
    assert not [name for name in modules if name.startswith("blocks.0.")]
    errors = [error for error in findings.tables["gradients"]["relative_error"] if error is not None]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] == findings.facts["error_gradient_max"].value


def test_sums_are_of_the_models_own_numbers():
    findings = measured(**SMALL, precision="fp32")
    assert findings.tables["accumulation"]["total"][1] == 9.953125
    assert set(findings.tables["reductions"]["what"]) == {
        "mean of magnitudes",
        "mean of squares",
        "softmax's sum",
        "RMSNorm",
    }


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16_autocast", "fp16_autocast", "bf16"])
def test_gradient_errors_on_a_gpu_are_those_of_the_precision(precision: str):
    findings = measured(model="small", layers=2, precision=precision, context=128, device="cuda")
    bounds = {"fp32": (1e-8, 1e-5), "tf32": (1e-5, 1e-2)}.get(precision, (1e-4, 0.1))
    assert bounds[0] < findings.facts["error_gradient_median"].value < bounds[1]
    torch.set_float32_matmul_precision("highest")


@pytest.mark.gpu
def test_autocast_on_a_gpu_keeps_layer_norm_wide():
    findings = measured(model="toy", precision="fp16_autocast", device="cuda")
    outputs = dict(zip(findings.tables["dtypes"]["module"], findings.tables["dtypes"]["output"], strict=True))
    assert (outputs["fc1"], outputs["norm"], outputs["fc2"], outputs["(loss)"]) == ("fp16", "fp32", "fp16", "fp32")
