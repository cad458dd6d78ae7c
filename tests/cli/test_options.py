"""--quiet, --dry-run, --budget-minutes and --resume: how a verb runs its cells."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cell_maker import import_path, planted, run_here
from record_maker import a_record
from trainstep.cli import app, cells
from trainstep.cli.cells import run_cells, unfinished
from trainstep.cli.options import GridOptions, RunOptions
from trainstep.config.grid import Cell
from trainstep.measure.harness import fork_client
from trainstep.records.record import Record
from trainstep.records.store import Store

SWEEP = '[grid]\nworkload = "workloads:SLEEP"\ndevice = "cpu"\nindex = [0, 1, 2]\n'
VERBS = ("bench", "attention", "op", "profile", "numerics", "memory", "parallel", "collectives")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, empty; no GPU is visible."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", import_path())
    return tmp_path


@pytest.mark.parametrize("verb", VERBS)
def test_a_dry_run_says_what_would_run_and_writes_no_file(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str
):
    monkeypatch.setattr(fork_client, "start_server", lambda: pytest.fail("a dry run imports torch"))
    assert app.run([verb, "--dry-run", "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    first, *lines = printed.out.splitlines()
    assert " to run, about " in first
    assert first.split()[0] == str(len([line for line in lines if line.startswith("  ")]))
    guess = f" of {2 if verb in ('attention', 'op', 'collectives') else 10} s for each"
    assert f"a rough guess{'' if first.startswith('1 cell ') else guess}" in first
    assert lines[-1].endswith("(nothing was run)")
    assert printed.err == ""
    assert list(folder.iterdir()) == []


def test_a_dry_run_of_tune_writes_no_file(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert app.run(["tune", "--dry-run", "--device", "cpu", "--head-dim", "64", "--kernel", "forward"]) == 0
    assert capsys.readouterr().out.startswith("2 cells to run, about ")
    assert list(folder.iterdir()) == []


def test_a_dry_run_as_json_lists_the_cells(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert app.run(["bench", "--device", "cpu", "--context", "16,32", "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["dry_run"], plan["to_run"], plan["done"]) == (True, 2, 0)
    assert [cell["label"] for cell in plan["cells"]] == ["tiny, context 16", "tiny, context 32"]
    assert plan["expected_s"] == sum(cell["expected_s"] for cell in plan["cells"])


def test_bad_input_is_refused_in_a_dry_run_too(refused: Any):
    refused(["bench", "--dry-run", "--context", "many"], "context: must be a whole number")
    refused(["bench", "--resume"], "resume: a new file holds no cell yet; name the file of records with --out")
    refused(["bench", "--budget-minutes", "0"], "budget_minutes: must be a positive number, not 0")
    refused(["memory", "--from", "x", "--dry-run"], "nothing runs: dry_run would have no effect")
    refused(["profile", "--from", "x", "--resume"], "nothing runs: resume would have no effect")
    refused(["memory", "--fit", "context", "--budget-minutes", "3"], "budget_minutes: a search with --fit")
    refused(["bench", "--allow-mixed"], "allow_mixed: every cell runs anew, which no record hinders; add --resume")


def test_resume_continues_records_of_another_machine_if_the_user_allows_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    Store(Path("r.jsonl")).append(a_record())
    resume = ["bench", "--device", "cpu", "--out", "r.jsonl", "--resume", "--dry-run"]
    assert app.run(resume) == 2
    assert "continue with --allow-mixed, or give --out another file" in capsys.readouterr().err
    assert app.run([*resume, "--allow-mixed"]) == 0
    assert capsys.readouterr().out.startswith("1 cell to run")


def test_a_dry_run_of_a_sweep_says_which_cells_are_done(folder: Path, capsys: pytest.CaptureFixture[str]):
    Path("s.toml").write_text(SWEEP)
    assert app.run(["sweep", "s.toml", "--set", "index=1", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    before = Path("runs/s.jsonl").read_bytes()
    assert app.run(["sweep", "s.toml", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 cells to run, about ")
    assert lines[0].endswith("; 1 of 3 is done already")
    assert [line.partition(": ")[2][:5] for line in lines[1:4]] == ["about", "done ", "about"]
    assert Path("runs/s.jsonl").read_bytes() == before


def test_quiet_prints_the_answer_and_errors_only(tmp_path: Path):
    (tmp_path / "s.toml").write_text(SWEEP)
    code, out, err = run_here("sweep", "s.toml", "--quiet", folder=tmp_path)
    assert (code, err) == (0, "")
    assert "records: runs/s.jsonl" in out
    code, out, err = run_here("sweep", "s.toml", "--quiet", "--timeout-s", "-1", folder=tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith("trainstep: timeout_s")


class Clock:
    """Time that passes as cells run."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("minutes", "group_size", "ran"),
    [(None, 1, 6), (0.01, 1, 1), (1.0, 1, 1), (2.0, 1, 2), (3.5, 1, 3), (6.0, 1, 6), (3.9, 2, 2), (4.0, 2, 4)],
)
def test_a_budget_begins_no_group_that_would_end_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: float | None, group_size: int, ran: int
):
    """Six cells of a minute each, alone or in pairs that are interleaved."""
    clock = Clock()
    monkeypatch.setattr(cells.CellProgress, "elapsed_s", property(lambda _self: clock.now_s))
    planned = [planted(index=index) for index in range(6)]
    groups = [planned[start : start + group_size] for start in range(0, 6, group_size)]
    closed = []

    def execute(waiting: Any, _tell: Any) -> Iterator[list[Record]]:
        try:
            for cell in (cell for group in waiting for cell in group):
                clock.now_s += 60
                yield [a_record(key=cell.key)]
        finally:
            closed.append(True)

    store = Store(tmp_path / "records.jsonl")
    how = GridOptions(budget_minutes=minutes, quiet=True)
    records = run_cells(groups, store, execute, environment=None, options=how, rerun=True)
    assert len(records) == len(store.read()) == ran
    assert closed == [True]


