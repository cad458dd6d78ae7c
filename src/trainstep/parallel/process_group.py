"""Start and stop of the processes that train together: torchrun's or Slurm's variables in, `Ranks` out.

ranks = start_ranks()
...
del model, sync
stop_ranks(ranks)
"""

import functools
import gc
import os
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from trainstep.parallel.launch import Launch, find_launch
from trainstep.parallel.ranks import Ranks
from trainstep.parallel.watch import Watch

_BACKENDS = ("nccl", "gloo")


def start_ranks(
    backend: str | None = None,
    *,
    timeout_s: float = 600.0,
    device: torch.device | str | None = None,
    watch: bool = True,
) -> Ranks:
    """Meet the other processes of torchrun or Slurm and bind this one's device.

    `backend`: nccl or gloo; by default nccl where there are GPUs. `device`: by default cuda:LOCAL_RANK for nccl, the CPU for
    gloo. `timeout_s`: of the meeting and of each collective. `watch`: a process that dies, or ends without `stop_ranks`, takes
    the others with it within seconds (watch.py).

    ValueError, with the way out, where no launcher is found, a GPU is missing, or the port is taken.
    """
    launch = find_launch(os.environ)
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend not in _BACKENDS:
        raise ValueError(f"backend: {backend!r} is not known; known: {', '.join(_BACKENDS)}")
    device = _bound_device(backend, device, launch)
    store = _store(launch, timeout_s)
    watching = _watch(store, launch, timeout_s) if watch and launch.world_size > 1 else None
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if backend == "nccl" else None,
    )
    return Ranks(rank=launch.rank, world_size=launch.world_size, device=device, group=dist.group.WORLD, watch=watching)


def stop_ranks(ranks: Ranks) -> Ranks:
    """Leave together. Drop model and optimizer first (`del`): collectives that ran inside autograd's hooks would be torn down at
    exit by whichever thread comes last, and gloo then aborts the process (pytorch#179291). Returns the ranks without a group.
    """
    gc.collect()
    if ranks.group is not None:
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)
        dist.barrier(group=ranks.group)
        dist.destroy_process_group()
    if ranks.watch is not None:
        ranks.watch.goodbye()
    return replace(ranks, group=None, watch=None)


def _bound_device(backend: str, asked: torch.device | str | None, launch: Launch) -> torch.device:
    """The device, set before anything is put on it: a tensor on the wrong GPU costs a context there, or hangs NCCL."""
    device = torch.device(asked or ("cuda" if backend == "nccl" else "cpu"))
    if backend == "nccl" and device.type != "cuda":
        raise ValueError(f"device: NCCL sends between GPUs, not from {device.type}; take backend gloo")
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    here = launch.local_size or launch.local_rank + 1
    chosen: int | None = device.index
    if chosen is None and launch.own_gpu_only:
        chosen = 0
    index = launch.local_rank if chosen is None else chosen
    if index >= count or (chosen is None and here > count):
        raise ValueError(
            f"ranks: {here} on this machine need {here} GPUs and {count} {'is' if count == 1 else 'are'} visible; start fewer, "
            'or run on the CPU: start_ranks("gloo")'
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _store(launch: Launch, timeout_s: float) -> Store:
    """Where the processes leave notes for each other; each group that is started has a part of its own."""
    store = _meeting_point(launch, timeout_s)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    group = (store.add(f"trainstep {restart}", 1) - 1) // launch.world_size
    place: Store = PrefixStore(f"trainstep {restart}.{group}", store)
    return place


@functools.cache
def _meeting_point(launch: Launch, timeout_s: float) -> Store:
    """Kept as long as the process: a second group would else meet at the first one's while that goes down."""
    try:
        return TCPStore(
            launch.address,
            launch.port,
            launch.world_size,
            is_master=launch.rank == 0 and not launch.store_is_there,
            timeout=timedelta(seconds=timeout_s),
            multi_tenant=True,
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ValueError(
            f"MASTER_PORT: port {launch.port} of {launch.address} is in use; take another: torchrun --master-port "
            f"{launch.port + 1}, or --standalone on one machine"
        ) from None


def _watch(store: Store, launch: Launch, timeout_s: float) -> Watch:
    return Watch(store, rank=launch.rank, world_size=launch.world_size, address=launch.address, timeout_s=timeout_s)
