"""No process of ours imports from the current folder, except the module that the user names."""

import os
import pickle
import sys
from pathlib import Path

import pytest

import fake_nsys
import trainstep
from cell_maker import finish, importable, planted, silent, start
from trainstep.config.grid import Cell
from trainstep.config.import_path import check_not_hidden, leave_current_folder, make_children_safe, python
from trainstep.config.parsing import build_config, to_plain
from trainstep.measure.harness.connection import CellConnection
from trainstep.measure.harness.runner import CellRun, Limits, run_alone
from trainstep.measure.harness.slurm_queue import JobRequest, new_submission
from trainstep.measure.harness.workload import runs_user_code
from trainstep.measure.machine.device import probe_device
from trainstep.measure.step.nsys import NsysFailed, record, steps_command
from trainstep.records.record import Record
from trainstep.traces.snapshot import plain_pickle

__all__ = ["importable"]
HOSTILE = ("pickle", "random", "profile", "json", "torch", "triton", "tempfile")
BEFORE_MAIN = ("types", "trainstep")
"""`python -m trainstep` imports these before any line of ours runs; no other process of ours may import them."""


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, importable: None) -> Path:
    """The current folder with modules that log their name when they are imported, and then fail."""
    for name in (*HOSTILE, *BEFORE_MAIN):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'RAN')!r}, 'a').write('{name} ')\nraise OSError\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ran(folder: Path) -> str:
    """The hostile modules that were run."""
    log = folder / "RAN"
    return log.read_text() if log.exists() else ""


def measured(cell: Cell) -> Record:
    connection = CellConnection(silent)
    cell_record, _ = run_alone(CellRun(cell, Limits(), connection))
    connection.close()
    return cell_record


def test_the_reader_of_a_snapshot_imports_no_hostile_module(hostile: Path):
    assert plain_pickle(pickle.dumps({"a": [1]})) == {"a": [1]}
    assert ran(hostile) == ""


def test_the_probe_imports_no_hostile_module(hostile: Path):
    assert probe_device().error is None
    assert ran(hostile) == ""


@pytest.mark.parametrize("act", ["nothing", "run_python"])
def test_a_cell_and_its_children_import_no_hostile_module(hostile: Path, act: str):
    assert measured(planted(act=act)).failure is None
    assert ran(hostile) == ""


@pytest.mark.slow
def test_the_process_under_nsys_imports_no_hostile_module(hostile: Path, monkeypatch: pytest.MonkeyPatch):
    """The process reaches the user's model, whose name is that of a module of Python."""
    fake_nsys.install(monkeypatch, hostile / "bin", does="runs")
    config = build_config("profile", {"model": "random:build", "steps": 1, "profiled_steps": 1, "device": "cpu"})
    with pytest.raises(NsysFailed, match="model: random is Python's own module"):
        record(steps_command(config, hostile / "r.nsys-rep"), hostile / "r.nsys-rep", timeout_s=100)
    assert ran(hostile) == ""


def test_a_job_on_slurm_starts_python_in_safe_path_mode(hostile: Path, monkeypatch: pytest.MonkeyPatch):
    for name, prints in (("sbatch", "Submitted batch job 7"), ("srun", ""), ("squeue", "")):
        program = hostile / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\necho {prints}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{hostile / 'bin'}:/usr/bin:/bin")
    new_submission(hostile / "s.slurm").submit([[planted()]], Limits(), JobRequest(partition="debug", gpus=0))
    [script] = hostile.glob("s.slurm/*/7_submission.sh")
    assert f"{sys.executable} -P -u -m submitit" in script.read_text()


def test_python_m_trainstep_imports_no_hostile_module(hostile: Path):
    for name in BEFORE_MAIN:
        (hostile / f"{name}.py").unlink()
    code, out, _ = finish(start("report", "--help", folder=hostile))
    assert (code, ran(hostile)) == (0, "")
    assert "trainstep report" in out


def test_a_users_module_in_the_current_folder_is_imported(hostile: Path):
    """A user's module is found there, with the modules it imports; Python's own modules come first."""
    (hostile / "own.py").write_text("import random, json\nfrom beside import WORKLOAD\n")
    (hostile / "beside.py").write_text("from workloads import SLEEP as WORKLOAD\n")
    user_record = measured(Cell(workload="own:WORKLOAD", config={}, point={}))
    assert user_record.failure is None
    hidden_record = measured(Cell(workload="random:WORKLOAD", config={}, point={}))
    assert hidden_record.failure is not None
    assert hidden_record.failure.kind == "import_error"
    assert hidden_record.failure.message.startswith("ImportError: workload: random is Python's own module (")
    assert hidden_record.failure.message.endswith("not the one in this folder; rename yours")
    assert ran(hostile) == ""


def test_only_workloads_and_models_named_by_the_user_are_user_code():
    assert runs_user_code("own:WORKLOAD", {})
    assert runs_user_code("train_step", to_plain(build_config("train_step", {"model": "own:build"})))
    assert not runs_user_code("train_step", to_plain(build_config("train_step", {"model": "tiny"})))
    assert not runs_user_code("numerics", to_plain(build_config("numerics", {"model": "toy"})))
    assert not runs_user_code("ceiling", {"kind": "copy"})


@pytest.mark.parametrize(
    ("module", "words"), [("numpy.own", "an installed module ("), ("time", "Python's own module, ")]
)
def test_a_module_name_that_is_taken_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, words: str
):
    top = module.partition(".")[0]
    (tmp_path / f"{top}.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    check_not_hidden("model", module)  # the current folder is not searched
    sys.path.append(str(tmp_path))
    with pytest.raises(ImportError, match=f"^model: {top} is ") as caught:
        check_not_hidden("model", module)
    assert words in str(caught.value)
    check_not_hidden("model", "nobodys_package_at_all")


def test_a_folder_without_modules_takes_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "numpy").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    check_not_hidden("model", "numpy")


def test_a_module_that_pythonpath_puts_first_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "cyclopts_of_mine.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    check_not_hidden("model", "cyclopts_of_mine")


def test_a_checkout_as_current_folder_stays_on_the_path(monkeypatch: pytest.MonkeyPatch):
    """Where trainstep is found only because the current folder is searched, its processes must find it too."""
    monkeypatch.chdir(Path(trainstep.__file__).parent.parent)
    assert python() == [sys.executable]
    monkeypatch.setattr(sys, "path", [os.getcwd(), *sys.path])
    leave_current_folder()
    assert sys.path[0] == os.getcwd()


def test_a_deleted_current_folder_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "path", list(sys.path))
    leave_current_folder()
    check_not_hidden("model", "numpy")
    assert python() == [sys.executable, "-P"]


def test_children_are_safe_only_if_their_parent_is(monkeypatch: pytest.MonkeyPatch):
    """A process that was not started safely, as this one, leaves its children as they are."""
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    make_children_safe()
    assert ("PYTHONSAFEPATH" in os.environ) == sys.flags.safe_path
