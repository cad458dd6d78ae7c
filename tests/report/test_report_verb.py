"""`trainstep report` as a function and as a process: formats, files, errors and start-up time."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cell_maker import finish, start
from trainstep.cli.report import report
from trainstep.records.record import Failure

PROGRAM = """
import sys
from pathlib import Path
from trainstep.cli.report import report
report([Path(sys.argv[1])])
print(sorted({"torch", "pandas", "plotly", "jinja2"} & set(sys.modules)), file=sys.stderr)
"""


def test_a_table_written_to_a_pipe_has_no_colours(store, end_to_end, capsys):
    report([store(end_to_end)])
    printed = capsys.readouterr().out
    assert printed.startswith("A step of 2.7B 256 takes 1,100 ms")
    assert "200.0" in printed
    assert "OOM" in printed
    assert "\x1b" not in printed


def test_the_default_file_of_html_is_report_html(store, end_to_end, tmp_path: Path, monkeypatch, capsys):
    path = store(end_to_end)
    monkeypatch.chdir(tmp_path)
    report([path], format="html")
    assert capsys.readouterr().out == "report.html\n"
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("name", "start"),
    [("a.csv", "workload,"), ("a.md", "**A step of"), ("a.tex", r"\begin{tabular}"), ("a.txt", "A step of")],
)
def test_the_files_name_chooses_the_format(store, end_to_end, tmp_path: Path, name, start):
    report([store(end_to_end)], out=tmp_path / "new" / name)
    assert (tmp_path / "new" / name).read_text().startswith(start)


@pytest.mark.parametrize("format", ["terminal", "markdown", "latex", "csv", "json", "html"])
def test_text_that_cannot_be_encoded_breaks_no_report(store, make, tmp_path: Path, format):
    lone_surrogate = "half a pair: \ud800"
    record = make(facts={"flops_convention": lone_surrogate, "throttle_reasons": lone_surrogate})
    crash = Failure(kind="crash", phase=lone_surrogate, message=lone_surrogate, last_lines=(lone_surrogate,))
    path = store([record, make(context=512, model="small", failure=crash)])
    report([path], out=tmp_path / "report", format=format)
    assert "crash" in (tmp_path / "report").read_text(encoding="utf-8")
    code, _, err = finish(start("report", path, "--format", format, folder=tmp_path))
    assert (code, err) == (0, "")


def test_json_keeps_a_nested_config(store, make, capsys):
    records = [replace(make(), workload="mine:IT", key=str(i), config={"shape": {"sides": [1, i]}}) for i in range(2)]
    report([store(records)], format="json")
    assert [row["shape"] for row in json.loads(capsys.readouterr().out)["rows"]] == [
        {"sides": [1, 0]},
        {"sides": [1, 1]},
    ]


def test_json_goes_to_standard_output(store, end_to_end, capsys):
    report([store(end_to_end)], format="json")
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 4


def test_a_file_that_cannot_be_written_is_one_sentence(store, end_to_end, tmp_path: Path):
    with pytest.raises(ValueError, match="cannot be written"):
        report([store(end_to_end)], out=tmp_path, format="csv")


def test_a_table_on_a_terminal_imports_neither_torch_nor_pandas_nor_plotly(store, end_to_end):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, store(end_to_end)], capture_output=True, text=True, check=True
    )
    assert done.stderr.strip() == "[]"


def test_a_hundred_records_are_reported_without_a_heavy_library(store, make):
    path = store([make(context=16 * (i + 1), step=[0.2] * 10) for i in range(100)])
    done = subprocess.run([sys.executable, "-c", PROGRAM, path], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    cells = {word for line in done.stdout.splitlines() for word in line.split()}
    assert {str(16 * (i + 1)) for i in range(100)} <= cells, "each context has its row"
