"""Rewrite the tables of docs/answers.md, and those beside the records under results/, from the records: python scripts/answers.py

`--check` writes nothing: it names the tables that are not what the records say, and ends with 1 where there are any. In
docs/answers.md a table stands between `<!-- table NAME -->` and `<!-- end -->`; scripts/answer_tables.py declares each. The
virtual environment's Python runs it: it needs trainstep, and no torch.
"""

import re
import sys
from pathlib import Path

from answer_tables import TABLES, Shown, table_of

from trainstep.report.answers import answers
from trainstep.report.kit.frames import markdown
from trainstep.report.kit.rows import read_rows
from trainstep.report.kit.tables import all_tables
from trainstep.report.step.comparison import comparison_tables

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
ANSWERS = ROOT / "docs" / "answers.md"
_PLACE = re.compile(r"(<!-- table (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_SHOWN_WITH = {"buckets": ("all_reduce",)}
"""Records whose tables need others: a bucket's best size is predicted from the all-reduces of the same machine."""


def main(options: list[str]) -> int:
    """Write what is stale, or with --check name it. The exit code: 1 where --check found any, 2 for another option."""
    if options not in ([], ["--check"]):
        print(f"answers: takes --check or nothing, not {' '.join(options)}", file=sys.stderr)
        return 2
    stale = {**stale_answers(), **stale_beside_records()}
    for name, (path, text) in stale.items():
        print(f"{name}: {'is not what the records say' if options else 'written'}")
        if not options:
            path.write_text(text, encoding="utf-8")
    return int(bool(options and stale))


def stale_answers() -> dict[str, tuple[Path, str]]:
    """`table NAME of answers.md` -> the file and its text with every table made anew, for each table that is stale."""
    before = ANSWERS.read_text(encoding="utf-8")
    there = {name: body for _, name, body, _ in _PLACE.findall(before)}
    if there.keys() != TABLES.keys():
        odd = ", ".join(sorted(there.keys() ^ TABLES.keys()))
        raise ValueError(
            f"answers: {odd}: in one of docs/answers.md and scripts/answer_tables.py alone; add or remove it"
        )
    made = {name: text_of(shown) for name, shown in TABLES.items()}
    after = _PLACE.sub(lambda found: f"{found[1]}{made[found[2]]}{found[4]}", before)
    return {f"table {name} of answers.md": (ANSWERS, after) for name, text in made.items() if text != there[name]}


def stale_beside_records() -> dict[str, tuple[Path, str]]:
    """`MACHINE/NAME.md` -> the file and what `trainstep report NAME.jsonl --format markdown` gives, where it is not that."""
    found = {}
    for records in sorted(RESULTS.glob("*/*.jsonl")):
        path = records.with_suffix(".md")
        if not path.exists():
            continue
        others = [records.with_name(f"{name}.jsonl") for name in _SHOWN_WITH.get(records.stem, ())]
        rows = read_rows([records, *others])
        text = markdown([*all_tables(rows), *comparison_tables(rows)], answers(rows))
        if text != path.read_text(encoding="utf-8"):
            found[str(path.relative_to(RESULTS))] = path, text
    return found


def text_of(shown: Shown) -> str:
    """A table of the answers in Markdown."""
    rows = read_rows([RESULTS / f"{name}.jsonl" for name in shown.records])
    return markdown([table_of(shown.lines(rows))])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
