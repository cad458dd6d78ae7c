"""A fast start: modules that `--help` and reading records do not import. (A limit in seconds would fit one machine only.)"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cell_maker import finish, import_path, start
from record_maker import a_record
from trainstep.config.parsing import build_run, to_plain
from trainstep.records.store import Store

RUN = """
import contextlib, io, json, sys
from trainstep.cli.app import run
with contextlib.redirect_stdout(io.StringIO()):
    code = run(sys.argv[1:])
print(json.dumps([code, sorted(name for name in sys.modules if "." not in name)]))
"""
HEAVY = {"torch", "triton", "pandas", "plotly", "numpy", "jinja2", "submitit", "tabulate"}


def imported_by(*arguments: str) -> set[str]:
    """Top-level modules that a command line imports on its way to exit code 0."""
    command = [sys.executable, "-c", RUN, *arguments]
    environ = {"PYTHONPATH": import_path(), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True)
    code, names = json.loads(done.stdout.splitlines()[-1])
    assert code == 0
    return set(names)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], [], ["bench", "--help"], ["sweep", "--help"], ["doctor", "--help"]]
)
def test_help_imports_nothing_heavy(arguments: list[str]):
    assert imported_by(*arguments) & (HEAVY | {"markdown_it"}) == set()


def test_reading_records_needs_no_torch(tmp_path: Path):
    path = tmp_path / "runs.jsonl"
    Store(path).append(a_record(config=to_plain(build_run({"model": "tiny"}))))
    assert imported_by("report", str(path)) & {"torch", "triton", "pandas", "plotly", "jinja2"} == set()
    assert imported_by("compare", str(path), str(path)) & {"torch", "triton", "pandas", "plotly"} == set()
    page = imported_by("report", str(path), "--format", "html", "--out", str(tmp_path / "page.html"))
    assert page & {"torch", "triton"} == set()


def test_planning_needs_no_torch():
    assert imported_by("plan", "--model", "8B", "--gpu", "h200", "--json") & {"torch", "triton", "pandas"} == set()
    assert imported_by("plan", "--model", "small", "--gpu", "h200") & {"torch", "triton", "pandas", "plotly"} == set()


def test_the_package_runs_as_a_module(tmp_path: Path):
    code, out, _ = finish(start("--help", folder=tmp_path))
    assert code == 0
    assert out.startswith("Usage: trainstep COMMAND")
