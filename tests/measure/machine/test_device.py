"""The device of a run: every refusal names the driver and what to do, and nothing that would work is refused."""

import dataclasses
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fake_nvml import install
from trainstep.measure.machine import device
from trainstep.measure.machine.device import Probe, probe_device, usable_device
from trainstep.measure.machine.environment import environment
from trainstep.measure.machine.nvml import Driver
from trainstep.records.record import Environment

CUDA_12 = Driver(version="570.86.15", cuda=(12, 8))
CUDA_13 = Driver(version="580.65.06", cuda=(13, 0))


@pytest.fixture(scope="module")
def without_gpu() -> Environment:
    with pytest.MonkeyPatch.context() as patch:
        install(patch, None)
        return environment()


def with_gpu(here: Environment, torch: str | None = "2.13.0+cu130", cuda: str | None = "13.0") -> Environment:
    return dataclasses.replace(here, gpu="NVIDIA H200", gpu_count=1, driver="570.86.15", torch=torch, cuda=cuda)


def refusal(*arguments: Any, **named: Any) -> str:
    with pytest.raises(ValueError) as caught:
        usable_device(*arguments, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_a_gpu_only_the_cpu_is_usable(without_gpu: Environment):
    assert usable_device("auto", without_gpu, driver=Driver()) == "cpu"
    assert usable_device("cpu", without_gpu, driver=Driver()) == "cpu"
    assert "no NVIDIA GPU is visible" in refusal("cuda", without_gpu, driver=Driver())


@pytest.mark.parametrize(
    ("cuda", "driver"),
    [("13.0", CUDA_13), ("13.2", CUDA_13), ("12.6", CUDA_12), ("12.9", CUDA_12), ("12.6", CUDA_13), ("13.0", Driver())],
)
def test_a_build_that_the_driver_supports_is_used(without_gpu: Environment, cuda: str, driver: Driver):
    here = with_gpu(without_gpu, "2.13.0", cuda)
    assert usable_device("auto", here, driver=driver) == "cuda"
    assert usable_device("cuda", here, driver=driver, probe=Probe(cuda_available=True)) == "cuda"


def test_a_cpu_build_beside_a_gpu_is_refused(without_gpu: Environment):
    text = refusal("auto", with_gpu(without_gpu, "2.13.0+cpu", None), driver=CUDA_12)
    for word in ("570.86.15", "CUDA 12.8", "NVIDIA H200", "2.13.0+cpu is a CPU build", "whl/cu126", "--device cpu"):
        assert word in text
    assert "whl/cu130" in refusal("auto", with_gpu(without_gpu, "2.13.0+cpu", None), driver=CUDA_13)


def test_a_build_newer_than_the_driver_is_refused(without_gpu: Environment):
    text = refusal("cuda", with_gpu(without_gpu), driver=CUDA_12)
    for word in ("built for CUDA 13.0", "whl/cu126", "driver 580 or newer"):
        assert word in text


def test_a_driver_too_old_for_any_build_is_refused(without_gpu: Environment):
    text = refusal("auto", with_gpu(without_gpu), driver=Driver(version="470.1", cuda=(11, 4)))
    assert "install driver 580 or newer" in text
    assert "whl/cu130" in text


def test_a_missing_torch_is_refused(without_gpu: Environment):
    assert "not installed" in refusal("auto", with_gpu(without_gpu, None, None), driver=CUDA_12)


@pytest.mark.parametrize(
    ("probe", "word"),
    [
        (Probe(cuda_available=False), "is_available() is False"),
        (Probe(cuda_available=False, error="CUDA initialization: too old"), "too old"),
        (Probe(cuda_available=True, error="no kernel image is available"), "no kernel image"),
    ],
)
def test_torchs_own_error_is_in_the_refusal(without_gpu: Environment, probe: Probe, word: str):
    assert word in refusal("auto", with_gpu(without_gpu), driver=CUDA_13, probe=probe)


def test_cpu_is_always_usable(without_gpu: Environment):
    assert usable_device("cpu", with_gpu(without_gpu, "2.13.0+cpu", None), driver=CUDA_12) == "cpu"


def test_a_driver_that_does_not_answer_is_refused_for_a_gpu(without_gpu: Environment):
    assert "version mismatch" in refusal("auto", without_gpu, driver=Driver(error="Driver/library version mismatch"))
    assert usable_device("cpu", without_gpu, driver=Driver(error="whatever")) == "cpu"


def test_an_unknown_device_is_refused_with_a_suggestion(without_gpu: Environment):
    assert "did you mean cuda?" in refusal("cud", without_gpu, driver=Driver())


def test_the_probe_gives_what_torch_says_here():
    import torch

    probe = probe_device()
    assert probe.imports
    assert probe.cuda_available == torch.cuda.is_available()
    assert len(probe.devices) == (torch.cuda.device_count() if probe.cuda_available else 0)


def test_a_torch_that_does_not_import_is_an_error_of_the_probe(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device, "_PROBE_MODULE", "trainstep.no_such_module")
    probe = probe_device()
    assert not probe.imports
    assert "no_such_module" in str(probe.error)


@pytest.mark.parametrize(
    ("outcome", "word"),
    [
        (SimpleNamespace(returncode=-11, stdout="", stderr=""), "SIGSEGV"),
        (SimpleNamespace(returncode=0, stdout="chatter\n", stderr=""), "exit code 0"),
        (SimpleNamespace(returncode=0, stdout='{"unknown": 1}\n', stderr=""), "exit code 0"),
        (subprocess.TimeoutExpired([sys.executable], 120), "took more than"),
        (OSError("no memory"), "no memory"),
    ],
)
def test_a_probe_that_crashes_or_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch, outcome: Any, word: str):
    def run(*arguments: Any, **named: Any) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(subprocess, "run", run)
    probe = probe_device()
    assert not probe.imports
    assert word in str(probe.error)


def test_lines_before_the_answer_are_ignored(monkeypatch: pytest.MonkeyPatch):
    answer = 'a warning\n{"cuda_available": true, "devices": [{"name": "x"}], "threads": 4, "error": null}\n'
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: SimpleNamespace(returncode=0, stdout=answer, stderr=""))
    probe = probe_device()
    assert (probe.cuda_available, probe.devices, probe.threads) == (True, ({"name": "x"},), 4)
