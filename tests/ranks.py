"""Several processes on gloo for tests: `run_ranks(4, function, *arguments)` returns what each rank's function returned.

A pool of processes for each number of ranks stands ready for the whole session (forked before torch has threads; a start costs
0.3 s, a call 0.02 s). `function` is importable by name; it gets this rank's `Ranks` first. An error on any rank is raised here
with that rank's traceback, and the pool, whose ranks may now disagree, is built anew for the next call.
"""

import atexit
import gc
import importlib
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from trainstep.parallel.ranks import Ranks

TIMEOUT_S = 60.0


class RankFailed(AssertionError):
    """A rank raised, died or took too long; the message has its traceback."""


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(ranks, *arguments)` returned on each rank, in order."""
    pool = _POOLS.get(world_size) or _POOLS.setdefault(world_size, Pool(world_size))
    try:
        return pool.run(function, *arguments)
    except BaseException:
        del _POOLS[world_size]
        pool.kill()
        raise


class Pool:
    """Processes with a standing process group."""

    def __init__(self, world_size: int) -> None:
        import torch._dynamo  # noqa: F401  (seconds to import: once here, not in every child)

        port = free_port()
        fork = multiprocessing.get_context("fork")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = fork.Pipe()
            process = fork.Process(target=_serve, args=(rank, world_size, port, theirs, list(self.pipes)), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        name = (function.__module__, function.__qualname__)
        for pipe in self.pipes:
            pipe.send((name, arguments))
        answers: dict[int, Any] = {}
        while len(answers) < len(self.pipes):
            waited = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            ready = wait(waited, TIMEOUT_S)
            if not ready:
                raise RankFailed(
                    f"ranks without an answer after {TIMEOUT_S} s: {set(range(len(self.pipes))) - set(answers)}"
                )
            for pipe in ready:
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank], error = self.pipes[rank].recv()
                except EOFError:
                    raise RankFailed(f"rank {rank} died in {name[1]}") from None
                if error:
                    raise RankFailed(f"rank {rank}:\n{error}")
        return [answers[rank] for rank in range(len(self.pipes))]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _serve(rank: int, world_size: int, port: int, pipe: Connection, others: list[Connection]) -> None:
    for other in others:  # a rank must not hold another's end open
        other.close()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    ranks = Ranks(rank=rank, world_size=world_size, device=torch.device("cpu"), group=dist.group.WORLD)
    gc.collect()
    gc.freeze()
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            (module, name), arguments = pipe.recv()
            try:
                result, error = getattr(importlib.import_module(module), name)(ranks, *arguments), None
            except BaseException:  # noqa: BLE001  (whatever a test raises belongs to the test)
                result, error = None, traceback.format_exc()
            gc.collect()  # a model with hooks must be gone before the process is
            pipe.send((result, error))
    sys.stdout.flush()
    os._exit(0)


_POOLS: dict[int, Pool] = {}


@atexit.register
def _kill_pools() -> None:
    for pool in _POOLS.values():
        pool.kill()
