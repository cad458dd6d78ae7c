"""What a report says of a run: its step first, what waits, what to do, how it ended."""

from pathlib import Path

import pytest

from run_records import CLASSES, COMPILED, PARTS_MS, WAITS, a_run
from trainstep.config.script import Part
from trainstep.records.record import Record
from trainstep.records.store import Store
from trainstep.report.answers import answers
from trainstep.report.kit.answer import Answer
from trainstep.report.kit.rows import read_rows, rows_of
from trainstep.report.kit.tables import all_tables
from trainstep.report.page import page


def answer_of(*records: Record) -> Answer:
    (answer,) = answers(rows_of([("r.jsonl", record) for record in records]))
    return answer


def test_the_step_comes_first_then_what_waits_then_the_parts():
    answer = answer_of(a_run())
    assert answer.verdict == (
        "Your step takes 10.00 ms (median of 20); of it 20.0 % waits for data. "
        "Backward 40.0 %, forward 30.0 %, optimizer 5.0 % and other code of yours 5.0 %."
    )
    assert "without its waits a step would take 8.000 ms" in answer.suggestion


def test_shares_of_a_run_whose_mean_is_far_from_its_median_name_their_base():
    """Forty steps of 10 ms and twenty of 100 ms: shares are of the whole time, so the mean stands beside the median."""
    slower = {part: 10 * ms for part, ms in PARTS_MS.items()}
    verdict = answer_of(a_run(steps=40), a_run(first_step=41, parts_ms=slower)).verdict
    assert verdict.startswith(
        "Your step takes 10.00 ms (median of 60; 40.00 ms on average, to which the shares refer); "
    )
    waits = [{**PARTS_MS, Part.DATA: ms} for ms in (0.0, 90.0)]
    loader = [a_run(steps=40, parts_ms=waits[0]), a_run(first_step=41, parts_ms=waits[1])]
    suggestion = answer_of(*loader).suggestion
    assert "without its waits a step would take 8.000 ms on average. " in suggestion, "40 steps of 8 ms, 20 of 98 ms"


def test_windows_of_a_run_are_one_run():
    slower = {part: 3 * ms for part, ms in PARTS_MS.items()}
    records = [a_run(facts={"ending": None}), a_run(first_step=21, steps=40, parts_ms=slower)]
    answer = answer_of(*records)
    assert "takes 30.00 ms (median of 60; 23.33 ms on average, to which the shares refer)" in answer.verdict
    assert "No record says" not in answer.verdict
    table = all_tables(rows_of([("r.jsonl", record) for record in records]))[0]
    assert len(table.entries) == 1
    assert table.entries[0][1].text == "60"


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"ending": None}, "No record says how it ended: it was killed after step 20, or it still runs."),
        (
            {"ending": "RuntimeError: boom", "ending_part": "backward"},
            "It ended after 20 steps, in backward: RuntimeError: boom.",
        ),
        ({"ending": "exit code 3"}, "It ended after 20 steps: exit code 3."),
    ],
)
def test_an_ending_that_is_no_finish_is_told(facts: dict[str, str], words: str):
    assert answer_of(a_run(facts=facts)).verdict.endswith(words)


def test_a_loader_that_was_not_seen_is_not_mentioned():
    parts = {**PARTS_MS, Part.DATA: 0.0}
    answer = answer_of(a_run(parts_ms=parts))
    assert "waits for data" not in answer.verdict
    assert answer.suggestion.startswith("No excess that is known takes 5 % of the time: `trainstep explain r.jsonl` ")


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cpu", "project/train.py:12 `total += loss.item()` reads a tensor's value in every inspected step"),
        ("cuda", "project/train.py:12 `total += loss.item()` makes the host wait for the GPU, 4.000 ms a step"),
    ],
)
def test_the_line_that_waits_is_named(device: str, words: str):
    inspected = a_run(tables={"waits": WAITS, "classes": CLASSES}, facts={"inspected_step": 5}, device=device)
    assert answer_of(inspected).suggestion.startswith(words)


