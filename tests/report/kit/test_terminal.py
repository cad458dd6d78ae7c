"""Tables on a terminal: few columns by default, no number cut, and no line wider than the terminal."""

import re
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

from cell_maker import import_path
from pseudo_terminal import COLOURS, on_terminal
from sources import ROOT
from trainstep.report.kit.forms import ABSENT, COUNT, MS_STD
from trainstep.report.kit.rows import read_rows
from trainstep.report.kit.tables import Column, Entry, Table, all_tables
from trainstep.report.kit.terminal import plain, print_tables
from trainstep.report.step.comparison import comparison_tables

RECORDS = sorted((ROOT / "results").rglob("*.jsonl"))
WIDTHS = (80, 100, 120)
_FEW_FILES = 30
END = "=== end of"
_REPORTS = """
import fcntl, struct, sys, termios
from pathlib import Path
from trainstep.report.kit.tables import all_tables
from trainstep.report.step.comparison import comparison_tables
from trainstep.report.kit.notes import notes
from trainstep.report.kit.rows import read_rows
from trainstep.report.kit.terminal import print_tables
for argument in sys.argv[1:]:
    path, *widths = argument.split(",")
    rows = read_rows([Path(path)])
    tables = [*all_tables(rows), *comparison_tables(rows)]
    for width in map(int, widths):
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
        for every in (False, True):
            print_tables(tables, notes(rows), sys.stdout, every=every)
            print("=== end of")
"""
"""Prints records ("FILE,80,120") at each width, with few columns, then with all; one process: reading the records takes time."""
_TIME = "1,234.56 ± 78.90"


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch):
    """Commands import the package from the folder that the test imports it from."""
    monkeypatch.setenv("PYTHONPATH", import_path())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def check(text: str, tables: list[Table], width: int) -> None:
    """Check that lines fit the width, and that no value of a column of numbers is split."""
    lines = text.split("\n")
    assert max(map(cell_len, lines)) <= width
    for table in tables:
        for place, column in enumerate(table.columns):
            numbers = {row[place].text for row in table.entries if column.number and not row[place].failure}
            cut = {number for number in numbers - {ABSENT} if number not in text}
            assert not cut, f"{table.title}: {column.title}"
    entries = [entry.text for table in tables for row in table.entries for entry in row]
    shortened = [words.split("…")[:-1] for words in (*entries, *(table.note for table in tables)) if "…" in words]
    # A table in blocks repeats the names of its rows, and a name may be wrapped: so not their number, but each end counts.
    endings = tuple(part for parts in shortened for part in parts)
    for ending in re.findall(r"(\S*)…", text):
        assert any(known.endswith(ending) for known in endings), f"{ending}… is cut"


def check_reports(widths_of: dict[Path, tuple[int, ...]]) -> None:
    """Check the printed tables of each file at its widths."""
    arguments = [",".join([str(path), *map(str, widths)]) for path, widths in widths_of.items()]
    code, text = on_terminal(["-c", _REPORTS, *arguments], WIDTHS[0])
    assert code == 0
    texts = iter(text.split(f"{END}\n")[:-1])
    for path, widths in widths_of.items():
        rows = read_rows([path])
        tables = [*all_tables(rows), *comparison_tables(rows)]
        for width in widths:
            check(next(texts), [table.brief() for table in tables], width)
            check(next(texts), tables, width)
    assert not list(texts)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not RECORDS, reason="a source distribution holds no records")
@pytest.mark.parametrize("folder", sorted({path.parent.name for path in RECORDS}))
def test_no_number_of_a_published_record_is_cut(folder: str):
    """A third of a large folder, at widths in turns, since one print of a file takes up to ten seconds."""
    paths = [path for path in RECORDS if path.parent.name == folder]
    some = paths if len(paths) <= _FEW_FILES else paths[::3]
    check_reports({path: (WIDTHS[place % len(WIDTHS)],) for place, path in enumerate(some)})


@pytest.mark.slow
@pytest.mark.skipif(not RECORDS, reason="a source distribution holds no records")
def test_no_number_of_these_records_is_cut():
    names = ("end_to_end", "numerics", "ddp_tiny")
    check_reports({path: WIDTHS for path in RECORDS if path.stem in names})


