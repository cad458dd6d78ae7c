"""A calibration: fits and curves of measured points, what is shipped, what is scaled from it, and what it refuses."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from record_maker import a_record
from sources import ROOT, load_script
from trainstep.config.machine import gpu_named
from trainstep.plan.time.calibration import Calibration, calibration_of, data_sheet, scaled_to, shipped
from trainstep.plan.time.fits import Curve, curve_of, nonnegative_fit
from trainstep.plan.time.kernels import Kernel, Kind, matmul, traffic
from trainstep.plan.time.matmul_work import matmul_work
from trainstep.plan.time.stored import read_calibration
from trainstep.records.facts import facts_of
from trainstep.records.record import Record
from trainstep.records.store import Store

SYMBOLS = {"N": 4096, "d": 2560, "f": 10240}
KEY = re.compile(r'"key":"([0-9a-f]{16})"')
H200 = shipped("NVIDIA H200")
assert H200 is not None


def a_calibration(**tables: dict[str, list[object]]) -> Record:
    made: dict[str, dict[str, list[object]]] = {
        "matmuls": {
            "dtype": ["fp32", "fp32"], "m": [100, 200], "n": [100, 200], "k": [100, 200], "batch": [1, 1],
            "time_s": [1e-6 + 2e6 / 1e12, 1e-6 + 16e6 / 1e12],
        },
        "traffic": {"kind": ["contiguous"] * 2, "bytes": [1e3, 1e9], "time_s": [1e-6, 1e-2]},
    }  # fmt: skip
    return replace(a_record(), workload="calibration", facts=facts_of(multiprocessors=1), tables=made | tables)


@pytest.mark.slow
def test_the_shipped_calibration_is_what_its_script_makes(monkeypatch: pytest.MonkeyPatch):
    script = load_script("h200_calibration", monkeypatch)
    assert script.TARGET.read_text() == script.text()


def test_its_points_name_records_that_are_there():
    stored = {key for path in (ROOT / "results/h200").glob("*.jsonl") for key in keys_of(path)}
    assert H200.used
    assert H200.used <= stored


def keys_of(path: Path) -> set[str]:
    return {match[1] for line in path.read_text().splitlines() if (match := KEY.search(line[:200]))}


def test_no_step_that_is_graded_is_among_the_points():
    """Only the files of steps that the script's docstring names give points."""
    names = ("captured", "fused", "precision", "ddp_xl", "numerics", "warmup")
    graded = {key for name in names for key in keys_of(ROOT / "results/h200" / f"{name}.jsonl")}
    # precision measured one step anew of which end_to_end gave the host's time
    assert len(graded & H200.used) <= 1


def test_a_fit_finds_planted_factors_and_never_a_negative_one():
    generator = np.random.default_rng(0)
    rows = np.column_stack([np.ones(20), generator.uniform(1e3, 1e6, 20), generator.uniform(1e9, 1e12, 20)])
    times_s = rows @ np.array([3e-6, 2e-11, 1e-15])
    fit = nonnegative_fit(rows.tolist(), times_s.tolist())
    assert fit.factors == pytest.approx((3e-6, 2e-11, 1e-15), rel=1e-6)
    noisy = times_s * generator.uniform(0.99, 1.01, 20)
    expected, *_ = np.linalg.lstsq(rows / noisy[:, None], np.ones(20), rcond=None)
    assert nonnegative_fit(rows.tolist(), noisy.tolist()).factors == pytest.approx(tuple(expected), rel=1e-3)
    falling = nonnegative_fit([[1.0, 1.0], [1.0, 2.0]], [2.0, 1.0])
    assert min(falling.factors) >= 0


