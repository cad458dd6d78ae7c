"""Variants side by side: they really alternate, a lost one takes nobody with it, and those that do not fit go in rounds."""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cell_maker import importable, is_alive, planted, silent, wait_until
from trainstep.config.cell import Cell
from trainstep.measure.environment import environment
from trainstep.measure.interleave import _Plan, run_interleaved
from trainstep.measure.round_parts import RoundParts
from trainstep.measure.runner import Limits
from trainstep.records.compare import compare_records
from trainstep.records.record import Record
from trainstep.records.store import Store

__all__ = ["importable"]
pytestmark = pytest.mark.usefixtures("importable")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def variants(log: Path, *names: str, **config: Any) -> list[Cell]:
    """Cells that differ in their name alone and note each call of theirs."""
    return [planted(name=name, log=str(log), **config) for name in names]


def shared(log: Path, *names: str) -> list[Cell]:
    """Cells whose processes can measure another one."""
    return [planted("SHARED", name=name, log=str(log), steps=10) for name in names]


def interleaved(*given: Any, **options: Any) -> list[Record]:
    return [record for records in run_interleaved(*given, **options) for record in records]


def run(
    cells: Sequence[Cell], timeout_s: float = 60.0, rounds: int | None = None, processes: int | None = 1
) -> list[Record]:
    records = interleaved(cells, Limits(timeout_s=timeout_s, rounds=rounds, processes=processes), silent)
    assert [record.key for record in records] == [cell.key for cell in cells]
    return records


def called(log: Path, what: str) -> list[str]:
    """Who did this, in the order of time: `a 2` for a call with 2 steps."""
    lines = [line.split() for line in log.read_text().splitlines()]
    return [" ".join([name, *rest]) for name, done, *rest in lines if done == what]


def test_turns_alternate(log: Path):
    records = run(variants(log, "a", "b", steps=20))
    assert called(log, "take") == ["a 2", "b 2"] * 10
    assert called(log, "prepare") == ["a", "b"]
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
    assert called(log, "take") == expected


def test_several_processes_a_variant(log: Path):
    """All steps in each, as they are quick; the order reversed from set to set, never within one."""
    records = run(variants(log, "a", "b", steps=10), processes=5)
    assert called(log, "prepare") == ["a", "b", "b", "a"] * 2 + ["a", "b"]
    assert called(log, "take") == (["a 1", "b 1"] * 10 + ["b 1", "a 1"] * 10) * 2 + ["a 1", "b 1"] * 10
    for record in records:
        assert len(record.samples["step"].values) == 50
        assert (record.fact("turn_steps"), record.fact("process_steps")) == (1, 10)
    comparison = compare_records(*records)
    assert (comparison.n, comparison.paired, comparison.interleaving) == (5, True, "live")


@pytest.mark.parametrize(("seconds", "steps"), [(0.0, 20), pytest.param(0.3, 4, marks=pytest.mark.slow)])
def test_slow_steps_are_split_over_processes(log: Path, seconds: float, steps: int):
    records = run(variants(log, "a", "b", steps=20, seconds=seconds), processes=5)
    assert [record.fact("process_steps") for record in records] == [steps] * 2
    assert [len(record.samples["step"].values) for record in records] == [5 * steps] * 2


@pytest.mark.parametrize(("set_s", "sets"), [(0.1, 12), (5.1, 10), (6.1, 8), (8.0, 6), (600.0, 6)])
def test_how_many_processes(set_s: float, sets: int):
    """As many as a minute holds, in pairs of sets of both orders."""
    plan = _Plan([planted(steps=10)], None)
    plan.decide_sets(set_s)
    assert plan.sets == sets


def test_few_steps_and_shared_workers_have_one_process(log: Path):
    for records in (run(variants(log, "a", "b", steps=2), processes=None), run(shared(log, "a", "b"), processes=None)):
        assert len({record.fact("process_steps") for record in records}) == 1
        assert [len(record.samples["step"].values) for record in records] == [int(records[0].config["steps"])] * 2


def test_a_variant_lost_in_its_second_process(log: Path):
    """Its failure stands for all its processes; the other one goes on alone, once it has its steps."""
    marker = str(log) + ".held"
    cells = [
        *variants(log, "a", steps=6),
        *variants(log, "b", steps=6, act="abort_second", where="prepare", file=marker),
    ]
    records = run(cells, processes=6)
    assert [record.failure and record.failure.kind for record in records] == [None, "crash"]
    assert called(log, "prepare") == ["a", "b", "b", "a"]
    assert len(records[0].samples["step"].values) == 12


