"""The search for the largest value that fits is right for every limit, takes few trials and stops at any other failure."""

import pytest

from record_maker import a_record
from trainstep.config.grid import Cell
from trainstep.config.memory import MemoryConfig
from trainstep.config.model import size
from trainstep.config.parsing import from_plain, to_plain
from trainstep.measure.harness.runner import at, largest_fit
from trainstep.records.record import Failure


def a_cell(**fields: int) -> Cell:
    config = to_plain(from_plain(MemoryConfig, {"model": size("tiny"), **fields}))
    return Cell(workload="memory", config=config, point={"model": "tiny"})


def search(start: int, limit: int, field: str = "batch_size", kind: str = "out_of_memory") -> list[tuple[int, bool]]:
    """Search; (value, whether it fitted) of each trial, on a machine where up to `limit` fits."""
    trials = []

    def run(cell: Cell):
        value = cell.config[field]
        trials.append((value, value <= limit))
        failure = None if value <= limit else Failure(kind=kind, phase="forward", message="no")
        return a_record(config=cell.config, failure=failure)

    assert len(list(largest_fit(a_cell(**{field: start}), field, run))) == len(trials)
    return trials


@pytest.mark.parametrize("start", [1, 3, 4, 100])
@pytest.mark.parametrize("limit", [1, 2, 7, 64, 100, 127])
def test_the_largest_value_is_found(start: int, limit: int):
    trials = search(start, limit)
    assert max(value for value, fits in trials if fits) == limit
    assert min(value for value, fits in trials if not fits) == limit + 1
    assert len(set(trials)) == len(trials) <= 16


def test_a_large_value_is_found_to_a_64th():
    trials = search(256, 10_000, "context")
    best = max(value for value, fits in trials if fits)
    assert best <= 10_000 < best + best // 64 + 1
    assert len(trials) < 14


def test_the_search_goes_down_to_1_where_nothing_fits():
    assert search(8, 0) == [(8, False), (4, False), (2, False), (1, False)]


def test_the_search_stops_at_the_bound():
    """Every value fits here; a search that begins beyond the bound tries only its start."""
    assert search(1000, 10**9) == [(1000, True), (2000, True), (4000, True), (4096, True)]
    assert search(4096, 10**9) == [(4096, True)]
    assert search(8192, 10**9) == [(8192, True)]
    assert search(65_536, 10**9, "context")[-1] == (131_072, True)
    assert max(value for value, fits in search(8192, 5000) if fits) > 4900, "the search downwards has no bound"


def test_another_failure_ends_the_search():
    assert search(4, 8, kind="timeout") == [(4, True), (8, True), (16, False)]


def test_each_trial_is_a_cell_of_its_own():
    cell = at(a_cell(), "context", 512)
    assert (cell.config["context"], cell.point["context"]) == (512, 512)
    assert cell.key != at(a_cell(), "context", 513).key
