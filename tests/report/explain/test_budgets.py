"""What a person reads of budgets: verdicts without a floor, one form of a time, each change's gain once, many steps in short."""

from dataclasses import replace

import pytest

from record_maker import ENVIRONMENT, a_record, seconds
from run_records import a_run
from sources import ROOT
from trainstep.explain.budget import AS_THEY_RUN, Budget, Finding
from trainstep.plan.time.calibration import Calibration, shipped
from trainstep.plan.time.interval import Interval
from trainstep.records.record import Record
from trainstep.records.store import Store
from trainstep.report.explain.budgets import (
    Explained,
    explain_answers,
    explain_rows,
    explain_sections,
    explain_tables,
    first_tables,
    suggestion_of,
    verdict_of,
)
from trainstep.report.kit.finding_words import evidence_words
from trainstep.report.kit.rows import read_rows, rows_of

CPU = ROOT / "results/cpu/same_against_same.jsonl"
PROFILES = ROOT / "results/h200/profile_captured.jsonl"


@pytest.fixture(scope="module")
def h200() -> Calibration:
    calibration = shipped("NVIDIA H200")
    assert calibration is not None
    return calibration


def first_of(path: object) -> Record:
    return next(record for record in Store(path).read() if record.failure is None)  # type: ignore[arg-type]


def an_interval(time_ms: float) -> Interval:
    return Interval(time_s=time_ms / 1e3, low_s=time_ms / 2e3, high_s=time_ms / 5e2)


def a_finding(cause: str = "host_launches", excess_ms: float = 1.0, gain_ms: float = 0.5, **more: object) -> Finding:
    given = {"evidence": "it was seen", **more}
    return Finding(cause=cause, excess=an_interval(excess_ms), gain=an_interval(gain_ms), **given)  # type: ignore[arg-type]


def a_step(*findings: Finding, label: str = "small", floor_ms: float = 1.0) -> Explained:
    [row] = rows_of([("a.jsonl", a_record())])
    excess_s = sum(finding.excess.time_s for finding in findings)
    budget = Budget(
        measured_s=floor_ms / 1e3 + excess_s, floor={"matmul": floor_ms / 1e3}, findings=findings, unexplained_s=0.0
    )
    return Explained(row=row, label=label, budget=budget)


def test_a_cpus_step_has_no_floor_and_its_longest_phase_is_named():
    config = {"device": "cpu", "model": {"name": "tiny"}}
    samples = {
        "step": seconds([0.010]),
        "forward": seconds([0.003]),
        "backward": seconds([0.006]),
        "optimizer": seconds([0.001]),
    }
    record = a_record(config=config, samples=samples, environment=replace(ENVIRONMENT, gpu=None))
    explained, refusals = explain_rows(rows_of([("a.jsonl", record)]))
    assert not refusals
    assert verdict_of(explained[0].budget) == (
        "The step takes 10.00 ms. No floor is known on a CPU, so nothing is explained; backward takes 60.0 %; "
        "`trainstep profile` shows the ops."
    )
    [table] = explain_tables(explained)
    assert "%" not in table.note, "no share of nothing"
    assert explained[0].budget.floor == {AS_THEY_RUN: pytest.approx(0.010)}


def test_a_step_that_is_mostly_its_ops_says_so_before_a_small_finding():
    budget = Budget(
        measured_s=0.1,
        floor={AS_THEY_RUN: 0.097},
        findings=(a_finding(excess_ms=3.0),),
        unexplained_s=0.0,
        on_device=False,
        phases_s={"forward": 0.04, "backward": 0.06},
    )
    assert verdict_of(budget) == (
        "The step takes 100.0 ms; 97.0 % is its ops as they run, of which backward is 60.0 %; `trainstep profile` shows them. "
        "Longest excess: host launches, 3.000 ms, 3.0 % of the step: it was seen."
    )
    kernels = replace(
        budget,
        on_device=True,
        phases_s={},
        as_they_run_s={"matmul": 0.05, "attention": 0.03, "casts": 0.01, "other": 0.007},
    )
    assert (
        "97.0 % is its kernels as they run (matmul 50.00 ms, attention 30.00 ms, casts 10.00 ms); `trainstep"
        in verdict_of(kernels)
    )
    assert suggestion_of(budget).startswith("Compile the model, or take a larger batch: ")
    assert suggestion_of(replace(budget, on_device=True)).startswith("Capture the step as a CUDA graph, ")
    large = replace(budget, floor={AS_THEY_RUN: 0.08}, findings=(a_finding(excess_ms=20.0),))
    assert "100.0 % of the rest" in verdict_of(large)


@pytest.mark.parametrize(
    ("path", "gpu", "why"),
    [
        (CPU, None, "calibration: has no effect, because no floor is known for a step on a CPU"),
        (PROFILES, "NVIDIA H100 80GB HBM3", "calibration: it was measured on NVIDIA H200, and the step on NVIDIA H100"),
        (PROFILES, "Another GPU", "calibration: it was measured on NVIDIA H200, and the step on Another GPU"),
    ],
)
def test_a_calibration_of_another_machine_or_without_effect_is_refused(
    path: object, gpu: str | None, why: str, h200: Calibration
):
    record = first_of(path)
    record = replace(record, environment=replace(record.environment, gpu=gpu))
    explained, refusals = explain_rows(rows_of([("a.jsonl", record)]), h200)
    assert not explained
    [reason] = refusals
    assert reason.startswith(why)


