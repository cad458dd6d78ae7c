"""`trainstep plan --grade FOLDER`: predicted peaks beside those of records."""

import sys
from pathlib import Path

from trainstep.cli.streams import outliving_reader
from trainstep.plan.grade import grade_records
from trainstep.records.store import Store
from trainstep.report.plan.grade import FiledGrade, grade_answer, grade_tables, plain, refusal_lines


def show_grades(path: Path, *, as_json: bool) -> int:
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
    grades, refusals = list[FiledGrade](), dict[str, int]()
    for file in files:
        graded, refused = grade_records(Store(file).read())
        grades += [FiledGrade(file=file.stem, grade=grade) for grade in graded]
        for reason, count in refused.items():
            refusals[reason] = refusals.get(reason, 0) + count
    if not grades:
        reason = next(
            iter(refusals), "a step on a GPU with its peaks, as bench, profile, memory and parallel record them"
        )
        raise ValueError(f"grade: {path} holds no step that can be graded: {reason}")
    answer = grade_answer(grades)
    if as_json:
        from trainstep.report.kit.answer import plain_answers
        from trainstep.report.kit.visible import ascii_json

        rows = [plain(item) for item in grades]
        print(ascii_json({"answer": plain_answers([answer]), "rows": rows, "refused": refusals}, indent=1))
        return 0
    from trainstep.report.kit.frames import markdown

    sys.stdout.write(markdown(grade_tables(grades), [answer]))
    for line in refusal_lines(refusals):
        print(f"\n{line}")
    return 0
