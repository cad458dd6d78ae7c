"""A proof's processes of a script: which record can be started again, the order, what is kept, given up, and told."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from run_records import a_run
from trainstep.config.script import text_of_changes
from trainstep.measure.run.changed.script_command import command_of
from trainstep.measure.run.changed.script_lab import ScriptLab
from trainstep.measure.run.changed.script_processes import failure_of
from trainstep.plan.trials import Options
from trainstep.records.facts import Fact
from trainstep.records.record import Failure, Record
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
        self.fails: str | None = None
        self.fails_in: tuple[str, int] | None = None
        """The changes and the window that fails beside others."""
        self.most_windows = 9
        """Of a process, before its script ends."""
        self.groups: list[int] = []
        """Number of processes that started together."""
        self.said: list[str] = []
        self.time_s = time_s
        record = recorded(folder)
        store = Store(folder / "p.jsonl")
        known = {"steps": STEPS, "pairs": 6, "timeout_s": 9.0, "say": self.said.append, "facts": {}}
        here = dataclasses.replace(record.environment, memory_bytes=2**36)
        super().__init__(store, command_of(record), here=here, **{**known, **options})
        self.may_share = True

    def _run(
        self, changes: Sequence[Mapping[str, str]], out: Sequence[Path], turns: Sequence[int]
    ) -> Iterator[tuple[int, str, str]]:
        self.groups.append(len(changes))
        windows, ended = [0] * len(changes), set()
        for place in turns:
            if place in ended:
                continue
            windows[place] += 1
            if windows[place] > self.most_windows:  # the script ended before
                self.started.append(f"{text_of_changes(changes[place])} ended")
                ended.add(place)
                yield place, "", ""
                continue
            trouble, kind = self._run_one(changes[place], out[place], windows[place], alone=len(changes) == 1)
            if trouble or changes[place].get("adamw") == "trainstep":
                ended.add(place)
            yield place, trouble, kind

    def _run_one(self, changes: Mapping[str, str], out: Path, window: int, *, alone: bool) -> tuple[str, str]:
        text = text_of_changes(changes)
        self.started.append(text)
        if text == "workers=7" and not alone:
            return "OutOfMemoryError (exit code 1)", "crash"
        if not alone and (text, window) == self.fails_in:
            return "RuntimeError: out of memory (exit code 1)", "crash"
        if text in ("gc=off", self.fails):
            return "ValueError: no (exit code 1)", "crash"
        facts = {
            "timed_s": 5 * self.time_s(text),
            "timed_steps": 5,
            "timed_windows": window,
            "script_precision": "fp32",
        }
        facts |= {"not_applied": "adamw: none was built"} if "adamw" in text else {}
        facts |= {"timed_s": None} if text == "adamw=trainstep" else {}
        facts |= {"timed_s": None} if text == "workers=9" else {}
        facts |= {"peak_rss_bytes": 2**30, "loader_batch_size": int(changes.get("batch_size", 4))}
        facts |= {"loader_batch_size": 4} if text == "batch_size=5" else {}
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
    assert "not 2 % faster in either of the first 2 pairs" in comparison.reason


def test_windows_of_shared_processes_follow_smaller_gains(tmp_path: Path):
    def small(text: str) -> float:
        return {"workers=2": 0.985, "workers=3": 0.995}.get(text, 1.0)

    def windows_of(lab: FakeLab) -> list[int]:
        lab.first()
        lab.measure_in_rounds([{"workers": "2"}, {"workers": "3"}])
        return [lab.started.count(f"workers={count}") for count in "23"]

    shared = FakeLab(tmp_path, small)
    assert windows_of(shared) == [6, 2]
    compared = shared.compare({}, {"workers": "2"}, 0)
    assert (compared.n, compared.word) == (6, "under 2 %"), "with all of its pairs, which no stricter rule ends"
    (tmp_path / "apart").mkdir()
    apart = FakeLab(tmp_path / "apart", small)
    apart.may_share = False
    assert windows_of(apart) == [2, 2]


def test_of_two_batch_sizes_the_slower_one_is_given_up_after_two_rounds(tmp_path: Path):
    times_s = {"batch_size=8": 1.0, "batch_size=16": 1.6, "batch_size=12": 1.505, "workers=2": 0.5, "workers=3": 0.6}
    lab = FakeLab(tmp_path, lambda text: times_s.get(text, 1.0))  # 0.5, 0.4 and 0.502 of a sequence's time
    lab.first()
    lab.start = {"batch_size": 4}
    sizes: list[Options] = [{"batch_size": size} for size in (8, 16, 12)]
    others: list[Options] = [{"batch_size": 4, "workers": count} for count in "23"]
    lab.measure_in_rounds([*sizes, *others])
    assert [lab.started.count(text) for text in times_s] == [2, 6, 2, 6, 6], "other options go on"
    slower = lab.compare(lab.start, sizes[0], 0)
    assert (slower.verdict, slower.n, slower.ratio) == ("cannot tell", 2, pytest.approx(0.5))
    assert slower.reason.startswith("batch_size=16 was faster in the first 2 rounds, so it was not compared further")
    assert lab.compare(lab.start, sizes[1], 0).verdict == "faster"


def test_no_batch_size_is_given_up_for_one_that_is_alike_or_was_not_applied(tmp_path: Path):
    lab = FakeLab(
        tmp_path, lambda text: {"batch_size=8": 1.6, "batch_size=16": 3.15, "batch_size=5": 0.5}.get(text, 1.0)
    )
    lab.first()
    lab.start = {"batch_size": 4}
    lab.measure_in_rounds([{"batch_size": size} for size in (8, 16, 5)])
    assert [lab.started.count(f"batch_size={size}") for size in (8, 16)] == [6, 6]


def test_rounds_measure_all_changes_beside_one_original(tmp_path: Path):
    lab = FakeLab(tmp_path, steady)
    lab.first()
    lab.measure_in_rounds([{"workers": "2"}, {"workers": "3"}, {"gc": "off"}, {"adamw": "fused"}])
    assert lab.started[1:6] == ["", "workers=2", "workers=3", "gc=off", "adamw=fused"]
    assert lab.started[6:10] == ["adamw=fused", "workers=3", "workers=2", ""], "in the opposite order"
    assert lab.started[10] == "gc=off", "what failed beside others runs again alone, and has no second round"
    assert lab.started[11:] == ["", "workers=2", "workers=2", ""] * 2, "workers=3 was not faster in two rounds"
    assert lab.groups == [1, 5, 1, 2], "windows of a change share a process in the first two rounds, and in all others"
    count = len(lab.started)
    compared = lab.compare({}, {"workers": "2"}, 0)
    assert (compared.verdict, compared.reason[-13:]) == ("faster", "over 6 rounds")
    assert "not 1 % faster in either of the first 2 pairs" in lab.compare({}, {"workers": "3"}, 0).reason
    assert lab.trial({"gc": "off"}, 0).failure_kind == "crash"
    assert len(lab.started) == count, "nothing was measured again"
    lab.compare({}, {"workers": "2"}, 1)
    assert len(lab.started) == count + 12, "a second comparison has an original of its own"
    assert lab.groups[4:] == [10, 2], "and nothing in it is given up early, so that as many as have room start together"
    assert lab.said[0].startswith("round 1 of 6: workers=2 0.500, workers=3 1.000 of")


def test_a_round_takes_as_many_changes_as_the_budget_has_room_for(tmp_path: Path):
    lab = FakeLab(tmp_path, steady, budget_minutes=5)
    lab.first()
    lab._starts_s, lab._turns_s = [50.0], [30.0]  # the last comparison: 2 * 50 + 10 * 30 s
    lab._began_s += 400 + 210 - 300  # 210 s for two rounds: the original and two changes take 200, three 260
    lab.measure_in_rounds([{"workers": "2"}, {"pin_memory": "on"}, {"copies": "non_blocking"}])
    assert lab.started[1:4] == ["", "workers=2", "pin_memory=on"], "those that come first"
    count = len(lab.started)
    lab._began_s += 10_000  # time is found after all
    lab.trial({"copies": "non_blocking"}, 0)
    lab.compare({}, {"copies": "non_blocking"}, 0)
    assert lab.started[count:] == ["", *2 * ["copies=non_blocking"], ""], "with an original beside it"
    count = len(lab.started)
    assert lab.compare({}, {"pin_memory": "on"}, 0).n < 6
    assert len(lab.started) == count, "the originals of its rounds are over"


def test_room_is_kept_for_a_comparison_of_all_that_helps_only_while_two_may(tmp_path: Path):
    lab = FakeLab(tmp_path, lambda text: 0.5 if "workers" in text else 1.0, budget_minutes=5)
    lab.first()
    two, four, pinned = {"workers": "2"}, {"workers": "4"}, {"pin_memory": "on"}
    assert lab._may_join([two, pinned]), "nothing is known of them yet"
    assert not lab._may_join([two, four]), "two values of one change are never joined"
    lab._starts_s, lab._turns_s = [50.0], [10.0]
    lab._began_s += 390 - 300  # a round of three takes 80 s, the last comparison 200, its trial 50
    lab.measure_in_rounds([two, four, pinned])
    assert not lab._may_join([two, four, pinned]), "only the workers helped"
    assert lab._may_join([two, {"copies": "non_blocking"}])
    assert len(lab._ratios(two)) == 6, "all rounds ran, with what the last comparison would have taken"
    assert lab.cut_off == []


def test_another_batch_is_compared_by_the_time_of_a_sequence(tmp_path: Path):
    times_s = {"": 1.0, "batch_size=8": 1.6, "batch_size=16": 4.4, "batch_size=5": 1.0}
    lab = FakeLab(tmp_path, lambda text: times_s[text])
    lab.first()
    lab.start = {"batch_size": 4}
    double, fourfold, ignored = ({"batch_size": size} for size in (8, 16, 5))
    lab.measure_in_rounds([double, fourfold, ignored])
    assert lab.said[0].startswith("round 1 of 6: batch_size=8 0.800, batch_size=16 1.100 of")
    comparison = lab.compare({"batch_size": 4}, double, 0)
    assert (comparison.verdict, comparison.ratio) == ("faster", pytest.approx(0.8))
    assert lab.trial(double, 0).step_s == pytest.approx(1.6)
    assert lab.trial(ignored, 0).message == "it found nothing to change: the script reads batches of 4, not of 5"


def test_what_found_nothing_to_change_may_end_before_its_turn(tmp_path: Path):
    lab = FakeLab(tmp_path, steady)
    lab.first()
    lab.measure_in_rounds([{"workers": "2"}, {"adamw": "trainstep"}])
    assert lab.started[1:4] == ["", "workers=2", "adamw=trainstep"]
    assert "adamw=trainstep" not in lab.started[4:]
    tried = lab.trial({"adamw": "trainstep"}, 0)
    assert (tried.failure_kind, tried.message) == ("not applied", "it found nothing to change: adamw: none was built")
    assert 1 not in lab.groups[1:], "it did not run again alone"


def test_rounds_that_are_on_disk_cost_nothing(tmp_path: Path):
    def fast(text: str) -> float:
        return 0.5 if text else 1.0

    first = FakeLab(tmp_path, fast)
    first.first()
    first.measure_in_rounds([{"workers": "2"}, {"workers": "4"}])
    again = FakeLab(tmp_path, fast, budget_minutes=1e-6)
    again.measure_in_rounds([{"workers": "2"}, {"workers": "4"}])
    assert again.started == []
    assert [again.compare({}, {"workers": n}, 0).verdict for n in "24"] == ["faster", "faster"]


def test_the_rounds_that_start_together_are_charged_one_start(tmp_path: Path):
    lab = FakeLab(tmp_path, steady, budget_minutes=100)
    lab.first()
    lab._note_time = lambda record: None
    lab._starts_s, lab._turns_s = [1000.0], [1.0]  # four rounds of two and the last comparison: 1,007 and 2,010 s
    lab._is_spent = lambda next_s: next_s > 3100
    lab.measure_in_rounds([{"workers": "2"}])
    assert lab.groups == [1, 2, 2]


def test_what_has_no_room_beside_the_others_has_rounds_with_an_original_of_its_own(tmp_path: Path):
    lab = FakeLab(tmp_path, lambda text: {"workers=2": 0.5, "pin_memory=on": 0.6}.get(text, 1.0))
    lab.first()
    lab._have_room = lambda together: len(together) <= 2
    lab.measure_in_rounds([{"workers": "2"}, {"pin_memory": "on"}])
    assert lab.started[1:9] == ["", "workers=2", "workers=2", "", "", "pin_memory=on", "pin_memory=on", ""]
    assert lab.groups == [1, 2, 2, 2, 2]
    ratios = [lab.compare({}, options, 0).ratio for options in ({"workers": "2"}, {"pin_memory": "on"})]
    assert ratios == pytest.approx([0.5, 0.6])
    assert len(lab.started) == 1 + 4 * 6


def test_what_has_no_room_beside_the_original_runs_behind_it_round_by_round(tmp_path: Path):
    lab = FakeLab(tmp_path, steady)
    lab.first()
    lab._have_room = lambda together: len(together) == 1
    lab.measure_in_rounds([{"workers": "2"}])
    assert lab.started[1:] == ["", "workers=2", "workers=2", ""] * 3
    assert lab.groups == [1] * 13


def test_on_a_cpu_each_window_has_a_process_of_its_own(tmp_path: Path):
    lab = FakeLab(tmp_path, steady)
    assert not ScriptLab(
        lab.store, lab.command, pairs=6, say=print, steps=9, timeout_s=9, facts={}, here=lab._here
    ).may_share
    lab.may_share = False
    lab.first()
    lab.measure_in_rounds([{"workers": "2"}, {"workers": "3"}])
    assert lab.groups == [1, 3, 3, 8], "those of four rounds start together"


def test_a_script_that_is_too_short_ends_the_rounds_where_the_budget_has_no_room_for_more_starts(tmp_path: Path):
    lab = FakeLab(tmp_path, steady)
    lab.most_windows = 1
    lab.first()
    lab._is_spent = lambda next_s: not lab.may_share
    lab.measure_in_rounds([{"workers": "2"}])
    assert lab.started[1:] == ["", "workers=2", "workers=2 ended", " ended"]
    assert "the budget had room for 1 of 6 rounds" in lab.compare({}, {"workers": "2"}, 0).reason


def test_what_fails_in_a_later_window_runs_the_rest_alone(tmp_path: Path):
    lab = FakeLab(tmp_path, steady)
    lab.first()
    lab.time_s = lambda text: 0.5 if text else 1.0
    lab.fails_in = ("workers=2", 2)
    lab.measure_in_rounds([{"workers": "2"}])
    assert lab.started[1:6] == ["", "workers=2", "workers=2", "", "workers=2"], "its second window again, by itself"
    assert lab.groups[:4] == [1, 2, 1, 2]
    assert lab.compare({}, {"workers": "2"}, 0).verdict == "faster"
    assert all(record.samples for record in lab._known.values())


def test_windows_that_a_script_is_too_short_for_have_processes_of_their_own(tmp_path: Path):
    lab = FakeLab(tmp_path, steady)
    lab.most_windows = 1
    lab.first()
    lab.measure_in_rounds([{"workers": "2"}])
    assert lab.started[1:5] == ["", "workers=2", "workers=2 ended", " ended"]
    assert lab.started[5:7] == ["workers=2", ""], "the second round again"
    assert lab.groups == [1, 2, 2, 8], "and no process is shared any more"
    assert lab.compare({}, {"workers": "2"}, 0).verdict == "faster"
    assert len(lab._known) == 13


def test_a_trial_tells_the_losses_of_all_other_runs_of_the_same(tmp_path: Path):
    lab = FakeLab(tmp_path, steady)
    lab.first()
    lab.measure_in_rounds([{"workers": "2"}])
    first = lab.trial({}, 0)
    assert (first.losses, first.others) == ((2.0, 1.0), ((2.0, 1.0),) * 2), (
        "of the two processes for rounds, not of each window"
    )
    assert len(lab.trial({"workers": "2"}, 0).others) == 1


def test_a_group_costs_one_start_and_its_turns(tmp_path: Path):
    lab = FakeLab(tmp_path, steady)
    lab.first()
    lab._starts_s = [50.0]
    assert lab.comparison_s({}) == 2 * 50 + 10 * (5 + 1.5), (
        "twelve processes in two groups; a turn has 5 s of steps and 1.5 s around them"
    )
    lab._turns_s = [2.0, 4.0]
    assert lab.comparison_s({}) == 2 * 50 + 10 * 3
    record = lab.command.record
    lab.command = dataclasses.replace(
        lab.command, record=dataclasses.replace(record, config={**record.config, "device": "cuda"})
    )
    assert lab.comparison_s({}) == pytest.approx(2 * 30 + 10 * 3), "a GPU's first start fills caches"
    lab._starts_s = [50.0, 20.0, 24.0]
    assert lab.comparison_s({}) == 2 * 22 + 10 * 3
    lab = FakeLab(tmp_path, steady)
    lab.measure_in_rounds([{"workers": "2"}])
    again = FakeLab(tmp_path, steady)
    assert (len(again._starts_s), len(again._turns_s)) == (1 + len(lab.groups), len(lab.started) - len(lab.groups))


def test_a_round_that_was_killed_begins_anew_with_its_original(tmp_path: Path):
    first = FakeLab(tmp_path, steady)
    first.first()
    first.time_s = lambda text: 1 / 0 if len(first.started) == 3 else steady(text)
    with pytest.raises(ZeroDivisionError):  # killed in the first round, after the original
        first.measure_in_rounds([{"workers": "2"}, {"pin_memory": "on"}])
    second = FakeLab(tmp_path, lambda text: {"workers=2": 0.5, "pin_memory=on": 0.6}.get(text, 1.0))
    second.measure_in_rounds([{"workers": "2"}, {"pin_memory": "on"}])
    assert second.started[:3] == ["", "workers=2", "pin_memory=on"], "no pair is of two commands"
    assert second.compare({}, {"pin_memory": "on"}, 0).verdict == "faster"
    assert len(second.started) == 6 * 3
    third = FakeLab(tmp_path, steady)
    third.measure_in_rounds([{"workers": "2"}, {"pin_memory": "on"}, {"workers": "8"}])
    assert third.started == ["", "workers=8", "workers=8", ""], "a change that is new has an original of its own"
    assert third.compare({}, {"pin_memory": "on"}, 0).verdict == "faster"
    assert len(third.started) == 4


def test_a_round_in_the_opposite_order_begins_anew_too(tmp_path: Path):
    first = FakeLab(tmp_path, steady)
    first.first()
    first.time_s = lambda text: 1 / 0 if len(first.started) == 6 else steady(text)
    with pytest.raises(ZeroDivisionError):  # killed in the second round, before its last, the original
        first.measure_in_rounds([{"workers": "2"}, {"workers": "4"}])
    second = FakeLab(tmp_path, lambda text: {"workers=2": 0.5, "workers=4": 0.6}.get(text, 1.0))
    second.measure_in_rounds([{"workers": "2"}, {"workers": "4"}])
    assert second.started[:3] == ["workers=4", "workers=2", ""]


def test_an_original_that_fails_ends_a_comparison_at_once(tmp_path: Path):
    lab = FakeLab(tmp_path, steady)
    lab.first()
    lab.fails = ""
    lab.measure_in_rounds([{"workers": "2"}])
    count = len(lab.started)
    assert lab.compare({}, {"workers": "2"}, 0).reason == "the original failed: ValueError: no (exit code 1)"
    assert len(lab.started) == count


def test_a_budget_that_is_spent_starts_no_round_and_keeps_what_was_decided(tmp_path: Path):
    first = FakeLab(tmp_path, steady)
    first.first()
    lab = FakeLab(tmp_path, steady, budget_minutes=0.001)
    lab._began_s -= 60
    lab.measure_in_rounds([{"workers": "2"}])
    assert lab.started == []
    first.measure_in_rounds([{"workers": "3"}])
    later = FakeLab(tmp_path, steady, budget_minutes=0.001)
    later._began_s -= 60
    later.measure_in_rounds([{"workers": "3"}])
    assert "not 1 % faster in either of the first 2 pairs" in later.compare({}, {"workers": "3"}, 0).reason
    assert (later.cut_off, later.started) == ([], [])


def test_what_fails_beside_others_may_run_alone(tmp_path: Path):
    lab = FakeLab(tmp_path, steady)
    lab.first()
    lab.measure_in_rounds([{"workers": "7"}])
    assert lab.trial({"workers": "7"}, 0).failure_kind == ""
    assert lab.groups[:3] == [1, 2, 1]
    assert not any(record.failure for record in lab.store.finished())


@pytest.mark.parametrize(
    ("code", "said", "expected"),
    [
        (1, "torch.OutOfMemoryError: no room", ("torch.OutOfMemoryError: no room (exit code 1)", "out_of_memory")),
        (3, "enough", ("enough (exit code 3)", "crash")),
        (-11, "step 7", ("ended by Segmentation fault; its last words: step 7", "crash")),
    ],
)
def test_an_end_has_a_kind_of_failure_that_records_know(code: int, said: str, expected: tuple[str, str]):
    assert failure_of(code, said) == expected
    assert Failure(kind=expected[1], phase="step", message=expected[0])


def test_what_fails_alone_stands_for_the_same_changes(tmp_path: Path):
    lab = FakeLab(tmp_path, steady)
    lab.first()
    assert lab.trial({"gc": "off"}, 0).failure_kind == "crash"
    assert lab.started == ["", *["", "gc=off", "gc=off", ""], "gc=off"], "two fail beside others, and one of them alone"
    assert lab.compare({}, {"gc": "off"}, 0).reason == "gc=off failed: ValueError: no (exit code 1)"
    assert len(lab.started) == 6


def test_what_has_no_rounds_is_tried_in_the_first_pairs_of_its_comparison(tmp_path: Path):
    both = {"workers": "2", "pin_memory": "on"}
    lab = FakeLab(tmp_path, lambda text: 0.5 if text else 1.0, budget_minutes=5)
    lab.first()
    lab._starts_s, lab._turns_s, lab.reserved = [50.0], [10.0], 1  # the last comparison: 2 * 50 + 10 * 10 s
    lab._began_s += 210 - 300
    assert lab.trial(both, 0).step_s == 0.5, "what is reserved has the time of its trial"
    assert lab.groups[1:] == [4]
    assert lab.trial(both, 1).step_s == 0.5
    assert lab.groups[1:] == [4]
    lab.reserved = 0
    assert lab.compare({}, both, 0).n == 6
    assert lab.groups[1:] == [4, 8]
    other = {"workers": "3", "pin_memory": "on"}
    lab._have_room = lambda together: len(together) < 3
    lab._began_s += 10_000
    lab.trial(other, 0)
    lab.trial(other, 1)
    assert lab.groups[3:] == [2, 2]
    lab._began_s -= 20_000
    assert lab.trial({"workers": "4", "pin_memory": "on"}, 0) is None


def two_that_help(folder: Path, most_s: float) -> FakeLab:
    """A lab of a start of 50 s and turns of 10 s behind two rounds, with a budget that has room for `most_s`."""
    lab = FakeLab(folder, lambda text: {"workers=2": 0.5, "pin_memory=on": 0.7}.get(text, 1.0))
    lab.first()
    lab._note_time = lambda record: None
    lab._starts_s, lab._turns_s, lab._turns_of = [50.0], [10.0], {}
    lab._is_spent = lambda next_s: len(lab.started) > 3 and next_s > most_s
    lab.measure_in_rounds([{"pin_memory": "on"}, {"workers": "2"}])
    lab._is_spent = lambda next_s: next_s > 0
    return lab


def test_without_room_for_all_that_may_help_rounds_end_and_all_together_decide(tmp_path: Path):
    lab = two_that_help(tmp_path, 300.0)  # four rounds of both take 160 s, of one 120, and the last comparison 200
    assert lab.started[7:] == []
    for options, ratio in (({"workers": "2"}, 0.5), ({"pin_memory": "on"}, 0.7)):
        cut = lab.compare({}, options, 0)
        assert (cut.verdict, cut.reason) == (
            "cannot tell",
            f"the budget had room for 2 of 6 rounds (ratio {ratio:.3f})",
        )
        assert cut.is_cut_off
        assert cut.each == pytest.approx((ratio, ratio))
    assert lab.cut_off == ["workers=2", "pin_memory=on"]


def test_without_room_for_all_together_the_budget_goes_to_the_fastest(tmp_path: Path):
    lab = two_that_help(tmp_path, 150.0)
    assert lab.started[7:] == ["", "workers=2", "workers=2", ""] * 2
    assert lab.compare({}, {"workers": "2"}, 0).verdict == "faster"
    assert lab.cut_off == []
    assert lab.compare({}, {"pin_memory": "on"}, 0).is_cut_off


@pytest.mark.parametrize(("budget_s", "rounds"), [(185.0, 1), (1000.0, 2)])
def test_what_clearly_lost_a_round_gives_way_to_what_gained_where_time_is_short(
    budget_s: float, rounds: int, tmp_path: Path
):
    """A process takes 10 s. Two rounds of all and the others of the workers would take 190 s."""
    times_s = {"workers=2": 0.475, "copies=non_blocking": 1.3, "mask=causal": 1.1, "pin_memory=on": 1.01}
    lab = FakeLab(tmp_path, lambda text: times_s.get(text, 1.0))
    lab.may_share = False
    lab.first()
    lab._note_time = lambda record: None
    lab._starts_s, lab._turns_s, lab._turns_of = [10.0], [10.0], {}
    lab._is_spent = lambda next_s: 10.0 * len(lab.started) + next_s > budget_s
    lab.measure_in_rounds([{name: value} for name, _, value in (text.partition("=") for text in times_s)])
    assert [lab.started.count(text) for text in times_s] == [6, rounds, rounds, 2], "1.01 may be noise"
    assert lab.compare({}, {"workers": "2"}, 0).verdict == "faster"
    lost = lab.compare({}, {"mask": "causal"}, 0)
    assert lost.is_cut_off is (rounds == 1)
    assert ("slower in the first of 6 rounds, it gave way" in lost.reason) is (rounds == 1)
    words = "no further rounds now of copies=non_blocking, mask=causal, slower in the first, as workers=2 gained in it"
    assert any(words in line for line in lab.said) is (rounds == 1)


def test_what_was_given_up_is_not_cut_off(tmp_path: Path):
    lab = FakeLab(tmp_path, lambda text: 0.995 if text else 1.0)
    lab.first()
    lab.measure_in_rounds([{"workers": "2"}])
    assert not lab.compare({}, {"workers": "2"}, 0).is_cut_off


def test_the_last_comparison_is_expected_to_take_the_turns_of_the_slowest_change(tmp_path: Path):
    lab = FakeLab(tmp_path, steady)
    lab.first()
    lab.start = {"batch_size": 4}
    sizes: list[Options] = [{"batch_size": size} for size in (8, 16)]
    lab._in_rounds = {lab.key_of(options): options for options in sizes}
    lab._starts_s, lab._turns_s = [50.0], [10.0]
    assert lab.comparison_s({}) == 2 * 50 + 4 * 10 + 6 * (10 + 3 * 5), (
        "four times as many sequences: only steps are longer"
    )
    lab._ratios = lambda options: [0.9] if options is sizes[0] else []
    assert lab.comparison_s({}) == 2 * 50 + 4 * 10 + 6 * (10 + 5), "and once others were measured, not one that failed"
    lab._ratios = lambda options: []
    lab._turns_of = {lab.key_of(sizes[1]): [25.0], lab.key_of(lab.start): [8.0]}
    assert lab.comparison_s({}) == 2 * 50 + 4 * 8 + 6 * 25


def test_as_many_live_at_once_as_have_room(tmp_path: Path):
    lab = FakeLab(tmp_path, steady)
    workers: Options = {"workers": "2"}

    def most() -> int:
        return next(count for count in range(1, 20) if not lab._have_room([{}, *[workers] * count]))

    assert most() == 1, "nothing is known yet"
    lab.first()
    assert most() == 10, "no more in any case"
    lab._here = dataclasses.replace(lab._here, memory_bytes=10 * 2**30, gpu_memory_bytes=30 * 2**30)
    assert most() == 4  # half of the memory over 1.05 GiB
    [name] = lab._known
    record = lab._known[name]
    on_gpu = dataclasses.replace(record, config={**record.config, "device": "cuda"})
    lab._known[name] = on_gpu
    assert most() == 1, "nothing says what it takes of the GPU"
    lab._known[name] = dataclasses.replace(
        on_gpu, facts={**on_gpu.facts, "peak_reserved_bytes": Fact(value=10 * 2**30, unit="bytes")}
    )
    assert most() == 2  # 11.2 GiB for the original, 11.5 for each other
    lab.command = dataclasses.replace(lab.command, ranks=2)
    assert most() == 1


def test_a_larger_batch_takes_more_of_a_gpu_until_one_has_run(tmp_path: Path):
    lab = FakeLab(tmp_path, steady)
    lab.first()
    lab.start = {"batch_size": "4"}
    lab._here = dataclasses.replace(lab._here, gpu_memory_bytes=60 * 2**30)
    [name] = lab._known
    held = {"peak_reserved_bytes": Fact(value=10 * 2**30, unit="bytes")}
    record = lab._known[name]
    lab._known[name] = dataclasses.replace(
        record, config={**record.config, "device": "cuda"}, facts={**record.facts, **held}
    )
    two, four, ten = ({"batch_size": size} for size in ("8", "16", "40"))
    given = [lab.start, {}, two, {}, four, ten, {}]
    groups = lab._groups([(options, str(number)) for number, options in enumerate(given)])
    # 11.2 GiB each for the original's batch, 22 for two, 43 for four, 106 for ten of it: which is tried alone all the same
    assert [[options for options, _ in group] for group in groups] == [[lab.start, {}, two, {}], [four], [ten], [{}]]
    roles = [(options, str(number)) for number, options in enumerate([lab.start, four, ten, ten, four, lab.start])]
    shared = lab._groups(roles, shared=True)
    assert [[name for _, name in group] for group in shared] == [["0", "1", "4", "5"], ["2", "3"]]
    assert lab._expected_s([lab.start, {}]) < lab._expected_s([lab.start, ten]), "one start, and two"
    lab._known["another"] = dataclasses.replace(lab._known[name], key=lab.key_of(ten))  # it took 10 GiB, too
    assert lab._have_room([ten, ten, lab.start])
    weights = {
        "trained_elements": Fact(value=2**27, unit="count"),
        "script_precision": Fact(value="bf16_autocast", unit=""),
    }
    lab._known[name] = dataclasses.replace(lab._known[name], facts={**lab._known[name].facts, **weights})
    assert lab._taken(four) == pytest.approx(
        (1.05 * 2**30, (1.05 * (2 + 4 * 8) + 1) * 2**30)
    )  # 2 GiB of weights, gradients and moments do not grow
    assert lab._taken({}) == pytest.approx((1.02 * 2**30, (1.02 * 10 + 1) * 2**30)), "it has run"
    with_ten = {"loader_batch_size": Fact(value=40, unit="count")}
    lab._known["another"] = dataclasses.replace(
        lab._known["another"], facts={**lab._known["another"].facts, **with_ten}
    )
    alike = lab._taken({"workers": "2", **ten})
    assert alike == pytest.approx((1.05 * 2**30, (1.05 * 10 + 1) * 2**30)), "as much as one of its batch"
    for precision, elements, expected in (("bf16", 2**27, 40), ("fp16", 2**27, 40), ("bf16_autocast", 2**31, 5 + 20)):
        weights["script_precision"] = Fact(value=precision, unit="")
        weights["trained_elements"] = Fact(value=elements, unit="count")
        lab._known[name] = dataclasses.replace(lab._known[name], facts={**lab._known[name].facts, **weights})
        assert lab._taken(four) == pytest.approx((1.05 * 2**30, (1.05 * expected + 1) * 2**30))


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
    assert lab.first() is not None  # which always runs
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


def test_ten_minutes_have_room_for_a_batch_eight_times_as_large_behind_a_first_start_of_a_minute(tmp_path: Path):
    """As on an H200, where a batch's windows were taken for as long as eight turns of a share of the first start."""
    lab = FakeLab(tmp_path, lambda text: 0.29, pairs=5, budget_minutes=10.0)
    lab.first()
    lab._starts_s, lab._began_s, record = [62.0], lab._began_s - 62, lab.command.record
    lab.command = dataclasses.replace(
        lab.command, record=dataclasses.replace(record, config={**record.config, "device": "cuda"})
    )
    lab.start = {"batch_size": 16}
    tried: list[Options] = [{"workers": str(number)} for number in range(2, 10)] + [{"batch_size": 128}]
    lab._in_rounds = {lab.key_of(options): options for options in tried}
    lab._have_room = lambda together: (
        len(together) < 3 + 6 * (lab.start not in together or {"batch_size": 128} not in together)
    )
    assert lab._affordable(tried, range(2)) == tried
    lab._budget_minutes = 6.0
    assert {"batch_size": 128} not in lab._affordable(tried, range(2))