def test_calls_of_a_waiting_line_are_per_inspected_step():
    records = [
        a_run(tables={"waits": WAITS, "classes": CLASSES}, facts={"inspected_step": 5}),
        a_run(tables={"classes": CLASSES}, facts={"inspected_step": 30}, first_step=21),
    ]
    tables = {table.title: table for table in all_tables(rows_of([("r.jsonl", record) for record in records]))}
    (line,) = tables["Lines that would wait for a GPU"].entries
    assert [entry.text for entry in line][2:4] == ["0.500", "2.000"]


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (a_run(tables={"compilations": COMPILED}), "torch.compile compiled again 1 time, f (project/train.py:3)"),
        (
            a_run(tables={"compilations": {**COMPILED, "file": ["<string>"] * 2}}),
            "torch.compile compiled again 1 time, f among them",
        ),
        (a_run(collection_ms=4.0), "Python's garbage collector takes 38.0 % of the time"),
        (
            a_run(tables={"classes": CLASSES}, facts={"exposed_s": 0.004, "profiled_step_s": 0.01}),
            "Messages are not hidden",
        ),
    ],
)
def test_the_largest_avoidable_time_is_suggested(run: Record, words: str):
    assert answer_of(run).suggestion.startswith(words)


@pytest.mark.parametrize(("excess_s", "is_first"), [(0.003, True), (0.001, False), (0.0, False)])
def test_what_explain_finds_is_suggested_where_it_takes_most(excess_s: float, is_first: bool):
    """Beside a loader that takes 2 of 10 ms, attention has 1 or 3 ms to save."""
    patterns = {
        "pattern": ["written-out attention"],
        "phase": ["forward"],
        "time_s": [excess_s],
        "least_s": [0.0],
        "least_is_timed": [True],
        "gap_s": [0.0],
        "ranges": [0.0],
        "of_s": [0.003],
        "of_ranges": [0.0],
        "what": ["scores are written"],
    }
    facts = {"inspected_step": 5, "profiled_step_s": 0.01}
    suggestion = answer_of(a_run(tables={"classes": CLASSES, "patterns": patterns}, facts=facts)).suggestion
    attention = (
        "Longest excess: attention kernel, 3.000 ms, 30.0 % of the step: scores are written. Take an attention that does "
        "not write scores to memory; `trainstep explain r.jsonl` has them all."
    )
    assert suggestion == attention if is_first else suggestion.startswith("Look at the data loader first: ")


def test_steps_of_no_time_are_reported():
    assert answer_of(a_run(parts_ms=dict.fromkeys(Part, 0.0))).suggestion.startswith("No excess that is known")


def test_nothing_is_suggested_from_a_few_steps():
    assert answer_of(a_run(steps=5)).suggestion == ""


def test_ranks_are_lines_and_rank_0_speaks():
    records = [a_run(rank=rank, ranks=2) for rank in (1, 0)]
    rows = rows_of([("r.jsonl", record) for record in records])
    (answer,) = answers(rows)
    assert answer.verdict.startswith("Your step takes")
    assert [entries[0].text for entries in all_tables(rows)[0].entries] == [
        "train.py (rank 0 of 2)",
        "train.py (rank 1 of 2)",
    ]


def test_several_runs_are_named():
    answer = answer_of(a_run(), a_run(run="run-2", arguments="--lr 1"))
    assert "The step of train.py takes" in answer.verdict
    assert "The step of train.py --lr 1 takes" in answer.verdict


def test_a_run_of_warm_ups_alone_says_so():
    record = a_run(steps=0, facts={"steps_seen": 2})
    assert answers(rows_of([("r.jsonl", record)])) == []


def test_the_page_has_the_parts_the_steps_and_what_was_noted(tmp_path: Path):
    store = Store(tmp_path / "r.jsonl")
    store.append(
        a_run(tables={"waits": WAITS, "classes": CLASSES, "compilations": COMPILED}, facts={"inspected_step": 5})
    )
    text = page(read_rows([store.path]))
    for words in (
        "<title>Runs of scripts on ",
        "Where the time of a step goes",
        "A step by part",
        "Time of every step",
        "Lines that would wait for a GPU",
        "Compilations",
        "Inspected step 5 of train.py",
    ):
        assert words in text, words


def test_hostile_names_are_shown_as_text(tmp_path: Path):
    store = Store(tmp_path / "r.jsonl")
    store.append(a_run(script="<script>alert(1)</script>\x1b[2J", arguments="`x`"))
    text = page(read_rows([store.path]))
    assert "<script>alert(1)" not in text
    assert "\x1b" not in text
