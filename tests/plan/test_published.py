"""Published tables: their files, their grades beside the committed ones, Kendall's tau, tensor and pipeline parallelism."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainstep.cli import app
from trainstep.config.machine import gpu_named
from trainstep.config.parsing import build
from trainstep.config.plan import FleetConfig, PlanConfig
from trainstep.plan.fleet.model_parallel import ModelParallelStep, model_parallel_time
from trainstep.plan.fleet.published import flops_per_token, grade_table, kendall_tau, read_table
from trainstep.plan.fleet.topology import topology_of
from trainstep.plan.time.calibration import calibration_for

FOLDER = Path(__file__).parents[2] / "results" / "published"
TABLES = sorted(FOLDER.glob("*.toml"))
QUICK = [table for table in TABLES if table.stem != "llm_foundry_h100"]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_figures_have_their_source_and_what_is_unknown(path: Path):
    table = read_table(path)
    assert re.fullmatch(r"[0-9a-f]{40}", table.words["commit"])
    assert table.words["url"].endswith(f"{table.words['commit']}/{table.words['file']}")
    assert table.unknown
    assert all(row.tokens_per_s > 0 for row in table.rows)


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=[] if path in QUICK else pytest.mark.slow, id=path.stem) for path in TABLES]
)
def test_grades_are_those_committed_and_within_the_aim(path: Path):
    grade = grade_table(read_table(path))
    committed = (FOLDER / "grade.md").read_text()
    [line] = [row for row in committed.splitlines() if row.startswith(f"| {grade.table.words['title']} ")]
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells[4:6] == [f"{100 * grade.median:.2f} %", f"{100 * abs(grade.error(grade.worst)):.2f} %"]
    assert float(cells[6]) == pytest.approx(grade.tau, abs=0.005)
    assert grade.median <= 0.10
    assert abs(grade.error(grade.worst)) <= 0.25
    assert grade.tau >= 0.9


def test_one_row_is_fitted_and_not_graded():
    grade = grade_table(read_table(FOLDER / "torchtitan_h100.toml"))
    [fitted] = [graded for graded in grade.rows if graded.fitted]
    assert (fitted.row.gpus, fitted.row.options["compile"]) == (8, "none")
    assert grade.error(fitted) == pytest.approx(0)
    assert len(grade.others) == len(grade.rows) - 1


def test_kendalls_tau():
    assert kendall_tau([(1, 10), (2, 20), (3, 30)]) == 1
    assert kendall_tau([(1, 30), (2, 20), (3, 10)]) == -1
    assert kendall_tau([(1, 1), (2, 3), (3, 2), (4, 4)]) == pytest.approx(4 / 6)
    assert kendall_tau([(1, 1), (1, 2), (2, 3)]) == pytest.approx(2 / (2 * 3) ** 0.5)


def test_flops_of_a_token():
    shape = {"d_model": 12288, "layers": 96, "vocab_size": 51200}
    blocks = 96 * (12 * 12288**2 + 2 * 2048 * 12288)
    assert flops_per_token(shape, 2048) == pytest.approx(6 * (blocks + 51200 * 12288))
    assert flops_per_token(shape, 2048, recomputes=True) == pytest.approx(8 * blocks + 6 * 51200 * 12288)


def model_parallel(**changes: Any) -> SimpleNamespace:
    values = {"model": "small", "d_model": 4096, "d_ff": 10944, "layers": 32, "heads": 32, "vocab_size": 51200}
    config: PlanConfig = build(PlanConfig, {**values, "context": 2048, "precision": "bf16"}, where="plan")
    speeds = calibration_for(gpu_named("h100"))
    assert speeds is not None
    step = ModelParallelStep(run=config.run, gpus=64, tensor=1, pipeline=1, virtual_stages=1, global_batch=256)
    step = replace(step, **changes)
    topology = topology_of(FleetConfig(nodes=8), ranks=64, calibration=speeds, spec=gpu_named("h100"))
    return SimpleNamespace(step=step, parts=model_parallel_time(step, topology, speeds).parts_s)


def test_pipelines_have_bubbles_and_tensors_messages():
    plain = model_parallel()
    assert plain.parts["bubble"] == plain.parts["tensor-parallel messages"] == plain.parts["sends between stages"] == 0
    piped = model_parallel(pipeline=4)
    work_s = piped.parts["compute"] + piped.parts["sends between stages"]
    assert piped.parts["bubble"] == pytest.approx(work_s * 3 / piped.step.micro_batches)
    assert model_parallel(pipeline=4, virtual_stages=2).parts["bubble"] < 0.6 * piped.parts["bubble"]
    divided = model_parallel(tensor=8)
    assert divided.parts["tensor-parallel messages"] > 0
    assert plain.parts["compute"] < divided.parts["compute"] < 8 * plain.parts["compute"], "norms stay whole"
    assert divided.parts["gradients"] < plain.parts["gradients"]
    hidden = model_parallel(pipeline=4, overlaps=True)
    assert hidden.parts["gradients"] < piped.parts["gradients"]
    with pytest.raises(ValueError, match="layers: 32 cannot be divided by 5"):
        model_parallel(pipeline=5, gpus=60)


@pytest.mark.parametrize(
    ("text", "words"),
    [("title = ", "is no TOML"), ('title = "mine"', "has no repository; a published table says where")],
)
def test_other_files_are_refused(text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    assert app.run(["plan", "--grade", str(path)]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_the_verb_grades_a_table(capsys: pytest.CaptureFixture[str]):
    path = str(FOLDER / "torchtitan_h100.toml")
    assert app.run(["plan", "--grade", path]) == 0
    text = capsys.readouterr().out
    assert "Unknown: the network's topology" in text
    assert app.run(["plan", "--grade", path, "--json"]) == 0
    [table] = json.loads(capsys.readouterr().out)["tables"]
    assert (table["repository"], len(table["rows"])) == ("pytorch/torchtitan", 4)
    assert app.run(["plan", "--grade", path, "--calibration", "x.jsonl"]) == 2
