"""Ranks of a cell meet: are there GPUs for all, which is whose, who else is on them, and what meeting took of the device.

device = own_device(config.ranks, config.run.device)
opened, ranks, met = open_ranks(config.ranks, device, Stages(stage))
"""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from trainstep.measure.built_step import OpenDevice, open_device
from trainstep.measure.failures import CellFailed
from trainstep.measure.memory import MemoryWatch
from trainstep.measure.nvml import GpuState
from trainstep.measure.workload import Stages
from trainstep.parallel.collectives import Collectives
from trainstep.parallel.launch import find_launch
from trainstep.parallel.process_group import start_ranks
from trainstep.parallel.ranks import Ranks, alone
from trainstep.records.facts import Fact, facts_of
from trainstep.records.record import Failure
from trainstep.training.build import Assembly


def check_gpus(ranks: int, device: str) -> None:
    """CellFailed where there are fewer GPUs than ranks."""
    if device == "cpu":
        return
    count = torch.cuda.device_count()
    if ranks > count:
        message = (
            f"ranks: {ranks} ranks on GPUs need {ranks} of them and {count} {'is' if count == 1 else 'are'} visible"
        )
        raise CellFailed(Failure(kind="unsupported", phase="build", message=message))


def own_device(ranks: int, device: str) -> torch.device:
    """This rank's, found without touching any: a first touch makes a context, whose memory is to be measured.

    CellFailed where there are fewer GPUs than ranks.
    """
    check_gpus(ranks, device)
    if device == "cpu":
        return torch.device(device)
    return torch.device("cuda", 0 if ranks == 1 else find_launch(os.environ).local_rank)


def open_ranks(ranks: int, device: torch.device, stages: Stages) -> tuple[OpenDevice, Ranks, dict[str, Fact]]:
    """The device opened; the ranks, which meet where there are several; what they found then (as `meet`)."""
    opened = open_device(device, stages)
    if ranks == 1:
        return opened, alone(device), {}
    with opened.names_out_of_memory():
        stages.enter("meet")
        group, met = meet(device, opened.memory)
        stages.enter("build")
    return opened, group, met


def meet(device: torch.device, memory: MemoryWatch) -> tuple[Ranks, dict[str, Fact]]:
    """The group of all ranks, and facts: on a GPU `context_bytes` and `nccl_bytes`, what the driver had given for the context, and
    gave while the ranks met; `gpu_other_processes`. The context must be there."""
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


def _call_first_collectives(ranks: Ranks) -> None:
    """The first of each kind makes its connections, and on a GPU loads what runs it."""
    collectives = Collectives(ranks)
    whole = torch.zeros(ranks.world_size, device=ranks.device)
    collectives.all_reduce(whole, reduction="average", label="first").wait()
    collectives.reduce_scatter(whole[:1].clone(), whole, reduction="average", label="first").wait()
    collectives.all_gather(whole, whole[:1].clone(), label="first").wait()
    collectives.broadcast(whole, label="first").wait()


def wait_for_parameters(assembly: Assembly) -> None:
    """For gathers that a step leaves to the next one's forward. A profiler that ends while gloo's threads still send crashes."""
    wait = getattr(assembly.step.gradient_sync, "wait_for_parameters", None)
    if wait is not None:
        wait()


def others_on_gpu(ranks: Ranks) -> dict[str, Fact]:
    """The most processes of others on any of the ranks' GPUs; nothing on a CPU, or where the driver does not say."""
    if ranks.device.type == "cpu":
        return {}
    uuid = str(torch.cuda.get_device_properties(ranks.device).uuid)
    seen = GpuState(uuid).processes()
    count = torch.tensor(-1 if seen is None else strangers(seen), device=ranks.device)
    Collectives(ranks).all_reduce(count, reduction="maximum").wait()
    most = int(count.item())
    return {} if most < 0 else facts_of(gpu_other_processes=most)


def strangers(processes: Sequence[int]) -> int:
    """How many of a GPU's processes are neither this one nor of the same driver, as variants that take turns are.

    One is always this one, though a container may know it by another number.
    """
    ours = [pid for pid in processes if pid == os.getpid() or _parent(pid) == os.getppid()]
    return len(processes) - max(len(ours), 1) if processes else 0


def _parent(pid: int) -> int | None:
    """None for a process that this system does not show."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None
