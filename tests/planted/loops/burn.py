"""Keeps a device busy for as long as another process lives: `python burn.py PID cpu|cuda`. It returns at once, leaving orphans.

On a CPU a process a core computes; on a GPU one process multiplies matrices.
"""

import os
import sys
import time

_LONGEST_S = 120.0
"""It ends then in any case."""


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def burn(pid: int, device: str) -> None:
    """Compute until the process is gone."""
    until_s = time.monotonic() + _LONGEST_S
    if device == "cuda":
        import torch

        matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    while _lives(pid) and time.monotonic() < until_s:
        if device == "cuda":
            for _ in range(20):
                matrix @ matrix
            torch.cuda.synchronize()
        else:
            sum(range(300_000))


if __name__ == "__main__":
    watched, device = int(sys.argv[1]), sys.argv[2]
    for _ in range(1 if device == "cuda" else len(os.sched_getaffinity(0))):
        if os.fork() == 0:
            os.setsid()
            with open(os.devnull, "r+") as nothing:
                for stream in range(3):
                    os.dup2(nothing.fileno(), stream)
            burn(watched, device)
            os._exit(0)
