"""Who holds which bytes; peaks."""

import resource
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainstep.measure.host import memory_bytes
from trainstep.measure.memory import MemoryWatch, held_bytes

CPU = torch.device("cpu")


def trained(device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    """35 parameters: a tied weight of 25, two biases of 5; gradients and AdamW's state are there."""
    module = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).to(device)
    module[1].weight = module[0].weight
    optimizer = torch.optim.AdamW(module.parameters(), fused=False)
    module(torch.ones(2, 5, device=device)).sum().backward()
    optimizer.step()
    return module, optimizer


def test_holders():
    held = MemoryWatch(CPU).holders(*trained())
    steps = 3 * 4
    assert held == {"parameters": 35 * 4, "gradients": 35 * 4, "optimizer state": 2 * 35 * 4 + steps}


def test_before_the_first_step():
    held = MemoryWatch(CPU).holders(nn.Linear(2, 3), None)
    assert held == {"parameters": 9 * 4, "gradients": 0, "optimizer state": 0}


def test_on_a_cpu():
    watch = MemoryWatch(CPU)
    watch.before_context()
    watch.start()
    assert set(watch.facts()) == {"peak_rss_bytes"}
    before = watch.facts()["peak_rss_bytes"]
    assert before.unit == "bytes"
    assert 20 * 2**20 < before.value < memory_bytes()
    held = torch.zeros(64 * 2**20, dtype=torch.uint8)
    grown = watch.allocated_bytes()
    del held
    assert grown - watch.allocated_bytes() >= 60 * 2**20, "what is freed no longer counts"
    assert watch.device_allocations() == 0


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_the_peak_is_in_bytes(monkeypatch: pytest.MonkeyPatch, platform: str, unit: int):
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=5_000))
    monkeypatch.setattr(sys, "platform", platform)
    assert MemoryWatch(CPU).facts()["peak_rss_bytes"].value == 5_000 * unit


def test_capacity_is_the_limit_of_this_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert MemoryWatch(CPU).capacity_bytes() == memory_bytes()
    monkeypatch.setattr(resource, "getrlimit", lambda which: (12_345, resource.RLIM_INFINITY))
    assert MemoryWatch(CPU).capacity_bytes() == 12_345


@pytest.mark.gpu
def test_on_a_gpu():
    device = torch.device("cuda")
    watch = MemoryWatch(device)
    watch.before_context()
    torch.cuda.empty_cache()
    held = torch.ones(2**22, device=device)
    allocations = watch.device_allocations()
    torch.ones(2**28, dtype=torch.uint8, device=device)
    assert watch.device_allocations() > allocations
    torch.cuda.empty_cache()
    watch.start()
    temporary = held + held
    del temporary
    facts = {name: fact.value for name, fact in watch.facts().items()}
    assert facts["peak_allocated_bytes"] == torch.cuda.memory_allocated() + held.nbytes
    assert facts["peak_allocated_bytes"] <= facts["peak_reserved_bytes"]
    assert facts["allocation_retries"] == torch.cuda.memory_stats()["num_alloc_retries"]
    assert watch.capacity_bytes() > facts["peak_reserved_bytes"]
    assert watch.allocated_bytes() == torch.cuda.memory_allocated() >= held.nbytes


@pytest.mark.gpu
def test_holders_on_a_gpu():
    module, optimizer = trained("cuda")
    other = torch.ones(1000, device="cuda")
    held = MemoryWatch(torch.device("cuda")).holders(module, optimizer)
    assert (held["parameters"], held["gradients"]) == (35 * 4, 35 * 4)
    assert held["activations and temporaries"] >= other.nbytes


def test_bytes_of_shared_storage_count_once():
    base = torch.zeros(10)
    assert held_bytes([base, base[2:4], base.view(2, 5), torch.zeros(3, dtype=torch.float64)]) == 40 + 24
    assert held_bytes([]) == 0