SMALL = ("--model", "tiny", "--layers", "1", "--context", "16", "--batch-size", "1", "--device", "cpu")
VERBS = {
    "bench": ("bench", *SMALL, "--steps", "5", "--attention", "plain,sdpa"),
    "profile": ("profile", *SMALL, "--steps", "2", "--top", "20"),
    "parallel": ("parallel", *SMALL, "--ranks", "2", "--sync", "none,flat", "--steps", "5", "--processes", "1"),
    "attention": (
        "attention",
        "--device",
        "cpu",
        "--seq",
        "64",
        "--head-dim",
        "16",
        "--implementation",
        "plain,sdpa_math",
    ),
}
"""Records under results/ have the tables of the others."""


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_the_tables_of_each_verb_fit_a_terminal(verb: str, tmp_path: Path):
    code, text = on_terminal(["-m", "trainstep", *VERBS[verb], "--out", "r.jsonl"], 80, folder=tmp_path)
    assert code == 0, text
    rows = read_rows([tmp_path / "r.jsonl"])
    check(text, [table.brief() for table in all_tables(rows)], 80)
    assert "add --all." in text


@pytest.mark.parametrize("verb", [*VERBS, "memory", "collectives", "numerics", "sweep", "tune", "report"])
def test_every_verb_with_tables_has_the_option_all(verb: str):
    code, text = on_terminal(["-m", "trainstep", verb, "--help"], 100)
    assert code == 0
    assert "--all" in text


def wide(*, names: int, values: int) -> Table:
    """A table of two rows, with columns of names, columns of times, and a column of doubts."""
    columns = [
        *(Column(f"name{place}", names=True) for place in range(names)),
        *(Column(f"time{place} (ms)", MS_STD, more=place == values - 1) for place in range(values)),
        Column("doubts"),
    ]
    texts = [
        [*(f"row{row}of{place}" for place in range(names)), *[_TIME] * values, "drifting; a word " * 9]
        for row in (1, 2)
    ]
    return Table(
        title="Wide", columns=tuple(columns), entries=tuple(tuple(Entry(text=t) for t in row) for row in texts)
    )


def on_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], table: Table, **options: bool
) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_tables([table], [], sys.stdout, **options)
    return COLOURS.sub("", capsys.readouterr().out)


def test_a_wide_table_is_split_into_blocks_that_repeat_the_names(monkeypatch, capsys):
    table = wide(names=1, values=6)
    text = on_screen(monkeypatch, capsys, table)
    assert text.count("row1of0") == text.count("name0") == 2
    assert text.count(_TIME) == 10
    assert "1 more column: add --all." in text
    assert on_screen(monkeypatch, capsys, table, every=True).count(_TIME) == 12
    check(text, [table.brief()], 80)


def test_texts_wrap_and_numbers_do_not(monkeypatch, capsys):
    table = wide(names=1, values=4)
    text = on_screen(monkeypatch, capsys, table)
    assert text.count("name0") == 1
    assert all(line.count(_TIME) in (0, 3) for line in text.split("\n"))
    assert text.count("drifting;") == 18
    check(text, [table.brief()], 80)


def test_rows_are_printed_as_lists_where_names_fill_the_width(monkeypatch, capsys):
    table = wide(names=7, values=2)
    text = on_screen(monkeypatch, capsys, table)
    assert [line.split() for line in text.split("\n") if "row1of6" in line] == [["name6", "row1of6"]]
    assert text.count(_TIME) == 2
    check(text, [table.brief()], 80)


def test_the_reason_of_a_failed_cell_is_wrapped(monkeypatch, capsys):
    why = "OOM (needs 68.7 GiB) " * 5
    columns = (Column("name", names=True), Column("time", COUNT), Column("other", COUNT))
    entries = (Entry(text="a"), Entry(text=why, failure=object()), Entry(text="1,234,567"))  # type: ignore[arg-type]
    table = Table(title="", columns=columns, entries=(entries,))
    text = on_screen(monkeypatch, capsys, table)
    assert text.split().count("68.7") == 5
    check(text, [table], 80)


def test_plain_text_has_few_columns_by_default():
    table = wide(names=1, values=3)
    assert "time2" not in plain([table])
    assert "1 more column: add --all." in plain([table])
    assert "time2" in plain([table], every=True)
    assert "--all" not in plain([table], every=True)
