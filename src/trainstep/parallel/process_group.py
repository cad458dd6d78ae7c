"""Start and stop of the processes that train together: torchrun's or Slurm's variables in, `Ranks` out.

ranks = start_ranks()
...
del model, sync
stop_ranks(ranks)

[Note: whom the ranks trust]
Ranks of one machine meet on its loopback address, which no other machine reaches. gloo and NCCL choose their address themselves:
GLOO_SOCKET_IFNAME=lo and NCCL_SOCKET_IFNAME=lo keep them on loopback too (a cell's ranks have both).
Ranks of several machines meet over the network, and torch's store, gloo and NCCL take whoever reaches their ports for a rank: the
network between the machines is the boundary of trust, and must be a private one. The watch (watch.py) asks for a token besides, so
that a stranger cannot end the job through it. The token is the variable TRAINSTEP_TOKEN: export the same random text for every
rank (`TRAINSTEP_TOKEN=$(openssl rand -hex 16) srun ...`; torchrun: on every node). Where it is not set, rank 0 makes one up and
leaves it in the store, so that whoever reaches the store has it too.
"""

import errno
import functools
import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from trainstep.parallel.launch import Launch, find_launch
from trainstep.parallel.listening import listen
from trainstep.parallel.ranks import Ranks
from trainstep.parallel.watch import Watch

_BACKENDS = ("nccl", "gloo")
_SLOW_MEETING_S = 10.0
_LONGEST_CONNECT_S = 10.0
_STORE_TRIES = 3
"""torch's store connects this often, and each try may take as long as its timeout."""


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
    the others with it within seconds, and a rank that keeps the others waiting is named (watch.py). Every rank must run the same
    number of batches.

    ValueError, with the way out, where no launcher is found, a GPU is missing, the port is taken, or rank 0 does not let this
    process in. TimeoutError naming the ranks that did not come; ConnectionError where rank 0 is not there.
    """
    if dist.is_initialized():
        raise ValueError(
            "ranks: a process group is there already; use ranks_of_default_group(), or call stop_ranks before"
        )
    launch = find_launch(os.environ)
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend not in _BACKENDS:
        raise ValueError(f"backend: {backend!r} is not known; known: {', '.join(_BACKENDS)}")
    device = _bound_device(backend, device, launch)
    watching = None
    with _rank_0_expected(launch, timeout_s):
        store = _store(launch, timeout_s)
        if watch and launch.world_size > 1:
            watching = Watch(
                store,
                rank=launch.rank,
                world_size=launch.world_size,
                address=launch.meeting_address,
                timeout_s=timeout_s,
                token=os.environ.get("TRAINSTEP_TOKEN"),
            )
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if backend == "nccl" else None,
    )
    group = dist.group.WORLD
    if watching is not None and group is not None:
        watching.follow(group._get_sequence_number_for_group)  # type: ignore[attr-defined]
    return Ranks(rank=launch.rank, world_size=launch.world_size, device=device, group=group, watch=watching)


def stop_ranks(ranks: Ranks) -> Ranks:
    """Leave together. Drop model and optimizer first (`del`): collectives that ran inside autograd's hooks would be torn down at
    exit by whichever thread comes last, and gloo then aborts the process (pytorch#179291). Returns the ranks without a group.

    Where another rank is still in a step, it has more batches than this one: all ranks say so and end.
    """
    gc.collect()
    if ranks.watch is not None:
        ranks.watch.stop()
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


@contextmanager
def _rank_0_expected(launch: Launch, timeout_s: float) -> Iterator[None]:
    """Around what needs rank 0: says so after a while, and that it is not there where torch gives up."""
    place = f"rank 0 at {_store_address(launch)}:{launch.port} (MASTER_ADDR, MASTER_PORT)"
    sentence = f"trainstep: rank {launch.rank} has waited {_SLOW_MEETING_S:g} s for {place}\n"
    said_if_slow = threading.Timer(_SLOW_MEETING_S, os.write, [2, sentence.encode()])
    said_if_slow.daemon = True
    if launch.rank != 0:
        said_if_slow.start()
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError, ConnectionError) as error:
        words = f"{place} did not come within {timeout_s:g} s, or died while the ranks met"
        raise ConnectionError(words) from error
    finally:
        said_if_slow.cancel()


def _store(launch: Launch, timeout_s: float) -> Store:
    """Where the processes leave notes for each other; each group that is started has a part of its own."""
    address = _store_address(launch)
    if launch.rank == 0 and not launch.store_is_there:
        _serve_store(address, launch.port)
    _wait_for_listener(address, launch.port, timeout_s)
    # Without waiting for the others: the watch does, and sees who dies meanwhile.
    # All tries together within timeout_s: rank 0 may have died since it was seen to listen.
    connecting = timedelta(seconds=min(timeout_s / _STORE_TRIES, _LONGEST_CONNECT_S))
    store = TCPStore(address, launch.port, timeout=connecting, wait_for_workers=False)
    store.set_timeout(timedelta(seconds=timeout_s))
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    group = (store.add(f"trainstep {restart}", 1) - 1) // launch.world_size
    place: Store = PrefixStore(f"trainstep {restart}.{group}", store)
    return place


def _wait_for_listener(address: str, port: int, timeout_s: float) -> None:
    """ConnectionError where nobody listens in time. Not left to torch's store, which tries for up to three times as long, and
    prints its own stack."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((address, port), timeout=timeout_s).close()
            return
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise ConnectionError(f"{address}:{port}: {error}") from None
        time.sleep(0.05)


def _store_address(launch: Launch) -> str:
    return launch.address if launch.store_is_there else launch.meeting_address


@functools.cache
def _serve_store(address: str, port: int) -> Store:
    """Kept as long as the process: a second group would else meet at the first one's while that goes down."""
    try:
        listener = listen(address, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ValueError(
            f"MASTER_PORT: port {port} of {address} is in use; take another: torchrun --master-port {port + 1}, or "
            "--standalone on one machine"
        ) from None
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
    )
