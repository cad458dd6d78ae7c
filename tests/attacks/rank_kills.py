"""Kills of a rank: one of two to four training processes is killed at a random moment; the others name it and end.

The ranks use gloo and a random strategy. A rank that is killed during the meeting may be unknown to the others; they then name
it when the time for the meeting is over.
"""

import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attacks.attack import Outcome
from attacks.reader import last_frame
from attacks.torch_process import TorchProcess
from ranks import free_port
from trainstep.parallel.liveness.watch import LEFT

STRATEGIES = (
    "naive",
    "flat",
    "overlapped",
    "bucketed",
    "sharded",
    "sharded_flat",
    "sharded_flat_units",
    "fsdp",
    "fsdp_units",
)
_MEETING_S = 15.0
_END_S = 20.0
"""Seconds within which the other ranks must end, on a busy machine."""
_READY_S = 60.0


class RankKills:
    """Kills of a rank: 60 cases at full size."""

    name = "rank_kills"
    full = 60

    def __init__(self, torch_process: TorchProcess) -> None:
        self._torch = torch_process

    def attack(self, draw: random.Random, folder: Path) -> Outcome:
        size = draw.choice((2, 3, 4))
        victim, strategy = draw.randrange(size), draw.choice(STRATEGIES)
        meeting = draw.random() < 0.25
        after_s = draw.uniform(0.0, 0.2 if meeting else 1.0)
        when = "the meeting began" if meeting else "all were ready"
        case = f"rank {victim} of {size}, {strategy}, killed {after_s:.2f} s after {when}"
        answer = self._torch.call(
            "attacks.rank_kills:train_and_kill",
            *(size, victim, strategy, meeting, after_s, str(folder), free_port()),
            timeout_s=_READY_S + _MEETING_S + 2 * _END_S,
        )
        if answer.timed_out or answer.error:
            return Outcome(case=case, time="it did not end" if answer.timed_out else "", other=answer.error)
        return _judged(case, answer.value, victim, meeting, folder)

    def afterwards(self) -> Iterator[Outcome]:
        return self._torch.left()


def _judged(case: str, ends: dict[str, Any], victim: int, meeting: bool, folder: Path) -> Outcome:
    others = [rank for rank in range(len(ends["pids"])) if rank != victim]
    errors = {rank: (folder / f"{rank}.err").read_text() for rank in others}
    dead = f"rank {victim} ({socket.gethostname()}, pid {ends['pids'][victim]}) died"
    problems = []
    for rank, err in errors.items():
        named = re.search(rf"ranks? .*\b{victim}\b", err) if meeting else dead in err
        blamed = {int(number) for number in re.findall(r"rank (\d+) \([^)]*\) died", err)} - {victim}
        if rank not in ends["late"] and (not named or blamed):
            problems.append(f"rank {rank} says {err[-200:]!a}")
        if rank not in ends["late"] and not meeting and ends["codes"][rank] != LEFT:
            problems.append(f"rank {rank} ends with exit code {ends['codes'][rank]}")
    tracebacks = [err for err in errors.values() if "Traceback (most recent call last)" in err and not meeting]
    allowed_s = _END_S + (_MEETING_S if meeting else 0.0)
    late = f"ranks {ends['late']} still run after {allowed_s:.0f} s" if ends["late"] else ""
    return Outcome(
        case=case,
        traceback=f"{last_frame(tracebacks[0])}: {tracebacks[0].strip().splitlines()[-1]!a}" if tracebacks else "",
        time=late,
        other="; ".join(problems),
    )


def train_and_kill(
    size: int, victim: int, strategy: str, meeting: bool, after_s: float, folder: str, port: int
) -> dict[str, Any]:
    """Fork the ranks, kill one, and wait for the others; process ids, exit codes, and the late ranks, which are killed here."""
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            _train(rank, size, strategy, Path(folder), port)
        pids.append(pid)
    ready = [Path(folder, f"{rank}.ready") for rank in range(size)]
    deadline_s = time.monotonic() + _READY_S
    while not meeting and not all(path.exists() for path in ready):
        if time.monotonic() > deadline_s:
            errors = [Path(folder, f"{rank}.err").read_text()[-500:] for rank in range(size)]
            raise TimeoutError(f"the ranks were not ready within {_READY_S:g} s: {errors}")
        time.sleep(0.01)
    time.sleep(after_s)
    os.kill(pids[victim], signal.SIGKILL)
    running = dict(enumerate(pids))
    deadline_s = time.monotonic() + _END_S + (_MEETING_S if meeting else 0.0)
    codes: dict[int, int] = {}
    while running and time.monotonic() < deadline_s:
        for rank, pid in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
                del running[rank]
        time.sleep(0.01)
    for pid in running.values():
        os.kill(pid, signal.SIGKILL)
    return {"pids": pids, "codes": [codes.get(rank) for rank in range(size)], "late": list(running)}


def _train(rank: int, size: int, strategy: str, folder: Path, port: int) -> None:
    """Run one rank in a forked process: it meets the others and trains until something ends it."""
    os.dup2(os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        _steps(rank, strategy, folder)
    except BaseException:  # noqa: BLE001  (a script ends by the same hook, which reports dead ranks)
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    os._exit(1)


def _steps(rank: int, strategy: str, folder: Path) -> None:
    import torch

    from parallel_strategies import STRATEGIES as STARTS
    from parallel_strategies import OptimizerOf
    from trainstep.parallel.process_group import start_ranks

    ranks = start_ranks("gloo", timeout_s=_MEETING_S)
    torch.manual_seed(0)

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.tanh(self.first(x)))

    model = Two()
    run = STARTS[strategy](model, ranks, OptimizerOf(torch.optim.AdamW, lr=1e-3))
    while True:
        model(torch.randn(4, 16)).square().mean().backward()
        run.sync.finish_gradient_synchronization()
        run.optimizer.step()
        run.optimizer.zero_grad()
        (folder / f"{rank}.ready").touch()
