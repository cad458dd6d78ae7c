"""`trainstep compare` of runs of scripts: a script's runs are one cell, whatever their names and however many records they have."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from record_maker import a_record, seconds
from run_records import a_run
from trainstep.cli import app
from trainstep.records.record import Record
from trainstep.records.store import Store

Compare = Callable[..., tuple[int, str, str]]


@pytest.fixture
def compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Compare:
    """Write both sides and compare them: the exit code, the output and the errors."""

    def call(before: Sequence[Record], after: Sequence[Record], *words: str) -> tuple[int, str, str]:
        for name, records in (("before", before), ("after", after)):
            for record in records:
                Store(tmp_path / f"{name}.jsonl").append(record)
        code = app.run(["compare", str(tmp_path / "before.jsonl"), str(tmp_path / "after.jsonl"), *words])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def a_script(step_ms: float, run: str = "before", **options: Any) -> Record:
    """A record of 20 steps that differ by up to 0.2 %."""
    record = a_run(run=run, **options)
    step = seconds([step_ms / 1e3 * (1 + 0.0001 * index) for index in range(20)])
    return replace(record, samples={**record.samples, "step": step})


def rows(out: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(out)["rows"]
    return found


def test_two_runs_of_a_script_have_a_ratio_of_their_medians_and_no_verdict(compare: Compare):
    """Steps of a process do not show how far processes lie apart: by them 33 of 45 equal pairs are called different."""
    before = [a_script(10.0), a_script(30.0, first_step=21), a_script(30.0, first_step=41)]
    code, out, _ = compare(before, [a_script(15.0, "after")])
    assert code == 0
    assert "The second file's step has no verdict (0.500 times as long; too few values: 1" in out, out
    assert "`trainstep run --out FILE` appends to its file: with at least 5 runs in each" in out
    assert "How far two runs of one script lie apart is not known from one." in out


def five(step_ms: float, side: str) -> list[Record]:
    return [a_script(step_ms * (1 + 0.001 * index), f"{side}-{index}") for index in range(5)]


def test_programs_get_the_same_with_what_a_value_is(compare: Compare):
    _, out, _ = compare(five(10.0, "before"), five(20.0, "after"), "--json")
    (row,) = rows(out)
    assert (row["verdict"], row["n"], row["paired"]) == ("slower", 5, False)
    assert row["config"]["script"] == "train.py"
    assert "run" not in row["config"], "the name of one run, which the other has not"
    assert "a value is the median of one run's steps" in row["reason"]


def test_another_quantity_and_the_gate_are_as_for_other_records(compare: Compare):
    assert compare(five(10.0, "before"), five(20.0, "after"), "--quantity", "forward")[0] == 0
    code, _, error = compare([], [], "--fail-if-slower", "50")
    assert (code, error) == (1, "trainstep: fail_if_slower 50 %: train.py: slower, ratio 2.000\n")


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({"arguments": "--lr 1"}, {"arguments": "--lr 2"}, "they differ in arguments (--lr 1; --lr 2)"),
        ({"arguments": ""}, {"arguments": "--lr 2"}, "they differ in arguments (none; --lr 2)"),
        ({"script": "old/train.py"}, {"script": "new/train.py"}, "script (old/train.py; new/train.py)"),
        ({}, {"facts": {"applied": "workers=8"}}, "they differ in applied (none; workers=8)"),
        ({"facts": {"script_source": "1a"}}, {"facts": {"script_source": "2b"}}, "script_source (1a; 2b)"),
    ],
)
def test_a_before_and_an_after_differ_in_what_is_said(
    before: dict[str, Any], after: dict[str, Any], words: str, compare: Compare
):
    code, out, error = compare([a_script(10.0, **before)], [a_script(20.0, "after", **after)])
    assert code == 0, error
    assert words in out


def test_variants_in_one_file_are_cells_of_their_own(compare: Compare):
    """As an original and a change from outside that were appended to one file; with no cell in common they are refused."""
    both = [a_script(10.0), a_script(5.0, "before-2", facts={"applied": "workers=8"})]
    code, out, _ = compare(both, [a_script(10.0, "after")], "--json")
    assert (code, [row["ratio"] for row in rows(out)]) == (0, [pytest.approx(1.0)])


def test_variants_without_a_partner_are_refused_with_the_way_out(compare: Compare):
    both = [a_script(10.0, arguments="--lr 1"), a_script(5.0, "before-2", arguments="--lr 2")]
    code, _, error = compare(both, [a_script(10.0, "after", arguments="--lr 3")])
    assert code == 2
    assert "no cell in common: they differ in arguments (--lr 1, --lr 2; --lr 3); runs are matched by" in error
    assert error.endswith("give each variant a file of records of its own\n")


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (a_script(10.0, "after", script="other.py"), "they differ in script (train.py; other.py); runs are matched"),
        (a_script(10.0, "after", script="other.py", arguments="1"), "arguments (none; 1); runs are matched"),
        (a_script(10.0, "after", device="cuda"), "they differ in device (cpu; cuda); runs are matched"),
        (a_record(workload="own:X", config={"size": 1}), "they differ in workload (run; own:X)\n"),
    ],
    ids=["another script", "other arguments", "another device", "another workload"],
)
def test_what_is_no_run_of_the_script_is_refused_in_a_sentence(after: Record, words: str, compare: Compare):
    code, _, error = compare([a_script(10.0)], [after])
    assert code == 2
    assert words in error


def test_several_runs_in_a_file_are_compared_run_by_run(compare: Compare):
    """Single runs of this script lie up to 12 % apart, which the steps of one run, alike to 0.2 %, do not show."""
    spread = [10.0, 10.3, 10.6, 10.9, 11.2]
    runs = [[a_script(ms, f"{side}-{ms}") for ms in spread] for side in ("before", "after")]
    runs[1][0] = a_script(10.1, "after-first")
    _, out, _ = compare(*runs, "--json")
    (row,) = rows(out)
    assert (row["verdict"], row["n"]) == ("cannot tell", 5)
    assert row["low"] < 0.95
    assert row["high"] > 1.05
    assert row["reason"].endswith("; a value is the median of one run's steps, and there are 5 and 5 runs")
    assert "not interleaved" not in row["reason"], "they may have been made alternately"


def test_a_few_runs_in_a_file_are_too_few(compare: Compare):
    code, out, _ = compare([a_script(10.0), a_script(10.1, "before-2")], [a_script(20.0, "after")])
    assert code == 0
    assert "has no verdict (1.990 times as long; too few values: 1, and at least 5 are needed" in out
    assert "there are 2 and 1 runs" in out
    assert "with at least 5 runs in each, made alternately" in out


def test_a_run_without_timed_steps_has_no_verdict(compare: Compare):
    code, out, _ = compare([a_script(10.0)], [a_run(run="after", steps=0)])
    assert code == 0
    assert "a side has no timed step, only warm-ups" in out


def test_runs_stand_beside_other_cells(compare: Compare):
    step = a_record(samples={"step": seconds([1.0] * 10)})
    code, out, _ = compare([step, a_script(10.0)], [a_script(10.0, "after"), step], "--json")
    assert (code, len(rows(out))) == (0, 2)


def test_windows_of_a_proof_stay_cells_of_their_own(compare: Compare):
    """They have one name and one config, and their keys tell the changes apart."""
    windows = [
        replace(a_script(ms, "proof", facts={"process": "1"}), key=key)
        for ms, key in ((10.0, "a" * 16), (5.0, "b" * 16))
    ]
    code, out, _ = compare(windows, windows, "--json")
    assert (code, [row["before_s"] for row in rows(out)]) == (
        0,
        [pytest.approx(0.01, 0.01), pytest.approx(0.005, 0.01)],
    )
