"""A search graded by grids of measured steps, and the published predictions beside measurements."""

from collections.abc import Sequence
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from sources import ROOT, load_script
from trainstep.config.machine import machine_spec
from trainstep.plan.search.graded import LEAST_CELLS, Grid, GridGrade, graded, grids_of
from trainstep.plan.search.search import search
from trainstep.plan.search.space import space_of
from trainstep.plan.time.calibration import calibration_for
from trainstep.plan.time.grade import grade_times
from trainstep.records.store import Store
from trainstep.report.plan.grade_chart import grade_chart
from trainstep.report.plan.search_grade import choices_table, plain
from trainstep.report.plan.time_grade import FiledTimeGrade

RECORDS = ROOT / "results"
pytestmark = pytest.mark.skipif(not RECORDS.exists(), reason="a source distribution holds no records")


def grades_of(folder: str, names: Sequence[str]) -> list[GridGrade]:
    records = [record for name in names for record in Store(RECORDS / folder / f"{name}.jsonl").read()]
    own = calibration_for(machine_spec(records[0].environment.gpu))
    assert own is not None
    return [grade for grid in grids_of(records, own) if (grade := graded(grid)) is not None]


@pytest.fixture(scope="module")
def on_h100() -> list[GridGrade]:
    return grades_of("h100", ["plan_grids", "plan_grids_ranks"])


@pytest.fixture(scope="module")
def on_h200() -> list[GridGrade]:
    return grades_of("h200", ["plan_grids"])


def test_the_choice_is_within_3_percent_of_the_best(on_h100: list[GridGrade], on_h200: list[GridGrade]):
    grids = [[(grade.grid.work[1], grade.grid.work[3]) for grade in grades] for grades in (on_h100, on_h200)]
    one_gpu = {("medium", 1), ("small", 1), ("large", 1)}
    assert [set(works) for works in grids] == [one_gpu | {("medium", 2)}, one_gpu]
    for grade in [*on_h100, *on_h200]:
        assert len(grade.grid.cells) >= LEAST_CELLS
        assert grade.loss <= 0.03, plain(grade)


def test_the_table_says_how_far_the_choice_is_behind(on_h100: list[GridGrade]):
    [medium] = [grade for grade in on_h100 if grade.grid.work[1] == "medium" and grade.grid.work[3] == 1]
    assert medium.loss > 0
    [row] = choices_table([medium]).raw
    assert row["behind"] == pytest.approx(medium.loss)
    assert row["place"] == medium.place > 1


def test_the_search_itself_chooses_the_same_in_a_grid_that_is_whole(on_h100: list[GridGrade]):
    [grade] = [grade for grade in on_h100 if grade.grid.work[1] == "medium" and grade.grid.work[3] == 1]
    options: dict[str, list[object]] = {}
    for cell in grade.grid.cells:
        for name, value in cell.options.items():
            if value not in options.setdefault(name, []):
                options[name].append(value)
    gpu, model, context, _, batch, precision = grade.grid.work
    spec = machine_spec(gpu)
    own = calibration_for(spec)
    assert spec is not None
    assert own is not None
    named = {"model": [model], "context": [context], "precision": [precision], **options}
    found = search(
        space_of(named, global_batch=batch, ranks=[1]), own, gpu_memory_bytes=spec.memory_bytes, minimize="time"
    )
    assert found.best is not None
    assert found.best.time_s == grade.chosen.time.step.time_s  # type: ignore[union-attr]


def test_cells_that_differ_in_timing_alone_are_one():
    records = Store(RECORDS / "h100" / "plan_grids_ranks.jsonl").read()
    own = calibration_for(machine_spec(records[0].environment.gpu))
    assert own is not None
    again = [
        replace(record, key=f"{record.key} again", config={**record.config, "window_steps": 10}) for record in records
    ]
    [grid] = grids_of([*records, *again], own)
    assert len(grid.cells) == len(records)
    assert all(cell.records == 2 for cell in grid.cells)


def test_fewer_cells_are_no_grid():
    assert grades_of("h100", ["plan_grids_ranks"])[0].grid.work[3] == 2
    records = Store(RECORDS / "h100" / "plan_grids_ranks.jsonl").read()[: LEAST_CELLS - 1]
    own = calibration_for(machine_spec(records[0].environment.gpu))
    assert own is not None
    assert grids_of(records, own) == []


def test_a_grid_without_predictions_has_no_grade(on_h100: list[GridGrade]):
    assert graded(Grid(work=on_h100[0].grid.work, cells=())) is None


def test_the_chart_has_a_mark_for_each_graded_step():
    records = Store(RECORDS / "h100" / "plan_grids_ranks.jsonl").read()
    own = calibration_for(machine_spec(records[0].environment.gpu))
    assert own is not None
    grades, _ = grade_times(records, own)
    root = ElementTree.fromstring(grade_chart([FiledTimeGrade(file="x", grade=grade) for grade in grades]))
    marks = [mark for mark in root.iter("{http://www.w3.org/2000/svg}circle") if mark.get("r") == "3.5"]
    assert len(marks) == len(grades) == 14
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    assert all(0 < float(mark.attrib["cx"]) < width and 0 < float(mark.attrib["cy"]) < height for mark in marks)


@pytest.mark.slow
def test_the_published_predictions_are_what_the_records_say(monkeypatch: pytest.MonkeyPatch):
    script = load_script("plan_grades", monkeypatch)
    for path, text in script.made(RECORDS).items():
        assert path.read_text("utf-8") == text, f"{path.name}: run python scripts/plan_grades.py"
