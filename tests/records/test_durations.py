"""How long cells will take, by what earlier records say."""

import json
from pathlib import Path
from typing import Any

import pytest

from cell_maker import planted
from record_maker import a_record
from trainstep.config.cell import Cell
from trainstep.config.grid import expand
from trainstep.records.durations import LIKE, ROUGH, ROUGH_S, SAME, earlier_durations, expected_time
from trainstep.records.facts import facts_of
from trainstep.records.record import Failure
from trainstep.records.store import Store


def cells() -> list[Cell]:
    """A tiny model at two contexts on a CPU, and small on a GPU."""
    both = expand({"model": ["tiny"], "context": [16, 32]}, {"device": "cpu"})
    return [*both, *expand({"model": ["small"]}, {"device": "cuda"})]


def kept(path: Path, cell: Cell, seconds: float, **fields: Any) -> None:
    Store(path).append(a_record(workload=cell.workload, key=cell.key, config=cell.config, duration_s=seconds, **fields))


def test_the_same_cell_then_cells_like_it_then_a_rough_guess(tmp_path: Path):
    first, second, other = cells()
    kept(tmp_path / "runs.jsonl", first, 4.0)
    kept(tmp_path / "runs.jsonl", first, 5.0)
    durations = earlier_durations([tmp_path])
    assert [
        (one.seconds, one.source) for one in (expected_time(cell, durations) for cell in (first, second, other))
    ] == [
        (5.0, SAME),
        (4.5, LIKE),
        (ROUGH_S["cuda"], ROUGH),
    ]


def test_cells_that_took_turns_share_their_time(tmp_path: Path):
    first, second, _ = cells()
    facts = facts_of(interleaving="live", interleaving_group="g")
    kept(tmp_path / "runs.jsonl", first, 10.0, facts=facts)
    kept(tmp_path / "runs.jsonl", second, 12.0, facts=facts)
    durations = earlier_durations([tmp_path / "runs.jsonl"])
    assert [expected_time(cell, durations).seconds for cell in (first, second)] == [5.0, 6.0]


def test_what_failed_or_is_no_record_says_nothing(tmp_path: Path):
    first, _, _ = cells()
    kept(tmp_path / "a.jsonl", first, 4.0, failure=Failure(kind="crash", phase="build", message="it did"))
    good = (tmp_path / "a.jsonl").read_text()
    lines = ["{", "[]", "7", json.dumps({"facts": []}), good.replace('"duration_s":4.0', '"duration_s":"4"')]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    (tmp_path / "c.jsonl").write_bytes(b"\xff\x00\n")
    (tmp_path / "d.jsonl").mkdir()
    durations = earlier_durations([tmp_path, tmp_path / "nowhere"])
    assert not durations.of_key
    assert expected_time(first, durations).source == ROUGH


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_one_s_own_workload_has_a_guess_too(device: str):
    assert expected_time(planted(device=device), earlier_durations([])).seconds == ROUGH_S[device]
