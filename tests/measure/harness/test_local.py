"""A cell gets a fresh process, or the one that its workload shares as long as no cell failed in it."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cell_maker import importable, is_alive, planted, silent, wait_until
from trainstep.config.grid import Cell
from trainstep.measure.harness.local import run_groups
from trainstep.measure.harness.runner import Limits
from trainstep.records.record import Record

__all__ = ["importable"]
pytestmark = pytest.mark.usefixtures("importable")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def run(*cells: Cell, timeout_s: float = 60.0) -> list[Record]:
    groups = run_groups([[cell] for cell in cells], Limits(timeout_s=timeout_s), silent)
    return [record for records in groups for record in records]


def pids(records: Sequence[Record]) -> list[int | None]:
    return [record.fact("pid") for record in records]


def shared(index: int, **config: Any) -> Cell:
    return planted("SHARED", index=index, **config)


def test_each_cell_has_a_fresh_process():
    process_ids = pids(run(planted(index=0), planted(index=1), planted(index=2)))
    assert len(set(process_ids)) == 3


def test_cells_that_share_a_process_have_one():
    process_ids = pids(run(shared(0), shared(1), shared(2)))
    assert len(set(process_ids)) == 1


def test_a_process_is_shared_until_a_cell_fails():
    acts = ["nothing", "nothing", "run_out", "nothing", "abort", "nothing", "hang", "nothing", "nothing"]
    cells = [shared(index, act=act) for index, act in enumerate(acts)]
    records = run(*cells, timeout_s=8.0)  # one hangs; the start of the one behind it waits for the machine's other work
    assert [record.key for record in records] == [cell.key for cell in cells]
    kinds = [record.failure.kind if record.failure else "" for record in records]
    assert kinds == ["", "", "out_of_memory", "", "crash", "", "timeout", "", ""]
    first, second, _, third, _, fourth, _, fifth, sixth = pids(records)
    assert (first, fifth) == (second, sixth)
    assert len({first, third, fourth, fifth}) == 4


def test_a_process_is_not_shared_with_another_workload():
    noisy = planted("NOISY")
    first, second, third = pids(run(shared(0), noisy, shared(1)))
    assert len({first, second, third}) == 3


def test_a_shared_process_that_died_between_cells_is_replaced():
    records: list[Record] = []
    for [record] in run_groups([[shared(0)], [shared(1)]], Limits(), silent):
        records.append(record)
        if len(records) == 1:
            kill_and_wait(record.fact("pid"))
    assert [record.failure for record in records] == [None, None], "the second cell did nothing wrong"


def kill_and_wait(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not is_alive(pid))
    time.sleep(0.2)  # so that its parent notices


def test_a_group_is_interleaved_between_single_cells(tmp_path: Path):
    log = tmp_path / "log"
    pair = [planted(name=name, steps=2, log=str(log)) for name in ("a", "b")]
    groups = list(run_groups([[shared(0)], pair, [shared(1)]], Limits(), silent))
    assert [len(records) for records in groups] == [1, 1, 1, 1], "the variants' records also come one by one"
    assert [record.fact("interleaving") for records in groups for record in records] == ["none", "live", "live", "none"]
    assert groups[0][0].fact("pid") != groups[3][0].fact("pid")
    assert "a take 1\nb take 1\na take 1\nb take 1\n" in log.read_text()


def test_variants_share_processes_with_those_of_the_next_group():
    """Each variant has one process for all groups, since to start one costs as much as hundreds of kernels."""
    groups = [[shared(0), shared(1)], [shared(2), shared(3), shared(4)], [shared(5)], [shared(6), shared(7)]]
    all_pids = pids([record for records in run_groups(groups, Limits(), silent) for record in records])
    group_pids = [all_pids[start : start + len(group)] for start, group in zip((0, 2, 5, 6), groups, strict=True)]
    assert all(len(set(group)) == len(group) for group in group_pids), "each variant has its own process"
    assert {pid for group in group_pids for pid in group} == set(group_pids[1])
    assert wait_until(lambda: not any(is_alive(pid) for pid in group_pids[1] if pid))


@linux
@pytest.mark.parametrize("name", ["SLEEP", "SHARED"])
def test_closing_ends_what_runs(tmp_path: Path, name: str):
    cells = [planted(name, index=index, act="spawn", pid_file=str(tmp_path / str(index))) for index in (0, 1)]
    groups = run_groups([[cell] for cell in cells], Limits(), silent)
    [record] = next(groups)
    groups.close()
    assert not (tmp_path / "1").exists()
    assert wait_until(lambda: not is_alive(record.fact("pid")))
    assert wait_until(lambda: not is_alive(int((tmp_path / "0").read_text())))


@linux
def test_a_record_does_not_wait_for_its_process_to_leave(tmp_path: Path):
    groups = run_groups([[planted()]], Limits(), silent)
    [record] = next(groups)
    assert is_alive(record.fact("pid"))
    groups.close()
    assert wait_until(lambda: not is_alive(record.fact("pid")))
