"""Starts and stops the processes that train together: from the variables of torchrun or Slurm it makes `Ranks`.

    ranks = start_ranks()
    ...
    del model, sync
    stop_ranks(ranks)

[Note: whom the ranks trust]
Ranks of one machine meet on its loopback address, which no other machine reaches. gloo and NCCL choose their address themselves:
GLOO_SOCKET_IFNAME=lo and NCCL_SOCKET_IFNAME=lo keep them on loopback too (a cell's ranks have both).
Ranks of several machines meet over the network, and torch's store, gloo and NCCL take any process that reaches their ports for a
rank: the network between the machines is the boundary of trust, and must be private. The watch (watch.py) also asks for a token, so
that a stranger cannot end the job through it. The token is the variable TRAINSTEP_TOKEN: export the same random text for every
rank (`TRAINSTEP_TOKEN=$(openssl rand -hex 16) srun ...`; torchrun: on every node). Where it is not set, rank 0 makes up a token and
leaves it in the store, so that any process that reaches the store has it too.
"""

import errno
import functools
import gc
import os
import queue
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
from trainstep.parallel.liveness.link import listen
from trainstep.parallel.liveness.watch import Watch
from trainstep.parallel.ranks import Ranks

_BACKENDS = ("nccl", "gloo")
_SLOW_MEETING_S = 10.0
_LONGEST_CONNECT_S = 10.0
_STORE_TRIES = 3
"""How often torch's store tries to connect; each try may take as long as its timeout."""


