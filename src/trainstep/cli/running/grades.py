"""For --grade of `trainstep plan`: predicts the steps of records anew, and shows how far the predictions are off."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainstep.cli.streams import outliving_reader
from trainstep.config.machine import machine_spec
from trainstep.plan.fleet.published import grade_table, read_table
from trainstep.plan.grade import grade_records
from trainstep.plan.search.graded import GridGrade, graded, grids_of
from trainstep.plan.time.calibration import Calibration, calibration_for
from trainstep.plan.time.grade import grade_times
from trainstep.records.record import Record
from trainstep.records.store import Store
from trainstep.report.kit.answer import Answer, plain_answers
from trainstep.report.kit.frames import markdown
from trainstep.report.kit.visible import ascii_json
from trainstep.report.plan.grade import FiledGrade, grade_answer, grade_tables, plain, refusal_lines
from trainstep.report.plan.published import plain as plain_published
from trainstep.report.plan.published import published_answer, published_tables
from trainstep.report.plan.search_grade import choices_table
from trainstep.report.plan.search_grade import plain as plain_choice
from trainstep.report.plan.time_grade import FiledTimeGrade, faulty_terms, time_answer, time_tables
from trainstep.report.plan.time_grade import plain as plain_time


@dataclass(kw_only=True)
class Graded:
    """Predictions beside what records say: of memory, of times, and of a search's choices."""

    grades: list[FiledGrade] = field(default_factory=list)
    times: list[FiledTimeGrade] = field(default_factory=list)
    choices: list[GridGrade] = field(default_factory=list)
    refusals: dict[str, int] = field(default_factory=dict)
    untimed: dict[str, int] = field(default_factory=dict)
    """Reasons why there is no time -> number of cells."""

    def answers(self) -> list[Answer]:
        """How far predictions are off."""
        found = [grade_answer(self.grades)] if self.grades else []
        if self.times:
            found.append(time_answer(self.times, self.times[0].grade.predicted.calibration.origin))
        return found

    def markdown(self) -> str:
        """All of it, as a document."""
        tables = [
            *(time_tables(self.times) if self.times else []),
            *([choices_table(self.choices)] if self.choices else []),
            *(grade_tables(self.grades) if self.grades else []),
        ]
        text = markdown(tables, self.answers())
        faults = faulty_terms(self.times)
        if faults:
            text += f"\nOff by more than 10 % in the median, which is the formula's fault: {'; '.join(faults)}.\n"
        for kind, reasons in (("", self.refusals), ("Time: ", self.untimed)):
            text += "".join(f"\n{kind}{line}\n" for line in refusal_lines(reasons))
        return text


def graded_files(files: Sequence[Path], speeds: Calibration | None = None) -> Graded:
    """Grade files of records. `speeds`: a calibration instead of each GPU's own."""
    found, of_gpus = Graded(), dict[str | None, list[Record]]()
    for file in files:
        records = Store(file).read()
        graded_memory, refused = grade_records(records)
        found.grades += [FiledGrade(file=file.stem, grade=grade) for grade in graded_memory]
        _add(found.refusals, refused)
        for gpu in {record.environment.gpu for record in records}:
            own = speeds or calibration_for(machine_spec(gpu))
            of_gpu = [record for record in records if record.environment.gpu == gpu]
            if own is None:
                _add(found.untimed, {f"the speeds of {gpu or 'a CPU'} are not known; give --calibration": len(of_gpu)})
                continue
            of_gpus.setdefault(gpu, []).extend(of_gpu)
            timed, refused = grade_times(of_gpu, own)
            found.times += [FiledTimeGrade(file=file.stem, grade=grade) for grade in timed]
            _add(found.untimed, refused)
    for gpu, records in of_gpus.items():
        own = speeds or calibration_for(machine_spec(gpu))
        assert own is not None
        choices = [graded(grid) for grid in grids_of(records, own)]
        found.choices += [choice for choice in choices if choice is not None]
    return found


def show_grades(path: Path, speeds: Calibration | None, *, as_json: bool) -> int:
    """Grade a file of records, or every *.jsonl of a folder, and print it. ValueError if nothing in it can be graded."""
    if not path.exists():
        raise ValueError(f"grade: {path} is neither a file of records nor a folder with some")
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    published = sorted(path.glob("*.toml")) if path.is_dir() and not files else [path] if path.suffix == ".toml" else []
    if published:
        return _show_published(published, speeds, as_json=as_json)
    with outliving_reader(sys.stderr):
        print(
            f"predicting the steps of {len(files)} files of records anew, about ten a second",
            file=sys.stderr,
            flush=True,
        )
    found = graded_files(files, speeds)
    if not found.grades and not found.times:
        reason = next(
            iter(found.refusals),
            "it takes records of steps on a GPU, as bench, profile, memory and parallel write them",
        )
        raise ValueError(f"grade: {path} holds no step that can be graded: {reason}")
    if not as_json:
        sys.stdout.write(found.markdown())
        return 0
    out = {
        "answer": plain_answers(found.answers()),
        "rows": [plain(item) for item in found.grades],
        "refused": found.refusals,
        "times": [plain_time(item) for item in found.times],
        "times_refused": found.untimed,
        "faults": faulty_terms(found.times),
        "choices": [plain_choice(choice) for choice in found.choices],
    }
    print(ascii_json(out, indent=1))
    return 0


def _show_published(files: Sequence[Path], speeds: Calibration | None, *, as_json: bool) -> int:
    """Grade tables that others published, and print it."""
    if speeds is not None:
        raise ValueError("calibration: a published table was measured on its own machine; leave it out")
    grades = [grade_table(read_table(file)) for file in files]
    answer = published_answer(grades)
    if as_json:
        tables = [plain_published(grade) for grade in grades]
        print(ascii_json({"answer": plain_answers([answer]), "tables": tables}, indent=1))
    else:
        sys.stdout.write(markdown(published_tables(grades), [answer]))
    return 0


def _add(counts: dict[str, int], more: Mapping[str, int]) -> None:
    for reason, count in more.items():
        counts[reason] = counts.get(reason, 0) + count
