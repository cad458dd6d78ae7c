"""One cell to one record, whatever happens on the way."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cell_maker import importable, planted, silent
from record_maker import a_record
from trainstep.config.cell import Cell
from trainstep.measure import runner
from trainstep.measure.runner import CellRun, Limits, open_run, run_alone, with_facts
from trainstep.records.record import Fact, Record, record_from_plain, record_to_plain

__all__ = ["importable"]
pytestmark = pytest.mark.usefixtures("importable")
GIB = 2**30
Run = Callable[..., tuple[Record, bool]]


@pytest.fixture
def alone() -> Iterator[Run]:
    """Runs a cell alone and closes its process at the end of the test."""
    opened: list[CellRun] = []

    def run(cell: Cell, limits: Limits | None = None, **options: Any) -> tuple[Record, bool]:
        opened.append(open_run(cell, limits or Limits(), silent))
        return run_alone(opened[-1], **options)

    yield run
    for run_ in opened:
        run_.connection.kill()
        run_.connection.close()


def test_a_record(alone: Run):
    cell = planted(steps=4, seconds=0.01)
    record, again = alone(cell)
    assert not again
    assert (record.workload, record.key, record.config) == (cell.workload, cell.key, cell.config)
    assert len(record.samples["step"].values) == 4
    assert min(record.samples["step"].values) >= 0.01
    assert record.fact("interleaving") == "none"
    assert record.fact("import_s") > 0
    assert record.environment.trainstep
    assert record.duration_s > 0.04
    assert record.started_at.endswith("+00:00")
    assert record.failure is None
    assert record_from_plain(record_to_plain(record)) == record


def test_as_many_steps_as_asked(alone: Run):
    record, _ = alone(planted(steps=4), steps=2)
    assert len(record.samples["step"].values) == 2


@pytest.mark.parametrize(
    ("act", "kind"),
    [("raise", "crash"), ("abort", "crash"), ("run_out", "out_of_memory"), ("kill", "crash")],
)
def test_a_failure_is_a_record(alone: Run, act: str, kind: str):
    record, again = alone(planted("SHARED", act=act))
    assert not again
    assert record.failure is not None
    assert (record.failure.kind, record.failure.phase) == (kind, "steps")
    assert record.environment.trainstep
    assert record_from_plain(record_to_plain(record)) == record


def test_a_time_out_names_the_whole_limit(alone: Run):
    record, again = alone(planted(act="hang", seconds=0.2), Limits(timeout_s=2.5))
    assert not again
    assert record.failure is not None
    assert record.failure.message == "killed in steps after its 2.5 s were over"
    assert record.duration_s >= 2.4


def test_findings_that_are_none(alone: Run):
    record, again = alone(planted(act="words"))
    assert again is False
    assert record.failure is not None
    assert record.failure.kind == "crash"
    assert "not all numbers" in record.failure.message


def test_a_build_that_returns_twice_is_a_crash(alone: Run):
    record, again = alone(planted(act="return_twice", where="prepare"))
    assert not again
    assert record.failure is not None
    assert record.failure.kind == "crash"


@pytest.mark.parametrize("then", ["nothing", "abort", "hang"])
def test_an_empty_compile_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = open_run(planted(act="compile", then=then, cold_compile=True), Limits(timeout_s=2.5), silent)
    record, _ = run_alone(run)
    assert (record.failure is None) == (then == "nothing")
    if then == "nothing":
        caches = record.fact("compile_caches").split()
        assert [Path(cache).parent.parent for cache in caches] == [tmp_path, tmp_path]
    run.connection.close()
    assert [*tmp_path.iterdir()] == []


def test_only_a_cpu_cell_is_limited():
    limits = Limits(memory_limit_bytes=GIB)
    assert limits.memory_for(planted()) == GIB
    assert limits.memory_for(planted(device="cuda")) is None


def test_ninety_percent_of_the_machine_by_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "memory_bytes", lambda: 10 * GIB)
    assert Limits().memory_for(planted()) == 9 * GIB


def test_facts_added_and_taken_away():
    record = a_record(facts={"driver_bytes": Fact(value=3, unit="bytes"), "tokens": Fact(value=4, unit="count")})
    changed = with_facts(record, driver_bytes=None, interleaving="live", turn_steps=2)
    assert changed.facts == {
        "tokens": Fact(value=4, unit="count"),
        "interleaving": Fact(value="live"),
        "turn_steps": Fact(value=2, unit="count"),
    }
