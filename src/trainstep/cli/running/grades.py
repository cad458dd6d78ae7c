"""`trainstep plan --grade`: predicts the steps of records anew, and shows how far the predictions are off."""

import sys
from collections.abc import Mapping
from pathlib import Path

from trainstep.cli.streams import outliving_reader
from trainstep.config.machine import machine_spec
from trainstep.plan.grade import grade_records
from trainstep.plan.time.calibration import Calibration, calibration_for
from trainstep.plan.time.grade import grade_times
from trainstep.records.store import Store
from trainstep.report.plan.grade import FiledGrade, grade_answer, grade_tables, plain, refusal_lines
from trainstep.report.plan.time_grade import FiledTimeGrade, time_answer, time_tables
from trainstep.report.plan.time_grade import plain as plain_time


def show_grades(path: Path, speeds: Calibration | None, *, as_json: bool) -> int:
    """Grade a file of records, or every *.jsonl of a folder, and print it. ValueError if nothing in it can be graded."""
    if not path.exists():
        raise ValueError(f"grade: {path} is neither a file of records nor a folder with some")
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    with outliving_reader(sys.stderr):
        print(
            f"predicting the steps of {len(files)} files of records anew, about ten a second",
            file=sys.stderr,
            flush=True,
        )
    grades, times = list[FiledGrade](), list[FiledTimeGrade]()
    refusals, untimed = dict[str, int](), dict[str, int]()
    for file in files:
        records = Store(file).read()
        graded, refused = grade_records(records)
        grades += [FiledGrade(file=file.stem, grade=grade) for grade in graded]
        _add(refusals, refused)
        for gpu in {record.environment.gpu for record in records}:
            own = speeds or calibration_for(machine_spec(gpu))
            of_gpu = [record for record in records if record.environment.gpu == gpu]
            if own is None:
                _add(untimed, {f"the speeds of {gpu or 'a CPU'} are not known; give --calibration": len(of_gpu)})
                continue
            timed, refused = grade_times(of_gpu, own)
            times += [FiledTimeGrade(file=file.stem, grade=grade) for grade in timed]
            _add(untimed, refused)
    if not grades and not times:
        reason = next(
            iter(refusals), "a step on a GPU with its peaks, as bench, profile, memory and parallel record them"
        )
        raise ValueError(f"grade: {path} holds no step that can be graded: {reason}")
    answers = [grade_answer(grades)] if grades else []
    if times:
        answers.append(time_answer(times, times[0].grade.predicted.calibration.origin))
    if as_json:
        from trainstep.report.kit.answer import plain_answers
        from trainstep.report.kit.visible import ascii_json

        out = {
            "answer": plain_answers(answers),
            "rows": [plain(item) for item in grades],
            "refused": refusals,
            "times": [plain_time(item) for item in times],
            "times_refused": untimed,
        }
        print(ascii_json(out, indent=1))
        return 0
    from trainstep.report.kit.frames import markdown

    tables = [*(time_tables(times) if times else []), *(grade_tables(grades) if grades else [])]
    sys.stdout.write(markdown(tables, answers))
    for kind, reasons in (("", refusals), ("Time: ", untimed)):
        for line in refusal_lines(reasons):
            print(f"\n{kind}{line}")
    return 0


def _add(counts: dict[str, int], more: Mapping[str, int]) -> None:
    for reason, count in more.items():
        counts[reason] = counts.get(reason, 0) + count
