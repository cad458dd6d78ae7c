"""A sweep writes each group before the next begins, resumes where it stopped, and refuses to mix machines and code."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cell_maker import importable, planted, silent
from record_maker import ENVIRONMENT, a_record
from trainstep.config.grid import Cell
from trainstep.measure.harness.local import run_groups
from trainstep.measure.harness.runner import Limits
from trainstep.measure.harness.sweep import Progress, RoundParts, pending, run_sweep
from trainstep.measure.machine.environment import environment
from trainstep.records.record import Environment, Failure, Record
from trainstep.records.store import Store

__all__ = ["importable"]

CELLS = [planted(index=index) for index in range(5)]
GROUPS = [[cell] for cell in CELLS]


def record_of(cell: Cell, kind: str | None = None, environment: Environment = ENVIRONMENT) -> Record:
    failure = None if kind is None else Failure(kind=kind, phase="steps", message="planted")
    return a_record(workload=cell.workload, key=cell.key, config=cell.config, environment=environment, failure=failure)


class Executor:
    """An executor that gives each group its records, and notes what was on disk when the group began."""

    def __init__(self, store: Store, stop_before: int = 10**9) -> None:
        self.store = store
        self.stop_before = stop_before
        self.ran: list[list[str]] = []
        self.on_disk: list[int] = []

    def __call__(self, groups: Sequence[Sequence[Cell]]) -> Iterator[list[Record]]:
        for index, group in enumerate(groups):
            if index == self.stop_before:
                raise KeyboardInterrupt
            self.on_disk.append(len(self.store.latest()))
            self.ran.append([cell.key for cell in group])
            yield [record_of(cell) for cell in group]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "runs" / "sweep.jsonl")


def sweep(
    store: Store,
    executor: Executor,
    groups: Sequence[Sequence[Cell]] = GROUPS,
    here: Environment = ENVIRONMENT,
    **options: Any,
) -> list[Progress]:
    return list(run_sweep(groups, store, executor, here=here, **options))


def test_each_group_is_on_disk_before_the_next_begins(store: Store):
    executor = Executor(store)
    steps = sweep(store, executor)
    assert executor.on_disk == [0, 1, 2, 3, 4]
    assert [(step.done, step.of) for step in steps] == [(index, 5) for index in range(6)]
    assert [record.key for step in steps for record in step.records] == [cell.key for cell in CELLS]
    assert list(store.latest()) == [cell.key for cell in CELLS]


def test_a_sweep_resumes_where_it_stopped(store: Store):
    with pytest.raises(KeyboardInterrupt):
        sweep(store, Executor(store, stop_before=2))
    executor = Executor(store)
    steps = sweep(store, executor)
    assert steps[0] == Progress(done=2, of=5, records=())
    assert executor.ran == [[cell.key] for cell in CELLS[2:]]
    assert sweep(store, Executor(store)) == [Progress(done=5, of=5, records=())]


def test_a_torn_last_line_is_run_again(store: Store):
    sweep(store, Executor(store))
    text = store.path.read_bytes()
    store.path.write_bytes(text[:-20])
    executor = Executor(store)
    sweep(store, executor)
    assert executor.ran == [[CELLS[4].key]]
    assert store.path.read_bytes() == text


def test_a_larger_grid_keeps_what_is_there(store: Store):
    sweep(store, Executor(store))
    executor = Executor(store)
    more = [[planted(index=9)], *GROUPS]
    assert sweep(store, executor, more)[-1].done == 6
    assert executor.ran == [[more[0][0].key]]


def test_failures_are_results_until_they_are_retried(store: Store):
    for cell, kind in zip(CELLS, (None, "out_of_memory", "crash", "timeout", "import_error"), strict=True):
        store.append(record_of(cell, kind))
    executor = Executor(store)
    sweep(store, executor)
    assert executor.ran == []
    sweep(store, executor, retry_failed=True)
    assert executor.ran == [[cell.key] for cell in CELLS[2:]], "out of memory would say the same again"
    sweep(store, executor, retry_failed=True)
    assert len(executor.ran) == 3


def test_what_a_node_lost_is_measured_again(store: Store):
    record = record_of(CELLS[0], "crash")
    lost = replace(record.failure, kind="node_lost", message="rank 1 (n2): node n2 was lost in steps")
    store.append(replace(record, failure=lost))
    store.append(record_of(CELLS[1], "crash"))
    assert pending([[cell] for cell in CELLS[:2]], store) == [[CELLS[0]]]


def test_an_incomplete_compared_group_runs_as_a_whole(store: Store):
    groups = [CELLS[:2], CELLS[2:4]]
    for cell in CELLS[:3]:
        store.append(record_of(cell))
    assert pending(groups, store) == [CELLS[2:4]]
    executor = Executor(store)
    steps = sweep(store, executor, groups)
    assert [(step.done, step.of) for step in steps] == [(2, 4), (4, 4)]
    assert len(store.read()) == 5, "nothing that was there is lost"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu": "NVIDIA L4"}, "gpu NVIDIA L4 against NVIDIA H200"),
        ({"gpu": None}, "gpu None against NVIDIA H200"),
        ({"torch": "2.14.0"}, "torch 2.14.0 against 2.13.0"),
        ({"commit": "fff"}, "commit fff against None"),
        ({"source": "fff"}, "source fff against abc"),
    ],
)
def test_another_machine_or_other_code_is_refused_unless_allowed(store: Store, changes: dict[str, str], words: str):
    store.append(record_of(CELLS[0]))
    here = replace(ENVIRONMENT, **changes)
    executor = Executor(store)
    with pytest.raises(ValueError, match=rf"{words} .*--allow-mixed"):
        sweep(store, executor, here=here)
    assert executor.ran == []
    assert sweep(store, executor, here=here, allow_mixed=True)[-1].done == 5


def test_code_that_changes_during_a_sweep_is_refused(store: Store):
    edited = replace(ENVIRONMENT, source="fff")

    def execute(groups: Sequence[Sequence[Cell]]) -> Iterator[list[Record]]:
        for index, group in enumerate(groups):
            yield [record_of(cell, environment=edited if index >= 2 else ENVIRONMENT) for cell in group]

    with pytest.raises(ValueError, match=r"the code changed during the sweep: .* source fff against abc"):
        list(run_sweep(GROUPS, store, execute, here=ENVIRONMENT))
    assert list(store.latest()) == [cell.key for cell in CELLS[:3]], (
        "the record that shows it is kept, none after it made"
    )
    for options in ({"allow_mixed": True}, {"rerun": True}):
        assert list(run_sweep(GROUPS, store, execute, here=ENVIRONMENT, **options))[-1].done == 5


@pytest.mark.parametrize("changes", [{"hostname": "other"}, {"dirty": True}, {"memory_bytes": 7}, {"driver": "580"}])
def test_other_fields_of_the_environment_may_differ(store: Store, changes: dict[str, Any]):
    store.append(record_of(CELLS[0]))
    assert sweep(store, Executor(store), here=replace(ENVIRONMENT, **changes))[-1].done == 5


def test_a_second_sweep_on_a_store_is_refused(store: Store):
    running = run_sweep(GROUPS, store, Executor(store), here=ENVIRONMENT)
    next(running)
    with pytest.raises(ValueError, match="another trainstep is writing to it; give --out"):
        sweep(store, Executor(store))
    assert len(list(running)) == 5
    assert sweep(store, Executor(store))[0].done == 5


@pytest.mark.slow
@pytest.mark.usefixtures("importable")
def test_parts_of_rounds_stay_until_their_group_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The sweep is killed between the records of a group: nothing runs again, and it resumes with the next group."""
    groups = [[planted(name=name, steps=2, log=str(tmp_path / "log")) for name in pair] for pair in ("ab", "cd")]
    store = Store(tmp_path / "runs" / "s.jsonl")
    round_parts = RoundParts(store)

    def sweep_in_rounds() -> list[Progress]:
        return list(
            run_sweep(
                groups,
                store,
                lambda waiting: run_groups(waiting, Limits(rounds=1), silent, round_parts),
                here=environment(),
            )
        )

    def kill(store: Store, record: Record) -> None:
        if store.path.name == "s.jsonl" and record.config["name"] == "b":
            raise KeyboardInterrupt
        append(store, record)

    append = Store.append
    with monkeypatch.context() as patch:
        patch.setattr(Store, "append", kill)
        with pytest.raises(KeyboardInterrupt):
            sweep_in_rounds()
    assert [record.config["name"] for record in store.latest().values()] == ["a"]
    (tmp_path / "log").unlink()
    assert sweep_in_rounds()[-1].done == 4
    assert [line for line in (tmp_path / "log").read_text().splitlines() if "take" in line] == ["c take 2", "d take 2"]
    assert [record.config["name"] for record in store.latest().values()] == ["a", "b", "c", "d"]
    assert [path.name for path in store.path.parent.iterdir()] == ["s.jsonl"]


