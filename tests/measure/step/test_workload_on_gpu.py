"""The workload train_step on a GPU: facts, clocks, no synchronisation inside a step, and out-of-memory failures."""

import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from measured_step import PHASES, forget_compilations, lengths, measured, prepare, values_of
from trainstep.config.model import ModelConfig
from trainstep.config.run import MODES, Phase, RunConfig
from trainstep.measure.harness.failures import CellFailed
from trainstep.measure.harness.workload import use_compile_cache
from trainstep.measure.step.clock import EventClock
from trainstep.training.build import build_step

pytestmark = pytest.mark.gpu

GPU_MODEL = ModelConfig(d_model=256, d_ff=1024, layers=4, heads=4, vocab_size=1_000)


@pytest.fixture(autouse=True)
def empty_memory() -> Iterator[None]:
    """Free cached memory, and memory that an error's frames refer to, as a new process would have none."""
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.set_float32_matmul_precision("highest")


def on_gpu(**fields: Any) -> dict[str, Any]:
    return {"model": GPU_MODEL, "device": "cuda", "batch_size": 4, "context": 128, "attention": "plain", **fields}


@pytest.mark.parametrize("sync", ["step", 2])
def test_facts_on_a_gpu_are_consistent(sync: str | int):
    findings = measured(**on_gpu(sync=sync))
    windows = 4 if sync == "step" else 2
    per_window = dict.fromkeys(["step", "enqueue", "device_allocations"], (windows, 2))
    assert per_window.items() <= lengths(findings).items()
    assert lengths(findings)["forward"] == (4, 2)
    facts = values_of(findings)
    assert facts["timing"] == "cuda_events"
    assert 0 < facts["device_busy_s"] <= 1.2 * max(findings.samples["step"].values)
    assert isinstance(facts["launch_bound"], bool)
    assert 0 < facts["peak_allocated_bytes"] <= facts["peak_reserved_bytes"]
    assert facts["peak_allocated_bytes"] > 16 * GPU_MODEL.parameters, "weights, gradients, two moments in fp32"
    assert facts["context_s"] > 0
    assert facts["reallocated_step_s"] > 0
    assert all(e <= s for e, s in zip(findings.samples["enqueue"].values, findings.samples["step"].values, strict=True))
    assert findings.samples["device_allocations"].values[-1] == 0, "a warm step allocates from the cache"
    assert findings.samples["device_allocations"].warmups[0] > 0
    phases = sum(sum(findings.samples[name].values) for name in ("forward", "backward", "optimizer"))
    assert phases <= 4 / windows * sum(findings.samples["step"].values)


def test_the_drivers_readings_are_plausible():
    findings = measured(**on_gpu())
    facts = values_of(findings)
    if "sm_clock" not in findings.samples:
        pytest.skip("NVML does not answer here")
    assert lengths(findings)["sm_clock"] == (4, 2)
    assert 1e8 < min(findings.samples["sm_clock"].values) <= facts["sm_clock_max_hz"] < 5e9
    assert 10 < facts["power_w"] < 2000
    assert 5 < facts["temperature_c"] < 120
    assert isinstance(facts["throttle_reasons"], str)


@pytest.mark.parametrize("mode", MODES)
def test_synchronised_phases_are_timed_by_the_host(mode: str):
    findings = measured(**on_gpu(mode=mode, sync="phase"))
    assert {name: n for name, n in lengths(findings).items() if name in PHASES["step"]} == dict.fromkeys(
        PHASES[mode], (4, 2)
    )
    facts = values_of(findings)
    assert facts["timing"] == "host_clock"
    assert "enqueue" not in findings.samples
    assert "launch_bound" not in facts


def test_events_and_host_clock_agree():
    """Phases here are long beside a synchronisation, except the optimizer's, which the host's clock can only make longer."""
    model = ModelConfig(d_model=1024, d_ff=4096, layers=4, heads=8, vocab_size=1_000)
    fields = on_gpu(model=model, batch_size=16, context=512, steps=10)
    by_events, by_host = (measured((10,), **{**fields, "sync": sync}) for sync in ("step", "phase"))
    for name in PHASES["step"]:
        on_device_s, on_host_s = (sorted(findings.samples[name].values)[5] for findings in (by_events, by_host))
        assert on_host_s > 0.8 * on_device_s, name
        assert name == "optimizer" or on_host_s == pytest.approx(on_device_s, rel=0.25), name


@pytest.mark.parametrize("precision", ["fp32", "bf16_autocast"])
@pytest.mark.parametrize("fields", [{}, {"accumulation": 2, "clip_grad_norm": 1.0, "adamw": "foreach"}])
def test_no_synchronisation_inside_a_step(precision: str, fields: dict[str, Any]):
    assembly = build_step(RunConfig(**on_gpu(precision=precision, **fields)))
    clock = EventClock()
    for guarded in (False, True):
        batches = assembly.micro_batches(0)
        clock.start_window()
        torch.cuda.set_sync_debug_mode("error" if guarded else "default")
        try:
            clock.start_step()
            assembly.step(batches, clock.mark)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        window = clock.stop_window()
    assert list(window.phases[0]) == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]


@pytest.mark.parametrize("mode", ["forward", "step"])
def test_cuda_out_of_memory_has_bytes_and_holders(mode: str):
    absurd = on_gpu(mode=mode, batch_size=4096, context=4096)  # the scores of plain attention: a TiB per layer
    with pytest.raises(CellFailed) as caught:
        prepare(**absurd)
    failed = caught.value.failure
    assert (failed.kind, failed.phase) == ("out_of_memory", "forward")
    assert failed.asked_bytes > 2**30
    assert failed.capacity_bytes == torch.cuda.get_device_properties(0).total_memory
    holders = {holder.name: holder.bytes for holder in failed.holders}
    assert holders["parameters"] == 4 * GPU_MODEL.parameters
    assert holders["activations and temporaries"] > 0
    assert failed.allocated_bytes == sum(holders.values())


def test_cuda_works_after_running_out_of_memory():
    with pytest.raises(CellFailed):
        prepare(**on_gpu(batch_size=4096, context=4096))
    gc.collect()  # the error's frames refer to the tensors that filled the memory
    torch.cuda.empty_cache()
    assert math.isfinite(values_of(measured(**on_gpu()))["loss"])


@pytest.mark.parametrize(
    "fields", [{"nvtx": True}, {"precision": "tf32"}, {"precision": "fp16_autocast"}, {"precision": "bf16"}]
)
def test_more_options_run_on_a_gpu(fields: dict[str, Any]):
    assert math.isfinite(values_of(measured(**on_gpu(**fields)))["loss"])


def test_a_cold_compile_on_a_gpu_is_in_the_first_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    forget_compilations()
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "set anew below, put back afterwards")
    use_compile_cache(str(tmp_path))
    findings = measured(**on_gpu(compile="block", cold_compile=True))
    facts = values_of(findings)
    assert facts["compile_s"] > 0
    assert facts["compile_cache"] == "cold"
    assert findings.samples["step"].warmups[0] > facts["compile_s"] / 2