def test_a_curve_is_flat_below_straight_between_and_proportional_above():
    curve = Curve(points=((100, 2.0), (200, 3.0)))
    assert [curve.seconds(nbytes) for nbytes in (1, 100, 150, 200, 400)] == [2, 2, 2.5, 3, 6]
    averaged, spread = curve_of([(100, 1.0), (105, 3.0), (1000, 5.0)])
    assert averaged.points == ((102.5, 2.0), (1000, 5.0))
    assert spread == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("shape", "tiles"),
    [((512, 256 * 33, 1024), 132), ((512, 256 * 33 + 1, 1024), 133)],
    ids=["a full wave", "one column more"],
)
def test_matmuls_run_in_whole_waves(shape: tuple[int, int, int], tiles: int):
    """128 x 256 tiles of 16-bit products: one column more than a wave costs almost another wave, in smaller tiles at least."""
    m, n, k = shape
    work = matmul_work("bf16", m, n, k, 1, 132)
    flops = 2 * m * n * k
    full = 132 * 2 * 128 * 256 * (k + 128)
    assert work >= flops
    if tiles == 132:
        assert work <= full * 1.0001
    else:
        assert work > 1.1 * matmul_work("bf16", m, n - 1, k, 1, 132)


def test_a_cpu_has_no_waves():
    assert matmul_work("fp32", 3, 5, 7, 2, 1) == 2 * 3 * 5 * 7 * 2


def test_large_matmuls_of_h200_take_what_was_measured():
    """matmul_ceiling.jsonl: 1.38 to 1.46 ms."""
    ceiling = matmul("", "n / n / n", "bf16")
    assert 1.2e-3 < H200.kernel_s(ceiling, {"n": 8192}).time_s < 1.46e-3


def test_what_was_not_measured_is_taken_from_its_neighbour_named_and_wider():
    without = replace(H200, traffic={Kind.CONTIGUOUS: H200.traffic[Kind.CONTIGUOUS]})
    estimate = without.kernel_s(traffic("norm", Kind.SOFTMAX, 8, "N d"), SYMBOLS)
    assert estimate.guess == "softmax kernels as contiguous ones"
    assert estimate.spread > H200.kernel_s(traffic("norm", Kind.CONTIGUOUS, 8, "N d"), SYMBOLS).spread
    tf32 = H200.kernel_s(matmul("mlp", "N / f / d", "tf32"), SYMBOLS)
    bf16 = H200.kernel_s(matmul("mlp", "N / f / d", "bf16"), SYMBOLS)
    assert "tf32 matmuls" in tf32.guess
    assert 1.5 < tf32.time_s / bf16.time_s < 2.5
    assert H200.kernel_s(matmul("mlp", "N / f / d", "fp16"), SYMBOLS) == bf16


def test_a_data_sheet_scales_and_widens():
    h100 = scaled_to(gpu_named("h100"))
    add = traffic("add", Kind.CONTIGUOUS, 12, "N f")
    slower, base = h100.kernel_s(add, SYMBOLS), H200.kernel_s(add, SYMBOLS)
    assert slower.time_s / base.time_s == pytest.approx(4.8 / 3.35, rel=0.05)
    given = data_sheet(peak_tflops=990, memory_bytes_per_s=4.8e12)
    assert given.kernel_s(add, SYMBOLS).time_s == pytest.approx(base.time_s, rel=1e-6)
    assert given.extra_spread > h100.extra_spread > H200.extra_spread == 0


def attention_s(calibration: Calibration, implementation: str, context: int) -> float:
    """Both passes of medium's attention, batch 4, in bf16."""
    symbols = {"B": 4, "H": 16, "S": context, "D": 64}
    kinds = (Kind.ATTENTION_FORWARD, Kind.ATTENTION_BACKWARD)
    kernels = [Kernel(kind=kind, op=implementation, shape="B H S S D", element_bytes=2) for kind in kinds]
    return sum(calibration.kernel_s(kernel, symbols).time_s for kernel in kernels)


