"""The published tables: every sweep that mirrors one has its records, and answers and tables in Markdown match the records."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sources import ROOT, load_script
from trainstep.config.grid import Cell, expand_all
from trainstep.config.parsing import CONFIGS, fields_of
from trainstep.config.sweep import load_sweep
from trainstep.records.record import Record, record_to_plain
from trainstep.records.store import Store

SWEEPS, RECORDS = ROOT / "sweeps", ROOT / "results" / "h200"
README = RECORDS / "README.md"
pytestmark = pytest.mark.skipif(not RECORDS.exists(), reason="a source distribution holds no records")

_NO_PUBLISHED_TABLE = {
    "attention_peers": "attention_hopper.toml has its sizes, with flash-attn-4, which that machine did not have",
    "attention_widths": "attention_hopper_widths.toml has its widths beside every implementation that runs them",
    "captured": "a table of our own: the step as one graph",
    "captured_ranks": "a table of our own: strategies as one graph, measured in part",
    "ops": "a table of our own: ops beside attention against other packages, measured in part",
    "predicted_again": "a table of our own: steps that were predicted first, beside their predictions in predicted_again_beside.md",
    "same_against_same": "a table of our own: a captured step compared with itself",
    "predicted_ranks": "the same on two GPUs; its records are in results/h100",
    "plan_grids": "a table of our own: what a search is graded on, in results/plan.md",
    "plan_grids_ranks": "the same on two GPUs",
    "copy_ceiling": "what the ops are compared with; its record is in ops.jsonl",
    "memory_ranks": "a table of our own: each rank's memory beside the formula",
}
"""Sweeps that mirror no published table, or whose table another sweep has."""

_NOT_YET_WHOLE: Mapping[str, str] = {
    "ddp_many": "30 of 35 cells: a time limit cut off fsdp launched by the host; three were added since",
}
"""Sweeps whose record in results/h200 lacks cells: how many it has, and why. A complete sweep must leave this list."""

_EXTRA_MEASUREMENTS = {"graph_replay"}
"""Fields that add a measurement after the timed steps: a cell without the field is answered by one with it."""
_PROMISED = sorted({path.stem for path in SWEEPS.glob("*.toml")} - _NO_PUBLISHED_TABLE.keys())


@cache
def defaults(workload: str) -> Mapping[str, Any]:
    return {name: field.default for name, field in fields_of(CONFIGS[workload]).items()}


def has_cell(config: Mapping[str, Any], cell: Cell) -> bool:
    """Whether a record of this config is one of the cell; fields that its code did not have yet are at their defaults."""
    known = {**defaults(cell.workload), **config}
    return all(known[name] == value for name, value in cell.config.items() if name not in _EXTRA_MEASUREMENTS)


def records_of(path: Path) -> list[Record]:
    return list(Store(path).latest().values())


@cache
def coverage(sweep: str) -> tuple[int, int]:
    """Cells of a sweep's grid that its record has, and all of them."""
    cells = expand_all(load_sweep(SWEEPS / f"{sweep}.toml").grids({}), {"device": "cuda"})
    measured = [
        (record.workload, record_to_plain(record)["config"]) for record in records_of(RECORDS / f"{sweep}.jsonl")
    ]
    done = [
        cell for cell in cells if any(cell.workload == name and has_cell(config, cell) for name, config in measured)
    ]
    return len(done), len(cells)


@pytest.mark.parametrize("sweep", _PROMISED)
def test_a_sweep_has_all_its_cells_or_a_reason(sweep: str):
    done, cells = coverage(sweep)
    if done == cells:
        assert sweep not in _NOT_YET_WHOLE, "its record is complete now: remove it from the list"
    else:
        assert _NOT_YET_WHOLE.get(sweep, "").startswith(f"{done} of {cells} cells: "), (
            f"{done} of {cells} cells in results/h200/{sweep}.jsonl: measure the others, or say so in _NOT_YET_WHOLE"
        )


@pytest.mark.parametrize("sweep", _PROMISED)
def test_the_readme_states_how_many_cells_are_measured(sweep: str):
    done, cells = coverage(sweep)
    lines = [line for line in README.read_text().splitlines() if f"[{sweep}.jsonl]({sweep}.jsonl)" in line]
    if lines:
        assert f"{done} of {cells}" in lines[0]
    else:
        assert not done
        assert not (RECORDS / f"{sweep}.jsonl").exists()


def test_the_lists_name_existing_sweeps():
    sweeps = {path.stem for path in SWEEPS.glob("*.toml")}
    assert not (_NO_PUBLISHED_TABLE.keys() | _NOT_YET_WHOLE.keys()) - sweeps
    assert not _NO_PUBLISHED_TABLE.keys() & _NOT_YET_WHOLE.keys()


def test_a_record_is_matched_to_a_cell_by_its_config():
    (cell,) = expand_all([{"model": ["small"], "context": [128], "attention": ["plain"]}], {"device": "cuda"})
    older = {name: value for name, value in cell.config.items() if name != "recompute"}
    assert has_cell(cell.config, cell)
    assert has_cell(older, cell), "a record from before that field existed"
    assert not has_cell({**older, "context": 256}, cell)
    assert not has_cell({**cell.config, "recompute": "block"}, cell), "a field that is not at its default"


def test_every_file_of_records_is_in_the_readme():
    named = set(re.findall(r"\]\((\w+\.jsonl)\)", README.read_text()))
    assert named == {path.name for path in RECORDS.glob("*.jsonl")}


def test_every_picture_is_in_the_readme_and_small():
    text = README.read_text()
    for path in RECORDS.glob("*.png"):
        assert f"({path.name})" in text
        assert path.stat().st_size <= 300_000


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/answers.py as a module."""
    return load_script("answers", monkeypatch)


def test_the_answers_match_the_records(answers: ModuleType):
    assert not list(answers.stale_answers()), "run scripts/answers.py, and read whether the sentences are still right"


@pytest.mark.slow
def test_the_tables_beside_the_records_match_the_report(answers: ModuleType):
    assert not list(answers.stale_beside_records()), "run scripts/answers.py"


def test_check_names_stale_tables(
    answers: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    page = tmp_path / "answers.md"
    page.write_text("Before.\n<!-- table compiled_model -->\n| old |\n<!-- end -->\nBehind.\n")
    monkeypatch.setattr(answers, "ANSWERS", page)
    monkeypatch.setattr(answers, "stale_beside_records", dict)
    monkeypatch.setattr(answers, "TABLES", {"compiled_model": answers.TABLES["compiled_model"]})
    assert answers.main(["--check"]) == 1
    assert capsys.readouterr().out == "table compiled_model of answers.md: is not what the records say\n"
    assert answers.main([]) == 0
    assert re.fullmatch(r"Before\.\n<!-- table \w+ -->\n(\|.*\|\n)+<!-- end -->\nBehind\.\n", page.read_text())
    assert answers.main(["--check"]) == 0
    monkeypatch.setattr(answers, "TABLES", {})
    with pytest.raises(ValueError, match="answers: compiled_model: in one of"):
        answers.main([])
    assert answers.main(["--force"]) == 2
    assert capsys.readouterr().err == "answers: takes --check or nothing, not --force\n"
