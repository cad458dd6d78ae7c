"""Cells run side by side: a process is kept for the next cell, a failure costs its own cell, none begins after the deadline."""

import time

import pytest

from cell_maker import importable, planted
from trainstep.measure.attention.tiles import SideProcesses
from trainstep.measure.harness.runner import Limits

__all__ = ["importable"]
pytestmark = pytest.mark.usefixtures("importable")
LIMITS = Limits(timeout_s=30)
NEVER_S = float("inf")


def test_a_failure_is_a_record_and_the_rest_go_on():
    side = SideProcesses(2)
    cells = [planted("SHARED"), planted("SEGFAULT"), planted("RAISE"), planted("SHARED", index=1)]
    records = dict(side.run(cells, LIMITS, deadline_s=NEVER_S))
    failures = [record.failure.kind if (record := records[i]) and record.failure else None for i in range(4)]
    assert failures == [None, "crash", "crash", None]
    side.close()


def test_a_process_is_kept_for_the_next_cell():
    side = SideProcesses(1)
    pids = set()
    for turn in range(2):
        cells = [planted("SHARED", index=i, turn=turn) for i in range(2)]
        pids |= {record and record.fact("pid") for _, record in side.run(cells, LIMITS, deadline_s=NEVER_S)}
    assert len(pids) == 1
    assert None not in pids
    side.close()


def test_nothing_begins_after_the_deadline():
    side = SideProcesses(1)
    assert list(side.run([planted("SHARED")], LIMITS, deadline_s=time.monotonic() - 1)) == [(0, None)]
    side.close()
