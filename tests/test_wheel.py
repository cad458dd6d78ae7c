"""The wheel holds the files of the page, requires torch without an upper bound, and runs from any folder."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import trainstep
from sources import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    isolation_options = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    pip(["wheel", str(ROOT), "--no-deps", *isolation_options, "--wheel-dir", str(folder)])
    [path] = folder.glob("trainstep-*.whl")
    return path


def pip(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_wheel_has_its_files_and_requirements(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [metadata] = [archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA")]
    needed = ("py.typed", "report/template.html", "report/style.css", "report/page.js")
    assert [name for name in needed if f"trainstep/{name}" not in names] == []
    assert not [name for name in names if not name.startswith("trainstep")], "no tests, no scripts"
    lines = metadata.splitlines()
    assert "Requires-Dist: torch>=2.11" in lines
    assert not [line for line in lines if line.startswith("Requires-Dist: ") and "<" in line.split(";")[0]]


@pytest.mark.slow
def test_the_wheel_runs_from_another_folder(wheel: Path, tmp_path: Path):
    target = tmp_path / "installed"
    pip(["install", "--no-deps", "--target", str(target), str(wheel)])
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    environ = {**os.environ, "PYTHONPATH": str(target)}
    for command in ([sys.executable, "-m", "trainstep"], [str(target / "bin" / "trainstep")]):
        done = subprocess.run([*command, "--version"], cwd=folder, env=environ, capture_output=True, text=True)
        assert (done.returncode, done.stdout.strip(), done.stderr) == (0, trainstep.__version__, "")
    print_place = [sys.executable, "-c", "import trainstep; print(trainstep.__file__)"]
    printed = subprocess.run(print_place, cwd=folder, env=environ, capture_output=True, text=True, check=True).stdout
    assert Path(printed.strip()).is_relative_to(target)