def test_a_group_whose_records_come_one_by_one_runs_again_as_a_whole(store: Store):
    """Killed between them, the sweep has the first record and runs the group again; other code is refused after the last record."""
    group = CELLS[:2]

    def killed(groups: Sequence[Sequence[Cell]]) -> Iterator[list[Record]]:
        yield [record_of(group[0])]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run_sweep([group], store, killed, here=ENVIRONMENT))
    assert list(store.latest()) == [group[0].key]
    assert pending([group], store) == [group]
    edited = replace(ENVIRONMENT, source="fff")
    steps = run_sweep(
        [group],
        store,
        lambda groups: iter([[record_of(group[0], environment=edited)], [record_of(group[1])]]),
        here=ENVIRONMENT,
    )
    assert [(step.done, step.whole) for step in (next(steps), next(steps), next(steps))] == [
        (0, True),
        (1, False),
        (2, True),
    ]
    with pytest.raises(ValueError, match="the code changed during the sweep"):
        next(steps)
    assert pending([group], store) == []


def test_a_record_that_comes_twice_counts_once(store: Store):
    """A variant's record comes twice if it had finished before another ran out of memory beside it."""
    first, second = CELLS[:2]
    answers = [[record_of(first)], [record_of(first), record_of(second)]]
    steps = run_sweep([[first, second]], store, lambda groups: iter(answers), here=ENVIRONMENT)
    assert [step.done for step in steps] == [0, 1, 2]