def test_few_steps_make_as_many_turns(log: Path):
    run(variants(log, "a", "b", steps=3))
    assert called(log, "take") == ["a 1", "b 1"] * 3


def test_each_turn_begins_with_a_step_that_is_not_timed(log: Path):
    settling, plain = variants(log, "a", steps=20, settles=True), variants(log, "b", steps=20)
    records = run([*settling, *plain])
    calls = [line for line in log.read_text().splitlines() if line.split()[1] in ("settle", "take")]
    assert calls == ["a settle", "a take 2", "b take 2"] * 10
    assert [len(record.samples["step"].values) for record in records] == [20, 20]


def test_one_that_is_lost_while_it_settles(log: Path):
    records = run(variants(log, "a", steps=4, settles=True, act="abort", where="settle") + variants(log, "b", steps=4))
    assert [record.failure.kind if record.failure else "" for record in records] == ["crash", ""]


@pytest.mark.parametrize(("steps", "turn"), [(40, 4), (12, 4), (100, 8)])
def test_turns_are_whole_windows(log: Path, steps: int, turn: int):
    records = run(variants(log, "a", "b", steps=steps, sync=4))
    taken = [int(call.split()[1]) for call in called(log, "take")]
    assert taken[0] == turn
    assert all(count % 4 == 0 for count in taken)
    assert records[0].fact("turn_steps") == turn // 4, "a window is one value of `step`"


def test_windows_of_two_lengths(log: Path):
    cells = [*variants(log, "a", steps=12, sync=2), *variants(log, "b", steps=12, sync=3)]
    records = run(cells)
    assert called(log, "take") == ["a 6", "b 6"] * 2
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
def test_a_lost_variant_takes_nobody_with_it(log: Path, act: str, kind: str, where: str):
    bad, good = variants(log, "bad", act=act, where=where, steps=4), variants(log, "good", steps=4)
    records = run([*bad, *good], timeout_s=3.0 if act == "hang" else 60.0)
    assert records[0].failure is not None
    assert records[0].failure.kind == kind
    assert records[1].failure is None
    assert len(records[1].samples["step"].values) == 4
    assert compare_records(*records).verdict == "cannot tell"


def test_waiting_for_a_turn_costs_no_time(log: Path):
    """Together they take longer than each may."""
    started_s = time.monotonic()
    records = run(variants(log, "a", "b", "c", steps=10, seconds=0.1), timeout_s=2.8)
    assert time.monotonic() - started_s > 2.8
    assert [record.failure for record in records] == [None, None, None]


def test_memory_that_never_fits_is_found_alone(log: Path):
    """The first is prepared alone: its failure needs no second try, and its process makes room at once."""
    first = variants(log, "first", act="run_out", where="prepare", alone=str(log) + ".alone")
    second = variants(log, "second", alone=str(log) + ".alone", steps=2)
    records = run([*first, *second])
    assert records[0].failure is not None
    assert records[0].failure.kind == "out_of_memory"
    assert records[1].failure is None
    assert records[1].fact("interleaving") == "live"
    assert called(log, "prepare") == ["first", "second"]


def test_the_last_one_alive_is_alone(log: Path):
    crashed, hungry = variants(log, "crashed", act="abort"), variants(log, "hungry", act="run_out")
    records = run([*crashed, *hungry])
    assert [record.failure.kind for record in records if record.failure] == ["crash", "out_of_memory"]
    assert called(log, "prepare") == ["crashed", "hungry"], "no rounds: they would say the same"


def test_rounds_where_they_do_not_fit(log: Path):
    records = run(variants(log, "a", "b", steps=10, alone=str(log) + ".alone"))
    rounds = ["a", "b", "b", "a", "a", "b", "b", "a", "a", "b"]
    assert called(log, "prepare") == ["a", *rounds], "the first a stood alone, then they met"
    assert called(log, "take") == [f"{name} 2" for name in rounds]
    for record in records:
        assert record.failure is None
        assert len(record.samples["step"].values) == 10
        assert record.fact("interleaving") == "rounds"
        assert record.fact("turn_steps") == 2
    assert records[0].fact("interleaving_group") == records[1].fact("interleaving_group")
    assert compare_records(*records).n == 5


