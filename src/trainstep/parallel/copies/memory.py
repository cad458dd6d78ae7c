"""Memory of the ranks of one machine that they read and write among each other, and their meetings.

A rank has one block of bytes, which every other rank can address. Ranks meet on a channel: each sets a signal for every other one,
then waits until the others' are set, and takes them.

On GPUs the block is torch's symmetric memory (`torch.distributed._symmetric_memory`), addresses over NVLink or PCIe; a meeting is a
kernel of one block, in the order of the current stream, so a CUDA graph can hold it. NVLink multicast is not used. On a CPU the
block is a file that all ranks map, and the host waits.
"""

import os
import secrets
import socket
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainstep.parallel.ranks import Ranks

_POLL_S = 2e-5
_WAIT_S = 600.0
"""How long the host waits for a signal. A GPU waits without end: the watch ends the ranks of a dead one (liveness/watch.py)."""

GatherTexts = Callable[[str], list[str]]
"""Every rank's text in the order of ranks; a collective."""


class PeerMemory(ABC):
    """This rank's block of `bytes_` bytes, and the other ranks' blocks."""

    @abstractmethod
    def of(self, rank: int) -> Tensor:
        """The rank's block, (bytes,) of uint8."""

    @abstractmethod
    def meet(self, channel: int) -> None:
        """What is enqueued on the current stream from here on begins when every rank has done what it had enqueued before."""


def open_peer_memory(ranks: Ranks, bytes_: int, *, channels: int, gather_texts: GatherTexts) -> PeerMemory:
    """Allocate a block on every rank and map the others'. A collective.

    ValueError where ranks are on several machines, or the GPUs cannot address each other's memory.
    """
    machines = gather_texts(socket.gethostname())
    if len(set(machines)) > 1:
        raise ValueError(
            f"transport: copies go between ranks of one machine, and these are on {len(set(machines))} "
            f"({', '.join(sorted(set(machines))[:2])}...); take library"
        )
    if ranks.device.type == "cuda":
        return _SymmetricMemory(ranks, bytes_)
    return _MappedFiles(ranks, bytes_, channels, gather_texts)


class _SymmetricMemory(PeerMemory):
    def __init__(self, ranks: Ranks, bytes_: int) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        group: Any = ranks.group
        try:
            self._own = symmetric_memory.empty(bytes_, dtype=torch.uint8, device=ranks.device)
            self._handle: Any = symmetric_memory.rendezvous(self._own, group)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"transport: the GPUs of this machine cannot address each other's memory ({reason}); take library"
            ) from error
        self._blocks = [
            self._own if rank == ranks.rank else self._handle.get_buffer(rank, (bytes_,), torch.uint8)
            for rank in range(ranks.world_size)
        ]

    def of(self, rank: int) -> Tensor:
        return self._blocks[rank]

    def meet(self, channel: int) -> None:
        self._handle.barrier(channel)


class _MappedFiles(PeerMemory):
    """Signals are bytes behind each block, one for each channel and sending rank."""

    def __init__(self, ranks: Ranks, bytes_: int, channels: int, gather_texts: GatherTexts) -> None:
        shared = Path("/dev/shm")
        folder = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
        own = folder / f"trainstep-{secrets.token_hex(8)}"
        size = bytes_ + channels * ranks.world_size
        descriptor = os.open(own, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.ftruncate(descriptor, size)
            # If the system has no memory for the file, a later write would end the process. macOS lacks this check.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            problem = f"transport: {folder} has no room for an inbox of {bytes_ / 2**20:.0f} MiB ({error.strerror})"
        else:
            problem = ""
        finally:
            os.close(descriptor)
        try:
            if any(problems := gather_texts(problem)):
                raise ValueError(f"{next(filter(None, problems))}; take a smaller inbox_mib, or library")
            paths = gather_texts(str(own))
            files = [torch.from_file(path, shared=True, size=size, dtype=torch.uint8) for path in paths]
            gather_texts("mapped")  # every rank has mapped all files: their names may go
        finally:
            own.unlink()
        self._rank, self._world_size = ranks.rank, ranks.world_size
        self._blocks = [file[:bytes_] for file in files]
        self._signals = [file[bytes_:].numpy() for file in files]

    def of(self, rank: int) -> Tensor:
        return self._blocks[rank]

    def meet(self, channel: int) -> None:
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        for rank in others:  # set this rank's signal in every block, once its owner has taken the one before
            self._flip(self._signals[rank], channel * self._world_size + self._rank, 1, rank)
        for rank in others:  # take the others' signals, once they are set
            self._flip(self._signals[self._rank], channel * self._world_size + rank, 0, rank)

    def _flip(self, signals: Any, place: int, value: int, rank: int) -> None:
        """Set a signal to `value` once it has the other one. `rank`: whom to name if it never has."""
        latest_s = time.monotonic() + _WAIT_S
        while signals[place] == value:
            if time.monotonic() > latest_s:
                raise TimeoutError(f"transport: rank {rank} did not come to the meeting within {_WAIT_S:.0f} s")
            time.sleep(_POLL_S)
        signals[place] = value