def test_a_calibration_has_no_effect_on_a_script(h200: Calibration):
    rows = rows_of([("train.jsonl", a_run())])
    assert len(explain_rows(rows)[0]) == 1
    explained, [reason] = explain_rows(rows, h200)
    assert not explained
    assert "has no effect" in reason


def test_a_scripts_change_is_what_run_applies():
    explained, _ = explain_rows(rows_of([("train.jsonl", a_run())]))
    (row,) = (row for row in explain_tables(explained)[0].raw if row["kind"] == "finding")
    assert (row["cause"], row["change"]) == ("data", {"workers": "2"})
    assert row["change_words"].startswith("more workers (num_workers)")


def test_a_calibration_of_the_steps_gpu_is_taken(h200: Calibration):
    explained, refusals = explain_rows(rows_of([("a.jsonl", first_of(PROFILES))]), h200)
    assert len(explained) == 1
    assert not refusals


def test_a_time_of_the_evidence_is_written_as_in_the_verdict():
    words = "the device has no work for {idle} while the host launches 1,629 kernels"
    step = a_step(a_finding(excess_ms=23.97, evidence=words, times_s={"idle": 0.02397}))
    assert evidence_words(step.budget.findings[0]).startswith("the device has no work for 23.97 ms while")
    assert verdict_of(step.budget).count("23.97 ms") == 2


def test_the_evidence_of_a_recorded_step_is_a_whole_sentence():
    explained, _ = explain_rows(
        rows_of([("a.jsonl", record) for record in Store(ROOT / "results/h200/captured.jsonl").read()])
    )
    words = [evidence_words(finding) for one in explained for finding in one.budget.findings]
    assert any("while the host launches" in text for text in words)
    assert not any("launches of" in text or "{" in text for text in words)


def test_the_gain_of_a_change_is_printed_once_and_stored_in_each_row():
    change = {"change": {"compile": "block"}}
    [table] = explain_tables([a_step(a_finding("unfused", 2.0, 3.6, **change), a_finding("casts", 1.0, 3.6, **change))])
    titles = [column.title for column in table.columns]
    gains = [row[titles.index("gain (ms)")].text for row in table.entries]
    assert len([text for text in gains if text.startswith("3.6")]) == 1
    changes = [row[titles.index("change")].text for row in table.entries]
    assert changes[1:3] == ["--compile block", "with the above"]
    assert "a gain may exceed its row" in table.note
    assert [row["gain_s"] for row in table.raw if row["kind"] == "finding"] == [0.0036, 0.0036]


def test_many_steps_are_counted_by_first_cause_and_five_are_shown():
    steps = [a_step(a_finding("precision", 10.0), label=f"step {number}") for number in range(6)]
    steps.append(a_step(a_finding("host_launches", 90.0), label="the furthest"))
    [answer] = explain_answers(steps)
    assert answer.verdict.startswith(
        "In 6 of 7 steps precision is first; in 1 host launches. Furthest above its floor: the furthest. The step takes 91.00 ms"
    )
    tables, notes = first_tables(steps)
    assert [table.title.split(": ")[1] for table in tables] == ["the furthest", "step 0", "step 1", "step 2", "step 3"]
    assert notes == ["2 more steps, nearer to the floor: add --all."]
    assert first_tables(steps[:5])[1] == []
    assert len(explain_tables(steps)) == 7


def test_a_change_against_another_cause_than_the_first_says_so():
    first = a_finding("precision", 10.0, gain_ms=0.0, change={"precision": "bf16_autocast"})
    best = a_finding("unfused", 4.0, gain_ms=3.0, change={"compile": "block"})
    suggestion = suggestion_of(a_step(first, best).budget)
    assert suggestion.startswith("`--compile block`, against unfused memory-bound ops: about 3.000 ms less (")
    assert "the most of all changes (against precision no gain is predicted); see " in suggestion
    assert suggestion_of(a_step(best).budget).startswith("`--compile block`: about 3.000 ms less (")


def test_a_page_has_one_bar_a_step_and_the_furthest_steps_budget_open():
    causes = ("host_launches", "precision", "unfused", "matmul_shapes", "optimizer", "attention_kernel", "stragglers")
    worst = a_step(*(a_finding(cause, 9.0 - place) for place, cause in enumerate(causes)), label="worst")
    [section] = explain_sections([a_step(a_finding(), label="small"), worst])
    [chart] = section.charts
    bars = {trace["name"]: trace["x"] for trace in chart.data}
    assert [*bars] == [
        *("floor", "host launches", "precision", "unfused memory-bound ops", "matmul shapes", "optimizer"),
        "other causes",
    ]
    assert [sum(shares) for shares in zip(*bars.values(), strict=True)] == pytest.approx([100, 100])
    assert len({trace["marker"]["color"] for trace in chart.data}) == len(bars)
    assert [(table.title.split(": ")[1], table.folded) for table in section.tables] == [
        ("worst", False),
        ("small", True),
    ]
    assert "`" not in str([row for table in section.tables for row in table.entries])


def test_commits_are_named_only_where_they_tell_steps_apart():
    """profile.jsonl has cells of several commits."""
    explained, _ = explain_rows(read_rows([ROOT / "results/h200/profile.jsonl"]))
    assert len({one.label for one in explained}) == len(explained)
    assert not any("commit" in one.label for one in explained)
