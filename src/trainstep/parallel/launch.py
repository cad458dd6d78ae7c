"""Reads this process's rank, the number of ranks and rank 0's address from the variables of torchrun or Slurm.

    torchrun --nproc-per-node 2 train.py
    srun --ntasks 2 python train.py

Any other launcher works if it sets torchrun's variables. A program may also ask to end with its torchrun (`end_with_torchrun`).
"""

import os
import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from trainstep.parallel.liveness.link import LOOPBACK

_NO_LAUNCHER = (
    "ranks: no launcher is found (neither RANK and WORLD_SIZE nor srun's SLURM_PROCID is set); start with "
    "`torchrun --nproc-per-node 2 SCRIPT`, or on Slurm with `srun --ntasks 2 python SCRIPT`"
)
_TORCHRUN_PORT = 29500
_FIRST_PORT, _PORTS = 10_000, 20_000
"""For Slurm jobs: below the range from which systems give out ports."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """This process among those started together. Ranks count from 0 over all nodes, local ranks on each node."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int | None
    """Number of processes on this node; None where the launcher does not say."""
    address: str
    """Host of rank 0."""
    port: int
    store_is_there: bool = False
    """Whether the launcher serves the store at that port; else rank 0 does."""
    own_gpu_only: bool = False
    """Whether this process sees only its own GPU."""
    nodes: int = 1
    node: int = 0
    """Number of nodes, and which of them this is, counted from 0: the first has rank 0."""
    hosts: tuple[str, ...] = ()
    """The nodes' names, where the launcher says them."""

    @property
    def meeting_address(self) -> str:
        """Where rank 0 listens: on loopback where all ranks run on one machine, so that no other machine reaches it."""
        return LOOPBACK if self.local_size == self.world_size else self.address


def is_launched(environ: Mapping[str, str]) -> bool:
    """Whether a launcher started this process."""
    # A batch script of Slurm has a SLURM_PROCID too, but is one process; only processes of srun have a step.
    return {"RANK", "WORLD_SIZE"} <= set(environ) or {"SLURM_PROCID", "SLURM_STEP_ID"} <= set(environ)


def find_launch(environ: Mapping[str, str]) -> Launch:
    """Read torchrun's variables, else Slurm's. ValueError where there are none, or one is missing or not a number."""
    if not is_launched(environ):
        raise ValueError(_NO_LAUNCHER)
    return _checked(_torchrun(environ) if "RANK" in environ and "WORLD_SIZE" in environ else _slurm(environ))


def end_with_torchrun(environ: Mapping[str, str]) -> None:
    """End this process within a second of a torchrun that started it: one that is killed by `kill -9` ends no task.

    The kernel could tell (PR_SET_PDEATHSIG), but it takes the end of the thread that started a process for the parent's end. Other
    launchers may leave on purpose, as `ssh host 'RANK=1 ... nohup trainstep ... &'` does.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return
    torchrun = os.getppid()

    def watch() -> None:
        while os.getppid() == torchrun:
            time.sleep(1)
        with suppress(OSError):
            os.write(2, f"trainstep: torchrun, process {torchrun}, is gone; leaving\n".encode())
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def first_host(nodes: str) -> str:
    """The first host of Slurm's list: `n7` for `n[7-9,12],m3`."""
    prefix, bracket, rest = re.split(r",(?![^\[]*\])", nodes.strip())[0].partition("[")
    if not bracket:
        return prefix
    numbers, _, suffix = rest.partition("]")
    return prefix + re.split(r"[-,]", numbers)[0] + suffix


def hosts_of(nodes: str) -> tuple[str, ...]:
    """Every host of Slurm's list: `n07 n08 m3` for `n[07-08],m3`."""
    hosts: list[str] = []
    for word in filter(None, re.split(r",(?![^\[]*\])", nodes.strip())):
        prefix, bracket, rest = word.partition("[")
        numbers, _, suffix = rest.partition("]")
        for span in numbers.split(",") if bracket else ():
            first, _, last = span.partition("-")
            if first.isdecimal() and (last or first).isdecimal():
                hosts += [f"{prefix}{n:0{len(first)}d}{suffix}" for n in range(int(first), int(last or first) + 1)]
        hosts += [] if bracket else [word]
    return tuple(hosts)


def _torchrun(environ: Mapping[str, str]) -> Launch:
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_size = _number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else None
    on_each = max(local_size or world_size, 1)
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK", rank),
        local_size=local_size,
        nodes=_number(environ, "GROUP_WORLD_SIZE", -(-world_size // on_each)),
        node=_number(environ, "GROUP_RANK", rank // on_each),
        address=environ.get("MASTER_ADDR", LOOPBACK),
        port=_number(environ, "MASTER_PORT", _TORCHRUN_PORT),
        store_is_there=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _slurm(environ: Mapping[str, str]) -> Launch:
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    world_size = _number(environ, tasks)
    node_count = environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES"))
    one_node = node_count == "1"
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    if not one_node and not nodes and "MASTER_ADDR" not in environ:
        raise ValueError("SLURM_JOB_NODELIST: is not set; set MASTER_ADDR to the host of rank 0")
    # Steps of one job may run at the same time, so each step has its own port.
    job = 100 * _number(environ, "SLURM_JOB_ID", 0) + _number(environ, "SLURM_STEP_ID", 0)
    return Launch(
        rank=_number(environ, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(environ, "SLURM_LOCALID", 0),
        local_size=world_size if one_node else None,
        address=environ.get("MASTER_ADDR") or (LOOPBACK if one_node else first_host(nodes)),
        port=_number(environ, "MASTER_PORT", _FIRST_PORT + job % _PORTS),
        nodes=_number({"SLURM_NNODES": node_count or "1"}, "SLURM_NNODES"),
        node=_number(environ, "SLURM_NODEID", 0),
        hosts=hosts_of(nodes),
        own_gpu_only=environ.get("SLURM_GPUS_PER_TASK") == "1",
    )


def _checked(launch: Launch) -> Launch:
    if not 0 <= launch.rank < launch.world_size:
        raise ValueError(f"RANK: {launch.rank} is not one of {launch.world_size} ranks, which count from 0")
    if not 0 < launch.port < 2**16:
        raise ValueError(f"MASTER_PORT: must be from 1 to 65535, not {launch.port}")
    return launch


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.strip().isdecimal():
        raise ValueError(f"{name}: must be a whole number, not {text!r}: the launcher sets it")
    return int(text)