@pytest.mark.parametrize("context", [256, 1024, 2048, 4096])
def test_torchs_own_attention_takes_what_its_kernels_in_a_step_took(context: int):
    """results/h200/sdpa_kernels.csv, of which the calibration has other heads than medium's."""
    measured_us = 0.0
    with (ROOT / "results/h200/sdpa_kernels.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            case = [row[name] for name in ("size", "context", "precision", "compile", "capture", "attention")]
            if case == ["medium", str(context), "bf16_autocast", "none", "none", "sdpa"]:
                measured_us += float(row["us"]) * int(row["calls"])
    assert attention_s(H200, "sdpa", context) * 1e6 == pytest.approx(measured_us, rel=0.06)
    assert attention_s(H200, "sdpa_flash", context) > 1.2 * attention_s(H200, "sdpa", context)


def test_torchs_own_attention_is_cudnns_on_hopper_alone():
    h100, a100 = (scaled_to(gpu_named(name)) for name in ("h100", "a100-sxm4-80gb"))
    assert attention_s(h100, "sdpa", 2048) == pytest.approx(attention_s(H200, "sdpa", 2048))
    assert attention_s(a100, "sdpa", 2048) == attention_s(a100, "sdpa_flash", 2048)
    assert attention_s(H200, "flash_attn_4", 2048) != attention_s(H200, "sdpa", 2048), "it is not torch's choice"


def test_a_record_becomes_speeds():
    calibration = calibration_of(a_calibration())
    assert calibration.matmuls["fp32"].flops_per_s == pytest.approx(1e12)
    assert calibration.matmuls["fp32"].fixed_s == pytest.approx(1e-6)
    with pytest.raises(ValueError, match="no matmuls in bf16; it has fp32"):
        calibration.kernel_s(matmul("mlp", "N / f / d", "bf16"), SYMBOLS)
    with pytest.raises(ValueError, match="no table of matmuls"):
        calibration_of(a_calibration(matmuls={}))


def test_matmuls_whose_small_ones_were_stopped_have_a_rate_and_a_wide_spread():
    """The smaller of two took longer, which no fixed part explains."""
    table = {"dtype": ["fp32"] * 2, "m": [16, 256], "n": [16, 256], "k": [16, 256], "batch": [1, 1]}
    speed = calibration_of(a_calibration(matmuls={**table, "time_s": [3e-4, 2e-4]})).matmuls["fp32"]
    assert speed.fixed_s == 0
    assert speed.flops_per_s == pytest.approx(2 * 256**3 / 2e-4, rel=0.01)
    assert speed.spread > 0.5


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"traffic": {"kind": ["magic"], "bytes": [1.0], "time_s": [1.0]}}, "'magic' is not a kind of kernel"),
        ({"traffic": {"kind": ["rows"], "bytes": [1.0], "time_s": [0.0]}}, "row 1 of its table traffic has time_s 0.0"),
        (
            {"host": {"what": ["graph"], "time_s": [-1.0], "low_s": [0.0], "high_s": [1.0]}},
            "table host has time_s -1.0",
        ),
    ],
)
def test_impossible_points_are_refused(tables: dict[str, dict[str, list[object]]], words: str):
    with pytest.raises(ValueError, match=words):
        calibration_of(a_calibration(**tables))


def test_a_file_without_a_calibration_is_refused(tmp_path: Path):
    path = tmp_path / "records.jsonl"
    Store(path).append(a_record())
    with pytest.raises(ValueError, match="holds no calibration"):
        read_calibration(path)
    with Store(path).locked():
        Store(path).append(a_calibration())
    read = read_calibration(path)
    assert read.origin == f"measured on {read.name}, {path}"
    assert json.loads(path.read_text().splitlines()[1])["workload"] == "calibration"


def test_a_gpus_calibration_without_the_hosts_costs_is_refused():
    """Its steps would seem to wait for nobody."""
    record = replace(a_calibration(), facts=facts_of(multiprocessors=132))
    with pytest.raises(ValueError, match="no host's cost of backward launch; measure it again"):
        calibration_of(record)
