"""`trainstep explain`: one verdict, the ranked table, JSON, the page, and sentences about bad input."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from record_maker import seconds
from run_records import a_run
from sources import ROOT
from trainstep.cli import app
from trainstep.config.script import Part
from trainstep.records.store import Store

PROFILES = str(ROOT / "results/h200/profile_captured.jsonl")


def test_the_verdict_comes_first_and_the_table_is_ranked(capsys: pytest.CaptureFixture[str]):
    assert app.run(["explain", str(ROOT / "results/h200/profile_again.jsonl")]) == 0
    out = capsys.readouterr().out
    assert "Longest excess: precision" in out.splitlines()[0]
    assert "--precision bf16_autocast" in out
    assert "see docs/guide/slow/" in out.splitlines()[0]
    assert out.index("floor: matmul") < out.index("\nprecision") < out.index("\nunexplained") < out.index("\nmeasured")


def test_json_has_the_answer_first_and_seconds_that_add_up(capsys: pytest.CaptureFixture[str]):
    assert app.run(["explain", PROFILES, "--json"]) == 0
    text = capsys.readouterr().out
    out = json.loads(text)
    assert next(iter(out)) == "answer"
    assert out["answer"][0]["workload"] == "explain"
    for cell in {row["cell"] for row in out["rows"]}:
        rows = [row for row in out["rows"] if row["cell"] == cell]
        [measured] = [row["time_s"] for row in rows if row["kind"] == "measured"]
        assert sum(row["time_s"] for row in rows if row["kind"] != "measured") == pytest.approx(measured)
        for row in rows:
            if row["kind"] == "finding":
                assert row["gain_low_s"] <= row["gain_s"] <= row["gain_high_s"]
                assert (ROOT / row["page"]).is_file()
                assert row["change"] is None or isinstance(row["change"], dict)


@pytest.mark.parametrize("value", [1e308, -1.0])
@pytest.mark.parametrize(
    "command", ["explain", "explain --json", "report", "report --format json", "report --format html"]
)
def test_times_that_no_measurement_has_are_refused_in_a_sentence(
    command: str, value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "r.jsonl"
    whole = a_run()
    Store(path).append(replace(whole, samples={**whole.samples, "data_wait": seconds([value] * 20)}))
    verb, *options = command.split()
    assert app.run([verb, str(path), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"trainstep: {path}: line 1: not a record: samples.data_wait.values cannot have {value}: ")
    assert error.count("\n") == 1


def test_of_many_steps_five_tables_are_shown_and_all_with_all(capsys: pytest.CaptureFixture[str]):
    path = str(ROOT / "results/h200/profile.jsonl")
    assert app.run(["explain", path]) == 0
    out = capsys.readouterr().out
    assert out.startswith("In 56 of 60 steps precision is first; in 4 host launches. Furthest above its floor: ")
    assert out.count("\nBudget of the step") == 5
    assert "55 more steps" in out
    assert app.run(["explain", path, "--all"]) == 0
    assert capsys.readouterr().out.count("\nBudget of the step") == 60


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([str(ROOT / "results/cpu/same_against_same.jsonl")], "no floor is known for a step on a CPU"),
        (["--device", "cpu", "--model", "tiny", "--dry-run"], "no floor is known for a step on a CPU"),
    ],
)
def test_a_calibration_without_effect_is_refused(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    measured = tmp_path / "h200.jsonl"
    shipped = json.loads((ROOT / "src/trainstep/plan/time/calibrations/h200.json").read_text())
    measured.write_text(json.dumps(shipped) + "\n")
    assert app.run(["explain", *words, "--calibration", str(measured)]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.splitlines()[-1].startswith("trainstep: calibration: ")


def test_a_run_of_a_script_is_explained_as_a_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "train.jsonl"
    for first_step in (1, 21):
        Store(path).append(a_run(parts_ms={**dict.fromkeys(Part, 1.0), Part.DATA: 30.0}, first_step=first_step))
    assert app.run(["explain", str(path)]) == 0
    out = capsys.readouterr().out
    assert "Longest excess: waiting for data, 30.00 ms" in out
    assert out.count("\nmeasured") == 1


def test_the_page_begins_with_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "why.html"
    assert app.run(["explain", PROFILES, "--page", str(page)]) == 0
    assert f"page: {page}" in capsys.readouterr().out
    text = page.read_text()
    assert "Why the step takes its time" in text
    assert text.index("Longest excess") < text.index("Budget of the step: small 256")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["explain", PROFILES, "--model", "small"], "model: records are read, nothing runs"),
        (["explain", str(ROOT / "results/h200/matmul_ceiling.jsonl")], "holds no time of a step"),
        (["explain", "absent.jsonl"], "absent.jsonl"),
        (["explain", PROFILES, "--calibration", PROFILES], "holds no calibration"),
    ],
)
def test_bad_input_gets_a_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]):
    assert app.run(words) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error


@pytest.mark.slow
def test_a_tiny_model_is_profiled_and_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "explained.jsonl"
    words = ["explain", "--device", "cpu", "--model", "tiny", "--context", "64", "--out", str(out)]
    assert app.run(words) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("The step takes ")
    assert "floor: work as it runs" in shown
    assert len(Store(out).finished()) == 1


def test_a_page_that_would_replace_something_else_is_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "mine.html"
    page.write_text("mine")
    assert app.run(["explain", PROFILES, "--page", str(page)]) == 2
    assert capsys.readouterr().out == ""
    assert page.read_text() == "mine"
