"""Variants side by side: they alternate, a lost one leaves the others running, and those that do not fit run in rounds."""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cell_maker import importable, is_alive, planted, silent, wait_until
from trainstep.config.grid import Cell
from trainstep.measure.harness import sets_plan
from trainstep.measure.harness.interleave import _prepares_beside_others, run_interleaved
from trainstep.measure.harness.runner import Limits
from trainstep.measure.harness.sets_plan import SetsPlan
from trainstep.measure.harness.sweep import RoundParts
from trainstep.measure.machine.environment import environment
from trainstep.records.compare import Comparison, compare_records, compare_samples
from trainstep.records.record import Record, Samples
from trainstep.records.store import Store

__all__ = ["importable"]
pytestmark = pytest.mark.usefixtures("importable")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def variants(log: Path, *names: str, **config: Any) -> list[Cell]:
    """Cells that differ in their name only and log each call."""
    return [planted(name=name, log=str(log), **config) for name in names]


def shared(log: Path, *names: str) -> list[Cell]:
    """Cells whose processes can measure another cell."""
    return [planted("SHARED", name=name, log=str(log), steps=10) for name in names]


def interleaved(*arguments: Any, **options: Any) -> list[Record]:
    return [record for records in run_interleaved(*arguments, **options) for record in records]


def run(
    cells: Sequence[Cell], timeout_s: float = 60.0, rounds: int | None = None, processes: int | None = 1
) -> list[Record]:
    records = interleaved(cells, Limits(timeout_s=timeout_s, rounds=rounds, processes=processes), silent)
    assert [record.key for record in records] == [cell.key for cell in cells]
    return records


def calls_of(log: Path, call: str) -> list[str]:
    """The cells that made this call, in the order of time: `a 2` for a call with 2 steps."""
    lines = [line.split() for line in log.read_text().splitlines()]
    return [" ".join([name, *rest]) for name, logged, *rest in lines if logged == call]


def test_variants_alternate(log: Path):
    records = run(variants(log, "a", "b", steps=20))
    assert calls_of(log, "take") == ["a 2", "b 2"] * 10
    assert calls_of(log, "prepare") == ["a", "b"]
    for record in records:
        assert len(record.samples["step"].values) == 20
        assert record.fact("interleaving") == "live"
        assert record.fact("turn_steps") == 2
        assert record.facts["turn_steps"].unit == "count"
    assert records[0].fact("interleaving_group") == records[1].fact("interleaving_group")
    assert records[0].fact("pid") != records[1].fact("pid")
    comparison = compare_records(*records)
    assert (comparison.n, comparison.paired, comparison.interleaving) == (10, True, "live")


def test_three_variants_and_steps_that_do_not_divide(log: Path):
    run(variants(log, "a", "b", "c", steps=23))
    expected = ["a 2", "b 2", "c 2"] * 11 + ["a 1", "b 1", "c 1"]
    assert calls_of(log, "take") == expected


def test_a_variant_has_several_processes(log: Path, monkeypatch: pytest.MonkeyPatch):
    """Each process runs all steps, as they are fast; the order of variants reverses from set to set, never within a set."""
    monkeypatch.setattr(sets_plan, "_STEPS_S", 60.0)  # a step of nothing takes 0.1 s where others have the cores
    records = run(variants(log, "a", "b", steps=10), processes=5)
    assert calls_of(log, "prepare") == ["a", "b", "b", "a"] * 2 + ["a", "b"]
    assert calls_of(log, "take") == (["a 1", "b 1"] * 10 + ["b 1", "a 1"] * 10) * 2 + ["a 1", "b 1"] * 10
    for record in records:
        assert len(record.samples["step"].values) == 50
        assert (record.fact("turn_steps"), record.fact("process_steps")) == (1, 10)
    comparison = compare_records(*records)
    assert (comparison.n, comparison.paired, comparison.interleaving) == (5, True, "live")


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "steps"), [(0.0, 20), pytest.param(0.3, 4, marks=pytest.mark.slow)])
def test_slow_steps_are_split_over_processes(log: Path, seconds: float, steps: int):
    records = run(variants(log, "a", "b", steps=20, seconds=seconds), processes=5)
    assert [record.fact("process_steps") for record in records] == [steps] * 2
    assert [len(record.samples["step"].values) for record in records] == [5 * steps] * 2


