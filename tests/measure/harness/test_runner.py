"""One cell gives one record, whatever happens while it runs."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cell_maker import importable, planted, silent
from record_maker import a_record
from trainstep.config.grid import Cell
from trainstep.measure.harness import runner
from trainstep.measure.harness.runner import CellRun, Limits, open_run, run_alone, with_facts
from trainstep.records.record import Fact, Record, record_from_plain, record_to_plain

__all__ = ["importable"]
pytestmark = pytest.mark.usefixtures("importable")
GIB = 2**30
Run = Callable[..., tuple[Record, bool]]


@pytest.fixture
def run_cell() -> Iterator[Run]:
    """Run a cell alone, and close its process at the end of the test."""
    opened: list[CellRun] = []

    def run(cell: Cell, limits: Limits | None = None, **options: Any) -> tuple[Record, bool]:
        opened.append(open_run(cell, limits or Limits(), silent))
        return run_alone(opened[-1], **options)

    yield run
    for cell_run in opened:
        cell_run.connection.kill()
        cell_run.connection.close()


def test_a_record_has_samples_facts_and_environment(run_cell: Run):
    cell = planted(steps=4, seconds=0.01)
    record, again = run_cell(cell)
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


def test_as_many_steps_run_as_requested(run_cell: Run):
    record, _ = run_cell(planted(steps=4), steps=2)
    assert len(record.samples["step"].values) == 2


@pytest.mark.parametrize(
    ("act", "kind"),
    [("raise", "crash"), ("abort", "crash"), ("run_out", "out_of_memory"), ("kill", "crash")],
)
def test_a_failure_is_a_record(run_cell: Run, act: str, kind: str):
    record, again = run_cell(planted("SHARED", act=act))
    assert not again
    assert record.failure is not None
    assert (record.failure.kind, record.failure.phase) == (kind, "steps")
    assert record.environment.trainstep
    assert record_from_plain(record_to_plain(record)) == record


def test_a_time_out_names_the_whole_limit(run_cell: Run):
    record, again = run_cell(planted(act="hang", seconds=0.2), Limits(timeout_s=2.5))
    assert not again
    assert record.failure is not None
    assert record.failure.message == "killed in steps at its time limit of 2.5 s"
    assert record.duration_s >= 2.4


def test_findings_that_are_not_numbers_are_a_crash(run_cell: Run):
    record, again = run_cell(planted(act="words"))
    assert again is False
    assert record.failure is not None
    assert record.failure.kind == "crash"
    assert "not all numbers" in record.failure.message


def test_a_build_that_returns_twice_is_a_crash(run_cell: Run):
    record, again = run_cell(planted(act="return_twice", where="prepare"))
    assert not again
    assert record.failure is not None
    assert record.failure.kind == "crash"


@pytest.mark.parametrize("then", ["nothing", "abort", "hang"])
def test_a_cold_compile_has_an_empty_cache_that_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    limits = Limits(timeout_s=2.5 if then == "hang" else 60.0)
    run = open_run(planted(act="compile", then=then, cold_compile=True), limits, silent)
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


def test_the_default_limit_is_90_percent_of_the_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "memory_bytes", lambda: 10 * GIB)
    assert Limits().memory_for(planted()) == 9 * GIB


def test_with_facts_adds_and_removes_facts():
    record = a_record(facts={"driver_bytes": Fact(value=3, unit="bytes"), "tokens": Fact(value=4, unit="count")})
    changed = with_facts(record, driver_bytes=None, interleaving="live", turn_steps=2)
    assert changed.facts == {
        "tokens": Fact(value=4, unit="count"),
        "interleaving": Fact(value="live"),
        "turn_steps": Fact(value=2, unit="count"),
    }
