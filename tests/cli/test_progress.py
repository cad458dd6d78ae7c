"""What a log shows of long work."""

import pytest

from cell_maker import planted
from record_maker import a_record
from trainstep.cli import progress
from trainstep.cli.progress import CellProgress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_log_is_not_silent_for_long(clock: list[float], capsys: pytest.CaptureFixture[str]):
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


def test_a_cell_that_ends_breaks_the_silence(clock: list[float], capsys: pytest.CaptureFixture[str]):
    cell = planted(name="a")
    with CellProgress([cell]) as shown:
        shown.finished(0, 1, [])
        clock[0] = 29
        shown.finished(1, 1, [a_record(key=cell.key)])
        clock[0] = 31
        shown.tell(cell, "afterwards")
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_no_time_left_from_half_a_group(clock: list[float], capsys: pytest.CaptureFixture[str]):
    """Those that took turns end one after the other: a rate from the first of them would be too low by their number."""
    cells = [planted(name=name) for name in "abcd"]
    with CellProgress(cells) as shown:
        shown.finished(0, 4, [])
        for done, at_s, whole in ((1, 100, False), (2, 101, True)):
            clock[0] = at_s
            shown.finished(done, 4, [a_record(key=cells[done - 1].key)], whole=whole)
    first, second = capsys.readouterr().err.splitlines()
    assert "left" not in first
    assert second.endswith("about 2 min left")