def test_a_step_of_a_turn_cut_short_counts_whole(log: Path, monkeypatch: pytest.MonkeyPatch):
    """A variant with fewer steps than a turn has its seconds divided by the steps that it took."""
    decided: list[float] = []
    monkeypatch.setattr(SetsPlan, "decide_steps", lambda _plan, step_s, shared: decided.append(step_s))
    run([*variants(log, "a", steps=40), *variants(log, "b", steps=1, seconds=0.2)])
    assert calls_of(log, "take")[:2] == ["a 4", "b 1"]
    assert decided[0] >= 0.2


@pytest.mark.parametrize(("set_s", "sets"), [(0.1, 12), (5.1, 10), (6.1, 8), (8.0, 6), (600.0, 6)])
def test_as_many_sets_of_processes_run_as_fit_into_a_minute(set_s: float, sets: int):
    """Sets come in pairs of both orders. The first set, which waits for imports, does not count."""
    plan = SetsPlan([planted(steps=10)], None)
    plan.decide_sets(100.0)
    assert plan.sets is None
    for later_s in (set_s, 100.0):
        plan.decide_sets(later_s)
        assert plan.sets == sets


@pytest.mark.parametrize(
    ("set_s", "half_width", "sets"),
    [(1.0, 0.02, 12), (1.0, 0.03, 18), (1.0, 0.3, 24), (6.1, 0.3, 18), (600.0, 0.3, 6)],
)
def test_a_noisy_machine_gets_more_processes(set_s: float, half_width: float, sets: int):
    """They are decided once, and never where the user gave a number."""
    plan, given = (SetsPlan([planted(steps=10)], processes) for processes in (None, 5))
    for each in (plan, given):
        each.decide_sets(100.0)
        each.decide_sets(set_s)
        each.extend(half_width)
        each.extend(1.0)
    assert (plan.sets, given.sets) == (sets, 5)


@pytest.mark.parametrize(("noise", "offset", "least", "most"), [(0.04, 0.0, 0, 8), (0.04, 0.05, 360, 400)])
def test_further_processes_keep_the_interval_honest_and_find_5_percent(
    noise: float, offset: float, least: int, most: int
):
    """400 comparisons whose pairs of processes vary by 4 %: at most 2 % of equal variants are called different."""
    random = np.random.default_rng(20)

    def compared(sets: int, logs: Sequence[float]) -> Comparison:
        a, b = (Samples(unit="s", values=tuple(np.exp(values))) for values in (np.zeros(sets), logs[:sets]))
        return compare_samples(a, b, process_steps=(1, 1))

    different = 0
    for _ in range(400):
        logs = random.normal(offset, noise, 24)
        plan = SetsPlan([planted(steps=10)], None)
        for _ in range(2):
            plan.decide_sets(1.0)
        first = compared(11, logs)
        assert first.low
        assert first.high
        assert plan.sets
        plan.extend(math.log(first.high / first.low) / 2)
        different += compared(plan.sets, logs).verdict != "cannot tell"
    assert least <= different <= most


def test_few_steps_and_shared_workers_have_one_process(log: Path):
    for records in (run(variants(log, "a", "b", steps=2), processes=None), run(shared(log, "a", "b"), processes=None)):
        assert len({record.fact("process_steps") for record in records}) == 1
        assert [len(record.samples["step"].values) for record in records] == [int(records[0].config["steps"])] * 2


def test_variants_that_all_fail_as_they_finish_a_set_end_the_run(log: Path):
    """Nothing is left for the second set."""
    records = run(variants(log, "a", "b", act="raise", where="finish", steps=4), processes=2)
    assert [record.failure is not None and record.failure.kind for record in records] == ["crash", "crash"]
    assert calls_of(log, "prepare") == ["a", "b"]