def start_ranks(
    backend: str | None = None,
    *,
    timeout_s: float = 600.0,
    device: torch.device | str | None = None,
    watch: bool = True,
) -> Ranks:
    """Meet the other processes of torchrun or Slurm and set this process's device.

    `backend`: nccl or gloo; by default nccl where there are GPUs. `device`: by default cuda:LOCAL_RANK for nccl, the CPU for
    gloo. `timeout_s`: of the meeting and of each collective. `watch`: when a process dies, or ends without `stop_ranks`,
    the others end within seconds, and a rank that keeps the others waiting is named (watch.py). Every rank must run the same
    number of batches.

    ValueError, with the way out, where no launcher is found, a GPU is missing, the port is taken, or rank 0 does not let this
    process in. TimeoutError naming the ranks that did not come; ConnectionError where rank 0 is not there.
    """
    if dist.is_initialized():
        raise ValueError(
            "ranks: there is a process group already; use ranks_of_default_group(), or call stop_ranks before"
        )
    launch = find_launch(os.environ)
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend not in _BACKENDS:
        raise ValueError(f"backend: {backend!r} is not known; known: {', '.join(_BACKENDS)}")
    device = _bound_device(backend, device, launch)
    started_watch = None
    with _rank_0_expected(launch, timeout_s):
        store = _store(launch, timeout_s)
        if watch and launch.world_size > 1:
            started_watch = Watch(
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
    if started_watch is not None and group is not None:
        started_watch.follow(group._get_sequence_number_for_group)  # type: ignore[attr-defined]
    return Ranks(rank=launch.rank, world_size=launch.world_size, device=device, group=group, watch=started_watch)


def stop_ranks(ranks: Ranks) -> Ranks:
    """Leave together with the other ranks; returns the ranks without a group.

    Drop model and optimizer first (`del`): else the last thread at exit tears down collectives that ran inside autograd's hooks,
    and gloo aborts the process (pytorch#179291). Where another rank is still in a step, it has more batches than this rank: all
    ranks say so and end.
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


def _bound_device(backend: str, requested: torch.device | str | None, launch: Launch) -> torch.device:
    """The device, made the current one before any tensor is made: a tensor on the wrong GPU costs a context, or hangs NCCL."""
    device = torch.device(requested or ("cuda" if backend == "nccl" else "cpu"))
    if backend == "nccl" and device.type != "cuda":
        raise ValueError(f"device: NCCL sends between GPUs, not from {device.type}; use backend gloo")
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    local_size = launch.local_size or launch.local_rank + 1
    chosen: int | None = device.index
    if chosen is None and launch.own_gpu_only:
        chosen = 0
    index = launch.local_rank if chosen is None else chosen
    if index >= count or (chosen is None and local_size > count):
        raise ValueError(
            f"ranks: {local_size} on this machine need {local_size} GPUs and {count} {'is' if count == 1 else 'are'} visible; "
            'start fewer, or run on the CPU: start_ranks("gloo")'
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


@contextmanager
def _rank_0_expected(launch: Launch, timeout_s: float) -> Iterator[None]:
    """Inside, the process waits for rank 0: after a while it says so, and ConnectionError where torch gives up."""
    place = f"rank 0 at {_store_address(launch)}:{launch.port} (MASTER_ADDR, MASTER_PORT)"
    sentence = f"trainstep: rank {launch.rank} has waited {_SLOW_MEETING_S:g} s for {place}\n"
    warning = threading.Timer(_SLOW_MEETING_S, os.write, [2, sentence.encode()])
    warning.daemon = True
    if launch.rank != 0:
        warning.start()
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError, ConnectionError) as error:
        raise ConnectionError(f"{place} did not come within {timeout_s:g} s, or died while the ranks met") from error
    finally:
        warning.cancel()


_AFTER_TRIES_S = 1.0
"""How much longer the store is waited for than its tries take, so that its own error comes first."""


def open_store(launch: Launch, timeout_s: float) -> Store:
    """The launch's key-value store, which rank 0 serves unless the launcher does. ConnectionError where rank 0 does not come."""
    address = _store_address(launch)
    if launch.rank == 0 and not launch.store_is_there:
        _serve_store(address, launch.port)
    _wait_for_listener(address, launch.port, timeout_s)
    # All tries together take at most timeout_s: rank 0 may have died since it was seen to listen.
    timeout_of_try = timedelta(seconds=min(timeout_s / _STORE_TRIES, _LONGEST_CONNECT_S))
    store = _opened(address, launch.port, timeout_of_try, timeout_s)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _opened(address: str, port: int, timeout_of_try: timedelta, timeout_s: float) -> Store:
    """The store that listens there. ConnectionError for a process that takes connections and is no store."""
    opened: queue.SimpleQueue[Store | Exception] = queue.SimpleQueue()

    def open_it() -> None:
        try:
            # The store does not wait for the other ranks: the watch does, and sees which rank dies meanwhile.
            opened.put(TCPStore(address, port, timeout=timeout_of_try, wait_for_workers=False))
        except (RuntimeError, ValueError) as error:  # raised by the thread that waits
            opened.put(error)

    # In a thread, because torch waits for the first answer without a time limit.
    threading.Thread(target=open_it, daemon=True).start()
    try:
        answer = opened.get(timeout=timeout_s + _AFTER_TRIES_S)
    except queue.Empty:
        raise ConnectionError(
            f"{address}:{port}: what listens there gave no answer in {timeout_s:g} s, so it is no store; set another MASTER_PORT"
        ) from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _store(launch: Launch, timeout_s: float) -> Store:
    """The key-value store of the group; groups that follow each other use different prefixes in it."""
    store = open_store(launch, timeout_s)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    group = (store.add(f"trainstep {restart}", 1) - 1) // launch.world_size
    place: Store = PrefixStore(f"trainstep {restart}.{group}", store)
    return place


def _wait_for_listener(address: str, port: int, timeout_s: float) -> None:
    """ConnectionError where no process listens in time."""
    # Not left to torch's store, which tries for up to three times as long and prints its own stack.
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
    """The store of rank 0, kept as long as the process: else a second group would meet at the first group's while that closes."""
    try:
        listener = listen(address, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ValueError(
            f"MASTER_PORT: port {port} of {address} is in use; choose another: torchrun --master-port {port + 1}, or "
            "--standalone on one machine"
        ) from None
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
    )
