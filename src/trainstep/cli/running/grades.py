"""For --grade of `trainstep plan`: predicts the steps of records again, and shows how far the predictions are off."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainstep.cli.running.progress import duration_words
from trainstep.config.machine import machine_spec
from trainstep.plan.fleet.published import grade_table, read_table
from trainstep.plan.grade import grade_records
from trainstep.plan.search.graded import GridGrade, graded, grids_of
from trainstep.plan.time.calibration import Calibration, calibration_for
from trainstep.plan.time.grade import grade_times
from trainstep.records.record import Record
from trainstep.records.store import Store
from trainstep.report.kit.answer import Answer, plain_answers, print_answers
from trainstep.report.kit.frames import markdown
from trainstep.report.kit.tables import Table
from trainstep.report.kit.terminal import print_tables
from trainstep.report.kit.visible import ascii_json
from trainstep.report.plan.grade import FiledGrade, grade_answer, grade_tables, plain, refusal_lines
from trainstep.report.plan.published import plain as plain_published
from trainstep.report.plan.published import published_answer, published_tables
from trainstep.report.plan.search_grade import choices_table
from trainstep.report.plan.search_grade import plain as plain_choice
from trainstep.report.plan.time_grade import FiledTimeGrade, faulty_terms, time_answer, time_tables
from trainstep.report.plan.time_grade import plain as plain_time

_SECONDS_A_BYTE = 2.5e-6
"""The time to grade a byte of records, as in results/h200 on one CPU core."""
_TOLD_EVERY_S = 5.0


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
        answers = [grade_answer(self.grades)] if self.grades else []
        if self.times:
            answers.append(time_answer(self.times, self.times[0].grade.predicted.calibration.origin))
        return answers

    def tables(self) -> list[Table]:
        """Times, a search's choices, memory."""
        return [
            *(time_tables(self.times) if self.times else []),
            *([choices_table(self.choices)] if self.choices else []),
            *(grade_tables(self.grades) if self.grades else []),
        ]

    def notes(self) -> list[str]:
        """Which formulas are wrong, and what was not graded."""
        faults = faulty_terms(self.times)
        wrong = f"Off by more than 10 % in the median, which is the formula's fault: {'; '.join(faults)}."
        reasons = (("", self.refusals), ("Time: ", self.untimed))
        refused = [f"{kind}{line}" for kind, lines in reasons for line in refusal_lines(lines)]
        return [*([wrong] if faults else []), *refused]

    def markdown(self) -> str:
        """The answers, tables and notes as one Markdown document."""
        return markdown(self.tables(), self.answers()) + "".join(f"\n{note}\n" for note in self.notes())


def graded_files(
    files: Sequence[Path], speeds: Calibration | None = None, on_file: Callable[[int], None] | None = None
) -> Graded:
    """Grade files of records. `speeds`: a calibration instead of each GPU's own. `on_file`: is told how many files are done."""
    result, of_gpus = Graded(), dict[str | None, list[Record]]()
    for place, file in enumerate(files):
        if on_file is not None:
            on_file(place)
        records = Store(file).read()
        graded_memory, refused = grade_records(records)
        result.grades += [FiledGrade(file=file.stem, grade=grade) for grade in graded_memory]
        _add(result.refusals, refused)
        for gpu in {record.environment.gpu for record in records}:
            own = speeds or calibration_for(machine_spec(gpu))
            of_gpu = [record for record in records if record.environment.gpu == gpu]
            if own is None:
                _add(result.untimed, {f"the speeds of {gpu or 'a CPU'} are not known; give --calibration": len(of_gpu)})
                continue
            of_gpus.setdefault(gpu, []).extend(of_gpu)
            timed, refused = grade_times(of_gpu, own)
            result.times += [FiledTimeGrade(file=file.stem, grade=grade) for grade in timed]
            _add(result.untimed, refused)
    for gpu, records in of_gpus.items():
        own = speeds or calibration_for(machine_spec(gpu))
        assert own is not None
        choices = [graded(grid) for grid in grids_of(records, own)]
        result.choices += [choice for choice in choices if choice is not None]
    return result


def show_grades(
    path: Path, speeds: Calibration | None, *, as_json: bool, tell: Callable[[str], None] | None = None
) -> int:
    """Grade a file of records, or every *.jsonl of a folder, and print it. ValueError if nothing in it can be graded.

    `tell`: shows the progress.
    """
    if not path.exists():
        raise ValueError(f"grade: {path} does not exist; give a file of records or a folder with some")
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    published = sorted(path.glob("*.toml")) if path.is_dir() and not files else [path] if path.suffix == ".toml" else []
    if published:
        if tell is not None:
            tell(
                f"predicting every row of {len(published)} published table{'s' if len(published) > 1 else ''}: seconds"
            )
        return _show_published(published, speeds, as_json=as_json)
    result = graded_files(files, speeds, None if tell is None else _progress(files, tell))
    if not result.grades and not result.times:
        reason = next(
            iter(result.refusals),
            "it takes records of steps on a GPU, as bench, profile, memory and parallel write them",
        )
        raise ValueError(f"grade: {path} holds no step that can be graded: {reason}")
    if not as_json:
        _print(result.tables(), result.answers(), result.notes(), result.markdown)
        return 0
    out = {
        "answer": plain_answers(result.answers()),
        "rows": [plain(item) for item in result.grades],
        "refused": result.refusals,
        "times": [plain_time(item) for item in result.times],
        "times_refused": result.untimed,
        "faults": faulty_terms(result.times),
        "choices": [plain_choice(choice) for choice in result.choices],
    }
    print(ascii_json(out, indent=1))
    return 0


def _progress(files: Sequence[Path], tell: Callable[[str], None]) -> Callable[[int], None]:
    """A callback that says how long the rest takes, by the size of the files: at the start roughly, then by the pace so far."""
    sizes = [file.stat().st_size if file.exists() else 0 for file in files]
    began_s = told_s = time.monotonic()
    what = f"{len(files)} file{'s' if len(files) > 1 else ''} of records"

    def on_file(done: int) -> None:
        nonlocal told_s
        now_s, left = time.monotonic(), sum(sizes[done:])
        if not done:
            tell(f"predicting the steps of {what} again: about {duration_words(max(1, left * _SECONDS_A_BYTE))}")
        elif now_s - told_s >= _TOLD_EVERY_S and left < sum(sizes):
            told_s = now_s
            left_s = (now_s - began_s) * left / (sum(sizes) - left)
            tell(f"{done} of {what}: about {duration_words(max(1, left_s))} left")

    return on_file


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
        tables_shown = published_tables(grades)
        _print(tables_shown, [answer], [], lambda: markdown(tables_shown, [answer]))
    return 0


def _print(
    tables: Sequence[Table], answers: Sequence[Answer], notes: Sequence[str], document: Callable[[], str]
) -> None:
    """Print tables that fit a terminal, or the Markdown document into a file or pipe."""
    if not sys.stdout.isatty():
        sys.stdout.write(document())
        return
    print_answers(answers, sys.stdout)
    print_tables(tables, notes, sys.stdout)


def _add(counts: dict[str, int], more: Mapping[str, int]) -> None:
    for reason, count in more.items():
        counts[reason] = counts.get(reason, 0) + count