def test_rounds_where_they_are_asked_for(log: Path):
    records = run(variants(log, "a", "b", steps=10), rounds=2)
    assert called(log, "prepare") == ["a", "b", "b", "a"]
    assert called(log, "take") == ["a 5", "b 5", "b 5", "a 5"]
    assert [record.fact("interleaving") for record in records] == ["rounds", "rounds"]
    assert [len(record.samples["step"].values) for record in records] == [10, 10]


def test_rounds_are_whole_windows_too(log: Path):
    records = run(variants(log, "a", "b", steps=10, sync=5, alone=str(log) + ".alone"))
    assert called(log, "take") == [f"{name} 5" for name in ("a", "b", "b", "a", "a", "b", "b", "a", "a", "b")]
    assert records[0].fact("turn_steps") == 1


def test_rounds_skip_a_variant_that_failed(log: Path):
    alone = str(log) + ".alone"
    good, bad = variants(log, "good", steps=3, alone=alone), variants(log, "bad", act="run_out", alone=alone)
    records = run([*good, *bad])
    assert records[0].failure is None
    assert len(records[0].samples["step"].values) == 3
    assert records[1].failure is not None
    assert records[1].failure.kind == "out_of_memory"
    assert records[1].failure.asked_bytes == 4096
    assert called(log, "prepare").count("bad") == 1


def test_a_record_is_there_before_the_next_variant_looks(log: Path):
    """So that whoever stores it loses nothing that is finished when the rest is killed."""
    cells = variants(log, "a", "b", "c", steps=4)
    coming = run_interleaved(cells, Limits(processes=1), silent)
    first, second = next(coming), next(coming)
    assert [record.config["name"] for records in (first, second) for record in records] == ["a", "b"]
    assert called(log, "finish") == ["a", "b"]
    coming.close()
    assert called(log, "finish") == ["a", "b"]
    assert len(first[0].samples["step"].values) == 4
    assert compare_records(*first, *second).paired


@pytest.mark.parametrize("rounds", [None, 2])
def test_records_of_two_runs_are_no_pairs(log: Path, rounds: int | None):
    cells = variants(log, "a", "b", steps=4)
    first, second = run(cells, rounds=rounds), run(cells, rounds=rounds)
    for one in (first, second):
        assert compare_records(*one).interleaving != "none"
    assert compare_records(first[0], second[1]).interleaving == "none"


def test_variants_that_do_not_fit_while_they_look(log: Path):
    """The first was there already: it comes again with the others."""
    cells = [*variants(log, "a", steps=4), *variants(log, "b", act="run_out", where="finish", steps=4)]
    cells += variants(log, "c", steps=4)
    [early], records = run_interleaved(cells, Limits(processes=1), silent)
    assert early.fact("interleaving") == "live"
    assert [record.config["name"] for record in records] == ["a", "b", "c"]
    assert [record.fact("interleaving") for record in records] == ["rounds"] * 3
    assert [record.failure and record.failure.kind for record in records] == [None, "out_of_memory", None]


def test_the_order_is_the_cells_also_where_one_failed_first(log: Path):
    cells = [*variants(log, "a", steps=2), *variants(log, "b", act="abort", steps=2), *variants(log, "c", steps=2)]
    assert [record.failure is not None for record in run(cells)] == [False, True, False]


@pytest.fixture
def kept(tmp_path: Path) -> RoundParts:
    return RoundParts(Store(tmp_path / "s.jsonl"))


def run_until(cells: Sequence[Cell], kept: RoundParts, ended: int, rounds: int | None = 2) -> None:
    """Rounds that are interrupted in the process that follows so many others."""
    began: list[Cell] = []

    def interrupt(cell: Cell, stage: str) -> None:
        began.extend([cell] if stage == "steps" else [])
        if len(began) > ended:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interleaved(cells, Limits(rounds=rounds), interrupt, kept=kept)


@pytest.mark.parametrize("ended", [1, 2, 3])
def test_killed_rounds_go_on_where_they_stopped(log: Path, kept: RoundParts, ended: int):
    cells = variants(log, "a", "b", steps=10)
    run_until(cells, kept, ended)
    assert called(log, "take") == ["a 5", "b 5", "b 5", "a 5"][:ended]
    log.unlink()
    stages: list[tuple[str, str]] = []
    first_parts = kept.found(cells, 2, None)
    records = interleaved(cells, Limits(rounds=2), lambda cell, stage: stages.append((cell.label, stage)), kept=kept)
    assert called(log, "take") == ["a 5", "b 5", "b 5", "a 5"][ended:]
    assert [stage for _, stage in stages[:ended]] == [f"round {n} of 2 is there already" for n in (1, 1, 2)][:ended]
    for cell, record in zip(cells, records, strict=True):
        assert len(record.samples["step"].values) == 10
        assert record.samples["step"].values[:5] == kept.found(cells, 2, None)[cell.key, 0].samples["step"].values
        assert record.fact("interleaving") == "rounds"
        assert not {"round", "rounds"} & set(record.facts), "marks of parts alone"
    assert records[0].started_at == first_parts[cells[0].key, 0].started_at
    assert compare_records(*records).n == 2