def budget_message(capsys: pytest.CaptureFixture[str], how: RunOptions, *words: str) -> str:
    """The message about two of three cells that a spent budget left."""
    planned: list[Cell] = [planted(index=index) for index in range(3)]
    sys.argv[1:] = words
    assert unfinished([[cell] for cell in planned], [a_record()], Store(Path("r.jsonl")), how) == 4
    return capsys.readouterr().err.strip()


def test_a_spent_budget_prints_the_command_that_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["trainstep"])
    spent = "2 of 3 cells are left: the budget of 5 min is spent. To continue: trainstep "
    grid, plain = GridOptions(budget_minutes=5), RunOptions(budget_minutes=5)
    assert budget_message(capsys, grid, "bench") == f"{spent}bench --out r.jsonl --resume"
    assert budget_message(capsys, grid, "bench", "--out=r.jsonl") == f"{spent}bench --out=r.jsonl --resume"
    assert (
        budget_message(capsys, grid, "bench", "--resume", "--out", "r.jsonl") == f"{spent}bench --resume --out r.jsonl"
    )
    assert budget_message(capsys, plain, "sweep", "a b.toml") == f"{spent}sweep 'a b.toml'"
    assert budget_message(capsys, plain, "tune") == f"{spent}tune --out r.jsonl"
    assert unfinished([[planted()]], [a_record()], Store(Path("r.jsonl")), grid) == 0


def test_a_sweep_continues_after_each_spent_budget(tmp_path: Path):
    """Each cell takes longer than the budget, so every call of the same command runs one cell more."""
    (tmp_path / "s.toml").write_text(SWEEP)
    command = ["sweep", "s.toml", "--budget-minutes", 0.0001]
    codes = [run_here(*command, folder=tmp_path)[0] for _ in range(3)]
    assert codes == [4, 4, 0]
    assert len(Store(tmp_path / "runs" / "s.jsonl").read()) == 3


@pytest.mark.slow
def test_resume_runs_the_cells_that_are_left(tmp_path: Path):
    options = ["--kib", 1, "--mib", 0.5, "--out", "r.jsonl", "--steps", 2, "--warmups", 0]
    code, _, err = run_here("collectives", *options, "--budget-minutes", 0.0001, folder=tmp_path)
    assert code == 4
    assert "1 of 2 cells are left" in err
    code, out, err = run_here("collectives", *options, "--resume", folder=tmp_path)
    assert code == 0, err
    assert "1 of 2 cells are done already" in err
    assert len(Store(tmp_path / "r.jsonl").read()) == 2
    assert out.count("all_reduce") >= 2


@pytest.mark.parametrize("verb", [*VERBS, "sweep", "tune"])
def test_help_names_the_options_of_running_cells(capsys: pytest.CaptureFixture[str], verb: str):
    assert app.run([verb, "--help"]) == 0
    printed = capsys.readouterr().out
    assert [word for word in ("--quiet", "--dry-run", "--budget-minutes") if word not in printed] == []
    assert ("--config" in printed and "--resume" in printed) == (verb in VERBS)


def test_the_first_line_is_printed_before_the_first_cell_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    printed_first = []

    def execute(waiting: Any, _tell: Any) -> Iterator[list[Record]]:
        printed_first.append(capsys.readouterr().err)
        yield from ([a_record(key=cell.key)] for group in waiting for cell in group)

    run_cells([[planted()]], Store(tmp_path / "r.jsonl"), execute, environment=None, rerun=True)
    assert printed_first == ["1 cell to run, about 10 s by a rough guess\n"]
