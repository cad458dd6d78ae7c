"""`Ranks`: this process and its group among those that train together; it is passed on and never global."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from trainstep.parallel.liveness.watch import Watch


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those of its group. Tensors of parallel/ live on its device."""

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    """None for a single process: collectives then cost nothing and change nothing."""
    watch: Watch | None = None
    """Tells when another rank died; None where no watch was started."""

    @property
    def is_first(self) -> bool:
        """Whether this rank prints and writes for all."""
        return self.rank == 0


def alone(device: torch.device | str = "cpu") -> Ranks:
    """The ranks of a single process without a group."""
    return Ranks(rank=0, world_size=1, device=torch.device(device))


def ranks_of_default_group(device: torch.device | str | None = None) -> Ranks:
    """The ranks of a process group that the caller has started with torch.distributed.

    `device`: by default the current GPU where the group's backend is NCCL, else the CPU. ValueError without a group.
    """
    if not dist.is_initialized():
        raise ValueError(
            "ranks: there is no process group; call start_ranks() under torchrun, or torch.distributed.init_process_group"
        )
    group = dist.group.WORLD
    if device is None:
        on_gpu = "nccl" in dist.get_backend(group)
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    return Ranks(rank=dist.get_rank(), world_size=dist.get_world_size(), device=torch.device(device), group=group)


def ranks_around(tensors: Iterable[Tensor]) -> Ranks:
    """The ranks of the default process group, on the device of the first of these tensors.

    NCCL sends only between GPUs: for NCCL and a CPU tensor it is the current GPU, so that the caller can refuse the tensor by name.
    """
    ranks = ranks_of_default_group()
    device = next((tensor.device for tensor in tensors), ranks.device)
    usable = device.type == "cuda" or (device.type == "cpu" and dist.get_backend(ranks.group) != "nccl")
    return replace(ranks, device=device) if usable else ranks
