"""Runs a gate's command once in a checkout: its time, its processor time, and the end of what it prints.

    ran = run_command(checkout, ["python", "bench.py"], limit_s=180)
    ran.wall_s, ran.cpu_s, ran.trouble

The command is a process group of its own, so that all of it ends with the gate. After a SIGKILL of the gate its last run goes on to
its end: having the kernel end it would need code between fork and exec, and each start would then copy this process's page tables.
What the command prints goes to a file, which has room for much output and costs the command less than a pipe that must be read.
"""

import os
import resource
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

from trainstep.measure.gate.checkouts import Checkout

_LAST_LINES = 20
_LAST_BYTES = 8192


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One run of the command. `cpu_s`: processor time of the command and of the processes that it waited for."""

    wall_s: float
    cpu_s: float
    trouble: str = ""
    """What went wrong, as `ended with exit code 3`; empty if nothing did."""
    output: tuple[str, ...] = ()
    """The last lines that it printed."""
    started: bool = True


def run_command(checkout: Checkout, command: Sequence[str], *, limit_s: float) -> Ran:
    """Run the command in the checkout's folder; after `limit_s` it is killed."""
    with tempfile.TemporaryFile() as output:
        before_s = _children_cpu_s()
        start_s = time.perf_counter()
        try:
            process = subprocess.Popen(
                command,
                cwd=checkout.folder,
                env=dict(checkout.environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            return Ran(wall_s=0.0, cpu_s=0.0, trouble=f"cannot be started: {reason}", started=False)
        # Not `wait(timeout=...)`: it polls, with up to 50 ms between two looks, and these would be measured too.
        timer = threading.Timer(min(limit_s, threading.TIMEOUT_MAX), _kill_group, [process.pid])
        timer.start()
        try:
            code = process.wait()
        finally:
            wall_s = time.perf_counter() - start_s
            timer.cancel()
            _kill_group(process.pid)  # also what the command left running
            process.wait()
            timer.join()
        trouble = f"did not end within {limit_s:.0f} s" if wall_s >= limit_s else _words(code) if code else ""
        return Ran(wall_s=wall_s, cpu_s=_children_cpu_s() - before_s, trouble=trouble, output=_last_lines(output))


def _kill_group(process_id: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process_id, signal.SIGKILL)


def _children_cpu_s() -> float:
    """Processor time of all processes that this process has waited for, and that those have waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _words(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def _last_lines(output: BinaryIO) -> tuple[str, ...]:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(size - _LAST_BYTES, 0))
    return tuple(output.read().decode(errors="replace").splitlines()[-_LAST_LINES:])
