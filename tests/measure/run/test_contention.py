"""What other processes take is read from /proc: here a made-up one."""

import os
from pathlib import Path
from typing import Any

import pytest

from trainstep.measure.run import contention
from trainstep.measure.run.contention import Contention


def write(proc: Path, *, busy: int, idle: int, ours: int, waited_ns: dict[int, int], others: int = 50) -> None:
    (proc / "stat").write_text(f"cpu {busy} 0 0 {idle} 0 0 0 0 0 0\n")
    for pid, parent, ticks in ((os.getpid(), 1, ours), (777_777, 1, others)):
        folder = proc / str(pid)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "stat").write_text(f"{pid} (name (x)) S {parent} " + "0 " * 9 + f"{ticks} 0 0\n")
    for thread, waited in waited_ns.items():
        folder = proc / "self" / "task" / str(thread)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(f"1000 {waited} 5\n")


def test_waits_and_shares_are_those_since_the_last_look(tmp_path: Path):
    write(tmp_path, busy=100, idle=100, ours=40, waited_ns={1: 10**9, 2: 5 * 10**9})
    seen = Contention(ranks=1, proc=tmp_path)
    write(tmp_path, busy=180, idle=120, ours=60, waited_ns={1: 3 * 10**9, 2: 6 * 10**9, 3: 10**8})
    assert seen.take() == {"core_wait_s": pytest.approx(2.0), "others_cpu_share": pytest.approx(0.6)}
    assert seen.take() == {"core_wait_s": 0.0}, "no time has passed"


def test_a_system_that_tells_nothing_gives_no_facts(tmp_path: Path):
    assert Contention(ranks=1, proc=tmp_path / "nothing").take() == {}


class Gpu:
    """A driver's view of one GPU."""

    def __init__(self, *pids: int, shares: dict[int, float]) -> None:
        self._pids, self._shares = pids, shares

    def processes(self) -> tuple[int, ...]:
        return self._pids

    def process_shares(self, since_s: float) -> dict[int, float]:
        return self._shares


@pytest.mark.parametrize(
    ("pids", "shares", "count", "share"),
    [
        ((os.getpid(), 9), {os.getpid(): 0.3, 9: 0.6}, 1, 0.6),
        ((os.getpid(),), {os.getpid(): 0.9}, 0, 0.0),
        ((1001, 1002), {1001: 0.5, 1002: 0.4}, 1, 0.4),  # of another namespace: the busiest is ours
        ((1001,), {1001: 0.5}, 0, 0.0),
    ],
)
def test_others_on_a_gpu(
    pids: Any, shares: Any, count: int, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(contention, "GpuState", lambda uuid: Gpu(*pids, shares=shares))
    write(tmp_path, busy=1, idle=1, ours=1, waited_ns={})
    seen = Contention(ranks=1, proc=tmp_path)
    seen.watch_gpu("GPU-1")
    assert seen.take() == {"gpu_others": count, "gpu_others_share": pytest.approx(share)}
