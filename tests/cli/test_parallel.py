"""`trainstep parallel`: records, tables and a page from real ranks; bad input in one sentence."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cell_maker import run_here
from record_maker import ENVIRONMENT
from trainstep.cli import app, parallel
from trainstep.config.parallel import OURS, PEERS
from trainstep.records.ranks import rank_values
from trainstep.records.record import Environment
from trainstep.records.store import Store

SMALL = ["--model", "tiny", "--layers", 1, "--context", 16, "--steps", 4, "--warmups", 1, "--window-steps", 2]


@pytest.mark.slow
def test_compared_strategies_are_interleaved_and_send_the_expected_bytes(tmp_path: Path):
    options = ["--sync", "bucketed,none", "--bucket-mib", "0.1,1", "--page", "p.html", "--json"]
    code, out, err = run_here("parallel", *SMALL, *options, folder=tmp_path)
    assert code == 0, err
    assert "Traceback" not in err
    cells = [row for row in json.loads(out)["rows"] if row.get("workload") == "parallel"]
    assert [row["sync"] for row in cells] == ["none", "bucketed", "bucketed"]
    for row in cells:
        assert (row["messages"], row["sent_bytes"]) == (row["expected_messages"], row["expected_sent_bytes"])
    assert cells[1]["messages"] > cells[2]["messages"] > 0
    assert cells[1]["step_ratio_to_none"] > 0
    [path] = (tmp_path / "runs").glob("parallel-*.jsonl")
    records = Store(path).read()
    assert [record.fact("interleaving") for record in records] == ["live"] * 3
    assert len({record.fact("interleaving_group") for record in records}) == 1
    for record in records:
        steps = rank_values(record, "step")
        assert record.samples["step"].values == tuple(map(max, steps[0], steps[1]))
        assert len(record.samples["window_step"].values) == 4  # each turn takes one step and one window
    assert "Time of a step by bucket size" in (tmp_path / "p.html").read_text()


DRIFTING = """
import os
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x):
        with torch.no_grad():
            self.linear.bias += int(os.environ["RANK"])
        return self.linear(x).square().mean()

def build(run, device):
    return Model(), lambda step: {"x": torch.full((4, 3), float(step))}
"""


@pytest.mark.slow
def test_replicas_that_drift_apart_are_named(tmp_path: Path):
    (tmp_path / "drifting.py").write_text(DRIFTING)
    options = ["--model", "drifting:build", "--sync", "bucketed", "--steps", 1, "--warmups", 1, "--window-steps", 1]
    code, out, err = run_here("parallel", *options, "--out", "d.jsonl", folder=tmp_path)
    assert code == 3
    assert "Traceback" not in err
    assert "divergence in agreement" in out
    (record,) = Store(tmp_path / "d.jsonl").read()
    assert record.failure is not None
    assert record.failure.kind == "divergence"
    assert record.failure.message == (
        "every rank: 1 of the tensors are not the same on all 2 ranks: linear.bias on ranks 0, 1"
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_strategy_runs_from_the_command_line(tmp_path: Path):
    options = ["--sync", ",".join((*OURS, *PEERS)), "--out", "all.jsonl"]
    code, out, err = run_here("parallel", *SMALL, *options, folder=tmp_path)
    assert code == 0, err
    assert "What a rank holds" in out
    records = Store(tmp_path / "all.jsonl").read()
    assert [record.config["sync"] for record in records] == [*OURS, *PEERS]
    assert [record.failure for record in records] == [None] * len(records)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--sync", "bucketd"], "sync: 'bucketd' is not known (did you mean bucketed?)"),
        (["--ranks", "0"], "ranks: must be a whole number of at least 1"),
        (["--sync", "none,flat", "--bucket-mib", "1,2"], "bucket_mib: has no effect with sync none, flat"),
        (["--sync", "bucketed", "--rounds", "2"], "rounds: no variants are compared here"),
        (["--sync", "none,bucketed", "--rounds", "0"], "rounds: must be at least 1"),
        (["--sync", "bucketed", "--bucket-mib", "0"], "bucket_mib: must be a positive number of MiB"),
        (["--sync", "fsdp", "--compile", "model"], "compile: fsdp gathers parameters block by block"),
        (["--ranks", "1", "--sync", "torch_ddp"], "ranks: torch_ddp needs several ranks"),
        (["--check-agreement", "maybe"], "check_agreement: must be true or false"),
        (["--device", "cuda"], "device: no NVIDIA GPU is visible"),
        (["--data", "nowhere.txt"], "data: there is no file or folder 'nowhere.txt'"),
        (["--page", "x.jsonl", "--out", "x.jsonl"], "page: x.jsonl is the file of records"),
        (["--keep-trace", "/dev/null/folder"], "keep_trace: no file can be made in '/dev/null/folder'"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    arguments: list[str], sentence: str, refused: Callable[[Sequence[str], str], None]
):
    refused(["parallel", *arguments], sentence)


def machine(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine with this many GPUs."""
    here = dataclasses.replace(ENVIRONMENT, gpu_count=gpus)

    def this_machine(device: str | None, **_: object) -> tuple[Environment, str]:
        return here, "cpu" if device == "cpu" else "cuda"

    monkeypatch.setattr(parallel, "this_machine", this_machine)


def test_more_ranks_than_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    machine(1, monkeypatch)
    assert app.run(["parallel", "--ranks", "1,2"]) == 2
    err = capsys.readouterr().err
    assert "ranks: 2 ranks need a GPU each, but 1 is visible" in err
    assert "trainstep parallel --device cpu --ranks 2" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("gpus", "arguments", "expected"),
    [
        (4, [], ("small", 256, 4, "cuda")),
        (1, [], ("tiny", 64, 2, "cpu")),
        (4, ["--device", "cpu", "--ranks", "3"], ("tiny", 64, 3, "cpu")),
        (4, ["--model", "xl", "--ranks", "2", "--check-agreement", "false"], ("xl", 256, 2, "cuda")),
    ],
)
def test_defaults_depend_on_the_machine(
    gpus: int, arguments: list[str], expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    from trainstep.cli import cells

    monkeypatch.chdir(tmp_path)
    machine(gpus, monkeypatch)
    groups_run: list[Any] = []
    monkeypatch.setattr(cells, "run_cells", lambda groups, *rest, **more: groups_run.extend(groups) or [])
    monkeypatch.setattr(cells, "show", lambda *rest, **more: 0)
    assert app.run(["parallel", *arguments]) == 0
    (group,) = groups_run
    assert [cell.config["sync"] for cell in group] == list(OURS)
    config = group[0].config
    assert (config["model"]["name"], config["context"], config["ranks"], config["device"]) == expected
    assert config["check_agreement"] is ("--check-agreement" not in arguments)


def test_help_has_an_example_of_bucket_sizes(capsys: pytest.CaptureFixture[str]):
    assert app.run(["parallel", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "trainstep parallel --model medium --sync none,bucketed,torch_ddp --bucket-mib 1,10,25,100,1000" in out
    assert "true, false [true]" in out
