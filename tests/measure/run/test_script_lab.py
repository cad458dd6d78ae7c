"""A proof's processes of a script: which record can be started again, the order, what is kept, given up, and told."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from run_records import a_run
from trainstep.config.script import text_of_changes
from trainstep.measure.run.script_lab import ScriptLab, command_of
from trainstep.records.record import Record
from trainstep.records.store import Store

STEPS = 10


def recorded(folder: Path, *, facts: Mapping[str, object] | None = None, **config: object) -> Record:
    """A record of `trainstep run train.py`, whose script lies in the folder."""
    (folder / "train.py").write_text("pass\n")
    known = {"command": "trainstep run train.py --lr 1", "script_folder": str(folder), **(facts or {})}
    return a_run(facts=known, arguments="--lr 1", **config)


class FakeLab(ScriptLab):
    """Writes what `trainstep run` would, with times from a function of the changes' text."""

    def __init__(self, folder: Path, time_s: Callable[[str], float], **options: object) -> None:
        self.started: list[str] = []
        self.said: list[str] = []
        self.time_s = time_s
        record = recorded(folder)
        store = Store(folder / "p.jsonl")
        known = {"steps": STEPS, "pairs": 6, "timeout_s": 9.0, "say": self.said.append, "facts": {}}
        super().__init__(store, command_of(record), here=record.environment, **{**known, **options})

    def _run(self, changes: Mapping[str, str], out: Path) -> tuple[str, str]:
        text = text_of_changes(changes)
        self.started.append(text)
        if text == "gc=off":
            return "ValueError: no (exit code 1)", "crash"
        facts = {"timed_s": 5 * self.time_s(text), "timed_steps": 5, "script_precision": "fp32"}
        facts |= {"not_applied": "adamw: none was built"} if text == "adamw=fused" else {}
        facts |= {"timed_s": None} if text == "workers=9" else {}
        record = a_run(facts=facts, tables={"losses": {"loss": [2.0, 1.0]}})
        Store(out).append(record)
        return "", ""


def steady(text: str) -> float:
    return 0.5 if text == "workers=2" else 1.0


def test_a_pair_is_two_neighbours_in_both_orders(tmp_path: Path):
    lab = FakeLab(tmp_path, steady)
    comparison = lab.compare({}, {"workers": "2"}, 0)
    assert lab.started == ["", "workers=2", "workers=2", ""] * 3
    assert (comparison.verdict, comparison.n, comparison.interleaving) == ("faster", 6, "rounds")
    assert comparison.ratio == pytest.approx(0.5)
    assert comparison.high == pytest.approx(0.5)


def test_a_change_that_is_not_faster_twice_is_given_up(tmp_path: Path):
    lab = FakeLab(tmp_path, steady)
    comparison = lab.compare({}, {"workers": "3"}, 0)
    assert len(lab.started) == 4
    assert (comparison.verdict, comparison.low) == ("cannot tell", None)
    assert "not faster in the first 2 pairs" in comparison.reason


def test_what_was_measured_is_not_measured_again(tmp_path: Path):
    first = FakeLab(tmp_path, steady)
    first.trial({}, 0)
    first.time_s = lambda text: 1 / 0 if len(first.started) == 6 else steady(text)
    with pytest.raises(ZeroDivisionError):  # killed in the sixth process
        first.compare({}, {"workers": "2"}, 0)
    second = FakeLab(tmp_path, steady)
    assert second.trial({}, 0).step_s == 1.0
    assert second.compare({}, {"workers": "2"}, 0).verdict == "faster"
    assert len(second.started) == 12 - 4
    assert second.compare({}, {"workers": "2"}, 1).verdict == "faster"
    assert len(second.started) == 12 - 4 + 12


def test_what_failed_or_found_nothing_is_told(tmp_path: Path):
    lab = FakeLab(tmp_path, steady)
    assert lab.trial({"gc": "off"}, 0).message == "ValueError: no (exit code 1)"
    assert lab.trial({"adamw": "fused"}, 0).failure_kind == "not applied"
    assert lab.trial({"compile": "module"}, 0).message == "torch.compile found nothing to compile"
    assert "the script ended after 20 steps of 10" in lab.trial({"workers": "9"}, 0).message
    assert lab.trial({"workers": "2"}, 0).losses == (2.0, 1.0)
    assert "failed: ValueError: no" in lab.compare({}, {"gc": "off"}, 0).reason


def test_a_budget_and_a_dry_run_start_nothing(tmp_path: Path):
    lab = FakeLab(tmp_path, steady, dry_run=True)
    assert lab.first() is None
    assert lab.compare({}, {"workers": "2"}, 0) is None
    lab = FakeLab(tmp_path, steady, budget_minutes=0.001)
    assert lab.trial({}, 0) is not None  # the first always runs
    lab._began_s -= 60
    assert lab.trial({}, 1) is None
    assert lab.compare({}, {"workers": "2"}, 0) is None


def test_the_precision_of_the_original_is_no_change(tmp_path: Path):
    lab = FakeLab(tmp_path, steady)
    before = lab.key_of({})
    lab.start = {"precision": "fp32"}
    assert lab.changes({"precision": "fp32", "workers": "2"}) == {"workers": "2"}
    assert lab.key_of({"precision": "fp32"}) == before
    assert lab.changes({"precision": "tf32"}) == {"precision": "tf32"}


def test_of_another_script_nothing_is_known(tmp_path: Path):
    first = FakeLab(tmp_path, steady)
    (tmp_path / "train.py").write_text("print()\n")
    changed = dataclasses.replace(first.command, source=command_of(first.command.record).source)
    assert changed.source != first.command.source
    before = first.key_of({})
    first.command = changed
    assert first.key_of({}) != before


def test_too_few_pairs_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="processes: an interval needs at least 5"):
        FakeLab(tmp_path, steady, pairs=4)


def test_a_script_is_started_as_it_was_recorded(tmp_path: Path):
    command = command_of(recorded(tmp_path))
    assert (command.words, command.folder, command.ranks) == (("train.py", "--lr", "1"), str(tmp_path), 1)
    assert not command.changed
    assert command_of(recorded(tmp_path, facts={"script_source": "0" * 12})).changed
    assert not command_of(recorded(tmp_path, facts={"script_source": command.source})).changed
    assert command_of(recorded(tmp_path, facts={"local_ranks": 2}, ranks=2)).ranks == 2


@pytest.mark.parametrize(
    ("facts", "config", "sentence"),
    [
        ({"command": "python train.py"}, {}, "a watch in code"),
        ({"applied": "gc=off"}, {}, "with --apply or --stop-after"),
        ({}, {"ranks": 2}, "2 ranks that were not all on one machine"),
        ({"local_ranks": 2}, {"ranks": 4}, "4 ranks that were not all on one machine"),
        ({"script_folder": "/gone/away"}, {}, "the run's folder /gone/away cannot be entered"),
        ({}, {"script": "gone.py"}, "gone.py cannot be read"),
    ],
)
def test_what_cannot_be_started_again_is_refused(
    facts: dict[str, object], config: dict[str, object], sentence: str, tmp_path: Path
):
    with pytest.raises(ValueError, match=sentence):
        command_of(recorded(tmp_path, facts=facts, **config))
