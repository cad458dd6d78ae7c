"""The lines of progress in a log: how often they are printed, and the time left that they state."""

import pytest

from cell_maker import planted
from record_maker import a_record
from trainstep.cli.running import progress
from trainstep.cli.running.progress import CellProgress, duration_words, time_words
from trainstep.records.durations import LIKE, ROUGH, SAME, ExpectedTime


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_log_gets_a_line_every_thirty_seconds(clock: list[float], capsys: pytest.CaptureFixture[str]):
    cells = [planted(name="a"), planted(name="b")]
    with CellProgress(cells) as shown:
        for at_s, cell, stage in (
            (1, 0, "prepare"),
            (29, 0, "steps"),
            (31, 0, "finish"),
            (60, 1, "prepare"),
            (62, 1, "steps"),
        ):
            clock[0] = at_s
            shown.tell(cells[cell], stage)
    assert capsys.readouterr().err.splitlines() == [f"{cells[0].label}: finish", f"{cells[1].label}: steps"]


def test_a_finished_cell_restarts_the_thirty_seconds(clock: list[float], capsys: pytest.CaptureFixture[str]):
    cell = planted(name="a")
    with CellProgress([cell]) as shown:
        shown.finished(0, 1, [])
        clock[0] = 29
        shown.finished(1, 1, [a_record(key=cell.key)])
        clock[0] = 31
        shown.tell(cell, "afterwards")
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_no_time_left_is_stated_within_a_group(clock: list[float], capsys: pytest.CaptureFixture[str]):
    """Interleaved cells end one right after the other, so the time up to the first of them is the time of the whole group."""
    cells = [planted(name=name) for name in "abcd"]
    with CellProgress(cells) as shown:
        shown.finished(0, 4, [])
        for done, at_s, whole in ((1, 100, False), (2, 101, True)):
            clock[0] = at_s
            shown.finished(done, 4, [a_record(key=cells[done - 1].key)], whole=whole)
    first, second = capsys.readouterr().err.splitlines()
    assert "left" not in first
    assert second.endswith("about 2 min left")


def expected(*seconds: float) -> list[ExpectedTime]:
    return [ExpectedTime(seconds=value, source=SAME) for value in seconds]


def test_the_time_left_is_stated_from_the_start(clock: list[float], capsys: pytest.CaptureFixture[str]):
    """First from the expected times, then scaled by the cells that ended: here each takes twice as long as expected."""
    cells = [planted(name=name) for name in "abc"]
    times = dict(zip([cell.key for cell in cells], expected(100, 200, 300), strict=True))
    with CellProgress(cells, times) as shown:
        shown.finished(0, 3, [])
        clock[0] = 40
        shown.tell(cells[0], "build")
        clock[0] = 200
        shown.finished(1, 3, [a_record(key=cells[0].key)])
        clock[0] = 300
        shown.tell(cells[1], "build")
    first, early, done, later = capsys.readouterr().err.splitlines()
    assert first == "3 cells to run, about 10 min by earlier records for 3 of the same cells"
    assert early.endswith(", about 9 min left"), "600 s less 40"
    assert done.endswith(", about 17 min left"), "twice 500 s"
    assert later.endswith(", about 15 min left"), "less 100 s"


def test_the_count_of_a_stage_replaces_its_expected_time(clock: list[float], capsys: pytest.CaptureFixture[str]):
    cells = [planted(name=name) for name in "ab"]
    times = dict(zip([cell.key for cell in cells], expected(10, 100), strict=True))
    with CellProgress(cells, times) as shown:
        shown.finished(0, 2, [])
        shown.tell(cells[0], "steps")
        for at_s, stage in ((40, "steps 1/10"), (80, "steps 2/10"), (115, "steps 3 of 10")):
            clock[0] = at_s
            shown.tell(cells[0], stage)
    _, *lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition("about ")[2] for line in lines] == ["8 min left", "7 min left", "6 min left"]


def test_the_count_goes_on_while_interleaved_cells_take_turns(clock: list[float], capsys: pytest.CaptureFixture[str]):
    """Expected 20 s; each process takes 40 s, and the number of processes doubles because the machine is noisy."""
    cells = [planted(name=name) for name in "ab"]
    times = dict(zip([cell.key for cell in cells], expected(10, 10), strict=True))
    with CellProgress(cells, times) as shown:
        shown.finished(0, 2, [])
        for count, of in ((1, "6 or more"), (2, "6"), (3, "6"), (6, "6"), (7, "12")):
            clock[0] = 40 * (count - 1)
            shown.tell(cells[count % 2], f"process {count} of {of}")
            shown.tell(cells[count % 2], "warmup")
    _, *lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition("about ")[2] for line in lines] == ["4 min left", "3 min left", "50 s left", "4 min left"]


def test_quiet_prints_nothing(clock: list[float], capsys: pytest.CaptureFixture[str]):
    cell = planted(name="a")
    with CellProgress([cell], {cell.key: expected(5)[0]}, quiet=True) as shown:
        shown.finished(0, 1, [])
        clock[0] = 50
        shown.tell(cell, "steps")
        shown.finished(1, 1, [a_record(key=cell.key)])
    assert capsys.readouterr().err == ""
    assert shown.elapsed_s == 50


def test_times_are_written_in_words():
    assert [duration_words(seconds) for seconds in (0.4, 89, 90, 5399, 5400, 36000)] == [
        "0 s", "89 s", "2 min", "90 min", "1.5 h", "10.0 h"
    ]  # fmt: skip
    rough = [ExpectedTime(seconds=seconds, source=ROUGH) for seconds in (10, 20, 20)]
    like = ExpectedTime(seconds=40, source=LIKE)
    sources = "earlier records for 2 of the same cells and 1 of the same workload and model"
    assert time_words([*expected(5, 7), like, *rough]) == (
        f"about 2 min by {sources}, and a rough guess of 10 or 20 s for each of 3"
    )
