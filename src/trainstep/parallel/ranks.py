"""Who is who among the processes that train together: passed on, never global."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.parallel.watch import Watch


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those of its group. Its device is bound: tensors of parallel/ live there."""

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    """None for a process on its own: collectives then cost nothing and change nothing."""
    watch: Watch | None = None
    """What tells when another one died; None where nobody watches."""

    @property
    def is_first(self) -> bool:
        """Whether this is the one that speaks for all."""
        return self.rank == 0


def alone(device: torch.device | str = "cpu") -> Ranks:
    """One process, no group."""
    return Ranks(rank=0, world_size=1, device=torch.device(device))


def ranks_of_default_group(device: torch.device | str | None = None) -> Ranks:
    """The ranks of a process group that the caller has started himself with torch.distributed.

    `device`: by default the current GPU where the group's backend is NCCL, else the CPU. ValueError without a group.
    """
    if not dist.is_initialized():
        raise ValueError(
            "ranks: no process group is there; call start_ranks() under torchrun, or torch.distributed.init_process_group"
        )
    group = dist.group.WORLD
    if device is None:
        on_gpu = "nccl" in dist.get_backend(group)
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    return Ranks(rank=dist.get_rank(), world_size=dist.get_world_size(), device=torch.device(device), group=group)


def ranks_around(tensors: Iterable[Tensor]) -> Ranks:
    """Of the process group that the caller has started himself, on the device that the first of these tensors is on.

    NCCL sends between GPUs alone: there it is the current GPU, and what is elsewhere can be refused by name.
    """
    ranks = ranks_of_default_group()
    device = next((tensor.device for tensor in tensors), ranks.device)
    usable = device.type == "cuda" or (device.type == "cpu" and dist.get_backend(ranks.group) != "nccl")
    return replace(ranks, device=device) if usable else ranks
