"""The workload train_step on a GPU: its facts, its clocks, no synchronisation of its own, and memory running out."""

import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from measured_step import PHASES, forget_compilations, lengths, measured, prepare, values_of
from trainstep.config.model import ModelConfig
from trainstep.config.phases import Phase
from trainstep.config.run import MODES, RunConfig
from trainstep.measure.clock import EventClock
from trainstep.measure.compilation import use_compile_cache
from trainstep.measure.failures import CellFailed
from trainstep.training.build import build_step

pytestmark = pytest.mark.gpu

GPU_MODEL = ModelConfig(d_model=256, d_ff=1024, layers=4, heads=4, vocab_size=1_000)


@pytest.fixture(autouse=True)
def empty_memory() -> Iterator[None]:
    """As in a process of its own: nothing cached, and nothing that an error's frames still hold."""
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.set_float32_matmul_precision("highest")


def on_gpu(**fields: Any) -> dict[str, Any]:
    return {"model": GPU_MODEL, "device": "cuda", "batch_size": 4, "context": 128, "attention": "plain", **fields}


@pytest.mark.parametrize("sync", ["step", 2])
def test_facts_on_a_gpu(sync: str | int):
    found = measured(**on_gpu(sync=sync))
    windows = 4 if sync == "step" else 2
    per_window = dict.fromkeys(["step", "enqueue", "device_allocations"], (windows, 2))
    assert per_window.items() <= lengths(found).items()
    assert lengths(found)["forward"] == (4, 2)
    facts = values_of(found)
    assert facts["timing"] == "cuda_events"
    assert 0 < facts["device_busy_s"] <= 1.2 * max(found.samples["step"].values)
    assert isinstance(facts["launch_bound"], bool)
    assert 0 < facts["peak_allocated_bytes"] <= facts["peak_reserved_bytes"]
    assert facts["peak_allocated_bytes"] > 16 * GPU_MODEL.parameters, "weights, gradients, two moments in fp32"
    assert facts["context_s"] > 0
    assert facts["reallocated_step_s"] > 0
    assert all(e <= s for e, s in zip(found.samples["enqueue"].values, found.samples["step"].values, strict=True))
    assert found.samples["device_allocations"].values[-1] == 0, "a warm step allocates from the cache"
    assert found.samples["device_allocations"].warmups[0] > 0
    phases = sum(sum(found.samples[name].values) for name in ("forward", "backward", "optimizer"))
    assert phases <= 4 / windows * sum(found.samples["step"].values)


def test_readings_of_the_driver():
    found = measured(**on_gpu())
    facts = values_of(found)
    if "sm_clock" not in found.samples:
        pytest.skip("NVML does not answer here")
    assert lengths(found)["sm_clock"] == (4, 2)
    assert 1e8 < min(found.samples["sm_clock"].values) <= facts["sm_clock_max_hz"] < 5e9
    assert 10 < facts["power_w"] < 2000
    assert 5 < facts["temperature_c"] < 120
    assert isinstance(facts["throttle_reasons"], str)


@pytest.mark.parametrize("mode", MODES)
def test_synchronised_phases_on_a_gpu(mode: str):
    found = measured(**on_gpu(mode=mode, sync="phase"))
    assert {name: n for name, n in lengths(found).items() if name in PHASES["step"]} == dict.fromkeys(
        PHASES[mode], (4, 2)
    )
    facts = values_of(found)
    assert facts["timing"] == "host_clock"
    assert "enqueue" not in found.samples
    assert "launch_bound" not in facts


def test_both_ways_of_timing_agree():
    """On phases that are long beside a synchronisation; the optimizer's is not, and can only look longer by the host's clock."""
    model = ModelConfig(d_model=1024, d_ff=4096, layers=4, heads=8, vocab_size=1_000)
    fields = on_gpu(model=model, batch_size=16, context=512, steps=10)
    by_events, by_host = (measured((10,), **{**fields, "sync": sync}) for sync in ("step", "phase"))
    for name in PHASES["step"]:
        on_device_s, on_host_s = (sorted(found.samples[name].values)[5] for found in (by_events, by_host))
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
def test_cuda_out_of_memory(mode: str):
    absurd = on_gpu(mode=mode, batch_size=4096, context=4096)  # the plain scores alone: a TiB a layer
    with pytest.raises(CellFailed) as caught:
        prepare(**absurd)
    failed = caught.value.failure
    assert (failed.kind, failed.phase) == ("out_of_memory", "forward")
    assert failed.asked_bytes > 2**30
    assert failed.capacity_bytes == torch.cuda.get_device_properties(0).total_memory
    held = {holder.name: holder.bytes for holder in failed.holders}
    assert held["parameters"] == 4 * GPU_MODEL.parameters
    assert held["activations and temporaries"] > 0
    assert failed.allocated_bytes == sum(held.values())


def test_cuda_is_well_after_running_out():
    with pytest.raises(CellFailed):
        prepare(**on_gpu(batch_size=4096, context=4096))
    gc.collect()  # the error's frames held what filled the memory
    torch.cuda.empty_cache()
    assert math.isfinite(values_of(measured(**on_gpu()))["loss"])


@pytest.mark.parametrize(
    "fields", [{"nvtx": True}, {"precision": "tf32"}, {"precision": "fp16_autocast"}, {"precision": "bf16"}]
)
def test_more_of_it_on_a_gpu(fields: dict[str, Any]):
    assert math.isfinite(values_of(measured(**on_gpu(**fields)))["loss"])


def test_compiled_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    forget_compilations()
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "set anew below, put back afterwards")
    use_compile_cache(str(tmp_path))
    found = measured(**on_gpu(compile="block", cold_compile=True))
    facts = values_of(found)
    assert facts["compile_s"] > 0
    assert facts["compile_cache"] == "cold"
    assert found.samples["step"].warmups[0] > facts["compile_s"] / 2
