"""The expected time of a cell follows from earlier records of the same cell, of similar cells, or is a rough guess."""

import json
from pathlib import Path
from typing import Any

import pytest

from cell_maker import planted
from record_maker import a_record
from trainstep.config.grid import Cell, expand
from trainstep.records.durations import LIKE, ROUGH, ROUGH_S, SAME, earlier_durations, expected_time
from trainstep.records.facts import facts_of
from trainstep.records.record import Failure
from trainstep.records.store import Store


def cells() -> list[Cell]:
    """The tiny model at two contexts on a CPU, and the small one on a GPU."""
    both = expand({"model": ["tiny"], "context": [16, 32]}, {"device": "cpu"})
    return [*both, *expand({"model": ["small"]}, {"device": "cuda"})]


def store_record(path: Path, cell: Cell, seconds: float, **fields: Any) -> None:
    Store(path).append(a_record(workload=cell.workload, key=cell.key, config=cell.config, duration_s=seconds, **fields))


def test_the_same_cell_comes_before_similar_cells_and_a_rough_guess(tmp_path: Path):
    first, second, other = cells()
    store_record(tmp_path / "runs.jsonl", first, 4.0)
    store_record(tmp_path / "runs.jsonl", first, 5.0)
    durations = earlier_durations([tmp_path])
    assert [
        (expected.seconds, expected.source)
        for expected in (expected_time(cell, durations) for cell in (first, second, other))
    ] == [
        (5.0, SAME),
        (4.5, LIKE),
        (ROUGH_S["cuda"], ROUGH),
    ]


def test_interleaved_cells_share_their_time(tmp_path: Path):
    first, second, _ = cells()
    facts = facts_of(interleaving="live", interleaving_group="g")
    store_record(tmp_path / "runs.jsonl", first, 10.0, facts=facts)
    store_record(tmp_path / "runs.jsonl", second, 12.0, facts=facts)
    durations = earlier_durations([tmp_path / "runs.jsonl"])
    assert [expected_time(cell, durations).seconds for cell in (first, second)] == [5.0, 6.0]


def test_failed_and_invalid_records_are_ignored(tmp_path: Path):
    first, _, _ = cells()
    store_record(tmp_path / "a.jsonl", first, 4.0, failure=Failure(kind="crash", phase="build", message="it did"))
    good = (tmp_path / "a.jsonl").read_text()
    lines = ["{", "[]", "7", json.dumps({"facts": []}), good.replace('"duration_s":4.0', '"duration_s":"4"')]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    (tmp_path / "c.jsonl").write_bytes(b"\xff\x00\n")
    (tmp_path / "d.jsonl").mkdir()
    durations = earlier_durations([tmp_path, tmp_path / "nowhere"])
    assert not durations.of_key
    assert expected_time(first, durations).source == ROUGH


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_users_workload_has_a_rough_guess(device: str):
    assert expected_time(planted(device=device), earlier_durations([])).seconds == ROUGH_S[device]
