"""The load of other processes just before a cell, on the cores and on the GPU, without trainstep's own work."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fake_nvml import FakeNvml, install
from record_maker import a_record
from trainstep.measure.machine import environment as machine_load
from trainstep.measure.machine.environment import load_before, others_share
from trainstep.records.facts import facts_of
from trainstep.records.summary import doubts

OWN_PID = os.getpid()


def proc_at(folder: Path, busy: int, ours: int, idle: int) -> None:
    """A /proc with this process, a child of it whose name is odd, and a stranger, at so many ticks."""
    (folder / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 0\n")
    for pid, parent, ticks in ((OWN_PID, 1, ours // 2), (OWN_PID + 1, OWN_PID, ours - ours // 2), (7, 1, busy - ours)):
        (folder / str(pid)).mkdir(exist_ok=True)
        fields = ["S", parent, *[0] * 9, ticks, 0, 0]
        (folder / str(pid) / "stat").write_text(f"{pid} (a) b) {' '.join(map(str, fields))}\n")


def moving(folder: Path, **after: int) -> Callable[[float], None]:
    return lambda _: proc_at(folder, **after)


@pytest.mark.parametrize(("ours", "share"), [(0, 0.4), (8, 0.0), (4, 0.2)])
def test_our_own_ticks_are_not_those_of_others(tmp_path: Path, ours: int, share: float):
    proc_at(tmp_path, busy=100, ours=50, idle=1000)
    measured_share = others_share(tmp_path, moving(tmp_path, busy=108, ours=50 + ours, idle=1012))
    assert measured_share == pytest.approx(share)


def test_a_machine_without_ticks_has_no_share(tmp_path: Path):
    assert others_share(tmp_path, lambda _: None) is None
    proc_at(tmp_path, busy=1, ours=1, idle=1)
    assert others_share(tmp_path, lambda _: None) is None, "no time passed"


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs /proc")
def test_a_childs_ticks_are_trainsteps_own():
    """The ticks of a child process count as trainstep's own, however busy the machine is."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        machine_load.time.sleep(0.3)
        assert child.pid in machine_load.process_ticks(Path("/proc"), os.getpid())
        child.kill()
    assert 1 not in machine_load.process_ticks(Path("/proc"), os.getpid())


def test_a_gpu_is_busy_where_it_stays_busy(monkeypatch: pytest.MonkeyPatch):
    fake = FakeNvml("NVIDIA H200")
    install(monkeypatch, fake)
    monkeypatch.setattr(machine_load, "_GPU_MEMORY_S", 0.25)
    fake.busy_percents = [90, 60, 2]
    assert load_before("cuda")["gpu_busy_before"] == 0.02, "the first readings are of trainstep's own last cell"
    fake.busy_percents = [90]
    assert load_before("cuda")["gpu_busy_before"] == 0.9
    assert "gpu_busy_before" not in load_before("cpu")


def test_gpu_processes_are_counted_where_their_numbers_are_this_systems(monkeypatch: pytest.MonkeyPatch):
    fake = FakeNvml("NVIDIA H200")
    install(monkeypatch, fake)
    for pids, count in (([], 0), ([OWN_PID], 0), ([OWN_PID, os.getppid()], 1), ([OWN_PID, 2**30], None)):
        fake.pids = pids
        assert load_before("cuda").get("gpu_other_processes") == count


def test_a_busy_machine_is_a_doubt():
    quiet = a_record(facts=facts_of(cpu_busy_before=0.2, gpu_busy_before=0.05, gpu_other_processes=0))
    assert doubts(quiet) == ("few samples",)
    busy = a_record(facts=facts_of(cpu_busy_before=0.5, gpu_busy_before=0.3, gpu_other_processes=2))
    assert doubts(busy)[1:] == (
        "other processes used 50% of the cores before it",
        "other processes used 30% of the GPU before it",
        "other processes on the GPU",
    )
