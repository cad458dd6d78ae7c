"""Rewrite results/plan.md and results/plan.svg, predictions beside measurements, from all records: python scripts/plan_grades.py

`--check` writes nothing: it names the files that are not what records and formulas say, and ends with 1 where there are any.
It predicts every step of results/*/ on a GPU whose speeds are known anew, which takes a minute. It needs trainstep, and no torch.
"""

import sys
from pathlib import Path

from trainstep.cli.running.grades import graded_files
from trainstep.report.plan.grade_chart import grade_chart

RESULTS = Path(__file__).resolve().parent.parent / "results"
FOLDERS = ("h200", "h100")
LEFT_OUT = {"same_against_same"}
"""A hundred records of one step."""
HEAD = """# Predictions beside measurements

By `python scripts/plan_grades.py`, of the records in h200/ and h100/, but not of a hundred that
repeat one step: what `trainstep plan --grade` prints of both.

![Predicted against measured time of every graded step](plan.svg)

"""


def made(results: Path) -> dict[Path, str]:
    """The files with their texts."""
    files = [file for folder in FOLDERS for file in sorted((results / folder).glob("*.jsonl"))]
    files = [file for file in files if file.stem not in LEFT_OUT]
    found = graded_files(files)
    return {results / "plan.md": HEAD + found.markdown(), results / "plan.svg": grade_chart(found.times)}


def main(options: list[str]) -> int:
    """The exit code: 1 where --check found stale files, 2 for another option."""
    if options not in ([], ["--check"]):
        print(f"plan_grades: takes --check or nothing, not {' '.join(options)}", file=sys.stderr)
        return 2
    stale = {path: text for path, text in made(RESULTS).items() if not path.exists() or path.read_text("utf-8") != text}
    for path, text in stale.items():
        print(f"{path.name}: {'is not what the records say' if options else 'written'}")
        if not options:
            path.write_text(text, encoding="utf-8")
    return int(bool(options and stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
