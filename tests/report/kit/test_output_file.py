"""A page or table may replace an empty file or one that trainstep wrote in the same format, and no other."""

import os
from pathlib import Path

import pytest

from full_disk import largest_file
from sources import ROOT
from trainstep.cli import app
from trainstep.cli.report import report
from trainstep.report.kit.output_file import check_output, write_output
from trainstep.report.page import page

FORMATS = ["terminal", "markdown", "latex", "csv", "json", "html"]
RESULTS = [ROOT / "results" / "h200" / f"{name}.jsonl" for name in ("all_reduce_four", "attention_fp32", "memory")]
"""Records whose tables begin with different columns, such as rows of comparisons before those of records."""
OTHERS = {
    "page": b"<!DOCTYPE html>\n<html lang='en'>\n<head>\n<title>My page</title>\n",
    "source": b"print('train')\n",
    "photo": b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 300,
    "sweep": b"[grid]\nmodel = ['tiny']\n",
    "Markdown": b"# Notes\n\n| a | b |\n|---|---|\n| 1 | 2 |\n",
    "Markdown with added notes": b"| a |\n\n<!-- written by trainstep report -->\n\nMy notes.\n",
    "LaTeX": b"\\begin{tabular}{lr}\n\\toprule\n\\end{tabular}\n",
    "CSV": b"workload,key,time\nmine,1,2\n",
    "JSON": b'{"workload": 1}',
    "JSON list": b'[\n {\n  "workload": "mine"\n }\n]\n',
    "JSON, damaged": b'[\n {\n  "workload": "train_step", "key": "k", "record_file": "f"',
    "JSON, deep": b'[\n {\n  "a": ' + b"[" * 100_000,
    "space": b"\n",
    "zeros": bytes(100_000),
}


@pytest.fixture
def records(store, end_to_end) -> Path:
    path: Path = store(end_to_end)
    return path


@pytest.mark.parametrize("format", FORMATS)
def test_a_written_file_is_replaced_by_the_same_format_only(records, tmp_path: Path, format, capsys):
    path = tmp_path / "out"
    path.touch()
    for _ in range(2):
        report([records], out=path, format=format)
    before = path.read_bytes()
    for other in FORMATS:
        if other != format:
            with pytest.raises(
                ValueError,
                match=r"out: .*out does not look like a .* trainstep wrote; name another file",
            ):
                check_output("out", path, other)
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "runs"]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", OTHERS)
def test_files_that_trainstep_did_not_write_are_left_alone(tmp_path: Path, format, kind):
    path = tmp_path / "foreign"
    path.write_bytes(OTHERS[kind])
    with pytest.raises(ValueError, match=r"option: .*foreign does not look like a .* trainstep wrote"):
        check_output("option", path, format)
    with pytest.raises(ValueError, match=r"option: .*foreign does not look like a .* trainstep wrote"):
        write_output("option", path, format, "text")
    assert path.read_bytes() == OTHERS[kind]


@pytest.mark.parametrize("format", ["csv", "json"])
@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_csv_and_json_tables_are_recognised_without_a_mark(tmp_path: Path, format, path, capsys):
    report([path], out=tmp_path / "out", format=format)
    check_output("out", tmp_path / "out", format)


def test_pages_of_earlier_versions_are_recognised(tmp_path: Path, rows, end_to_end):
    text = page(rows(end_to_end))
    mark = '<meta name="generator" content="trainstep">\n'
    assert mark in text
    (tmp_path / "page.html").write_text(text.replace(mark, ""))
    check_output("page", tmp_path / "page.html", "html")


@pytest.mark.parametrize("format", FORMATS)
def test_a_full_disk_leaves_the_earlier_file_whole(records, tmp_path: Path, format, capsys):
    path = tmp_path / "out"
    report([records], out=path, format=format)
    before = path.read_bytes()
    with largest_file(100), pytest.raises(ValueError, match=r"out: .*out cannot be written: File too large"):
        report([records], out=path, format=format)
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "runs"]


@pytest.mark.parametrize("command", ["bench --page", "sweep s.toml --page", "report good.jsonl --format csv --out"])
@pytest.mark.parametrize(
    "name",
    ["/", ".", "..", "loop", "/dev/null", "pipe", "s.toml", "good.jsonl", "train.py", "x" * 256, "a/" * 2000 + "b"],
)
def test_a_bad_output_is_refused_before_anything_is_measured(
    records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command, name
):
    def measured(*arguments, **options):
        raise AssertionError("measured")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("trainstep.cli.cells.run_cells", measured)
    Path("loop").symlink_to("loop")
    os.mkfifo("pipe")
    Path("s.toml").write_text("[grid]\nmodel = ['tiny']\n")
    Path("train.py").write_text("print(1)")
    Path("good.jsonl").write_bytes(records.read_bytes())
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert app.run([*command.split(), name]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"{command.split('--')[-1]}: {name} " in err
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