def test_processes_of_a_gpu_prepare_at_the_same_time_after_the_first_set(log: Path):
    """Each waits for the other in the second set, so that one after the other would fail."""
    names, meets = ("a", "b"), {"act": "meet", "where": "prepare", "steps": 6, "folder": str(log) + ".met"}
    records = run(variants(log, *names, **meets, device="cuda"), processes=2)
    assert [record.failure for record in records] == [None, None]
    assert calls_of(log, "prepare")[:2] == ["a", "b"]
    assert calls_of(log, "take")[-6:] == ["b 1", "a 1"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("act", ["nothing", "abort_second"])
@pytest.mark.parametrize("hungry_first", [True, False])
def test_a_variant_that_runs_out_while_others_prepare_makes_rounds(act: str, hungry_first: bool, log: Path):
    """Both prepare in the second set, and one of them has no memory for it: whatever becomes of the other, which held some."""
    hungry = {"act": "run_out_second", "where": "prepare", "file": str(log) + ".held"}
    other = {"act": act, "where": "prepare", "file": str(log) + ".aborted"}
    cells = [
        *variants(log, "a", steps=5, device="cuda", **other),
        *variants(log, "b", steps=5, device="cuda", **hungry),
    ]
    records = {
        str(record.config["name"]): record for record in run(cells[::-1] if hungry_first else cells, processes=2)
    }
    assert records["b"].failure is None
    assert records["b"].fact("interleaving") == "rounds"


@pytest.mark.parametrize("changed", [{"device": "cpu"}, {"device": "cuda", "ranks": 2, "sync": "none"}])
def test_others_prepare_in_turn(changed: dict[str, Any]):
    assert not _prepares_beside_others(planted(**changed))
    assert _prepares_beside_others(planted(device="cuda"))


def test_a_variant_lost_in_its_second_process_has_failed(log: Path):
    """The failure of one process is the variant's; the other variant finishes alone."""
    marker = str(log) + ".held"
    cells = [
        *variants(log, "a", steps=6),
        *variants(log, "b", steps=6, act="abort_second", where="prepare", file=marker),
    ]
    records = run(cells, processes=6)
    assert [record.failure and record.failure.kind for record in records] == [None, "crash"]
    assert calls_of(log, "prepare") == ["a", "b", "b", "a"]
    assert len(records[0].samples["step"].values) == 12


def test_few_steps_alternate_one_by_one(log: Path):
    run(variants(log, "a", "b", steps=3))
    assert calls_of(log, "take") == ["a 1", "b 1"] * 3


def test_each_turn_begins_with_an_untimed_step(log: Path):
    settling, unsettled = variants(log, "a", steps=20, settles=True), variants(log, "b", steps=20)
    records = run([*settling, *unsettled])
    calls = [line for line in log.read_text().splitlines() if line.split()[1] in ("settle", "take")]
    assert calls == ["a settle", "a take 2", "b take 2"] * 10
    assert [len(record.samples["step"].values) for record in records] == [20, 20]


def test_a_variant_lost_while_it_settles_has_failed(log: Path):
    records = run(variants(log, "a", steps=4, settles=True, act="abort", where="settle") + variants(log, "b", steps=4))
    assert [record.failure.kind if record.failure else "" for record in records] == ["crash", ""]


@pytest.mark.parametrize(("steps", "turn"), [(40, 4), (12, 4), (100, 8)])
def test_a_turn_is_a_whole_number_of_windows(log: Path, steps: int, turn: int):
    records = run(variants(log, "a", "b", steps=steps, sync=4))
    taken = [int(call.split()[1]) for call in calls_of(log, "take")]
    assert taken[0] == turn
    assert all(count % 4 == 0 for count in taken)
    assert records[0].fact("turn_steps") == turn // 4, "a window is one value of `step`"


def test_a_turn_fits_windows_of_two_lengths(log: Path):
    cells = [*variants(log, "a", steps=12, sync=2), *variants(log, "b", steps=12, sync=3)]
    records = run(cells)
    assert calls_of(log, "take") == ["a 6", "b 6"] * 2
    assert [record.fact("turn_steps") for record in records] == [3, 2]


@pytest.mark.parametrize(
    ("act", "kind", "where"),
    [
        ("abort", "crash", "prepare"),
        ("abort", "crash", "take"),
        ("abort", "crash", "finish"),
        ("raise", "crash", "take"),
        ("hang", "timeout", "take"),
    ],
)
def test_a_lost_variant_leaves_the_others_running(log: Path, act: str, kind: str, where: str):
    bad, good = variants(log, "bad", act=act, where=where, steps=4), variants(log, "good", steps=4)
    records = run([*bad, *good], timeout_s=3.0 if act == "hang" else 60.0)
    assert records[0].failure is not None
    assert records[0].failure.kind == kind
    assert records[1].failure is None
    assert len(records[1].samples["step"].values) == 4
    assert compare_records(*records).verdict == "cannot tell"


def test_waiting_for_a_turn_does_not_count_as_time(log: Path):
    """Together the variants take longer than the time limit of each."""
    started_s = time.monotonic()
    # 2 s of steps and a start each
    records = run(variants(log, *"abcde", steps=10, seconds=0.2), timeout_s=9.5)
    assert time.monotonic() - started_s > 9.5
    assert [record.failure for record in records] == [None] * 5


def test_a_variant_that_never_fits_is_tried_once(log: Path):
    """The first variant is prepared alone, so its failure needs no second try, and its process frees its memory at once."""
    first = variants(log, "first", act="run_out", where="prepare", alone=str(log) + ".alone")
    second = variants(log, "second", alone=str(log) + ".alone", steps=2)
    records = run([*first, *second])
    assert records[0].failure is not None
    assert records[0].failure.kind == "out_of_memory"
    assert records[1].failure is None
    assert records[1].fact("interleaving") == "live"
    assert calls_of(log, "prepare") == ["first", "second"]


def test_the_last_variant_alive_is_not_tried_again(log: Path):
    crashed, hungry = variants(log, "crashed", act="abort"), variants(log, "hungry", act="run_out")
    records = run([*crashed, *hungry])
    assert [record.failure.kind for record in records if record.failure] == ["crash", "out_of_memory"]
    assert calls_of(log, "prepare") == ["crashed", "hungry"], "no rounds: they would end the same way"


@pytest.mark.slow
def test_variants_that_do_not_fit_together_run_in_rounds(log: Path):
    records = run(variants(log, "a", "b", steps=10, alone=str(log) + ".alone"))
    rounds = ["a", "b", "b", "a", "a", "b", "b", "a", "a", "b"]
    assert calls_of(log, "prepare") == ["a", *rounds], "a was prepared alone, then b did not fit beside it"
    assert calls_of(log, "take") == [f"{name} 2" for name in rounds]
    for record in records:
        assert record.failure is None
        assert len(record.samples["step"].values) == 10
        assert record.fact("interleaving") == "rounds"
        assert record.fact("turn_steps") == 2
    assert records[0].fact("interleaving_group") == records[1].fact("interleaving_group")
    assert compare_records(*records).n == 5


def test_rounds_run_where_they_are_requested(log: Path):
    records = run(variants(log, "a", "b", steps=10), rounds=2)
    assert calls_of(log, "prepare") == ["a", "b", "b", "a"]
    assert calls_of(log, "take") == ["a 5", "b 5", "b 5", "a 5"]
    assert [record.fact("interleaving") for record in records] == ["rounds", "rounds"]
    assert [len(record.samples["step"].values) for record in records] == [10, 10]


@pytest.mark.slow
def test_a_round_is_a_whole_number_of_windows(log: Path):
    records = run(variants(log, "a", "b", steps=10, sync=5, alone=str(log) + ".alone"))
    assert calls_of(log, "take") == [f"{name} 5" for name in ("a", "b", "b", "a", "a", "b", "b", "a", "a", "b")]
    assert records[0].fact("turn_steps") == 1


def test_rounds_skip_a_variant_that_failed(log: Path):
    marker = str(log) + ".alone"
    good, bad = variants(log, "good", steps=3, alone=marker), variants(log, "bad", act="run_out", alone=marker)
    records = run([*good, *bad])
    assert records[0].failure is None
    assert len(records[0].samples["step"].values) == 3
    assert records[1].failure is not None
    assert records[1].failure.kind == "out_of_memory"
    assert records[1].failure.asked_bytes == 4096
    assert calls_of(log, "prepare").count("bad") == 1


def test_a_record_comes_before_the_next_variant_finishes(log: Path):
    """The caller can store it at once, and loses nothing finished when the other variants are killed."""
    cells = variants(log, "a", "b", "c", steps=4)
    groups = run_interleaved(cells, Limits(processes=1), silent)
    first, second = next(groups), next(groups)
    assert [record.config["name"] for records in (first, second) for record in records] == ["a", "b"]
    assert calls_of(log, "finish") == ["a", "b"]
    groups.close()
    assert calls_of(log, "finish") == ["a", "b"]
    assert len(first[0].samples["step"].values) == 4
    assert compare_records(*first, *second).paired


@pytest.mark.parametrize("rounds", [None, 2])
def test_records_of_two_runs_are_not_paired(log: Path, rounds: int | None):
    cells = variants(log, "a", "b", steps=4)
    first, second = run(cells, rounds=rounds), run(cells, rounds=rounds)
    for records in (first, second):
        assert compare_records(*records).interleaving != "none"
    assert compare_records(first[0], second[1]).interleaving == "none"


@pytest.mark.slow
def test_variants_that_run_out_in_finish_run_in_rounds(log: Path):
    """The first variant's record is there already; it comes again with the others."""
    cells = [*variants(log, "a", steps=4), *variants(log, "b", act="run_out", where="finish", steps=4)]
    cells += variants(log, "c", steps=4)
    [early], records = run_interleaved(cells, Limits(processes=1), silent)
    assert early.fact("interleaving") == "live"
    assert [record.config["name"] for record in records] == ["a", "b", "c"]
    assert [record.fact("interleaving") for record in records] == ["rounds"] * 3
    assert [record.failure and record.failure.kind for record in records] == [None, "out_of_memory", None]


def test_records_have_the_cells_order_where_one_failed_first(log: Path):
    cells = [*variants(log, "a", steps=2), *variants(log, "b", act="abort", steps=2), *variants(log, "c", steps=2)]
    assert [record.failure is not None for record in run(cells)] == [False, True, False]


@pytest.fixture
def round_parts(tmp_path: Path) -> RoundParts:
    return RoundParts(Store(tmp_path / "s.jsonl"))


def run_until(cells: Sequence[Cell], round_parts: RoundParts, ended: int, rounds: int | None = 2) -> None:
    """Run rounds and interrupt them in the process after this many others."""
    began: list[Cell] = []

    def interrupt(cell: Cell, stage: str) -> None:
        began.extend([cell] if stage == "steps" else [])
        if len(began) > ended:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interleaved(cells, Limits(rounds=rounds), interrupt, kept=round_parts)


@pytest.mark.parametrize("ended", [1, 2, 3])
def test_killed_rounds_resume_where_they_stopped(log: Path, round_parts: RoundParts, ended: int):
    cells = variants(log, "a", "b", steps=10)
    run_until(cells, round_parts, ended)
    assert calls_of(log, "take") == ["a 5", "b 5", "b 5", "a 5"][:ended]
    log.unlink()
    stages: list[tuple[str, str]] = []
    first_parts = round_parts.stored(cells, 2, None)
    records = interleaved(
        cells, Limits(rounds=2), lambda cell, stage: stages.append((cell.label, stage)), kept=round_parts
    )
    assert calls_of(log, "take") == ["a 5", "b 5", "b 5", "a 5"][ended:]
    assert [stage for _, stage in stages[:ended]] == [f"round {n} of 2 is stored already" for n in (1, 1, 2)][:ended]
    for cell, record in zip(cells, records, strict=True):
        assert len(record.samples["step"].values) == 10
        assert (
            record.samples["step"].values[:5] == round_parts.stored(cells, 2, None)[cell.key, 0].samples["step"].values
        )
        assert record.fact("interleaving") == "rounds"
        assert not {"round", "rounds"} & set(record.facts), "only parts have these facts"
    assert records[0].started_at == first_parts[cells[0].key, 0].started_at
    assert compare_records(*records).n == 2


def test_nothing_runs_where_all_parts_are_stored(log: Path, round_parts: RoundParts):
    """A driver may be killed after the last part, before the group is stored."""
    cells = variants(log, "a", "b", steps=2)
    first = interleaved(cells, Limits(rounds=2), silent, kept=round_parts)
    log.unlink()
    assert interleaved(cells, Limits(rounds=2), silent, kept=round_parts) == first
    assert not log.exists()


def test_parts_of_another_group_or_code_are_dropped(
    log: Path, round_parts: RoundParts, monkeypatch: pytest.MonkeyPatch
):
    """Parts of another group, of another number of rounds, or made by other code are dropped."""
    cells = variants(log, "a", "b", "c", steps=6)
    run_until(cells[:2], round_parts, 1)
    assert list(round_parts.stored(cells[:2], 2, None)) == [(cells[0].key, 0)]
    assert list(round_parts.stored([cells[1], cells[0]], 2, None)) == [(cells[0].key, 0)], "in any order"
    assert round_parts.stored(cells, 2, None) == {}
    assert round_parts.stored(cells[:2], 3, None) == {}
    edited = replace(environment(), source="fff")
    monkeypatch.setattr("trainstep.measure.harness.sweep.environment", lambda **_: edited)
    log.unlink()
    interleaved(cells[:2], Limits(rounds=2), silent, kept=round_parts)
    assert calls_of(log, "take") == ["a 3", "b 3", "b 3", "a 3"]


def test_stored_parts_show_that_variants_do_not_fit_together(log: Path, round_parts: RoundParts):
    cells = variants(log, "a", "b", steps=3, alone=str(log) + ".alone")
    run_until(cells, round_parts, 3, rounds=None)  # a alone, then both of the first round
    log.unlink()
    interleaved(cells, Limits(), silent, kept=round_parts)
    assert calls_of(log, "prepare") == ["b", "a", "a", "b"]


def test_a_failed_part_is_retried_only_if_requested(log: Path, round_parts: RoundParts, tmp_path: Path):
    cells = [*variants(log, "bad", act="abort", steps=4), *variants(log, "good", steps=4)]
    run_until(cells, round_parts, 2)
    for parts, ran in ((round_parts, ["good"]), (RoundParts(Store(tmp_path / "s.jsonl"), retry_failed=True), ["bad"])):
        log.unlink()
        records = interleaved(cells, Limits(rounds=2), silent, kept=parts)
        assert calls_of(log, "prepare") == ran
        assert [record.failure is not None for record in records] == [True, False]


def test_parts_are_dropped_with_their_own_group_only(log: Path, round_parts: RoundParts, tmp_path: Path):
    pair, other_pair = variants(log, "a", "b", steps=2), variants(log, "c", "d", steps=2)
    run_until(pair, round_parts, 1)
    run_until(other_pair, round_parts, 1)
    round_parts.drop([pair])
    assert (round_parts.stored(pair, 2, None), len(round_parts.stored(other_pair, 2, None))) == ({}, 1)
    round_parts.drop([pair, other_pair])
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_interrupt_leaves_nothing_running(log: Path):
    def interrupt(cell: Cell, stage: str) -> None:
        if cell.config["name"] == "b" and stage == "steps":
            raise KeyboardInterrupt

    cells = variants(log, "a", "b", "c", act="spawn", where="prepare", pid_file=str(log) + ".pid")
    with pytest.raises(KeyboardInterrupt):
        interleaved(cells, Limits(), interrupt)
    assert calls_of(log, "prepare") == ["a", "b"]
    assert wait_until(lambda: not is_alive(int(Path(str(log) + ".pid").read_text())))


@pytest.mark.slow
def test_equal_variants_are_seldom_called_different(log: Path):
    """Ten A/A comparisons of 19 turns of the same hashing. Two processes on a shared machine may differ for long
    (docs/facts.md), so up to three may be called different."""
    verdicts = []
    for index in range(10):
        comparison = compare_records(*run(variants(log, f"a{index}", f"b{index}", steps=19, work=300)))
        assert comparison.n == 19
        verdicts.append(comparison.verdict)
    assert sum(verdict != "cannot tell" for verdict in verdicts) <= 3, verdicts
