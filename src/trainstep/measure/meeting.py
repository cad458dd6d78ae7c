"""Ranks of a cell meet: are there GPUs for all, which is whose, and who else is on them."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from trainstep.measure.failures import CellFailed
from trainstep.measure.nvml import GpuState
from trainstep.parallel.collectives import Collectives
from trainstep.parallel.launch import find_launch
from trainstep.parallel.ranks import Ranks
from trainstep.records.record import Fact, Failure


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
    """This rank's, found without touching any: a first touch makes a context, whose memory is to be measured."""
    if device == "cpu":
        return torch.device(device)
    return torch.device("cuda", 0 if ranks == 1 else find_launch(os.environ).local_rank)


def others_on_gpu(ranks: Ranks) -> dict[str, Fact]:
    """The most processes of others on any of the ranks' GPUs; nothing on a CPU, or where the driver does not say."""
    if ranks.device.type == "cpu":
        return {}
    uuid = str(torch.cuda.get_device_properties(ranks.device).uuid)
    seen = GpuState(uuid).processes()
    count = torch.tensor(-1 if seen is None else strangers(seen), device=ranks.device)
    Collectives(ranks).all_reduce(count, reduction="maximum").wait()
    most = int(count.item())
    return {} if most < 0 else {"gpu_other_processes": Fact(value=most, unit="count")}


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