def test_all_parts_there_run_nothing(log: Path, kept: RoundParts):
    """Killed after the last part, before the group was stored."""
    cells = variants(log, "a", "b", steps=2)
    first = interleaved(cells, Limits(rounds=2), silent, kept=kept)
    log.unlink()
    assert interleaved(cells, Limits(rounds=2), silent, kept=kept) == first
    assert not log.exists()


def test_parts_of_others_are_not_taken(log: Path, kept: RoundParts, monkeypatch: pytest.MonkeyPatch):
    """Of another group, of another number of rounds, of other code."""
    cells = variants(log, "a", "b", "c", steps=6)
    run_until(cells[:2], kept, 1)
    assert list(kept.found(cells[:2], 2, None)) == [(cells[0].key, 0)]
    assert list(kept.found([cells[1], cells[0]], 2, None)) == [(cells[0].key, 0)], "in any order"
    assert kept.found(cells, 2, None) == {}
    assert kept.found(cells[:2], 3, None) == {}
    edited = replace(environment(), source="fff")
    monkeypatch.setattr("trainstep.measure.round_parts.environment", lambda **_: edited)
    log.unlink()
    interleaved(cells[:2], Limits(rounds=2), silent, kept=kept)
    assert called(log, "take") == ["a 3", "b 3", "b 3", "a 3"]


def test_parts_say_that_turns_do_not_fit(log: Path, kept: RoundParts):
    cells = variants(log, "a", "b", steps=3, alone=str(log) + ".alone")
    run_until(cells, kept, 3, rounds=None)  # the first stood alone, then the two of the first round
    log.unlink()
    interleaved(cells, Limits(), silent, kept=kept)
    assert called(log, "prepare") == ["b", "a", "a", "b"]


def test_a_part_that_failed_is_retried_if_asked(log: Path, kept: RoundParts, tmp_path: Path):
    cells = [*variants(log, "bad", act="abort", steps=4), *variants(log, "good", steps=4)]
    run_until(cells, kept, 2)
    for again, ran in ((kept, ["good"]), (RoundParts(Store(tmp_path / "s.jsonl"), retry_failed=True), ["bad"])):
        log.unlink()
        records = interleaved(cells, Limits(rounds=2), silent, kept=again)
        assert called(log, "prepare") == ran
        assert [record.failure is not None for record in records] == [True, False]


def test_parts_leave_with_their_group_alone(log: Path, kept: RoundParts, tmp_path: Path):
    pair, other = variants(log, "a", "b", steps=2), variants(log, "c", "d", steps=2)
    run_until(pair, kept, 1)
    run_until(other, kept, 1)
    kept.drop([pair])
    assert (kept.found(pair, 2, None), len(kept.found(other, 2, None))) == ({}, 1)
    kept.drop([pair, other])
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_an_interrupt_leaves_nothing_running(log: Path):
    def interrupt(cell: Cell, stage: str) -> None:
        if cell.config["name"] == "b" and stage == "steps":
            raise KeyboardInterrupt

    cells = variants(log, "a", "b", "c", act="spawn", where="prepare", pid_file=str(log) + ".pid")
    with pytest.raises(KeyboardInterrupt):
        interleaved(cells, Limits(), interrupt)
    assert called(log, "prepare") == ["a", "b"]
    assert wait_until(lambda: not is_alive(int(Path(str(log) + ".pid").read_text())))


@pytest.mark.slow
def test_equal_variants_are_seldom_called_different(log: Path):
    """Ten real A/A comparisons of 19 turns of the same hashing. Two processes of a shared machine may differ for long
    (docs/facts.md), so three may be called different, not the most of them."""
    verdicts = []
    for index in range(10):
        comparison = compare_records(*run(variants(log, f"a{index}", f"b{index}", steps=19, work=300)))
        assert comparison.n == 19
        verdicts.append(comparison.verdict)
    assert sum(verdict != "cannot tell" for verdict in verdicts) <= 3, verdicts
