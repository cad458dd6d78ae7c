"""Several ranks for tests: `run_ranks(4, function, *arguments)` returns the result of the function on each rank.

They communicate by gloo on the CPU; with `backend="nccl"` each has a GPU.

A pool of processes for each number of ranks is kept for the whole session (a start costs 0.3 s, a call 0.02 s). A server that has
imported torch and done nothing else forks them: what tests do here, autograd's and OpenMP's threads among it, would break a fork of
this process. `function` is importable by name; it gets this rank's `Ranks` first. An error on any rank is raised here with that
rank's traceback, and the next call starts a new pool, since the ranks may now disagree.
"""

import atexit
import gc
import importlib.util
import inspect
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from trainstep.parallel.ranks import Ranks

TIMEOUT_S = 60.0
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp", "trainstep.training.build"])  # imported once


class RankFailed(AssertionError):
    """The error for a rank that raised, died or took too long; the message has its traceback."""


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any, backend: str = "gloo") -> list[Any]:
    """The results of `function(ranks, *arguments)` on all ranks, in order."""
    kind = (world_size, backend)
    pool = _POOLS.get(kind) or _POOLS.setdefault(kind, Pool(world_size, backend))
    try:
        return pool.run(function, *arguments)
    except BaseException:
        del _POOLS[kind]
        pool.kill()
        raise


class Pool:
    """Processes that share one process group."""

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        # Here and not in rank 0, which would have to be told a port that another process may take meanwhile
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = (
            _FORKS if backend == "gloo" else multiprocessing.get_context("spawn")
        )  # CUDA does not work after a fork
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            own_end, child_end = context.Pipe()
            arguments = (rank, world_size, self._store.port, backend, child_end)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            child_end.close()
            self.pipes.append(own_end)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        name = (function.__module__, function.__qualname__, inspect.getfile(function))
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
    """A port that no process listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _serve(rank: int, world_size: int, port: int, backend: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    ranks = Ranks(rank=rank, world_size=world_size, device=device, group=dist.group.WORLD)
    gc.freeze()
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            (module, name, file), arguments = pipe.recv()
            try:
                result, error = getattr(_module(module, file), name)(ranks, *arguments), None
            except BaseException:  # noqa: BLE001  (whatever a test raises belongs to the test)
                result, error = None, traceback.format_exc()
            gc.collect()  # a model with hooks must be collected before the process ends
            pipe.send((result, error))
    sys.stdout.flush()
    os._exit(0)


def _module(name: str, file: str) -> ModuleType:
    """A module of tests, loaded from its file by the first call of one of its functions."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
        gc.freeze()  # it stays to the end, too: each call ends in a search for garbage
    return sys.modules[name]


_POOLS: dict[tuple[int, str], Pool] = {}


@atexit.register
def _kill_pools() -> None:
    for pool in _POOLS.values():
        pool.kill()
