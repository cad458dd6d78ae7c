"""Two pretend nodes on this machine: the command line as the first task of each, with a launcher's variables, without GPUs.

with two_nodes("collectives", "--mib", "1", folder=tmp_path, mark="a") as (first, second):
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from cell_maker import MARK, import_path
from ranks import free_port

NAMES = ("n1", "n2")
RANKS_OF_NODE = 2


def variables(node: int, port: int) -> dict[str, str]:
    """What a launcher gives the first task of a node."""
    return {
        "RANK": str(node * RANKS_OF_NODE),
        "WORLD_SIZE": str(RANKS_OF_NODE * len(NAMES)),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(RANKS_OF_NODE),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "SLURMD_NODENAME": NAMES[node],
        "OMP_NUM_THREADS": "1",
    }


@contextmanager
def two_nodes(
    *words: object,
    folder: Path,
    mark: str,
    of_all: Mapping[str, str] = MappingProxyType({}),
    of_second: Mapping[str, str] = MappingProxyType({}),
    launcher: Sequence[str] = (),
) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """Both nodes' processes, each the leader of a session; killed in the end. All that they start has the mark (cell_maker.py).

    `of_all`: more variables of both nodes, `of_second` of the second alone.
    `launcher`: the beginning of a command line that starts another.
    """
    port = free_port()
    processes = [
        subprocess.Popen(
            [*launcher, sys.executable, "-m", "trainstep", *map(str, words)],
            cwd=folder,
            env={
                **os.environ,
                **variables(node, port),
                "PYTHONPATH": import_path(),
                "CUDA_VISIBLE_DEVICES": "",
                MARK: mark,
                **of_all,
                **(of_second if node else {}),
            },
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for node in range(len(NAMES))
    ]
    try:
        yield processes[0], processes[1]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
