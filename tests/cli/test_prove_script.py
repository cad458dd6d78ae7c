"""`trainstep explain RUN.jsonl --prove` of a script on a CPU: a slow loader is undone from outside, and a killed proof goes on."""

import importlib.util
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cell_maker import finish, start, wait_until
from run_records import PARTS_MS, a_run
from sources import ROOT
from trainstep.cli.options import GridOptions
from trainstep.cli.running import prove_script
from trainstep.config.script import Part
from trainstep.explain.proof import Candidate, Proof, Tried
from trainstep.measure.run.changed.script_command import command_of
from trainstep.measure.run.changed.script_lab import ScriptLab
from trainstep.plan.trials import Step
from trainstep.records.compare import Comparison
from trainstep.records.store import Store
from trainstep.report.explain.budgets import explain_rows
from trainstep.report.kit.rows import rows_of

LOOPS = ROOT / "tests/planted/loops"
PROVE = ("explain", "run.jsonl", "--prove", "--out", "p.jsonl", "--json", "--script-steps", "16", "--processes", "5")
NEEDED = {"hugging_face": ("transformers", "accelerate"), "lightning_loop": ("lightning",)}


SLOW = """
import time
import torch

class Late(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        time.sleep(0.05)  # far above what other processes can disturb
        return torch.full((16,), float(index % 7))

torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for number, batch in zip(range(20), torch.utils.data.DataLoader(Late(), batch_size=2)):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def record_run(folder: Path) -> None:
    (folder / "train.py").write_text(SLOW)
    words = ["run", "--quiet", "--no-page", "--out", "run.jsonl", "train.py"]
    code, _, err = finish(start(*words, folder=folder), 110)
    assert code == 0, err


def count(path: Path) -> int:
    return len(Store(path).finished())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_slow_loader_is_undone_from_outside_and_a_killed_proof_goes_on(tmp_path: Path):
    record_run(tmp_path)
    records = tmp_path / "p.jsonl"
    first = start(*PROVE, folder=tmp_path)
    assert wait_until(lambda: count(records) >= 3, 110)
    os.killpg(first.pid, signal.SIGINT)
    code, _, err = finish(first)
    assert code == 130
    assert "finished processes are kept in" in err
    before = count(records)
    code, out, err = finish(start(*PROVE, folder=tmp_path), 450)
    assert code == 0, err
    assert f"is started again and again in {tmp_path}, 16 steps each time" in err
    processes = [record.fact("process") for record in Store(records).finished()]
    assert len(processes) == len(set(processes)) > before, "nothing finished ran again"
    answer = json.loads(out)
    rows = {row["name"]: row for row in answer["rows"] if row["kind"] == "change"}
    assert next(iter(rows)).startswith("workers=")
    workers = next(iter(rows.values()))
    assert workers["verdict"] == "faster", workers["reason"]
    assert workers["losses_apart"] == 0, "the same data, by other processes"
    assert rows["adamw=fused"]["verdict"] == "not applied", "it is fused already"
    assert rows["precision=bf16_autocast"]["verdict"] == "not run"
    assert "trainstep run --apply workers=" in out
    calls = count(records)
    assert finish(start(*PROVE, folder=tmp_path), 110)[1] == out
    assert count(records) == calls


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("loop", NEEDED)
def test_other_loops_take_all_changes_of_a_cpu(loop: str, tmp_path: Path):
    if any(importlib.util.find_spec(package) is None for package in NEEDED[loop]):
        pytest.skip(f"{loop} needs {NEEDED[loop]}")
    changes = "adamw=fused,workers=2,compile=module,precision=bf16_autocast"
    words = ["run", "--quiet", "--no-page", "--inspect-every", "0", "--stop-after", "12", "--out", "s.jsonl"]
    script = [LOOPS / f"{loop}.py", "--steps", "500", "--plant", "adamw_loop"]
    code, _, err = finish(start(*words, "--apply", changes, *script, folder=tmp_path), 200)
    assert code == 0, err
    record = Store(tmp_path / "s.jsonl").finished()[-1]
    assert record.fact("ending") == "stopped after 12 steps"
    assert (record.fact("applied"), record.fact("not_applied")) == (changes, None)
    assert record.fact("compiled_graphs") >= 1
    assert len(record.tables["losses"]["loss"]) == 10


@pytest.mark.slow
def test_a_script_that_fails_or_ends_early_proves_nothing(tmp_path: Path):
    record_run(tmp_path)
    code, out, _ = finish(start(*PROVE[:-4], "--script-steps", "30", folder=tmp_path), 110)
    assert code == 3
    assert "the script ended after 20 steps of 30: let it run longer, or give --script-steps" in out


@pytest.mark.parametrize(
    ("together", "again", "unfinished"),
    [
        (None, False, ["workers=2", "gc=off"]),
        ("faster", False, ["gc=off"]),
        ("slower", False, ["workers=2", "gc=off"]),
        ("slower", True, ["gc=off"]),
    ],
)
def test_what_the_budget_cut_off_is_unfinished_unless_it_is_taken_with_all_or_compared_again(
    together: str | None, again: bool, unfinished: list[str]
):
    """Workers are in the comparison of all together, `gc` is left out of it."""

    def change(verdict: str, **fields: str) -> Tried:
        known = Comparison(verdict=verdict, reason="", ratio=0.9, low=0.89, high=0.91, n=6)
        return Tried(
            candidate=Candidate(fields=fields), step=Step(change="", kept=verdict == "faster", comparison=known)
        )

    def cut_off(**fields: str) -> Tried:
        known = Comparison(verdict="cannot tell", reason="", ratio=0.9, each=(0.9, 0.9), n=2, is_cut_off=True)
        return Tried(candidate=Candidate(fields=fields), step=Step(change="", comparison=known))

    proof = Proof(start={}, measured_s=1.0, singles=[cut_off(workers="2"), cut_off(gc="off")])
    proof.together = None if together is None else change(together, workers="2", copies="non_blocking")
    proof.again = [change("faster", workers="2")] if again else []
    lab = cast(ScriptLab, SimpleNamespace(cut_off=["workers=2", "gc=off"], changes=dict))
    assert prove_script._unfinished(proof, lab) == unfinished


LOADER = "loader = DataLoader(data)\noptimizer = AdamW(weights)\n"


def a_tried(verdict: str, /, **fields: str) -> Tried:
    ratio = 0.5 if verdict == "faster" else 1.2
    known = Comparison(verdict=verdict, reason="", ratio=ratio, low=ratio - 0.01, high=ratio + 0.01, n=6)
    step = Step(change="", kept=verdict == "faster", comparison=known, word=verdict)
    return Tried(candidate=Candidate(fields=fields, cause="data"), step=step)


def shown(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    *words: str,
    how: GridOptions = GridOptions(),
    **values: Any,
) -> str:
    """What a finished proof prints of a script whose run waited for data."""
    (folder / "train.py").write_text(LOADER)
    record = a_run(
        parts_ms={**PARTS_MS, Part.DATA: 90.0},
        facts={"command": "trainstep run train.py", "script_folder": str(folder)},
        script=" ".join(words) or "train.py",
    )
    [one], _ = explain_rows(rows_of([("run.jsonl", record)]), None)
    assert "data" in [finding.cause for finding in one.budget.findings]
    lab = SimpleNamespace(command=command_of(record), changes=dict, store=Store(folder / "p.jsonl"))
    proof = Proof(start={}, measured_s=1.0, start_s=1.0, **values)
    prove_script._show(one, proof, cast(ScriptLab, lab), how)
    return capsys.readouterr().out


@pytest.mark.parametrize("words", [(), ("-m", "train")], ids=["file", "module"])
def test_the_patch_has_the_winners_with_their_values(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    won = a_tried("faster", workers="2", compile="module")
    out = shown(tmp_path, capsys, *words, singles=[won, a_tried("slower", adamw="fused")], together=won)
    assert "The winning changes by lines of the script:\n--- a/train.py\n+++ b/train.py\n" in out
    assert "\nThe patch lacks compile=module.\n" in out
    assert "+loader = DataLoader(data, num_workers=2, persistent_workers=True)\n" in out
    assert "fused=True" not in out
    assert f"trainstep run --apply workers=2,compile=module {' '.join(words) or 'train.py'}" in out


def test_programs_and_the_page_are_told_what_the_patch_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    won = a_tried("faster", workers="2", compile="module")
    page = tmp_path / "page.html"
    out = shown(tmp_path, capsys, how=GridOptions(json=True, page=page), singles=[won], together=won)
    [patch] = [row for row in json.loads(out)["rows"] if row["kind"] == "patch"]
    assert patch["patch"].startswith("--- a/train.py\n")
    assert patch["note"] == "The patch lacks compile=module."
    assert "The patch lacks compile=module." in page.read_text()


def test_without_winners_there_is_no_patch_and_the_lines_are_said_to_be_suggestions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = shown(tmp_path, capsys, singles=[a_tried("slower", workers="2")])
    assert "+loader" not in out
    assert "with predicted gains; the proof's table says what was measured" in out
