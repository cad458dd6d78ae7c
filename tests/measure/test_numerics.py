"""The workload `numerics`: a timed step and, beside it, what the precision did to the numbers."""

import json
from typing import Any

import pytest
import torch

from trainstep.config.parsing import build_config, to_plain
from trainstep.measure.numerics import WORKLOAD
from trainstep.measure.workload import Findings, load_workload

SMALL = {"model": "tiny", "d_model": 32, "d_ff": 64, "heads": 2, "context": 8, "batch_size": 2}


def measured(**values: Any) -> Findings:
    stages: list[str] = []
    config = to_plain(build_config("numerics", {"steps": 2, "warmups": 1, **values}))
    measurement = WORKLOAD.prepare(config, stages.append)
    measurement.take(2)
    found = measurement.finish()
    assert [stage for stage in stages if stage in ("reference", "errors", "sums")] == ["reference", "errors", "sums"]
    return found


def test_it_is_the_workload_numerics():
    assert load_workload("numerics") is WORKLOAD


@pytest.mark.parametrize("precision", ["fp32", "bf16_autocast", "fp16_autocast", "bf16"])
def test_the_toy(precision: str):
    found = measured(model="toy", precision=precision, context=16)
    assert len(found.samples["step"].values) == 2
    assert len(found.samples["step"].warmups) == 1
    assert found.facts["reference"].value == "fp64"
    assert found.facts["error_logits"].unit == "ratio"
    dtypes = found.tables["dtypes"]
    assert list(dtypes["module"]) == ["fc1", "relu", "norm", "fc2", "(logits)", "(loss)", "(gradients)"]
    compute = {"fp32": "fp32", "fp16_autocast": "fp16"}.get(precision, "bf16")
    assert dtypes["output"][0] == dtypes["output"][4] == compute
    assert dtypes["output"][6] == ("bf16" if precision == "bf16" else "fp32")
    assert ("ranges" in found.tables) == ("settled_scale" in found.facts) == (precision == "fp16_autocast")
    json.dumps({name: dict(columns) for name, columns in found.tables.items()}, allow_nan=False)


def test_fp16_with_a_scaled_loss():
    found = measured(**SMALL, precision="fp16_autocast")
    settled = found.facts["settled_scale"].value
    assert settled >= found.facts["gradient_scale"].value == 2.0**16
    assert 1e-5 < found.facts["error_gradient_median"].value < 1e-2
    ranges = found.tables["ranges"]
    assert {"blocks.0", "blocks.1", "head"} == set(ranges["layer"])
    lost = sum(ranges["zero_unscaled"]) + sum(ranges["subnormal_unscaled"])
    assert lost > 10 * (sum(ranges["zero_scaled"]) + sum(ranges["subnormal_scaled"]))
    assert sum(ranges["overflow_at_twice"]) > 0
    assert all(0 <= share <= 1 for name, column in ranges.items() if "scale" in name for share in column)


def test_blocks_are_folded_and_worst_come_first():
    found = measured(**SMALL, precision="bf16_autocast")
    modules = list(found.tables["dtypes"]["module"])
    assert "blocks.0-1.mlp.up" in modules
    assert not [name for name in modules if name.startswith("blocks.0.")]
    errors = [error for error in found.tables["gradients"]["relative_error"] if error is not None]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] == found.facts["error_gradient_max"].value


def test_sums_are_of_the_models_own_numbers():
    found = measured(**SMALL, precision="fp32")
    assert found.tables["accumulation"]["total"][1] == 9.953125
    assert set(found.tables["reductions"]["what"]) == {
        "mean of magnitudes",
        "mean of squares",
        "softmax's sum",
        "RMSNorm",
    }


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16_autocast", "fp16_autocast", "bf16"])
def test_on_a_gpu(precision: str):
    found = measured(model="small", layers=2, precision=precision, context=128, device="cuda")
    bounds = {"fp32": (1e-8, 1e-5), "tf32": (1e-5, 1e-2)}.get(precision, (1e-4, 0.1))
    assert bounds[0] < found.facts["error_gradient_median"].value < bounds[1]
    torch.set_float32_matmul_precision("highest")


@pytest.mark.gpu
def test_autocast_on_a_gpu_keeps_layer_norm_wide():
    found = measured(model="toy", precision="fp16_autocast", device="cuda")
    outputs = dict(zip(found.tables["dtypes"]["module"], found.tables["dtypes"]["output"], strict=True))
    assert (outputs["fc1"], outputs["norm"], outputs["fc2"], outputs["(loss)"]) == ("fp16", "fp32", "fp16", "fp32")
