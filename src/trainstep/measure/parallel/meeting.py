"""Connects the ranks of a cell: checks that each has a GPU, opens its device, and measures the memory this takes.

device = own_device(config.ranks, config.run.device)
opened, ranks, facts = open_ranks(config.ranks, device, Stages(stage))
"""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from trainstep.measure.harness.failures import CellFailed
from trainstep.measure.harness.workload import Stages
from trainstep.measure.machine.nvml import GpuState
from trainstep.measure.step.built_step import OpenDevice, open_device
from trainstep.measure.step.memory_watch import MemoryWatch
from trainstep.parallel.collectives import Collectives
from trainstep.parallel.launch import find_launch
from trainstep.parallel.process_group import start_ranks
from trainstep.parallel.ranks import Ranks, alone
from trainstep.records.facts import Fact, facts_of
from trainstep.records.record import Failure
from trainstep.training.build import Assembly


def check_gpus(ranks: int, device: str) -> None:
    """Raise CellFailed if there are fewer GPUs than ranks."""
    if device == "cpu":
        return
    count = torch.cuda.device_count()
    if ranks > count:
        message = f"ranks: {ranks} ranks need a GPU each, and {count} {'is' if count == 1 else 'are'} visible"
        raise CellFailed(Failure(kind="unsupported", phase="build", message=message))


def own_device(ranks: int, device: str, nodes: int = 1) -> torch.device:
    """This rank's device. CellFailed if there are fewer GPUs than ranks on a node."""
    check_gpus(ranks // nodes, device)
    if device == "cpu":
        return torch.device(device)
    # No GPU is touched here: the first touch makes a context, and its memory is measured later.
    return torch.device("cuda", 0 if ranks == 1 else find_launch(os.environ).local_rank)


def open_ranks(ranks: int, device: torch.device, stages: Stages) -> tuple[OpenDevice, Ranks, dict[str, Fact]]:
    """Open the device and connect the ranks, if there are several; returns the facts of `meet` with them."""
    opened = open_device(device, stages)
    if ranks == 1:
        return opened, alone(device), {}
    with opened.names_out_of_memory():
        stages.enter("meet")
        group, facts = meet(device, opened.memory)
        stages.enter("build")
    return opened, group, facts


def meet(device: torch.device, memory: MemoryWatch) -> tuple[Ranks, dict[str, Fact]]:
    """The group of all ranks and, on a GPU, the facts `context_bytes`, `nccl_bytes` and `gpu_other_processes`.

    The first two are what the driver had given before the ranks met (the context, which must be open) and while they met.
    """
    before = memory.driver_bytes()
    ranks = start_ranks("nccl" if device.type == "cuda" else "gloo", device=device)
    _call_first_collectives(ranks)
    if device.type == "cuda":
        torch.cuda.synchronize()
    after = memory.driver_bytes()
    facts = {}
    if before is not None and after is not None:
        facts = {"context_bytes": before, "nccl_bytes": after - before}
    return ranks, facts_of(**facts) | others_on_gpu(ranks)


def wait_for_parameters(assembly: Assembly) -> None:
    """Wait for gathers that a step leaves to the next step's forward.

    A profiler must not end before them: it crashes while gloo's threads still send.
    """
    wait = getattr(assembly.step.gradient_sync, "wait_for_parameters", None)
    if wait is not None:
        wait()


def others_on_gpu(ranks: Ranks) -> dict[str, Fact]:
    """The fact `gpu_other_processes`: the most foreign processes on any rank's GPU. Empty on a CPU or if unknown."""
    if ranks.device.type == "cpu":
        return {}
    uuid = str(torch.cuda.get_device_properties(ranks.device).uuid)
    processes = GpuState(uuid).processes()
    count = torch.tensor(-1 if processes is None else count_others(processes), device=ranks.device)
    Collectives(ranks).all_reduce(count, reduction="maximum").wait()
    most = int(count.item())
    return {} if most < 0 else facts_of(gpu_other_processes=most)


def count_others(processes: Sequence[int]) -> int:
    """How many of a GPU's processes are neither this one nor started by the same driver, as interleaved variants are."""
    ours = [pid for pid in processes if pid == os.getpid() or _parent(pid) == os.getppid()]
    # One process is always this one, though a container may know it by another number.
    return len(processes) - max(len(ours), 1) if processes else 0


def _call_first_collectives(ranks: Ranks) -> None:
    """Call each kind of collective once: the first call opens its connections and, on a GPU, loads its kernels."""
    collectives = Collectives(ranks)
    whole = torch.zeros(ranks.world_size, device=ranks.device)
    collectives.all_reduce(whole, reduction="average", label="first").wait()
    collectives.reduce_scatter(whole[:1].clone(), whole, reduction="average", label="first").wait()
    collectives.all_gather(whole, whole[:1].clone(), label="first").wait()
    collectives.broadcast(whole, label="first").wait()


def _parent(pid: int) -> int | None:
    """The parent's process id, or None if this system does not show the process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None
