"""The search for the largest that fits: right for every limit, with few trials, and ended by what says nothing of memory."""

import pytest

from record_maker import a_record
from trainstep.config.cell import Cell
from trainstep.config.memory import MemoryConfig
from trainstep.config.parsing import from_plain, to_plain
from trainstep.config.presets import size
from trainstep.measure.runner_fit import at, largest_fit
from trainstep.records.record import Failure


def a_cell(**fields: int) -> Cell:
    config = to_plain(from_plain(MemoryConfig, {"model": size("tiny"), **fields}))
    return Cell(workload="memory", config=config, point={"model": "tiny"})


def search(start: int, limit: int, field: str = "batch_size", kind: str = "out_of_memory") -> list[tuple[int, bool]]:
    """(value, whether it fitted) of each trial, on a machine that holds up to `limit`."""
    tried = []

    def run(cell: Cell):
        value = cell.config[field]
        tried.append((value, value <= limit))
        failure = None if value <= limit else Failure(kind=kind, phase="forward", message="no")
        return a_record(config=cell.config, failure=failure)

    assert len(list(largest_fit(a_cell(**{field: start}), field, run))) == len(tried)
    return tried


@pytest.mark.parametrize("start", [1, 3, 4, 100])
@pytest.mark.parametrize("limit", [1, 2, 7, 64, 100, 127])
def test_finds_the_very_largest(start: int, limit: int):
    tried = search(start, limit)
    assert max(value for value, fits in tried if fits) == limit
    assert min(value for value, fits in tried if not fits) == limit + 1
    assert len(set(tried)) == len(tried) <= 16


def test_a_large_value_is_found_to_a_64th():
    tried = search(256, 10_000, "context")
    best = max(value for value, fits in tried if fits)
    assert best <= 10_000 < best + best // 64 + 1
    assert len(tried) < 14


def test_nothing_fits():
    assert search(8, 0) == [(8, False), (4, False), (2, False), (1, False)]


def test_it_stops_at_the_bound():
    """Where all fits; a search that begins beyond the bound tries its start alone."""
    assert search(1000, 10**9) == [(1000, True), (2000, True), (4000, True), (4096, True)]
    assert search(4096, 10**9) == [(4096, True)]
    assert search(8192, 10**9) == [(8192, True)]
    assert search(65_536, 10**9, "context")[-1] == (131_072, True)
    assert max(value for value, fits in search(8192, 5000) if fits) > 4900, "downwards it is searched as ever"


def test_another_failure_ends_it():
    assert search(4, 8, kind="timeout") == [(4, True), (8, True), (16, False)]


def test_each_trial_is_a_cell_of_its_own():
    cell = at(a_cell(), "context", 512)
    assert (cell.config["context"], cell.point["context"]) == (512, 512)
    assert cell.key != at(a_cell(), "context", 513).key
