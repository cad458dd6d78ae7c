"""Bytes of memory by holder, and peaks, on a CPU and on a GPU."""

import mmap
import resource
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainstep.measure.machine.environment import memory_bytes
from trainstep.measure.step.memory_watch import MemoryWatch, held_bytes

CPU = torch.device("cpu")


def trained(device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    """A module of 35 parameters (a tied weight of 25, two biases of 5) after a step, with gradients and AdamW's state."""
    module = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).to(device)
    module[1].weight = module[0].weight
    optimizer = torch.optim.AdamW(module.parameters(), fused=False)
    module(torch.ones(2, 5, device=device)).sum().backward()
    optimizer.step()
    return module, optimizer


def test_holders_have_the_bytes_of_the_tensors():
    holders = MemoryWatch(CPU).holders(*trained())
    steps = 3 * 4
    assert holders == {"parameters": 35 * 4, "gradients": 35 * 4, "optimizer state": 2 * 35 * 4 + steps}


def test_holders_before_the_first_step_have_no_state():
    holders = MemoryWatch(CPU).holders(nn.Linear(2, 3), None)
    assert holders == {"parameters": 9 * 4, "gradients": 0, "optimizer state": 0}


def test_a_cpu_has_a_peak_and_counts_what_is_allocated():
    watch = MemoryWatch(CPU)
    watch.before_context()
    watch.start()
    assert set(watch.facts()) == {"peak_rss_bytes"}
    before = watch.facts()["peak_rss_bytes"]
    assert before.unit == "bytes"
    assert 20 * 2**20 < before.value < memory_bytes()
    pages = mmap.mmap(
        -1, 64 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )  # not a tensor: malloc may keep what is freed, or give what it had kept
    grown = watch.allocated_bytes()
    pages.close()
    assert grown - watch.allocated_bytes() >= 60 * 2**20, "freed memory no longer counts"
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
def test_a_gpu_has_the_allocators_peaks():
    device = torch.device("cuda")
    watch = MemoryWatch(device)
    watch.before_context()
    torch.cuda.empty_cache()
    tensor = torch.ones(2**22, device=device)
    allocations = watch.device_allocations()
    torch.ones(2**28, dtype=torch.uint8, device=device)
    assert watch.device_allocations() > allocations
    torch.cuda.empty_cache()
    watch.start()
    temporary = tensor + tensor
    del temporary
    facts = {name: fact.value for name, fact in watch.facts().items()}
    assert facts["peak_allocated_bytes"] == torch.cuda.memory_allocated() + tensor.nbytes
    assert facts["peak_allocated_bytes"] <= facts["peak_reserved_bytes"]
    assert facts["allocation_retries"] == torch.cuda.memory_stats()["num_alloc_retries"]
    assert watch.capacity_bytes() > facts["peak_reserved_bytes"]
    assert watch.allocated_bytes() == torch.cuda.memory_allocated() >= tensor.nbytes


@pytest.mark.gpu
def test_holders_on_a_gpu_have_temporaries_too():
    module, optimizer = trained("cuda")
    temporary = torch.ones(1000, device="cuda")
    holders = MemoryWatch(torch.device("cuda")).holders(module, optimizer)
    assert (holders["parameters"], holders["gradients"]) == (35 * 4, 35 * 4)
    assert holders["activations and temporaries"] >= temporary.nbytes


def test_bytes_of_shared_storage_count_once():
    base = torch.zeros(10)
    assert held_bytes([base, base[2:4], base.view(2, 5), torch.zeros(3, dtype=torch.float64)]) == 40 + 24
    assert held_bytes([]) == 0
