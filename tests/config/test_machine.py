"""The data sheets: known values, and the ratios between dtypes that hold for every NVIDIA chip with matrix units."""

import pytest

from trainstep.config.machine import _SPECS, machine_spec, matmul_dtype


def test_the_h200_has_its_published_values():
    spec = machine_spec("NVIDIA H200")
    assert spec is not None
    assert dict(spec.peak_flops) == {"fp32": 67e12, "tf32": 495e12, "bf16": 990e12, "fp16": 990e12}
    assert spec.memory_bytes_per_s == 4.8e12
    assert "data sheet" in spec.source
    assert "dense" in spec.source


@pytest.mark.parametrize(
    "name",
    [
        None,
        "",
        "H200",
        "nvidia h200",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H800",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
    ],
)
def test_an_unknown_chip_has_no_spec(name: str | None):
    assert machine_spec(name) is None


@pytest.mark.parametrize("name", _SPECS)
def test_peaks_of_dtypes_have_the_known_ratios(name: str):
    peaks = _SPECS[name].peak_flops
    assert set(peaks) == {"fp32", "tf32", "bf16", "fp16"}
    assert peaks["bf16"] == peaks["fp16"]
    assert peaks["bf16"] / peaks["tf32"] == pytest.approx(2, rel=0.03), "a value with sparsity, or a mistyped one"
    assert 1 <= peaks["tf32"] / peaks["fp32"] < 15


@pytest.mark.parametrize("name", _SPECS)
def test_values_are_in_si_units(name: str):
    spec = _SPECS[name]
    assert 1e13 < spec.peak_flops["fp32"] < 2e14
    assert 2e11 < spec.memory_bytes_per_s < 1e13
    # FLOPs per byte at which matmul stops waiting for memory: 100 to 450 on every chip here.
    assert 50 < spec.peak_flops["bf16"] / spec.memory_bytes_per_s < 500


@pytest.mark.parametrize(
    ("faster", "slower"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"),
        ("NVIDIA H200", "NVIDIA H200 NVL"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB"),
        ("NVIDIA L40S", "NVIDIA L4"),
        ("NVIDIA GeForce RTX 5090", "NVIDIA GeForce RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3090"),
    ],
)
def test_the_faster_chip_of_a_pair_has_the_larger_values(faster: str, slower: str):
    fast, slow = _SPECS[faster], _SPECS[slower]
    assert fast.peak_flops["bf16"] >= slow.peak_flops["bf16"]
    assert fast.memory_bytes_per_s >= slow.memory_bytes_per_s
    assert (fast.peak_flops["bf16"], fast.memory_bytes_per_s) != (slow.peak_flops["bf16"], slow.memory_bytes_per_s)


def test_a_spec_cannot_be_changed():
    with pytest.raises(TypeError):
        _SPECS["NVIDIA H200"].peak_flops["bf16"] = 1.0  # type: ignore[index]


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", "fp32"), ("tf32", "tf32"), ("bf16", "bf16"), ("bf16_autocast", "bf16"), ("fp16_autocast", "fp16")],
)
def test_each_precision_is_compared_with_the_peak_of_its_dtype(precision: str, dtype: str):
    assert matmul_dtype(precision) == dtype
