"""Two runs into one file stay two runs, and the ranks of a launch agree on the name without asking each other."""

from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch

import trainstep
from run_records import a_run
from trainstep.measure.run.run_name import run_name
from trainstep.measure.run.show import rank_path, wait_for_ranks
from trainstep.records.store import Store
from trainstep.report.kit.rows import read_rows
from trainstep.report.run.runs import runs_of


def wrote(path: Path, rank: int, run: str, *, ranks: int = 2, launch: str = "", **facts: Any) -> None:
    """Append a record, as this rank of that run would."""
    record = a_run(run=run, rank=rank, ranks=ranks, facts={"launch": launch or None, **facts})
    Store(rank_path(path, rank)).append(record)


def names(path: Path, ranks: int, launch: str) -> list[str]:
    return [run_name(path, rank, launch) for rank in range(ranks)]


def test_each_run_into_a_file_gets_the_next_name(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    for name in ("a", "a-2", "a-3"):
        assert run_name(path) == name
        wrote(path, 0, name, ranks=1)


@pytest.mark.parametrize("written", [(0,), (0, 1), (1,)], ids=["fewer ranks", "as many", "rank 0's file removed"])
def test_ranks_agree_whatever_ranks_the_earlier_run_had(written: tuple[int, ...], tmp_path: Path):
    path = tmp_path / "a.jsonl"
    for rank in written:
        wrote(path, rank, "a", launch="first")
    assert names(path, 3, "second") == ["a-2"] * 3


def test_a_rank_that_is_late_has_the_name_of_those_that_wrote_already(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    for run, launch in (("a", "first"), ("a-2", "second")):
        wrote(path, 0, run, launch=launch)
    wrote(path, 1, "a", launch="first")
    assert [run_name(path, rank, "second") for rank in (1, 2)] == ["a-2", "a-2"]


def test_runs_that_one_launcher_starts_have_names_of_their_own(tmp_path: Path):
    """Two `watch` blocks, or two launches from one shell: the word of the launch is the same."""
    path = tmp_path / "a.jsonl"
    for rank in range(2):
        wrote(path, rank, "a", launch="same")
    assert names(path, 2, "same") == ["a-2"] * 2


def test_a_file_of_another_rank_that_cannot_be_read_stops_no_run(tmp_path: Path):
    (tmp_path / "a.rank1.jsonl").write_text("no record\n")
    assert run_name(tmp_path / "a.jsonl") == "a"


def test_two_blocks_into_one_file_are_two_runs(tmp_path: Path):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with trainstep.watch(model, optimizer, out=tmp_path / "a.jsonl", page=False, quiet=True, inspect_every=0):
            for _ in range(6):
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
    runs = runs_of(read_rows([tmp_path / "a.jsonl"]))
    assert [(run.last.config["run"], run.steps) for run in runs] == [("a", 6), ("a-2", 6)]
    assert [run.name.rpartition(", ")[2] for run in runs] == ["run a", "run a-2"], "what tells them apart"


def test_an_earlier_runs_end_is_not_waited_for(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    for run in ("a", "a-2"):
        wrote(path, 0, run)
    wrote(path, 1, "a")
    timer = Timer(0.2, wrote, [path, 1, "a-2"])
    timer.start()
    wait_for_ranks(path, 2, longest_s=60)
    assert Store(rank_path(path, 1)).read()[-1].config["run"] == "a-2"
    timer.join()
