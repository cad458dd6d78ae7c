"""Ceilings of matmuls and copies, on a CPU and on a GPU, and the precision and operands that they are measured with."""

import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from trainstep.config.collective import KINDS, CeilingConfig
from trainstep.config.parsing import to_plain
from trainstep.costs.transformer import copied_bytes, counted, matmul_flops
from trainstep.measure.harness.workload import Findings, load_workload
from trainstep.measure.step import ceilings
from trainstep.measure.step.ceilings import WORKLOAD


def measured(stages: list[str] | None = None, turns: tuple[int, ...] = (3,), **fields: Any) -> Findings:
    config = to_plain(CeilingConfig(**{"warmups": 2, "n": 64, "mib": 1, **fields}))
    measurement = WORKLOAD.prepare(config, (stages if stages is not None else []).append)
    for steps in turns:
        measurement.take(steps)
    return measurement.finish()


@pytest.fixture
def operands(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[torch.Tensor, torch.Tensor, str]]]:
    """The operands of every torch.mm, and the float32 precision that it ran at."""
    calls: list[tuple[torch.Tensor, torch.Tensor, str]] = []
    real = torch.mm

    def spy(left: torch.Tensor, right: torch.Tensor, **named: Any) -> torch.Tensor:
        calls.append((left, right, torch.get_float32_matmul_precision()))
        return real(left, right, **named)

    monkeypatch.setattr(torch, "mm", spy)
    return calls


def test_the_workload_ceiling_is_found_by_name():
    assert load_workload("ceiling") is WORKLOAD
    assert WORKLOAD.shares_worker


def test_a_matmul_has_times_flops_and_a_rate():
    stages: list[str] = []
    findings = measured(stages, turns=(3, 2), kind="matmul", dtype="fp32")
    time = findings.samples["time"]
    assert (time.unit, len(time.values), len(time.warmups)) == ("s", 5, 2)
    assert all(value > 0 for value in (*time.values, *time.warmups))
    assert (findings.facts["flops"].value, findings.facts["flops"].unit) == (2 * 64**3, "flops")
    rate = findings.facts["rate"]
    assert (rate.value, rate.unit) == (pytest.approx(2 * 64**3 / statistics.median(time.values)), "flop/s")
    assert "2 n^3" in findings.facts["counted"].value
    assert findings.facts["timing"].value == "host_clock"
    assert stages == ["build", "warmup", "matmul", "matmul"]


def test_a_copy_counts_reads_and_writes():
    findings = measured(kind="copy", mib=1)
    assert (findings.facts["bytes"].value, findings.facts["bytes"].unit) == (2 * 2**20, "bytes")
    assert findings.facts["rate"].unit == "bytes/s"
    assert "flops" not in findings.facts


def test_flops_and_bytes_are_counted_by_kind():
    assert matmul_flops(10) == 2000
    assert copied_bytes("copy", 3) == 2 * copied_bytes("host_to_device", 3) == 6 * 2**20
    assert len({counted(kind) for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_operands_are_normal_seeded_and_of_the_dtype(operands: Any, dtype: str):
    measured(kind="matmul", dtype=dtype, seed=7)
    measured(kind="matmul", dtype=dtype, seed=7)
    measured(kind="matmul", dtype=dtype, seed=8)
    left, right, _ = operands[0]
    assert left.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert not torch.equal(left, right)
    assert abs(left.float().mean()) < 0.1
    assert left.float().std() == pytest.approx(1, abs=0.1)
    assert torch.equal(left, operands[5][0])
    assert not torch.equal(left, operands[10][0])


@pytest.mark.parametrize(("dtype", "during"), [("fp32", "highest"), ("tf32", "high"), ("bf16", "highest")])
def test_float32_precision_is_set_and_restored(operands: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, during: str):
    config = CeilingConfig(dtype="fp32", n=8, warmups=1)
    object.__setattr__(config, "dtype", dtype)  # a config with tf32 on a CPU is refused
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        ceilings.CeilingMeasurement(config, ceilings._matmul(config), lambda stage: None, []).take(1)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert {precision for _, _, precision in operands} == {during}


def test_precision_is_restored_after_an_error():
    def fails() -> None:
        raise RuntimeError("out of memory")

    before = torch.get_float32_matmul_precision()
    changed = "medium" if before != "medium" else "high"
    torch.set_float32_matmul_precision(changed)
    try:
        config = CeilingConfig(dtype="fp32", warmups=1)
        with pytest.raises(RuntimeError, match="out of memory"):
            ceilings.CeilingMeasurement(config, fails, lambda stage: None, []).take(1)
        assert torch.get_float32_matmul_precision() == changed
    finally:
        torch.set_float32_matmul_precision(before)


def test_no_steps_gives_no_rate():
    findings = measured(turns=(), kind="matmul")
    assert findings.samples["time"].values == ()
    assert "rate" not in findings.facts


def test_an_absent_peer_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="peer: there is no GPU 3"):
        measured(kind="peer_copy", device="cuda", peer=3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["matmul", "copy", "host_to_device", "device_to_host"])
def test_a_gpu_is_timed_by_events(kind: str):
    findings = measured(kind=kind, device="cuda", n=4096, mib=256, dtype="bf16" if kind == "matmul" else "fp32")
    assert findings.facts["timing"].value == "cuda_events"
    assert 1e9 < findings.facts["rate"].value < 1e16


@pytest.mark.gpu
def test_tf32_is_faster_than_fp32():
    rates = {
        dtype: measured(kind="matmul", device="cuda", n=4096, dtype=dtype).facts["rate"] for dtype in ("fp32", "tf32")
    }
    assert rates["tf32"].value > 1.2 * rates["fp32"].value or torch.cuda.get_device_capability() < (8, 0)


@pytest.mark.multigpu
def test_a_copy_between_gpus_names_its_route():
    findings = measured(kind="peer_copy", device="cuda", mib=256)
    assert findings.facts["route"].value in ("peer to peer", "through host memory")
    assert findings.facts["rate"].value > 1e9
