"""The lab looks up before it measures, keeps to its budget with what is reserved, and compares unlike batches per token."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fake_groups import FakeGroups
from trainstep.config.grid import Cell
from trainstep.measure.harness import lab
from trainstep.measure.harness.lab import TRIAL_STEPS, Lab, tokens_of
from trainstep.measure.harness.runner import Limits
from trainstep.records.record import Failure, Record
from trainstep.records.store import Store

OPTIONS = {"model": "tiny", "batch_size": 4, "context": 32}
BLOCK = {**OPTIONS, "compile": "block"}


class Silent:
    def tell(self, cell: Cell, stage: str) -> None: ...

    def finished(self, done: int, of: int, records: Sequence[Record], *, whole: bool = True) -> None: ...


@contextlib.contextmanager
def silent(_cells: Sequence[Cell]) -> Iterator[Silent]:
    yield Silent()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeGroups:
    groups = FakeGroups({"block": 0.5, 8: 1.2})
    monkeypatch.setattr(lab, "run_groups", groups)
    return groups


def a_lab(path: Path, **options: Any) -> Lab:
    limits = Limits(timeout_s=1.0, processes=6)
    return Lab(
        Store(path / "p.jsonl"),
        limits,
        device="cpu",
        progress=silent,
        say=lambda _: None,
        facts={"command": "c"},
        **options,
    )


def test_a_trial_reads_text_for_enough_steps_and_is_kept(fake: FakeGroups, tmp_path: Path):
    trial = a_lab(tmp_path).trial(OPTIONS, 0)
    assert trial is not None
    assert (trial.losses, trial.step_s) == ((2.0, 1.5, 1.25), 0.02)
    [record] = Store(tmp_path / "p.jsonl").read()
    assert (record.config["data"], record.config["warmups"]) == ("stdlib", TRIAL_STEPS)
    assert record.fact("command") == "c"
    again = a_lab(tmp_path)
    assert again.trial(OPTIONS, 0) == trial
    assert len(fake.ran) == 1, "looked up"
    assert again.trial(OPTIONS, 1) == trial
    assert len(fake.ran) == 2, "another run of it was asked for"


@pytest.mark.parametrize(("kind", "ran"), [("timeout", 1), ("crash", 0)])
def test_what_a_time_limit_ended_is_tried_again_and_a_crash_is_not(
    kind: str, ran: int, fake: FakeGroups, tmp_path: Path
):
    a_lab(tmp_path / "before").trial(OPTIONS, 0)
    [record] = Store(tmp_path / "before/p.jsonl").read()
    failure = Failure(kind=kind, phase="steps", message="ended")
    Store(tmp_path / "p.jsonl").append(replace(record, samples={}, tables={}, failure=failure))
    trial = a_lab(tmp_path).trial(OPTIONS, 0)
    assert trial is not None
    assert (trial.failure_kind, len(fake.ran)) == ("" if ran else kind, 1 + ran)


def test_a_comparison_is_kept_and_half_of_one_is_not_taken(fake: FakeGroups, tmp_path: Path):
    comparison = a_lab(tmp_path).compare(OPTIONS, BLOCK, 0)
    assert comparison is not None
    assert (comparison.verdict, comparison.ratio) == ("faster", pytest.approx(0.5))
    assert a_lab(tmp_path).compare(OPTIONS, BLOCK, 0) == comparison
    assert len(fake.ran) == 1
    path = tmp_path / "p.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])  # as a kill between both records leaves it
    a_lab(tmp_path).compare(OPTIONS, BLOCK, 0)
    assert len(fake.ran) == 2


def test_unlike_batches_are_compared_by_the_time_per_token(fake: FakeGroups, tmp_path: Path):
    comparison = a_lab(tmp_path).compare(OPTIONS, {**OPTIONS, "batch_size": 8}, 0)
    assert comparison is not None
    assert comparison.ratio == pytest.approx(0.6)
    assert comparison.reason.endswith(", per token")


def test_a_dry_run_measures_nothing(fake: FakeGroups, tmp_path: Path):
    dry = a_lab(tmp_path, dry_run=True)
    assert (dry.trial(OPTIONS, 0), dry.compare(OPTIONS, BLOCK, 0), fake.ran) == (None, None, [])


def test_the_first_measurement_always_runs_and_the_others_within_the_budget(fake: FakeGroups, tmp_path: Path):
    poor = a_lab(tmp_path, budget_minutes=1e-9)
    assert poor.trial(OPTIONS, 0) is not None
    assert poor.trial(BLOCK, 0) is None
    assert poor.compare(OPTIONS, BLOCK, 0) is None
    rich = a_lab(tmp_path, budget_minutes=10.0)
    assert rich.trial(BLOCK, 0) is not None
    assert rich.compare(OPTIONS, BLOCK, 0) is not None


def test_what_is_reserved_counts_and_so_does_time_before_the_lab(fake: FakeGroups, tmp_path: Path):
    first = a_lab(tmp_path, budget_minutes=10.0)
    first.trial(OPTIONS, 0)
    first.reserved = 10**9
    assert first.trial(BLOCK, 0) is None, "no room for what comes after it"
    first.reserved = 0
    assert first.trial(BLOCK, 0) is not None
    late = a_lab(tmp_path, budget_minutes=10.0, began_s=-1e9)
    late.trial(OPTIONS, 1)
    assert late.compare(OPTIONS, BLOCK, 0) is None


def test_the_tokens_of_all_ranks_count():
    assert tokens_of({"batch_size": 2, "context": 8, "accumulation": 3}) == 48
    assert tokens_of({"batch_size": 2, "context": 8, "accumulation": 1, "ranks": 4}) == 64
